# Every LMHEAD_* option, its default and its meaning. Parts that are AUTO are used when found and reported.
function(lmhead_option name default doc)
  set(${name} "${default}" CACHE STRING "${doc}")
  set_property(CACHE ${name} PROPERTY STRINGS ON OFF AUTO)
endfunction()

lmhead_option(LMHEAD_ONEDNN AUTO "CPU GEMM by oneDNN; without it the cpu backend runs its own blocked loop")
lmhead_option(LMHEAD_CUDA AUTO "CUDA backends (needs nvcc and cuBLASLt)")
lmhead_option(LMHEAD_MPI AUTO "MPI communicator")
lmhead_option(LMHEAD_NCCL AUTO "NCCL communicator (needs LMHEAD_CUDA)")

set(LMHEAD_CUDA_ARCHITECTURES "80;90" CACHE STRING
  "Machine code of cuda_portable, 80 or more, ascending; other devices take the last one's PTX. sm90's is always 90a")
option(LMHEAD_TOOLS "The lmhead command (needs CLI11, nlohmann-json, fmt)" ${PROJECT_IS_TOP_LEVEL})
option(LMHEAD_TESTS "Unit tests (needs GoogleTest)" ${PROJECT_IS_TOP_LEVEL})
option(LMHEAD_BENCHMARKS "GPU benchmarks gpu_bench and local_ranks (needs LMHEAD_CUDA)" OFF)
option(LMHEAD_PYTHON "Python extension module (set by pyproject.toml)" OFF)
option(LMHEAD_WERROR "Warnings are errors (CI)" OFF)
set(LMHEAD_SANITIZE "" CACHE STRING "Sanitizers for every target, such as address;undefined or thread")
