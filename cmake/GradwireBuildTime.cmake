# Precompiled headers: parsing the standard library is half the cost of compiling most files. Sanitizer builds
# do not use them, and so detect missing includes.
option(GRADWIRE_UNITY "Compile several source files at a time" ON)
option(GRADWIRE_PCH "Precompile the standard library's headers" ON)

# gradwire_precompile(TARGET [<header>...]): precompiles the headers below, and headers that most files of the
# target include.
function(gradwire_precompile target)
  if(NOT GRADWIRE_PCH OR GRADWIRE_SANITIZE)
    return()
  endif()
  set(headers <algorithm> <atomic> <chrono> <cmath> <condition_variable> <cstdint> <cstring> <functional>
      <map> <memory> <mutex> <optional> <span> <string> <string_view> <thread> <vector> ${ARGN})
  list(TRANSFORM headers REPLACE "<(.+)>" "$<$<COMPILE_LANGUAGE:CXX>:<\\1$<ANGLE-R>>")
  target_precompile_headers(${target} PRIVATE ${headers})
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # Required by ccache to handle precompiled headers.
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-fpch-preprocess>)
    if(CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
      # GCC 12 wrongly warns about overflows in std::string concatenation (GCC bug 105651). It suppresses the
      # warning in system headers, but not in precompiled ones.
      target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wno-stringop-overflow>)
    endif()
  endif()
endfunction()

# gradwire_unity(TARGET...): compiles up to seven files of a folder as one, so that each header is parsed, and
# each inline function compiled, only a few times. Anonymous namespaces then share names across these files.
# -DGRADWIRE_UNITY=OFF recompiles less after an edit, and detects missing includes.
function(gradwire_unity)
  if(NOT GRADWIRE_UNITY)
    return()
  endif()
  foreach(target ${ARGN})
    get_target_property(sources ${target} SOURCES)
    list(FILTER sources INCLUDE REGEX "\\.cpp$")
    set(previous)
    foreach(source ${sources})  # sorted, so that the files of a folder are adjacent
      get_filename_component(folder ${source} DIRECTORY)
      if(NOT folder STREQUAL previous)
        set(previous ${folder})
        set(files 0)
      endif()
      math(EXPR part "${files} / 7")
      math(EXPR files "${files} + 1")
      get_filename_component(name ${folder} NAME)
      set_source_files_properties(${source} PROPERTIES UNITY_GROUP ${name}_${part})
    endforeach()
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  endforeach()
endfunction()
