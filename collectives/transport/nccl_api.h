// A table of the NCCL functions that Gradwire uses. The library is loaded on first use, so programs start
// where it is missing; a copy that the process has already loaded is shared; and tests can substitute
// functions of their own.
//
// Includes nccl.h, and with it CUDA's headers: only for the NCCL transport and the interposer.
#pragma once

#include <nccl.h>

#include <string>

// Of NCCL's device API, which older headers do not have.
struct ncclWindow_vidmem;
struct ncclDevComm;
struct ncclDevCommRequirements;

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
  // Optional: null in versions that lack them.
  decltype(&ncclAllReduce) all_reduce = nullptr;
  decltype(&ncclGetLastError) last_error = nullptr;
  ncclResult_t (*shrink)(ncclComm_t, int*, int, ncclComm_t*, ncclConfig_t*, int) = nullptr;  // 2.27
  ncclResult_t (*revoke)(ncclComm_t, int) = nullptr;                                         // 2.28.7

  ncclResult_t (*mem_alloc)(void**, size_t) = nullptr;  // 2.19
  ncclResult_t (*mem_free)(void*) = nullptr;
  ncclResult_t (*comm_register)(const ncclComm_t, void*, size_t, void** handle) = nullptr;  // 2.19
  ncclResult_t (*comm_deregister)(const ncclComm_t, void* handle) = nullptr;
  ncclResult_t (*window_register)(ncclComm_t, void*, size_t, ncclWindow_vidmem**, int) = nullptr;  // 2.27
  ncclResult_t (*window_deregister)(ncclComm_t, ncclWindow_vidmem*) = nullptr;
  // The ranks whose memory this one can load and store: how many, which of them it is, and their distance. (ncclTeam_t,
  // for headers that lack it.)
  struct Team {
    int ranks, rank, stride;
  };
  Team (*team_lsa)(ncclComm_t) = nullptr;  // 2.28

  // "unhandled system error (socket closed by peer)"
  std::string text(ncclResult_t result, ncclComm_t comm) const;
  std::string version() const;  // "2.28.9"

  // Loads libnccl.so.2, or what GRADWIRE_NCCL_LIBRARY names, once. Throws BadInput that says what is missing.
  static const NcclApi& loaded();
};

}  // namespace gradwire
