#include "runtime/util/signals.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <csignal>
#include <cstring>
#include <ctime>
#include <string_view>

namespace gradwire {
namespace {

std::atomic<const char*> shown = "";
std::atomic<int> requested = 0;
std::atomic<time_t> requested_at = 0;

// Calls only functions that are safe in a signal handler. Returns when no process reads standard error.
void print_final_text(int number) {
  constexpr size_t kAtOnce = 512;  // a pipe that is ready for writing has room for as many bytes
  const char* begin =
      isatty(STDERR_FILENO) == 1 ? "\ngradwire: interrupted by SIG" : "gradwire: interrupted by SIG";
  for (std::string_view rest : {begin, sigabbrev_np(number), "; ", shown.load(), "\n"}) {
    while (!rest.empty()) {
      pollfd room{.fd = STDERR_FILENO, .events = POLLOUT, .revents = 0};
      if (poll(&room, 1, 200) != 1 || (room.revents & POLLOUT) == 0) return;
      const ssize_t done = write(STDERR_FILENO, rest.data(), std::min(rest.size(), kAtOnce));
      if (done <= 0) return;
      rest.remove_prefix(static_cast<size_t>(done));
    }
  }
}

}  // namespace

void on_signal(int number) {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  const bool defers = DeferredEnd::deferring > 0 && (number == SIGTERM || number == SIGUSR1);
  if (!defers || (requested == number && now.tv_sec > requested_at + 1)) end_by_signal(number);
  if (requested == number) return;
  requested_at = now.tv_sec;
  requested = number;
}

void prepare_signals() {
  std::signal(SIGCHLD, SIG_DFL);
  sigset_t none;
  sigemptyset(&none);
  pthread_sigmask(SIG_SETMASK, &none, nullptr);
  for (int number : {SIGHUP, SIGINT, SIGQUIT, SIGUSR1, SIGUSR2, SIGALRM, SIGTERM, SIGXCPU, SIGPWR}) {
    struct sigaction action {};
    if (sigaction(number, nullptr, &action) != 0 || action.sa_handler != SIG_DFL) continue;
    action.sa_handler = on_signal;
    action.sa_flags = SA_RESTART;
    sigfillset(&action.sa_mask);
    sigaction(number, &action, nullptr);
  }
}

void set_final_text(const std::string& text) {
  static std::array<char, 1 << 16> texts[2];  // a signal handler may be printing the other
  static size_t next = 0;
  auto& to = texts[next++ % 2];
  to[text.copy(to.data(), to.size() - 1)] = 0;
  shown = to.data();
}

int requested_end() {
  return requested;
}

bool reader_is_gone() {
  pollfd out{.fd = STDOUT_FILENO, .events = 0, .revents = 0};
  return poll(&out, 1, 0) == 1 && (out.revents & (POLLERR | POLLHUP)) != 0;
}

void end_by_signal(int number) {
  sigset_t signals;
  sigfillset(&signals);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  static std::atomic_flag ending;
  while (ending.test_and_set()) pause();  // another thread ends the process
  if (*shown != 0) print_final_text(number);
  std::signal(number, SIG_DFL);
  raise(number);
  sigdelset(&signals, number);
  pthread_sigmask(SIG_SETMASK, &signals, nullptr);  // ends the process, unless it is process 1
  _exit(128 + number);
}

}  // namespace gradwire
