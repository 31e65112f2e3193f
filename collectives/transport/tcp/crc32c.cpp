#include "collectives/transport/tcp/crc32c.h"

#include "runtime/util/crc32.h"

namespace gradwire {
namespace {

#ifdef __x86_64__
__attribute__((target("sse4.2"))) uint32_t by_instruction(const void* data, size_t bytes, uint32_t crc) {
  const auto* at = static_cast<const unsigned char*>(data);
  uint64_t wide = ~crc;
  for (; bytes >= 8; bytes -= 8, at += 8) {
    uint64_t eight;
    std::memcpy(&eight, at, 8);
    wide = __builtin_ia32_crc32di(wide, eight);
  }
  auto narrow = static_cast<uint32_t>(wide);
  for (; bytes > 0; --bytes, ++at) narrow = __builtin_ia32_crc32qi(narrow, *at);
  return ~narrow;
}
#endif

}  // namespace

uint32_t crc32c(const void* data, size_t bytes, uint32_t crc) {
#ifdef __x86_64__
  static const bool has_instruction = __builtin_cpu_supports("sse4.2");
  if (has_instruction) return by_instruction(data, bytes, crc);
#endif
  return crc32<kCrc32c>(data, bytes, crc);
}

}  // namespace gradwire
