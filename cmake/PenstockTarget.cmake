# Sets the language, warnings and sanitizers of a target. Targets that link it get the language and sanitizers alone.
function(penstock_target target)
  target_compile_features(${target} PUBLIC cxx_std_20)
  set_target_properties(${target} PROPERTIES CXX_EXTENSIONS OFF POSITION_INDEPENDENT_CODE ON)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wpedantic -Wconversion -Wshadow)
  if(PENSTOCK_SANITIZE)
    target_compile_options(${target} PRIVATE -fsanitize=${PENSTOCK_SANITIZE} -fno-omit-frame-pointer -g)
    target_link_options(${target} PUBLIC -fsanitize=${PENSTOCK_SANITIZE})
    if(PENSTOCK_SANITIZE MATCHES undefined)
      target_compile_options(${target} PRIVATE -fno-sanitize-recover=undefined)
    endif()
    # libtorch's headers have fences, which this sanitizer does not see; tests/tsan.supp answers for them.
    if(PENSTOCK_SANITIZE MATCHES thread)
      target_compile_options(${target} PRIVATE $<$<CXX_COMPILER_ID:GNU>:-Wno-tsan>)
    endif()
  endif()
  if(PENSTOCK_FUZZ)
    target_compile_options(${target} PRIVATE -fsanitize=fuzzer-no-link)
  endif()
endfunction()

# penstock_unity(TARGET COUNT [TOGETHER source…])
#
# Compiles COUNT sources of the target at a time. A source of these targets spends most of its compile time on reading
# libtorch's headers, so this builds in about half the time, and clang-tidy takes a third. The sources after TOGETHER,
# which include a header that has to come first, are compiled at a time.
function(penstock_unity target count)
  cmake_parse_arguments(PARSE_ARGV 2 arg "" "" "TOGETHER")
  # A type with a member of a type in an unnamed namespace is fine in a source, which GCC cannot tell from a header here.
  target_compile_options(${target} PRIVATE $<$<CXX_COMPILER_ID:GNU>:-Wno-subobject-linkage>)
  set_target_properties(${target} PROPERTIES UNITY_BUILD ${PENSTOCK_UNITY} UNITY_BUILD_MODE GROUP)
  get_target_property(sources ${target} SOURCES)
  list(FILTER sources INCLUDE REGEX "\\.cc$")
  list(REMOVE_ITEM sources ${arg_TOGETHER} "")
  set(number 0)
  foreach(source IN LISTS sources)
    math(EXPR group "${number} / ${count}")
    set_source_files_properties("${source}" PROPERTIES UNITY_GROUP ${group})
    math(EXPR number "${number} + 1")
  endforeach()
  set_source_files_properties(${arg_TOGETHER} PROPERTIES UNITY_GROUP together)
endfunction()
