# The target penstock_nccl: the NCCL plugin, which Penstock loads on use. It is compiled with the headers of libtorch's CPU
# build and NVIDIA's, and not linked with libtorch_cuda, which Penstock loads before the plugin.
set(PENSTOCK_CUDA_HEADERS "" CACHE STRING
    "Directories of NVIDIA's headers, or a site-packages directory with the packages nvidia-…; by default those in build/cuda/venv")

set(headers ${PENSTOCK_CUDA_HEADERS})
if(NOT headers)
  file(GLOB headers "${PROJECT_SOURCE_DIR}/build/cuda/venv/lib/python3*/site-packages")
endif()
set(PENSTOCK_CUDA_INCLUDE_DIRS "")
foreach(directory IN LISTS headers)
  file(GLOB packages "${directory}/nvidia/cu*/include" "${directory}/nvidia/nccl/include")
  list(APPEND PENSTOCK_CUDA_INCLUDE_DIRS ${packages} "${directory}")
endforeach()
foreach(header cuda_runtime_api.h crt/host_defines.h nccl.h)
  set(found FALSE)
  foreach(directory IN LISTS PENSTOCK_CUDA_INCLUDE_DIRS)
    if(EXISTS "${directory}/${header}")
      set(found TRUE)
    endif()
  endforeach()
  if(NOT found)
    message(FATAL_ERROR "PENSTOCK_NCCL needs ${header}, which is not in '${headers}'.\n"
                        "Run scripts/cuda_check --install, which installs NVIDIA's headers into build/cuda/venv, or give "
                        "their directories with -DPENSTOCK_CUDA_HEADERS=….")
  endif()
endforeach()

add_library(penstock_nccl MODULE "${PROJECT_SOURCE_DIR}/penstock/transport/nccl_plugin.cc")
penstock_target(penstock_nccl)
target_compile_definitions(penstock_nccl PRIVATE USE_C10D_NCCL C10_CUDA_NO_CMAKE_CONFIGURE_FILE)
target_include_directories(penstock_nccl PRIVATE "${PROJECT_SOURCE_DIR}")
target_include_directories(penstock_nccl SYSTEM PRIVATE ${PENSTOCK_CUDA_INCLUDE_DIRS})
target_link_libraries(penstock_nccl PRIVATE torch)
set_target_properties(penstock_nccl PROPERTIES
  CXX_VISIBILITY_PRESET hidden LIBRARY_OUTPUT_DIRECTORY "${CMAKE_RUNTIME_OUTPUT_DIRECTORY}"
  INSTALL_RPATH "$<TARGET_FILE_DIR:torch>")
