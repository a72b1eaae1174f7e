# Installation: headers under include/penstock, the libraries, the command, and a package for find_package(penstock).
include(CMakePackageConfigHelpers)

# Public headers are an explicit list; without libtorch those of the schedule component.
file(STRINGS "${PROJECT_SOURCE_DIR}/penstock/public_headers.txt" penstock_public_headers)
foreach(header IN LISTS penstock_public_headers)
  if(PENSTOCK_TORCH OR header MATCHES "^(base|schedule)/")
    get_filename_component(folder "penstock/${header}" DIRECTORY)
    install(FILES "${PROJECT_SOURCE_DIR}/penstock/${header}" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/${folder}")
  endif()
endforeach()

# One set of targets for each component, so that the one without libtorch can be found alone.
set(penstock_package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/penstock")
install(TARGETS penstock_schedule EXPORT penstock-schedule-targets)
install(EXPORT penstock-schedule-targets NAMESPACE penstock:: DESTINATION "${penstock_package_dir}")
if(PENSTOCK_TORCH)
  install(TARGETS penstock EXPORT penstock-torch-targets)
  install(EXPORT penstock-torch-targets NAMESPACE penstock:: DESTINATION "${penstock_package_dir}")
endif()
if(TARGET penstock_nccl)
  install(TARGETS penstock_nccl LIBRARY DESTINATION "lib/penstock")
endif()
if(PENSTOCK_BUILD_CLI)
  install(TARGETS penstock_cli)
  if(PENSTOCK_TORCH)
    install(TARGETS penstock_programs LIBRARY DESTINATION "lib/penstock")
  endif()
endif()

configure_package_config_file("${PROJECT_SOURCE_DIR}/cmake/penstock-config.cmake.in"
                              "${PROJECT_BINARY_DIR}/penstock-config.cmake"
                              INSTALL_DESTINATION "${penstock_package_dir}")
write_basic_package_version_file("${PROJECT_BINARY_DIR}/penstock-config-version.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/penstock-config.cmake" "${PROJECT_BINARY_DIR}/penstock-config-version.cmake"
        DESTINATION "${penstock_package_dir}")
