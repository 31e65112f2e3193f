# Finds NCCL's header. The library is loaded at first use (collectives/transport/nccl/nccl_api.h), so programs
# start without it, and use a copy that the process has already loaded.
#   NCCL_FOUND, NCCL_INCLUDE_DIRS, NCCL_VERSION.   NCCL_ROOT: folder to search first.
find_package(CUDAToolkit QUIET)
find_path(NCCL_INCLUDE_DIR nccl.h
  HINTS ${NCCL_ROOT} ENV NCCL_ROOT ${CUDAToolkit_INCLUDE_DIRS} PATH_SUFFIXES include)
if(NCCL_INCLUDE_DIR)
  file(STRINGS ${NCCL_INCLUDE_DIR}/nccl.h lines REGEX "^#define NCCL_(MAJOR|MINOR|PATCH) [0-9]+")
  string(REGEX REPLACE "[^0-9;]" "" NCCL_VERSION "${lines}")
  string(REPLACE ";" "." NCCL_VERSION "${NCCL_VERSION}")
endif()
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(NCCL
  REQUIRED_VARS NCCL_INCLUDE_DIR CUDAToolkit_INCLUDE_DIRS VERSION_VAR NCCL_VERSION)
set(NCCL_INCLUDE_DIRS ${NCCL_INCLUDE_DIR} ${CUDAToolkit_INCLUDE_DIRS})  # nccl.h includes CUDA's headers
mark_as_advanced(NCCL_INCLUDE_DIR)
