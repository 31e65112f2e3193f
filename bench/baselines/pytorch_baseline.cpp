#include "bench/baselines/pytorch_baseline.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "bench/harness/spawn.h"
#include "runtime/util/error.h"

namespace gradwire::bench {

extern const char* const kPyTorchHookScript;  // bench/baselines/pytorch_hook.py, embedded by CMake

namespace {

// Creates an anonymous file that the child inherits. The file's path in the child is /proc/self/fd/<number>.
FileDescriptor anonymous_file(const char* name) {
  FileDescriptor file(memfd_create(name, 0));
  if (!file) throw Error(fmt::format("memfd_create: {}", std::strerror(errno)));
  return file;
}

void write_all(int fd, std::string_view bytes) {
  if (const int error = write_fully(fd, bytes); error != 0)
    throw Error(fmt::format("write to the baseline: {}", std::strerror(error)));
}

}  // namespace

PyTorchBaseline::PyTorchBaseline(const std::string& python, Device device, int threads,
                                 const std::vector<GradientTensor>& tensors, std::span<const float> data)
    : python_(python) {
  const FileDescriptor file = anonymous_file("gradients");
  write_all(file.fd(), {reinterpret_cast<const char*>(data.data()), data.size_bytes()});
  errors_ = anonymous_file("errors");
  nlohmann::json shapes = nlohmann::json::array();
  for (const GradientTensor& t : tensors) shapes.push_back(t.shape);
  nlohmann::json config = {{"device", device.is_host() ? "cpu" : device.name()},
                           {"threads", threads},
                           {"shapes", shapes},
                           {"data", fmt::format("/proc/self/fd/{}", file.fd())}};
  std::string text = config.dump(), count = fmt::to_string(threads);
  int in[2], out[2];
  if (pipe2(in, O_CLOEXEC) != 0 || pipe2(out, O_CLOEXEC) != 0) throw Error("pipe2 failed");
  to_ = FileDescriptor(in[1]);
  from_ = FileDescriptor(out[0]);
  FileDescriptor their_in(in[0]), their_out(out[1]);
  try {
    process_.emplace(
        std::vector<std::string>{python_, "-c", kPyTorchHookScript, text},
        ChildProcess::Descriptors{{in[0], 0}, {out[1], 1}, {errors_.fd(), 2}},
        ChildProcess::Variables{
            {"OMP_NUM_THREADS", count}, {"OPENBLAS_NUM_THREADS", count}, {"MKL_NUM_THREADS", count}});
  } catch (const ChildProcess::NotStarted& error) {
    throw BadInput(fmt::format("--baseline: {}", error.what()));
  }
  their_in.close();
  their_out.close();
  nlohmann::json hello = read_answer();
  if (hello.contains("missing")) {
    throw BadInput(
        fmt::format("--baseline: {}: {}; install python3-torch and python3-numpy, or give --python an "
                    "interpreter that has them",
                    python_, hello["missing"].get<std::string>()));
  }
}

bool PyTorchBaseline::has(const CompressionSpec& spec) {
  if (spec.method == CompressionSpec::Method::powersgd) return spec.wire == kFp32 && !spec.alternate;
  return spec.method == CompressionSpec::Method::wire && spec.wire == kBf16 &&
         spec.rounding == Rounding::nearest;
}

std::string PyTorchBaseline::prepare(const CompressionSpec& spec) {
  nlohmann::json options = {{"method", "bf16"}};
  if (spec.method == CompressionSpec::Method::powersgd) {
    options = {{"method", "powersgd"},
               {"rank", spec.rank},
               {"error_feedback", spec.policy.keeps_errors()},
               {"warm", spec.warm},
               {"min_ratio", spec.min_ratio}};
  }
  return ask("prepare " + options.dump()).at("baseline").get<std::string>();
}

std::string PyTorchBaseline::prepare_qr() {
  return ask("prepare " + nlohmann::json{{"method", "qr"}}.dump()).at("baseline").get<std::string>();
}

double PyTorchBaseline::run_ms() {
  return ask("run").at("ms").get<double>();
}

nlohmann::json PyTorchBaseline::ask(const std::string& command) {
  std::string line = command + "\n";
  write_all(to_.fd(), line);
  return read_answer();
}

nlohmann::json PyTorchBaseline::read_answer() {
  constexpr int kTimeoutMs = 300'000;
  size_t end;
  while ((end = received_.find('\n')) == std::string::npos) {
    pollfd readable{from_.fd(), POLLIN, 0};
    int ready = poll(&readable, 1, kTimeoutMs);
    if (ready < 0 && errno == EINTR) continue;
    if (ready == 0) throw Error(fmt::format("--baseline: {} did not answer for five minutes", python_));
    char chunk[4096];
    ssize_t n = read(from_.fd(), chunk, sizeof chunk);
    if (n <= 0) {
      const std::string why = last_line(errors_.fd());
      throw Error(
          fmt::format("--baseline: {} {}{}{}", python_, process_->wait().text, why.empty() ? "" : ": ", why));
    }
    received_.append(chunk, static_cast<size_t>(n));
  }
  nlohmann::json answer = nlohmann::json::parse(received_.substr(0, end));
  received_.erase(0, end + 1);
  return answer;
}

}  // namespace gradwire::bench
