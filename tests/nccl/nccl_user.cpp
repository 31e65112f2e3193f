// A program that uses NCCL and is unaware of Gradwire.
#include <nccl.h>

#include <cstdio>

int main() {
  auto comm = reinterpret_cast<ncclComm_t>(0x10);
  auto stream = static_cast<cudaStream_t>(nullptr);
  char* a = reinterpret_cast<char*>(0x1000);
  char* b = reinterpret_cast<char*>(0x2000);
  const size_t large = 1 << 20;
  auto call = [&](size_t count, ncclDataType_t type, ncclRedOp_t op) {
    std::printf("  -> %d\n", ncclAllReduce(a, b, count, type, op, comm, stream));
  };
  call(large, ncclFloat32, ncclSum);
  call(large, ncclFloat32, ncclAvg);
  call(large, ncclFloat32, ncclMax);
  call(large, ncclFloat16, ncclSum);
  call(100, ncclFloat32, ncclSum);
  call(13, ncclInt8, ncclSum);
  ncclGroupStart();
  call(large, ncclFloat32, ncclSum);
  ncclGroupStart();
  ncclGroupEnd();
  call(large, ncclFloat32, ncclSum);
  ncclGroupEnd();
  ncclBroadcast(a, b, 7, ncclInt8, 0, comm, stream);
  call(large, ncclFloat32, ncclSum);
  ncclCommDestroy(comm);
  ncclCommAbort(comm);
}
