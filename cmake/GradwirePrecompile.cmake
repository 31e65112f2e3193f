# Precompiled headers: parsing the standard library is half the cost of compiling most files. Sanitizer builds go without them,
# which shows a missing include.
option(GRADWIRE_PCH "Precompile the standard library's headers" ON)

# gradwire_precompile(TARGET [<header>...]): the list below, and headers that most of the target's own files include.
function(gradwire_precompile target)
  if(NOT GRADWIRE_PCH OR GRADWIRE_SANITIZE)
    return()
  endif()
  set(headers <algorithm> <atomic> <chrono> <cmath> <condition_variable> <cstdint> <cstring> <functional> <map> <memory>
      <mutex> <optional> <span> <string> <string_view> <thread> <vector> ${ARGN})
  list(TRANSFORM headers REPLACE "<(.+)>" "$<$<COMPILE_LANGUAGE:CXX>:<\\1$<ANGLE-R>>")
  target_precompile_headers(${target} PRIVATE ${headers})
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # ccache needs it to follow a precompiled header.
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-fpch-preprocess>)
    if(CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
      # GCC 12 sees overflows in std::string concatenation that are not there (GCC bug 105651). In a plain system header it
      # keeps quiet about them, in a precompiled one not.
      target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wno-stringop-overflow>)
    endif()
  endif()
endfunction()
