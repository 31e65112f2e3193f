// libgraph_trace.so: lists the kernels of an unmodified CUDA program, those of replayed graphs included,
// without serializing them (CUPTI's activity records). bench/harness/graph_table.py reads the list.
//
//   CUDA_INJECTION64_PATH=/path/libgraph_trace.so PROGRAM
//
// writes graph_trace.tsv to the current folder: start and end in ns, stream, graph (0: none), launch (the
// same for all kernels of a replay), grid, threads per block, registers, bytes of shared memory, name. The
// driver loads the library at the first CUDA call.
#include <cupti.h>

#include <cstdio>
#include <cstdlib>

namespace {

FILE* file = nullptr;

void CUPTIAPI provide_buffer(uint8_t** buffer, size_t* size, size_t* most_records) {
  *size = size_t{8} << 20;
  *most_records = 0;  // as many as fit
  *buffer = static_cast<uint8_t*>(std::aligned_alloc(ACTIVITY_RECORD_ALIGNMENT, *size));
}

void write_record(const CUpti_Activity* record) {
  if (record->kind != CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) return;
  const auto& k = *reinterpret_cast<const CUpti_ActivityKernel9*>(record);
  std::fprintf(file, "%llu\t%llu\t%u\t%u\t%u\t%d,%d,%d\t%d\t%d\t%d\t%s\n",
               static_cast<unsigned long long>(k.start), static_cast<unsigned long long>(k.end), k.streamId,
               k.graphId, k.correlationId, k.gridX, k.gridY, k.gridZ, k.blockX * k.blockY * k.blockZ,
               k.registersPerThread, k.staticSharedMemory + k.dynamicSharedMemory, k.name);
}

void CUPTIAPI take_buffer(CUcontext, uint32_t, uint8_t* buffer, size_t, size_t valid_bytes) {
  CUpti_Activity* record = nullptr;
  while (file != nullptr && cuptiActivityGetNextRecord(buffer, valid_bytes, &record) == CUPTI_SUCCESS)
    write_record(record);
  std::free(buffer);
}

}  // namespace

// Called by the driver. Returns 1, so that the program runs even where CUPTI refuses.
extern "C" __attribute__((visibility("default"))) int InitializeInjection() {
  file = std::fopen("graph_trace.tsv", "w");
  if (file == nullptr) {
    std::perror("graph_trace: graph_trace.tsv");
    return 1;
  }
  cuptiActivityRegisterCallbacks(provide_buffer, take_buffer);
  if (const CUptiResult result = cuptiActivityEnable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL);
      result != CUPTI_SUCCESS)
    std::fprintf(stderr, "graph_trace: CUPTI refuses records of kernels: error %d\n", result);
  std::atexit([] {
    cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);
    std::fclose(file);
    file = nullptr;
  });
  return 1;
}
