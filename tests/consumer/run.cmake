# Builds and runs the consumer in every supported way: against an installed Penstock that has been moved, with libtorch and
# without it, with the CMake lines of the README, and with Penstock as a subproject.
#
#   cmake -DBUILD_DIR=build/release -DSOURCE_DIR=. -DWORK_DIR=build/release/consumer -P tests/consumer/run.cmake
#
# WORK_DIR is created again, and removed unless something fails.
cmake_minimum_required(VERSION 3.25)

foreach(name BUILD_DIR SOURCE_DIR WORK_DIR)
  if(NOT ${name})
    message(FATAL_ERROR "run.cmake needs -D${name}=…")
  endif()
  get_filename_component(${name} "${${name}}" ABSOLUTE BASE_DIR "${CMAKE_CURRENT_SOURCE_DIR}")
endforeach()

# Runs a command and sets `output` to what it printed. Fails with this output if the command fails.
function(run what)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE printed ERROR_VARIABLE complaint)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "${what} failed (${result}):\n${printed}${complaint}")
  endif()
  set(output "${printed}${complaint}" PARENT_SCOPE)
endfunction()

# 1F1B with forwards of 1 and backwards of 2: (8 microbatches + 4 ranks - 1) * 3.
set(expected_consumer "1F1B, 4 ranks, 8 microbatches: makespan 33\n")
set(expected_consumer_torch "4 chunks, merged to 10 that sum to 90\n")

# Fails unless a text contains all of these phrases, with any line breaks between words.
function(require_words what text)
  string(REGEX REPLACE "[ \n]+" " " text "${text}")
  foreach(words IN LISTS ARGN)
    string(FIND "${text}" "${words}" found)
    if(found EQUAL -1)
      message(FATAL_ERROR "${what} does not say\n  ${words}\nbut\n  ${text}")
    endif()
  endforeach()
endfunction()

# try_consumer(NAME PROGRAMS CMAKE_ARGUMENT…): builds the consumer and runs its programs. Sets `configured` to the output of the
# configuration.
function(try_consumer way programs)
  set(build "${WORK_DIR}/${way}")
  if(NOT consumer_source)
    set(consumer_source "${SOURCE_DIR}/tests/consumer")
  endif()
  run("Configuring the consumer (${way})" ${CMAKE_COMMAND} -S "${consumer_source}" -B "${build}" -G Ninja
      ${same_tools} ${ARGN})
  set(configured "${output}" PARENT_SCOPE)
  run("Building the consumer (${way})" ${CMAKE_COMMAND} --build "${build}")
  foreach(program IN LISTS programs)
    run("Running ${program} (${way})" "${build}/${program}")
    if(NOT output STREQUAL expected_${program})
      message(FATAL_ERROR "${program} (${way}) printed\n  ${output}instead of\n  ${expected_${program}}")
    endif()
  endforeach()
endfunction()

# Uses the compiler of the tested build, through ccache if that does.
load_cache("${BUILD_DIR}" READ_WITH_PREFIX cached_ CMAKE_CXX_COMPILER PENSTOCK_BUILD_CLI PENSTOCK_CCACHE Torch_DIR)
set(same_tools "-DCMAKE_CXX_COMPILER=${cached_CMAKE_CXX_COMPILER}")
if(cached_PENSTOCK_CCACHE)
  list(APPEND same_tools "-DCMAKE_CXX_COMPILER_LAUNCHER=${cached_PENSTOCK_CCACHE}")
endif()

file(REMOVE_RECURSE "${WORK_DIR}")

# The installation is moved, so that absolute paths in it would be found.
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
file(STRINGS "${SOURCE_DIR}/penstock/public_headers.txt" public_headers)
list(LENGTH public_headers count)
require_words("Configuring the consumer" "${configured}" "-- ${count} installed headers")

# Without libtorch, penstock::penstock is left out, and a project that requires it gets a hint.
set(no_torch "-DCMAKE_PREFIX_PATH=${prefix}" -DCMAKE_DISABLE_FIND_PACKAGE_Torch=ON)
set(hint "Hint: set Torch_DIR to the folder of TorchConfig.cmake, or add libtorch to CMAKE_PREFIX_PATH")
try_consumer(without_torch consumer ${no_torch})
require_words("Configuring without libtorch" "${configured}" "penstock::penstock is left out: libtorch" "was not found"
              "${hint}")
if(EXISTS "${WORK_DIR}/without_torch/consumer_torch")
  message(FATAL_ERROR "penstock::penstock exists without libtorch.")
endif()
try_consumer(schedule_alone consumer ${no_torch} -DPENSTOCK_COMPONENT=schedule)
if(configured MATCHES "penstock::penstock")
  message(FATAL_ERROR "A project that needs only penstock::schedule gets a message:\n${configured}")
endif()
execute_process(COMMAND ${CMAKE_COMMAND} -S "${SOURCE_DIR}/tests/consumer" -B "${WORK_DIR}/refused" -G Ninja ${same_tools}
                        ${no_torch} -DPENSTOCK_COMPONENT=penstock
                RESULT_VARIABLE result OUTPUT_QUIET ERROR_VARIABLE complaint)
if(result EQUAL 0)
  message(FATAL_ERROR "penstock::penstock was required and does not exist, but the configuration succeeded.")
endif()
require_words("Requiring penstock::penstock without libtorch" "${complaint}" "There is no penstock::penstock: libtorch"
              "${hint}")

# The CMake lines of the README, with a program of one file.
file(READ "${SOURCE_DIR}/README.md" readme)
string(REGEX MATCH "```cmake\n([^`]+)```" lines "${readme}")
if(NOT lines)
  message(FATAL_ERROR "README.md has no CMake code block.")
endif()
set(consumer_source "${WORK_DIR}/readme source")
file(WRITE "${consumer_source}/CMakeLists.txt" "${CMAKE_MATCH_1}")
file(COPY_FILE "${SOURCE_DIR}/tests/consumer/torch.cc" "${consumer_source}/app.cc")
get_filename_component(torch_prefix "${cached_Torch_DIR}" DIRECTORY)
set(expected_app "${expected_consumer_torch}")
# A list cannot be passed as an argument.
file(WRITE "${consumer_source}/cache.cmake" "set(CMAKE_PREFIX_PATH \"${prefix};${torch_prefix}\" CACHE STRING \"\")\n")
try_consumer(readme app -C "${consumer_source}/cache.cmake" -DCMAKE_BUILD_TYPE=Release)
unset(consumer_source)

# Without optimization and precompiled headers, since this compiles the library again.
try_consumer(subproject consumer "-DPENSTOCK_SOURCE_DIR=${SOURCE_DIR}" -DPENSTOCK_TORCH=OFF -DPENSTOCK_PCH=OFF)

file(REMOVE_RECURSE "${WORK_DIR}")
message(STATUS "The consumer builds and runs in every way.")
