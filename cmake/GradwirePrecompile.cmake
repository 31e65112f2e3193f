# Precompiled headers: parsing the standard library is half the cost of compiling most files. Sanitizer builds
# do not use them, so they detect missing includes.
option(GRADWIRE_PCH "Precompile the standard library's headers" ON)

# gradwire_precompile(TARGET [<header>...]): the list below, plus headers that most files of the target
# include.
function(gradwire_precompile target)
  if(NOT GRADWIRE_PCH OR GRADWIRE_SANITIZE)
    return()
  endif()
  set(headers <algorithm> <atomic> <chrono> <cmath> <condition_variable> <cstdint> <cstring> <functional>
      <map> <memory> <mutex> <optional> <span> <string> <string_view> <thread> <vector> ${ARGN})
  list(TRANSFORM headers REPLACE "<(.+)>" "$<$<COMPILE_LANGUAGE:CXX>:<\\1$<ANGLE-R>>")
  target_precompile_headers(${target} PRIVATE ${headers})
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # ccache needs this to handle precompiled headers.
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-fpch-preprocess>)
    if(CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
      # GCC 12 wrongly warns about overflows in std::string concatenation (GCC bug 105651). It suppresses the
      # warning in system headers, but not in precompiled ones.
      target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wno-stringop-overflow>)
    endif()
  endif()
endfunction()
