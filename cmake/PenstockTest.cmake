# Functions that declare programs, fixtures and tests. Sources and scripts are named relative to the folder that declares them.

# A wrapper around a command that compares numbers with the reference's: it chooses the CPU settings.
set(PENSTOCK_TEST_SETTINGS "${PROJECT_SOURCE_DIR}/tests/settings")
# The Python that has the reference, under the same settings.
set(PENSTOCK_REFERENCE_PYTHON "${PROJECT_SOURCE_DIR}/tests/reference_python")
# Tests that compare with PyTorch, open a browser or build a second time run in the release build alone.
set(PENSTOCK_REFERENCE_TESTS OFF)
if(PENSTOCK_TORCH AND NOT PENSTOCK_SANITIZE)
  set(PENSTOCK_REFERENCE_TESTS ON)
endif()

# penstock_test_program(NAME [NO_TORCH] [LIBRARIES library…] SOURCES file…)
#
# Adds a program of the tests. It links GoogleTest's main function if a source's name ends in _test.cc. With libtorch the
# first such program precompiles what all of them include, as nearly every test needs all operators.
function(penstock_test_program name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "NO_TORCH" "" "LIBRARIES;SOURCES")
  add_executable(${name} ${arg_SOURCES})
  penstock_target(${name})
  target_include_directories(${name} PRIVATE "${PROJECT_SOURCE_DIR}")
  target_link_libraries(${name} PRIVATE ${arg_LIBRARIES})
  if(NOT arg_NO_TORCH)
    target_link_libraries(${name} PRIVATE penstock)
    # The library under test is optimised; the tests themselves compile in half the time without.
    target_compile_options(${name} PRIVATE -O1)
    penstock_unity(${name} 4)
  endif()
  if(NOT arg_SOURCES MATCHES "_test\\.cc")
    return()
  endif()
  target_link_libraries(${name} PRIVATE GTest::gtest_main)
  if(NOT PENSTOCK_PCH)
    return()
  endif()
  if(arg_NO_TORCH)
    target_precompile_headers(${name} PRIVATE <gtest/gtest.h>)
    return()
  endif()
  get_property(first GLOBAL PROPERTY PENSTOCK_TEST_PCH)
  if(first)
    target_precompile_headers(${name} REUSE_FROM ${first})
  else()
    target_precompile_headers(${name} PRIVATE <gtest/gtest.h> <ATen/ATen.h>)
    set_property(GLOBAL PROPERTY PENSTOCK_TEST_PCH ${name})
  endif()
endfunction()

# penstock_example(NAME LIBRARY): a program of examples/.
function(penstock_example name library)
  add_executable(example_${name} "${PROJECT_SOURCE_DIR}/examples/${name}.cc")
  penstock_target(example_${name})
  target_link_libraries(example_${name} PRIVATE ${library})
endfunction()

# penstock_reference(NAME VARIABLE variable SCRIPT script [argument…] [TIMEOUT seconds])
#
# Adds the test reference.NAME, which lets PyTorch write its answers into a folder: `script argument… FOLDER`. A test that
# NEEDS NAME runs after it, and finds the folder in the environment variable.
function(penstock_reference name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "VARIABLE;TIMEOUT" "SCRIPT")
  list(POP_FRONT arg_SCRIPT script)
  set(folder "${PROJECT_BINARY_DIR}/tests/${name}")
  add_test(NAME reference.${name}
           COMMAND "${PENSTOCK_REFERENCE_PYTHON}" -W ignore "${CMAKE_CURRENT_SOURCE_DIR}/${script}" ${arg_SCRIPT} "${folder}")
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 600)
  endif()
  set_tests_properties(reference.${name} PROPERTIES FIXTURES_SETUP ${name} TIMEOUT ${arg_TIMEOUT})
  set_property(GLOBAL PROPERTY PENSTOCK_FIXTURE_${name} "${arg_VARIABLE}=${folder}")
endfunction()

# penstock_test(NAME COMMAND command… [SETTINGS] [NEEDS fixture…] [PROVIDES fixture] [ENVIRONMENT NAME=value…]
#               [PASSES_WITH regular-expression] [SKIP_CODE code] [TIMEOUT seconds])
#
# Adds a test. A command that ends in .py is run by Python. With SETTINGS it runs under tests/settings. A fixture that it
# NEEDS runs before it and adds its folder to the environment. Every test finds the command in PENSTOCK, and its OpenMP
# threads do not spin: beside other tests they would get nowhere.
function(penstock_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "SETTINGS" "PROVIDES;PASSES_WITH;SKIP_CODE;TIMEOUT" "COMMAND;NEEDS;ENVIRONMENT")
  list(GET arg_COMMAND 0 first)
  if(first MATCHES "\\.py$")
    list(POP_FRONT arg_COMMAND)
    list(PREPEND arg_COMMAND "${Python3_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/${first}")
  elseif(TARGET ${first})
    list(POP_FRONT arg_COMMAND)
    list(PREPEND arg_COMMAND $<TARGET_FILE:${first}>)
  endif()
  if(arg_SETTINGS)
    list(PREPEND arg_COMMAND "${PENSTOCK_TEST_SETTINGS}")
  endif()
  add_test(NAME ${name} COMMAND ${arg_COMMAND})

  set(environment OMP_WAIT_POLICY=PASSIVE ${arg_ENVIRONMENT})
  if(TARGET penstock_cli)
    list(APPEND environment "PENSTOCK=$<TARGET_FILE:penstock_cli>")
  endif()
  foreach(fixture IN LISTS arg_NEEDS)
    get_property(folder GLOBAL PROPERTY PENSTOCK_FIXTURE_${fixture})
    list(APPEND environment ${folder})
  endforeach()
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 900)
  endif()
  set_tests_properties(${name} PROPERTIES ENVIRONMENT "${environment}" TIMEOUT ${arg_TIMEOUT})
  if(arg_NEEDS)
    set_tests_properties(${name} PROPERTIES FIXTURES_REQUIRED "${arg_NEEDS}")
  endif()
  if(arg_PROVIDES)
    set_tests_properties(${name} PROPERTIES FIXTURES_SETUP ${arg_PROVIDES})
  endif()
  if(arg_PASSES_WITH)
    set_tests_properties(${name} PROPERTIES PASS_REGULAR_EXPRESSION "${arg_PASSES_WITH}")
  endif()
  if(arg_SKIP_CODE)
    set_tests_properties(${name} PROPERTIES SKIP_RETURN_CODE ${arg_SKIP_CODE})
  endif()
endfunction()
