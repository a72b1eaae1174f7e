# Builds and runs the consumer both ways: against an installed Penstock that has been moved, and with Penstock as a
# folder of the project.
#
#   cmake -DBUILD_DIR=build/release -DSOURCE_DIR=. -DWORK_DIR=build/release/consumer -P tests/consumer/run.cmake
#
# WORK_DIR is made anew, and removed unless something fails.
cmake_minimum_required(VERSION 3.25)

foreach(name BUILD_DIR SOURCE_DIR WORK_DIR)
  if(NOT ${name})
    message(FATAL_ERROR "run.cmake needs -D${name}=…")
  endif()
  get_filename_component(${name} "${${name}}" ABSOLUTE BASE_DIR "${CMAKE_CURRENT_SOURCE_DIR}")
endforeach()

# Fails with the command's output, unless it succeeds; leaves what it printed in `output`.
function(run what)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE printed ERROR_VARIABLE complaint)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "${what} failed (${result}):\n${printed}${complaint}")
  endif()
  set(output "${printed}" PARENT_SCOPE)
endfunction()

# 1F1B with forwards of 1 and backwards of 2: (8 microbatches + 4 ranks - 1) * 3.
set(expected_consumer "1F1B, 4 ranks, 8 microbatches: makespan 33\n")
set(expected_consumer_torch "4 chunks, merged to 10 that sum to 90\n")

# try_consumer(way "programs that it has" how to configure it…)
function(try_consumer way programs)
  set(build "${WORK_DIR}/${way}")
  run("Configuring the consumer (${way})" ${CMAKE_COMMAND} -S "${SOURCE_DIR}/tests/consumer" -B "${build}" -G Ninja
      ${same_tools} ${ARGN})
  run("Building the consumer (${way})" ${CMAKE_COMMAND} --build "${build}")
  foreach(program IN LISTS programs)
    run("Running ${program} (${way})" "${build}/${program}")
    if(NOT output STREQUAL expected_${program})
      message(FATAL_ERROR "${program} (${way}) printed\n  ${output}instead of\n  ${expected_${program}}")
    endif()
  endforeach()
endfunction()

# The compiler of the build that is tested, through its cache of compilations where it has one.
load_cache("${BUILD_DIR}" READ_WITH_PREFIX cached_ CMAKE_CXX_COMPILER PENSTOCK_BUILD_CLI PENSTOCK_CCACHE Torch_DIR)
set(same_tools "-DCMAKE_CXX_COMPILER=${cached_CMAKE_CXX_COMPILER}")
if(cached_PENSTOCK_CCACHE)
  list(APPEND same_tools "-DCMAKE_CXX_COMPILER_LAUNCHER=${cached_PENSTOCK_CCACHE}")
endif()

file(REMOVE_RECURSE "${WORK_DIR}")

# Moved after its installation, so that a path which was fixed then leads nowhere.
set(first_prefix "${WORK_DIR}/first prefix")
set(prefix "${WORK_DIR}/prefix")
run("Installing" ${CMAKE_COMMAND} --install "${BUILD_DIR}" --prefix "${first_prefix}")
file(RENAME "${first_prefix}" "${prefix}")

file(GLOB_RECURSE package_files "${prefix}/*.cmake")
if(NOT package_files)
  message(FATAL_ERROR "Nothing was installed for find_package.")
endif()
foreach(file IN LISTS package_files)
  file(READ "${file}" content)
  foreach(place IN ITEMS "${first_prefix}" "${BUILD_DIR}" "${SOURCE_DIR}")
    string(FIND "${content}" "${place}/" found)
    if(NOT found EQUAL -1)
      message(FATAL_ERROR "${file} names ${place}, so the installation cannot be moved.")
    endif()
  endforeach()
endforeach()

if(cached_PENSTOCK_BUILD_CLI)
  run("The installed command with libtorch" "${prefix}/bin/penstock" split --help)
endif()

try_consumer(installed "consumer;consumer_torch" "-DCMAKE_PREFIX_PATH=${prefix}" "-DTorch_DIR=${cached_Torch_DIR}"
             -DCMAKE_BUILD_TYPE=Release)
# Without optimisation and precompiled headers: this one compiles the library again, and should be quick about it.
try_consumer(subproject consumer "-DPENSTOCK_SOURCE_DIR=${SOURCE_DIR}" -DPENSTOCK_TORCH=OFF -DPENSTOCK_PCH=OFF)

file(REMOVE_RECURSE "${WORK_DIR}")
message(STATUS "The consumer runs both ways.")
