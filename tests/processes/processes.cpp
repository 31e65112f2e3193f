#include "tests/processes/processes.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "collectives/net/listener.h"
#include "collectives/net/socket.h"
#include "runtime/util/error.h"
#include "tests/support/temporary_folder.h"

namespace gradwire::testing {
namespace {

using Clock = std::chrono::steady_clock;

std::map<std::string, ProcessMain>& programs() {
  static std::map<std::string, ProcessMain> all;
  return all;
}

int number_from_environment(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::stoi(text);
}

struct Child {
  pid_t pid = -1;
  int output = -1;
  bool running = false;
};

Child start(const std::vector<std::string>& arguments) {
  Child child;
  child.output = memfd_create("output", 0);
  std::vector<char*> argv;
  for (const std::string& a : arguments) argv.push_back(const_cast<char*>(a.c_str()));
  argv.push_back(nullptr);
  pid_t parent = getpid();
  child.pid = fork();
  if (child.pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(127);
    dup2(child.output, 1);
    dup2(child.output, 2);
    execv("/proc/self/exe", argv.data());
    _exit(127);
  }
  child.running = child.pid > 0;
  return child;
}

std::string read_all(int fd) {
  std::string text;
  char chunk[4096];
  lseek(fd, 0, SEEK_SET);
  for (ssize_t n; (n = read(fd, chunk, sizeof chunk)) > 0;) text.append(chunk, static_cast<size_t>(n));
  close(fd);
  return text;
}

}  // namespace

RegisterProgram::RegisterProgram(const char* name, ProcessMain program) {
  programs()[name] = program;
}

int run_rank_program(int argc, char** argv) {
  if (argc < 6 || std::string(argv[1]) != "--rank-program") return -1;
  Me me;
  me.rank = std::atoi(argv[3]);
  me.world = std::atoi(argv[4]);
  me.timeout = std::chrono::milliseconds(std::atoi(argv[5]));
  me.rendezvous = argv[6];
  for (int i = 7; i < argc; ++i) {
    std::string option = argv[i];
    size_t equals = option.find('=');
    me.options[option.substr(0, equals)] = option.substr(equals + 1);
  }
  setvbuf(stdout, nullptr, _IOLBF, 0);
  try {
    programs().at(argv[2])(me);
    return 0;
  } catch (const BadInput& error) {
    std::printf("BadInput: %s\n", error.what());
    return 2;
  } catch (const CommError& error) {
    std::printf("CommError: %s\n", error.what());
    return 3;
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    return 4;
  }
}

SoakSeeds::SoakSeeds(uint32_t least)
    : first(static_cast<uint32_t>(number_from_environment("GRADWIRE_TEST_SEED", 1))),
      least_(least),
      until_(Clock::now() + std::chrono::seconds(number_from_environment("GRADWIRE_SOAK_S", 0))) {}

std::optional<uint32_t> SoakSeeds::next() {
  const uint32_t before = drawn_++;
  if (before >= least_ && Clock::now() >= until_) return {};
  return first + before;
}

std::vector<Outcome> run_processes(const std::string& program, int world, const ProcessOptions& options) {
  static std::atomic<int> runs = 0;
  std::string rendezvous = options.rendezvous;
  if (rendezvous.empty()) rendezvous = "file://" + scratch_path(fmt::format("rendezvous{}", runs++));
  std::vector<Child> children(world);
  std::vector<Outcome> outcomes(world);
  auto started = Clock::now();
  for (int r = 0; r < world; ++r) {
    if (!options.only.empty() && std::find(options.only.begin(), options.only.end(), r) == options.only.end())
      continue;
    std::vector<std::string> arguments = {fmt::format("rank{}", r),
                                          "--rank-program",
                                          program,
                                          fmt::to_string(r),
                                          fmt::to_string(world),
                                          fmt::to_string(options.timeout.count()),
                                          rendezvous};
    for (const auto& [key, value] : options.options) arguments.push_back(key + "=" + value);
    children[r] = start(arguments);
  }
  auto endless = [&](int r) {
    return std::find(options.never_ending.begin(), options.never_ending.end(), r) !=
           options.never_ending.end();
  };
  while (true) {
    bool waiting = false;
    for (int r = 0; r < world; ++r) {
      Child& child = children[r];
      int status = 0;
      if (child.running && waitpid(child.pid, &status, WNOHANG) == child.pid) {
        child.running = false;
        outcomes[r].took = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - started);
        outcomes[r].exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
        outcomes[r].signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
      }
      waiting = waiting || (child.running && !endless(r));
    }
    if (!waiting || Clock::now() - started > options.limit) break;
    std::this_thread::sleep_for(2ms);
  }
  for (int r = 0; r < world; ++r) {
    Child& child = children[r];
    if (child.running) {
      kill(child.pid, SIGKILL);
      int status = 0;
      waitpid(child.pid, &status, 0);
      outcomes[r].ended_by_itself = false;
      outcomes[r].signal = SIGKILL;
      outcomes[r].took = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - started);
    }
    if (child.output >= 0) outcomes[r].output = read_all(child.output);
  }
  return outcomes;
}

void pause_for(std::chrono::milliseconds time) {
  const pid_t me = getpid(), helper = fork();
  if (helper == 0) {
    usleep(static_cast<useconds_t>(time.count() * 1000));
    kill(me, SIGCONT);
    _exit(0);
  }
  raise(SIGSTOP);
  waitpid(helper, nullptr, 0);
}

std::string free_tcp_rendezvous() {
  Socket socket = listen_on({"127.0.0.1", 0});
  return fmt::format("tcp://127.0.0.1:{}", local_port(socket));
}

std::string scratch_path(const std::string& name) {
  static const TemporaryFolder folder;
  return folder.path(name);
}

void wait_for_file(const std::string& path, std::chrono::milliseconds limit) {
  for (const auto until = Clock::now() + limit; access(path.c_str(), F_OK) != 0 && Clock::now() < until;)
    std::this_thread::sleep_for(1ms);
}

bool all_succeeded(const std::vector<Outcome>& ranks) {
  bool good = true;
  for (size_t r = 0; r < ranks.size(); ++r) {
    const Outcome& o = ranks[r];
    EXPECT_TRUE(o.ended_by_itself) << "rank " << r << " did not end\n" << o.output;
    EXPECT_EQ(o.exit_code, 0) << "rank " << r << ", signal " << o.signal << "\n" << o.output;
    good = good && o.exit_code == 0;
  }
  return good;
}

}  // namespace gradwire::testing

int main(int argc, char** argv) {
  int code = gradwire::testing::run_rank_program(argc, argv);
  if (code >= 0) return code;
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
