#include "bench/baselines/pytorch_baseline.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "bench/harness/spawn.h"
#include "runtime/util/error.h"

namespace gradwire::bench {

extern const char* const kPyTorchHookScript;  // bench/baselines/pytorch_hook.py, embedded by CMake

namespace {

// Creates an anonymous file that the child inherits. The file's path in the child is /proc/self/fd/<number>.
int anonymous_file(const char* name) {
  int fd = memfd_create(name, 0);
  if (fd < 0) throw Error(fmt::format("memfd_create: {}", std::strerror(errno)));
  return fd;
}

void write_all(int fd, const void* data, size_t bytes) {
  for (const char* at = static_cast<const char*>(data); bytes > 0;) {
    ssize_t n = write(fd, at, bytes);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) throw Error(fmt::format("write to the baseline: {}", std::strerror(errno)));
    at += n;
    bytes -= static_cast<size_t>(n);
  }
}

}  // namespace

PyTorchBaseline::PyTorchBaseline(const std::string& python, Device device, int threads,
                                 const std::vector<GradientTensor>& tensors, std::span<const float> data)
    : python_(python) {
  signal(SIGPIPE, SIG_IGN);  // with SIGPIPE ignored, write() fails if the child is dead
  int file = anonymous_file("gradients");
  write_all(file, data.data(), data.size_bytes());
  errors_ = anonymous_file("errors");
  nlohmann::json shapes = nlohmann::json::array();
  for (const GradientTensor& t : tensors) shapes.push_back(t.shape);
  nlohmann::json config = {{"device", device.is_host() ? "cpu" : device.name()},
                           {"threads", threads},
                           {"shapes", shapes},
                           {"data", fmt::format("/proc/self/fd/{}", file)}};
  std::string text = config.dump(), count = fmt::to_string(threads);
  int in[2], out[2];
  if (pipe2(in, O_CLOEXEC) != 0 || pipe2(out, O_CLOEXEC) != 0) throw Error("pipe2 failed");
  const char* argv[] = {python_.c_str(), "-c", kPyTorchHookScript, text.c_str(), nullptr};
  int parent = getpid();
  pid_ = fork();
  if (pid_ == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(127);
    dup2(in[0], 0);
    dup2(out[1], 1);
    dup2(errors_, 2);
    for (const char* variable : {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"}) {
      setenv(variable, count.c_str(), 1);
    }
    execvp(argv[0], const_cast<char**>(argv));
    dprintf(2, "%s: %s\n", argv[0], std::strerror(errno));
    _exit(127);
  }
  close(in[0]);
  close(out[1]);
  close(file);
  to_ = in[1];
  from_ = out[0];
  nlohmann::json hello = read_answer();
  if (hello.contains("missing")) {
    throw BadInput(
        fmt::format("--baseline: {}: {}; install python3-torch and python3-numpy, or give --python an "
                    "interpreter that has them",
                    python_, hello["missing"].get<std::string>()));
  }
}

PyTorchBaseline::~PyTorchBaseline() {
  if (to_ >= 0) close(to_);
  if (from_ >= 0) close(from_);
  if (errors_ >= 0) close(errors_);
  if (pid_ > 0) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
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
  write_all(to_, line.data(), line.size());
  return read_answer();
}

nlohmann::json PyTorchBaseline::read_answer() {
  constexpr int kTimeoutMs = 300'000;
  size_t end;
  while ((end = received_.find('\n')) == std::string::npos) {
    pollfd readable{from_, POLLIN, 0};
    int ready = poll(&readable, 1, kTimeoutMs);
    if (ready < 0 && errno == EINTR) continue;
    if (ready == 0) throw Error(fmt::format("--baseline: {} did not answer for five minutes", python_));
    char chunk[4096];
    ssize_t n = read(from_, chunk, sizeof chunk);
    if (n <= 0) {
      std::string why = fmt::format("--baseline: {} ended: {}", python_, last_line(errors_));
      int status = 0;
      waitpid(pid_, &status, 0);
      pid_ = -1;
      if (WIFEXITED(status) && WEXITSTATUS(status) == 127) throw BadInput(why);
      throw Error(why);
    }
    received_.append(chunk, static_cast<size_t>(n));
  }
  nlohmann::json answer = nlohmann::json::parse(received_.substr(0, end));
  received_.erase(0, end + 1);
  return answer;
}

}  // namespace gradwire::bench
