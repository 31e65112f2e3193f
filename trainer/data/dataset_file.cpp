#include "trainer/data/dataset_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

#include "runtime/util/error.h"

namespace gradwire {

std::vector<uint8_t> read_file(const std::string& path, size_t limit_bytes, const std::string& remedy) {
  auto fail = [&](const std::string& why) { throw BadInput(fmt::format("{}: {}; {}", path, why, remedy)); };
  struct stat status {};
  if (stat(path.c_str(), &status) != 0) fail(errno == ENOENT ? "no such file" : std::strerror(errno));
  if (!S_ISREG(status.st_mode)) fail("not a regular file");

  gzFile file = gzopen(path.c_str(), "rb");
  if (file == nullptr) fail(std::strerror(errno == 0 ? ENOMEM : errno));
  std::unique_ptr<gzFile_s, int (*)(gzFile)> closer(file, gzclose_r);
  gzbuffer(file, 1 << 18);

  std::vector<uint8_t> contents;
  constexpr size_t kChunk = 1 << 20;
  while (true) {
    size_t filled = contents.size();
    if (filled > limit_bytes) fail(fmt::format("larger than the limit of {} bytes", limit_bytes));
    contents.resize(filled + kChunk);
    int got = gzread(file, contents.data() + filled, kChunk);
    if (got < 0) {
      int code = 0;
      const char* text = gzerror(file, &code);
      bool truncated = code == Z_BUF_ERROR || std::strstr(text, "unexpected end") != nullptr;
      fail(truncated ? "truncated gzip file" : fmt::format("corrupt gzip file ({})", text));
    }
    contents.resize(filled + static_cast<size_t>(got));
    if (got == 0) break;
  }
  // Close explicitly: only closing reports a gzip stream that ends before its trailer.
  closer.release();
  if (int code = gzclose_r(file); code != Z_OK) {
    fail(code == Z_BUF_ERROR ? "truncated gzip file" : fmt::format("cannot be read (zlib error {})", code));
  }
  return contents;
}

}  // namespace gradwire
