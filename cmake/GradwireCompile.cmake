# Compiler options of all targets. Sanitizers apply to host code; a sanitized build has no CUDA side.
add_library(gradwire_options INTERFACE)
target_include_directories(gradwire_options INTERFACE ${PROJECT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/include)
target_compile_options(gradwire_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra>)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # GCC 12 wrongly warns about overlaps in std::string concatenation (GCC bug 105651).
  target_compile_options(gradwire_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict>)
endif()
if(GRADWIRE_WERROR AND NOT GRADWIRE_SANITIZE)
  target_compile_options(gradwire_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Werror>)
endif()
# Contracting a*b+c into an FMA would make results depend on the compiler. The code requests FMAs explicitly.
# See docs/numerics.md.
target_compile_options(gradwire_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off>)
# No code reads errno after sqrt or traps on floating-point flags; assuming otherwise prevents vectorization.
target_compile_options(gradwire_options INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-fno-math-errno -fno-trapping-math>)
# -fopenmp-simd: `#pragma omp simd` without OpenMP's runtime, see kernels/simd/vector.h.
# -Wno-psabi: vectors of floats (kernels/simd/vector.h) exist only in inlined code, never in an ABI.
target_compile_options(gradwire_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-fopenmp-simd -Wno-psabi>)
if(GRADWIRE_HAS_CUDA)
  target_compile_definitions(gradwire_options INTERFACE GRADWIRE_HAS_CUDA=1)
  # -Xptxas --warn-on-spills together with -Werror all-warnings: a kernel that spills registers does not
  # build. On sm_100 and sm_120 a few kernels spill (docs/gpu.md).
  target_compile_options(gradwire_options INTERFACE
    $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr -Xcompiler=-Wall,-Wextra>)
  if(NOT GRADWIRE_ALL_GPUS)
    target_compile_options(gradwire_options INTERFACE
      $<$<COMPILE_LANGUAGE:CUDA>:-Xptxas=--warn-on-spills,--warn-on-local-memory-usage>)
  endif()
  if(GRADWIRE_WERROR)
    target_compile_options(gradwire_options INTERFACE
      $<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings -Xptxas=--warning-as-error>)
  endif()
endif()
if(GRADWIRE_SANITIZE)
  if(GRADWIRE_HAS_CUDA)
    message(FATAL_ERROR
      "GRADWIRE_SANITIZE needs -DGRADWIRE_CUDA=OFF: the host sanitizers do not check device code.")
  endif()
  target_compile_options(gradwire_options INTERFACE
    -fsanitize=${GRADWIRE_SANITIZE} -fno-omit-frame-pointer -g1 -fno-sanitize-recover=all)
  # The release build enables warnings. With sanitizers, GCC wrongly reports uninitialized values, sizes and
  # bounds, which depend on the grouping of files.
  target_compile_options(gradwire_options INTERFACE -w)
  target_compile_definitions(gradwire_options INTERFACE GRADWIRE_SANITIZED=1)
  target_link_options(gradwire_options INTERFACE -fsanitize=${GRADWIRE_SANITIZE})
endif()

# gradwire_compile_quickly(TARGET): for code that mostly calls the libraries, such as tests and the commands.
# -O1 compiles such code in 56 % of -O3's time. Results are the same: the options above leave no freedom in
# arithmetic.
function(gradwire_compile_quickly target)
  target_compile_options(${target} PRIVATE $<$<AND:$<CONFIG:Release>,$<COMPILE_LANGUAGE:CXX>>:-O1>)
endfunction()
