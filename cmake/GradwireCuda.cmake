# Finds nvcc, decides whether to build the CUDA side, and reports the decision: no silent fallback.
set(GRADWIRE_HAS_CUDA OFF)
if(NOT GRADWIRE_CUDA STREQUAL "OFF")
  # Uses the nvcc of `make build CUDA=pip`, unless another one is chosen. An earlier run without nvcc leaves
  # NOTFOUND in the cache.
  set(pip_nvcc ${PROJECT_SOURCE_DIR}/build/cuda-pip/bin/nvcc)
  if(EXISTS ${pip_nvcc} AND NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
    set(CMAKE_CUDA_COMPILER ${pip_nvcc} CACHE FILEPATH "nvcc" FORCE)
  endif()
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    # Default architectures. PTX covers GPUs between and after them.
    if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
      set(CMAKE_CUDA_ARCHITECTURES "80-real;90-real;90-virtual")
      if(GRADWIRE_ALL_GPUS)
        set(CMAKE_CUDA_ARCHITECTURES "80-real;90;100-real;120")
      endif()
    endif()
    enable_language(CUDA)
    if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 stops at C++17
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
      set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
    endif()
    set(CMAKE_CUDA_STANDARD 20)
    set(CMAKE_CUDA_STANDARD_REQUIRED ON)
    find_package(CUDAToolkit REQUIRED)
    set(GRADWIRE_HAS_CUDA ON)
  elseif(GRADWIRE_CUDA STREQUAL "ON")
    message(FATAL_ERROR
      "GRADWIRE_CUDA=ON, but no nvcc was found. Put nvcc on PATH, set CUDACXX, install nvcc by make build CUDA=pip, "
      "or use -DGRADWIRE_CUDA=OFF.")
  endif()
endif()
if(GRADWIRE_HAS_CUDA)
  message(STATUS "Gradwire: building the host side and the CUDA side (nvcc ${CMAKE_CUDA_COMPILER_VERSION}, "
                 "architectures ${CMAKE_CUDA_ARCHITECTURES})")
else()
  message(STATUS "Gradwire: building the host side only (GRADWIRE_CUDA=${GRADWIRE_CUDA}, no nvcc in use)")
endif()
