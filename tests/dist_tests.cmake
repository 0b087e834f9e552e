# Tests over several ranks: threads everywhere, MPI where the build has it.
add_library(lmhead_sharded_run STATIC sharded_run.cc)
target_link_libraries(lmhead_sharded_run PUBLIC lmhead_testing PRIVATE lmhead_build_flags)
foreach(name communicator_test packed_test vocab_parallel_test)
  lmhead_test(${name} dist ${name}.cc)
  target_link_libraries(${name} PRIVATE lmhead_sharded_run)
endforeach()

if(LMHEAD_HAS_MPI AND NOT LMHEAD_SANITIZE)  # OpenMPI itself does not run clean under the sanitizers
  find_package(MPI REQUIRED COMPONENTS CXX)
  add_executable(mpi_test mpi_test.cc)
  target_include_directories(mpi_test PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/tests)
  target_compile_definitions(mpi_test PRIVATE OMPI_SKIP_MPICXX MPICH_SKIP_MPICXX)
  target_link_libraries(mpi_test PRIVATE lmhead_sharded_run lmhead_build_flags MPI::MPI_CXX)
  # More ranks than cores are meant; root is what containers run as.
  set(mpirun ${MPIEXEC_EXECUTABLE} --allow-run-as-root --oversubscribe)
  foreach(ranks 3 8)
    add_test(NAME mpi_${ranks}_ranks COMMAND ${mpirun} -n ${ranks} $<TARGET_FILE:mpi_test>)
  endforeach()
  add_test(NAME mpi_silent_rank COMMAND ${mpirun} -n 3 $<TARGET_FILE:mpi_test> silent)
  add_test(NAME mpi_killed_rank COMMAND ${mpirun} --enable-recovery -n 3 $<TARGET_FILE:mpi_test> killed)
  set_tests_properties(mpi_silent_rank mpi_killed_rank PROPERTIES
    PASS_REGULAR_EXPRESSION "rank 0: noticed: .*rank 2: noticed: |rank 2: noticed: .*rank 0: noticed: "
    FAIL_REGULAR_EXPRESSION "WRONG")
  set_tests_properties(mpi_3_ranks mpi_8_ranks mpi_silent_rank mpi_killed_rank PROPERTIES LABELS dist TIMEOUT 90)
endif()

if(LMHEAD_HAS_NCCL)
  lmhead_test(nccl_test cuda nccl_test.cc)
  target_link_libraries(nccl_test PRIVATE lmhead_sharded_run CUDA::cudart_static)
endif()

if(LMHEAD_HAS_MPI AND LMHEAD_TOOLS AND NOT LMHEAD_SANITIZE)
  find_package(CLI11 REQUIRED)
  add_executable(mpi_score ${PROJECT_SOURCE_DIR}/examples/mpi_score.cc)
  set_target_properties(mpi_score PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR})
  target_include_directories(mpi_score PRIVATE ${PROJECT_SOURCE_DIR}/tools ${PROJECT_SOURCE_DIR}/src)
  target_compile_definitions(mpi_score PRIVATE OMPI_SKIP_MPICXX MPICH_SKIP_MPICXX)
  target_link_libraries(mpi_score PRIVATE lmhead lmhead_safetensors lmhead_build_flags CLI11::CLI11 MPI::MPI_CXX)
endif()
