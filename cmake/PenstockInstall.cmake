# Installation: headers under include/penstock, the libraries, the command, and a package for find_package(penstock).
include(CMakePackageConfigHelpers)

set(penstock_layers "${PROJECT_SOURCE_DIR}/penstock/schedule")
if(PENSTOCK_TORCH)
  foreach(layer tensor transport stage program runtime train)
    list(APPEND penstock_layers "${PROJECT_SOURCE_DIR}/penstock/${layer}")
  endforeach()
endif()
# What lies in folders inside a layer is its own.
install(DIRECTORY ${penstock_layers} DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/penstock"
        FILES_MATCHING PATTERN "*.h" PATTERN "generators" EXCLUDE PATTERN "passes" EXCLUDE PATTERN "draw" EXCLUDE
        PATTERN "verify" EXCLUDE PATTERN "attention" EXCLUDE PATTERN "gloo_headers" EXCLUDE)
# One set of targets for each component, so that the one without libtorch can be found alone.
set(penstock_package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/penstock")
install(TARGETS penstock_schedule EXPORT penstock-schedule-targets)
install(EXPORT penstock-schedule-targets NAMESPACE penstock:: DESTINATION "${penstock_package_dir}")
if(PENSTOCK_TORCH)
  install(TARGETS penstock EXPORT penstock-torch-targets)
  install(EXPORT penstock-torch-targets NAMESPACE penstock:: DESTINATION "${penstock_package_dir}")
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
