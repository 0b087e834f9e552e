# Installs the library, its headers and the package that find_package(lmhead) reads. Included last, when
# every part has linked what it uses: a static library hands its private dependencies on to its users.
include(CMakePackageConfigHelpers)

# find_dependency call of each namespace of imported targets that the library may link.
set(dependency_Threads "Threads")
set(dependency_DNNL "dnnl")
set(dependency_OpenMP "OpenMP COMPONENTS CXX")
set(dependency_CUDA "CUDAToolkit")
set(dependency_MPI "MPI COMPONENTS CXX")

set(LMHEAD_FIND_DEPENDENCIES "")
get_target_property(linked lmhead LINK_LIBRARIES)
foreach(item IN LISTS linked)
  if(NOT item MATCHES "^([A-Za-z0-9_]+)::")
    continue()  # a file, a flag, or our build flags
  endif()
  if(NOT DEFINED dependency_${CMAKE_MATCH_1})
    message(FATAL_ERROR "cmake/install.cmake: name the package of ${item}, which the installed library needs")
  endif()
  list(APPEND LMHEAD_FIND_DEPENDENCIES "find_dependency(${dependency_${CMAKE_MATCH_1}})")
endforeach()
list(REMOVE_DUPLICATES LMHEAD_FIND_DEPENDENCIES)
list(JOIN LMHEAD_FIND_DEPENDENCIES "\n" LMHEAD_FIND_DEPENDENCIES)

set(config_dir ${CMAKE_INSTALL_LIBDIR}/cmake/lmhead)
configure_package_config_file(cmake/lmhead-config.cmake.in ${PROJECT_BINARY_DIR}/lmhead-config.cmake
                              INSTALL_DESTINATION ${config_dir} NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/lmhead-config-version.cmake COMPATIBILITY SameMinorVersion)

install(TARGETS lmhead EXPORT lmhead-targets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT library)
install(DIRECTORY include/lmhead DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT library)
install(EXPORT lmhead-targets NAMESPACE lmhead:: DESTINATION ${config_dir} COMPONENT library)
install(FILES ${PROJECT_BINARY_DIR}/lmhead-config.cmake ${PROJECT_BINARY_DIR}/lmhead-config-version.cmake
        DESTINATION ${config_dir} COMPONENT library)
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT library)
