#include "bench/harness/spawn.h"

#include <fmt/format.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <memory>

#include "runtime/threads/child_process.h"
#include "runtime/threads/thread.h"
#include "runtime/util/error.h"
#include "runtime/util/file.h"

namespace gradwire::bench {
namespace {

// Returns the last line of a child's output, without the program name.
std::string message_of(int fd) {
  const std::string text = last_line(fd), program = "gradwire-bench: ";
  return text.starts_with(program) ? text.substr(program.size()) : text;
}

}  // namespace

std::string last_line(int fd) {
  std::string text = read_from_start(fd, "a file in memory");
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text.substr(text.rfind('\n') + 1);  // without a line break, the whole text, because npos + 1 is 0
}

ScratchFolder::ScratchFolder() {
  std::string name = (std::filesystem::temp_directory_path() / "gradwire-bench-XXXXXX").string();
  if (mkdtemp(name.data()) == nullptr)
    throw Error(fmt::format("cannot create the folder {}; set TMPDIR to a writable one", name));
  path_ = name;
}
ScratchFolder::~ScratchFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

void run_as_ranks(const std::vector<std::string>& arguments, int world) {
  std::vector<std::string> words = {"/proc/self/exe"};
  // /proc is not mounted
  if (access(words[0].c_str(), X_OK) != 0) words[0] = reinterpret_cast<const char*>(getauxval(AT_EXECFN));
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<FileDescriptor> errors;
  std::vector<std::unique_ptr<ChildProcess>> ranks;
  for (int r = 0; r < world; ++r) {
    const std::string rank = fmt::to_string(r), all = fmt::to_string(world);
    const int fd = errors.emplace_back(memfd_create("errors", MFD_CLOEXEC)).fd();
    if (fd < 0) throw_refused(fmt::format("cannot start rank {}", r), errno);
    const ChildProcess::Variables variables = {
        {"RANK", rank}, {"LOCAL_RANK", rank}, {"WORLD_SIZE", all}, {"LOCAL_WORLD_SIZE", all}};
    ranks.push_back(std::make_unique<ChildProcess>(
        words, ChildProcess::Descriptors{{fd, 2}, {r > 0 ? fd : 1, 1}}, variables));
  }
  std::string failure;
  // Wait for all ranks. Each rank has deadlines, so all ranks end.
  for (size_t r = 0; r < ranks.size(); ++r) {
    const ChildProcess::End& end = ranks[r]->wait();
    if ((end.code == 0 && end.signal == 0) || !failure.empty()) continue;
    failure = message_of(errors[r].fd());
    if (end.signal != 0 || failure.empty()) failure = fmt::format("rank {} {}", r, end.text);
  }
  if (!failure.empty()) throw Error(failure);
}

}  // namespace gradwire::bench
