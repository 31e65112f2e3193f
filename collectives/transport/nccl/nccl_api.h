// A table of the NCCL functions that Gradwire uses. The library is loaded on first use, so programs start
// without NCCL. Programs that have already loaded NCCL share that copy. Tests can substitute functions.
//
// Includes nccl.h, and with it CUDA's headers. Only the NCCL transport and the interposer may include this
// file.
#pragma once

#include <nccl.h>

#include <string>

namespace gradwire {

struct NcclApi {
  decltype(&ncclGetVersion) get_version = nullptr;
  decltype(&ncclGetErrorString) error_string = nullptr;
  decltype(&ncclGetUniqueId) get_unique_id = nullptr;
  decltype(&ncclCommInitRankConfig) init_rank = nullptr;
  decltype(&ncclCommFinalize) finalize = nullptr;
  decltype(&ncclCommDestroy) destroy = nullptr;
  decltype(&ncclCommAbort) abort = nullptr;
  decltype(&ncclCommGetAsyncError) async_error = nullptr;
  decltype(&ncclCommCount) count = nullptr;
  decltype(&ncclCommUserRank) user_rank = nullptr;
  decltype(&ncclCommCuDevice) device = nullptr;
  decltype(&ncclGroupStart) group_start = nullptr;
  decltype(&ncclGroupEnd) group_end = nullptr;
  decltype(&ncclSend) send = nullptr;
  decltype(&ncclRecv) receive = nullptr;
  decltype(&ncclCommSplit) split = nullptr;
  decltype(&ncclAllReduce) all_reduce = nullptr;
  // The functions below are optional: null in NCCL versions without them.
  decltype(&ncclGetLastError) last_error = nullptr;
  ncclResult_t (*shrink)(ncclComm_t, int*, int, ncclComm_t*, ncclConfig_t*, int) = nullptr;  // NCCL 2.27
  ncclResult_t (*revoke)(ncclComm_t, int) = nullptr;                                         // NCCL 2.28.7

  // Returns an error text, e.g. "unhandled system error (socket closed by peer)".
  std::string text(ncclResult_t result, ncclComm_t comm) const;
  std::string version() const;  // e.g. "2.28.9"

  // Returns the functions of libnccl.so.2, or of the library in GRADWIRE_NCCL_LIBRARY. Loads the library
  // once. Throws BadInput that names the missing library or function.
  static const NcclApi& loaded();
};

}  // namespace gradwire
