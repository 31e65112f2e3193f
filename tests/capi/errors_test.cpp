// Tests that wrong use of the C ABI returns a status and an error text and never crashes. AddressSanitizer
// builds run these tests as well.
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>

#include "tests/capi/ranks.h"
#include "tests/support/expect.h"

namespace {

using capi::Model;
using capi::normal;
using capi::run_ranks;
using std::chrono::steady_clock;

double seconds_since(steady_clock::time_point start) {
  return std::chrono::duration<double>(steady_clock::now() - start).count();
}

gw_comm single() {
  gw_comm comm = nullptr;
  GW_EXPECT_OK(capi::create(nullptr, 0, 1, GW_HOST, 1000, &comm));
  return comm;
}

TEST(CApiErrors, CommCreateChecksEveryArgument) {
  gw_comm untouched = reinterpret_cast<gw_comm>(1234);
  gw_comm comm = untouched;
  GW_EXPECT_BAD("comm is null", capi::create("local://x", 0, 2, GW_HOST, 1000, nullptr));
  GW_EXPECT_BAD("options is null", gw_comm_create(nullptr, &comm));
  auto options = capi::comm_options("local://x", 0, 2);
  options.size = 8;
  GW_EXPECT_BAD("gw_comm_options.size is 8", gw_comm_create(&options, &comm));
  options = capi::comm_options("local://x", 0, 2);
  options.secret = "";
  GW_EXPECT_BAD("the secret is empty", gw_comm_create(&options, &comm));
  GW_EXPECT_BAD("rendezvous is null", capi::create(nullptr, 0, 2, GW_HOST, 1000, &comm));
  GW_EXPECT_BAD("rank is 2", capi::create("local://x", 2, 2, GW_HOST, 1000, &comm));
  GW_EXPECT_BAD("rank is -1", capi::create("local://x", -1, 2, GW_HOST, 1000, &comm));
  GW_EXPECT_BAD("world is 0", capi::create("local://x", 0, 0, GW_HOST, 1000, &comm));
  GW_EXPECT_BAD("world is 2147483647; it must be from 1 to 65536",
                capi::create("tcp://127.0.0.1:29500", 0, INT32_MAX, GW_HOST, 1000, &comm));
  GW_EXPECT_BAD("timeout_ms is 0", capi::create("local://x", 0, 2, GW_HOST, 0, &comm));
  GW_EXPECT_BAD("device -2", capi::create("local://x", 0, 2, -2, 1000, &comm));
  GW_EXPECT_FAILS(GW_DEVICE_FAILED, "device 1000", capi::create("local://x", 0, 2, 1000, 1000, &comm));
  GW_EXPECT_BAD("lacks a name", capi::create("local://", 0, 2, GW_HOST, 1000, &comm));
  GW_EXPECT_BAD("none of", capi::create("http://x", 0, 2, GW_HOST, 1000, &comm));
  GW_EXPECT_BAD("none of", capi::create("", 0, 2, GW_HOST, 1000, &comm));
  EXPECT_EQ(comm, untouched) << "outputs are written on success only";
}

TEST(CApiErrors, FromNcclSaysWhatIsMissing) {
  gw_comm comm = nullptr;
  int not_nccl = 0;
  auto options = capi::comm_options(nullptr, 0, 0, GW_HOST, 1000);
  options.nccl_comm = &not_nccl;
  GW_EXPECT_BAD("comm is null", gw_comm_create(&options, nullptr));
  GW_EXPECT_BAD("device", gw_comm_create(&options, &comm));
  options.device = 4711;
  options.world = 2;
  GW_EXPECT_BAD("world is 2; with gw_comm_options.nccl_comm both must be 0", gw_comm_create(&options, &comm));
  options.world = 0;
  // The test machine may lack NCCL or the GPU.
  const gw_status status = gw_comm_create(&options, &comm);
  EXPECT_TRUE(status == GW_UNSUPPORTED || status == GW_DEVICE_FAILED) << gw_status_string(status);
  EXPECT_TRUE(std::string(gw_last_error()).find(status == GW_UNSUPPORTED ? "NCCL" : "device 4711") !=
                  std::string::npos ||
              std::string(gw_last_error()).find("no CUDA side") != std::string::npos)
      << gw_last_error();
  EXPECT_EQ(comm, nullptr);
  GW_EXPECT_BAD("GW_HOST", capi::create("nccl://", 0, 2, GW_HOST, 1000, &comm));
}

TEST(CApiErrors, RanksThatMeetWithWrongArgumentsAreRefused) {
  gw_comm comm = nullptr;
  const std::string name = capi::fresh_name();
  GW_EXPECT_FAILS(GW_COMM_FAILED, "for rank 1, 2", capi::create(name.c_str(), 0, 3, GW_HOST, 100, &comm));

  // The failed group's name can be used again. Two threads claim to be rank 0. The second thread is rejected
  // and then joins as rank 1.
  std::atomic<int> refused{0};
  capi::in_threads(2, [&](int) {
    gw_comm mine = nullptr;
    if (capi::create(name.c_str(), 0, 2, GW_HOST, 60'000, &mine) != GW_OK) {
      gradwire::testing::expect_has(gw_last_error(), {"has joined already"});
      ++refused;
      GW_EXPECT_BAD("has world 3", capi::create(name.c_str(), 1, 3, GW_HOST, 60'000, &mine));
      GW_EXPECT_OK(capi::create(name.c_str(), 1, 2, GW_HOST, 60'000, &mine));
    }
    GW_EXPECT_OK(gw_comm_destroy(mine));
  });
  EXPECT_EQ(refused, 1);
}

// Calls every function that takes a handle with every kind of wrong handle.
TEST(CApiErrors, WrongHandlesAreRecognizedByEveryFunction) {
  gw_comm comm = single(), dead_comm = single();
  const Model model;
  gw_reducer reducer = nullptr, dead_reducer = nullptr;
  auto tensors = model.tensors();
  const auto n = static_cast<int32_t>(tensors.size());
  GW_ASSERT_OK(gw_reducer_create(comm, "fp32", tensors.data(), n, nullptr, &reducer));
  GW_ASSERT_OK(gw_reducer_create(comm, "fp32", tensors.data(), n, nullptr, &dead_reducer));
  GW_ASSERT_OK(gw_comm_destroy(dead_comm));
  GW_ASSERT_OK(gw_reducer_destroy(dead_reducer));
  int on_the_stack = 0;

  float value = 0;
  for (auto [handle, text] : {std::pair<void*, const char*>{nullptr, "is null"},
                              {dead_comm, "was destroyed"},
                              {reducer, "is not a handle"},
                              {&on_the_stack, "is not a handle"},
                              {reinterpret_cast<void*>(~uintptr_t{0}), "is not a handle"}}) {
    auto c = static_cast<gw_comm>(handle);
    gw_reducer out = nullptr;
    GW_EXPECT_FAILS(GW_BAD_HANDLE, text, gw_comm_abort(c, nullptr));
    GW_EXPECT_FAILS(GW_BAD_HANDLE, text, gw_comm_check(c));
    GW_EXPECT_FAILS(GW_BAD_HANDLE, text, capi::sum(c, value));
    GW_EXPECT_FAILS(GW_BAD_HANDLE, text, gw_reducer_create(c, "fp32", tensors.data(), n, nullptr, &out));
    int32_t chosen = 0;
    GW_EXPECT_FAILS(GW_BAD_HANDLE, text, gw_orthonormalize(c, &value, nullptr, 0, 0, 0, 0, nullptr, nullptr));
    GW_EXPECT_FAILS(GW_BAD_HANDLE, text, gw_choose(c, tensors.data(), n, nullptr, nullptr, nullptr, &chosen));
    if (handle != nullptr) GW_EXPECT_FAILS(GW_BAD_HANDLE, text, gw_comm_destroy(c));
  }
  char state[64];
  size_t size = 0;
  gw_stats stats{};
  stats.size = sizeof stats;
  for (auto [handle, text] : {std::pair<void*, const char*>{nullptr, "is null"},
                              {dead_reducer, "was destroyed"},
                              {comm, "is not a handle"},
                              {&on_the_stack, "is not a handle"}}) {
    auto r = static_cast<gw_reducer>(handle);
    GW_EXPECT_FAILS(GW_BAD_HANDLE, text, gw_reducer_allreduce(r, nullptr, nullptr, nullptr));
    GW_EXPECT_FAILS(GW_BAD_HANDLE, text, gw_reducer_apply(r, nullptr, nullptr, nullptr, nullptr));
    GW_EXPECT_FAILS(GW_BAD_HANDLE, text, gw_reducer_ready(r, 0, nullptr));
    GW_EXPECT_FAILS(GW_BAD_HANDLE, text, gw_reducer_wait(r, nullptr, nullptr));
    GW_EXPECT_FAILS(GW_BAD_HANDLE, text, gw_reducer_stats(r, &stats));
    GW_EXPECT_FAILS(GW_BAD_HANDLE, text, capi::state_size(r, &size));
    GW_EXPECT_FAILS(GW_BAD_HANDLE, text, capi::save_state(r, state, sizeof state));
    GW_EXPECT_FAILS(GW_BAD_HANDLE, text, gw_reducer_state_load(r, state, sizeof state));
    if (handle != nullptr) GW_EXPECT_FAILS(GW_BAD_HANDLE, text, gw_reducer_destroy(r));
  }
  GW_EXPECT_OK(gw_comm_destroy(nullptr));
  GW_EXPECT_OK(gw_reducer_destroy(nullptr));
  GW_EXPECT_OK(gw_reducer_destroy(reducer));
  GW_EXPECT_OK(gw_comm_destroy(comm));
}

TEST(CApiErrors, AllreduceChecksEveryArgument) {
  run_ranks(2, [](gw_comm comm, int) {
    float value[2] = {1, 2};
    auto call = [&](void* buf, int64_t count, int dtype, int op, const char* spec, void* stream) {
      return gw_allreduce(comm, buf, count, dtype, op, spec, stream, nullptr);
    };
    GW_EXPECT_BAD("buf is null", call(nullptr, 1, GW_FLOAT32, GW_SUM, "fp32", nullptr));
    GW_EXPECT_BAD("count is -1", call(value, -1, GW_FLOAT32, GW_SUM, "fp32", nullptr));
    GW_EXPECT_BAD("dtype 7", call(value, 1, 7, GW_SUM, "fp32", nullptr));
    GW_EXPECT_BAD("op 9", call(value, 1, GW_FLOAT32, 9, "fp32", nullptr));
    GW_EXPECT_BAD("spec is null", call(value, 1, GW_FLOAT32, GW_SUM, nullptr, nullptr));
    GW_EXPECT_BAD("unknown method", call(value, 1, GW_FLOAT32, GW_SUM, "zip", nullptr));
    GW_EXPECT_BAD("use a reducer", call(value, 1, GW_FLOAT32, GW_SUM, "powersgd:rank=2", nullptr));
    GW_EXPECT_BAD("over the local transport there is no NCCL",
                  call(value, 1, GW_FLOAT32, GW_SUM, "fp32:schedule=nccl", nullptr));
    GW_EXPECT_BAD("stream", call(value, 1, GW_FLOAT32, GW_SUM, "fp32", value));
    GW_EXPECT_BAD("not aligned",
                  call(reinterpret_cast<char*>(value) + 1, 1, GW_FLOAT32, GW_SUM, "fp32", nullptr));
    // The communicator still works.
    GW_EXPECT_OK(call(value, 2, GW_FLOAT32, GW_SUM, "fp32", nullptr));
    EXPECT_EQ(value[0], 2.0f);
  });
}

TEST(CApiErrors, ReducerCreateChecksEveryArgument) {
  gw_comm comm = single();
  const Model model;
  gw_reducer reducer = nullptr;
  auto create = [&](auto change) {
    auto tensors = model.tensors();
    change(tensors);
    return capi::create_reducer(comm, "fp32", tensors, nullptr, &reducer);
  };
  auto good = model.tensors();
  GW_EXPECT_BAD("spec is null", gw_reducer_create(comm, nullptr, good.data(), 1, nullptr, &reducer));
  GW_EXPECT_BAD("rank='0'", gw_reducer_create(comm, "powersgd:rank=0", good.data(), 1, nullptr, &reducer));
  GW_EXPECT_BAD("tensors is null", gw_reducer_create(comm, "fp32", nullptr, 1, nullptr, &reducer));
  GW_EXPECT_BAD("n_tensors is -1", gw_reducer_create(comm, "fp32", good.data(), -1, nullptr, &reducer));
  GW_EXPECT_BAD("reducer is null", gw_reducer_create(comm, "fp32", good.data(), 1, nullptr, nullptr));
  GW_EXPECT_BAD("gw_tensor.size is 0", create([](auto& t) { t[0].size = 0; }));
  GW_EXPECT_BAD("gw_tensor.size is 0", create([](auto& t) { t[3].size = 0; }));
  GW_EXPECT_BAD("gw_tensor.size is", create([](auto& t) { t[0].size = ~size_t{0}; }));
  GW_EXPECT_BAD("same name", create([](auto& t) { t[1].name = t[0].name; }));
  GW_EXPECT_BAD("rows -1", create([](auto& t) { t[1].rows = -1; }));
  GW_EXPECT_BAD("too many", create([](auto& t) { t[1].rows = t[1].cols = int64_t{1} << 40; }));
  GW_EXPECT_BAD("dtype 9", create([](auto& t) { t[1].dtype = 9; }));
  GW_EXPECT_BAD("not aligned to its elements of 4 bytes",
                create([](auto& t) { t[1].grad = reinterpret_cast<void*>(2); }));
  auto how = capi::options();
  how.size = 8;
  GW_EXPECT_BAD("gw_reducer_options.size is 8",
                gw_reducer_create(comm, "fp32", good.data(), 1, &how, &reducer));
  how = capi::options(-5);
  GW_EXPECT_BAD("bucket_bytes is -5", gw_reducer_create(comm, "fp32", good.data(), 1, &how, &reducer));
  EXPECT_EQ(reducer, nullptr);
  // A reducer may have no tensors, and a tensor may have no name.
  GW_EXPECT_OK(gw_reducer_create(comm, "fp32", nullptr, 0, nullptr, &reducer));
  GW_EXPECT_OK(gw_reducer_allreduce(reducer, nullptr, nullptr, nullptr));
  GW_EXPECT_OK(gw_reducer_destroy(reducer));
  GW_EXPECT_OK(create([](auto& t) { t[1].name = nullptr; }));
  GW_EXPECT_OK(gw_reducer_destroy(reducer));
  GW_EXPECT_OK(gw_comm_destroy(comm));
}

// Accepts the longer structs of a later header as long as the new fields are zero.
TEST(CApiErrors, StructsMayGrow) {
  struct LaterTensor {
    gw_tensor now;
    int64_t later;
  };
  struct LaterOptions {
    gw_reducer_options now;
    int64_t later;
  };
  gw_comm comm = single();
  const Model model;
  std::vector<LaterTensor> tensors;
  for (const gw_tensor& t : model.tensors()) {
    tensors.push_back({t, 0});
    tensors.back().now.size = sizeof(LaterTensor);
  }
  LaterOptions how{capi::options(), 0};
  how.now.size = sizeof how;
  gw_reducer reducer = nullptr;
  const auto n = static_cast<int32_t>(tensors.size());
  GW_ASSERT_OK(gw_reducer_create(comm, "fp32", &tensors[0].now, n, &how.now, &reducer));
  GW_EXPECT_OK(gw_reducer_destroy(reducer));
  how.later = 1;
  GW_EXPECT_FAILS(GW_UNSUPPORTED, "does not know",
                  gw_reducer_create(comm, "fp32", &tensors[0].now, n, &how.now, &reducer));
  how.later = 0;
  tensors[2].later = 1;
  GW_EXPECT_FAILS(GW_UNSUPPORTED, "does not know",
                  gw_reducer_create(comm, "fp32", &tensors[0].now, n, &how.now, &reducer));
  GW_EXPECT_OK(gw_comm_destroy(comm));
}

TEST(CApiErrors, StepsOutOfOrderAreNamedAndCanBeCorrected) {
  run_ranks(2, [](gw_comm comm, int rank) {
    const Model model;
    auto flat = normal(model.elements(), static_cast<unsigned>(rank));
    auto at = model.addresses(flat.data());
    const auto n = static_cast<int32_t>(at.size());
    capi::Reducer r(comm, "bf16", model);
    GW_EXPECT_BAD("set gw_tensor.grad", gw_reducer_allreduce(r.handle, nullptr, nullptr, nullptr));
    GW_EXPECT_BAD("set gw_tensor.grad", gw_reducer_ready(r.handle, 0, nullptr));
    auto with_null = at;
    with_null[1] = nullptr;
    GW_EXPECT_BAD("'tall' is null", gw_reducer_allreduce(r.handle, with_null.data(), nullptr, nullptr));
    with_null[1] = static_cast<char*>(at[1]) + 2;
    GW_EXPECT_BAD("not aligned to its elements of 4 bytes",
                  gw_reducer_allreduce(r.handle, with_null.data(), nullptr, nullptr));
    GW_EXPECT_BAD("stream", gw_reducer_allreduce(r.handle, at.data(), at.data(), nullptr));
    GW_ASSERT_OK(gw_reducer_allreduce(r.handle, at.data(), nullptr, nullptr));

    GW_EXPECT_BAD("tensor 99", gw_reducer_ready(r.handle, 99, nullptr));
    GW_EXPECT_BAD("tensor -1", gw_reducer_ready(r.handle, -1, nullptr));
    for (int32_t i = 0; i + 1 < n; ++i) GW_ASSERT_OK(gw_reducer_ready(r.handle, i, nullptr));
    GW_EXPECT_BAD("twice", gw_reducer_ready(r.handle, 0, nullptr));
    GW_EXPECT_BAD("'square'", gw_reducer_wait(r.handle, nullptr, nullptr));
    GW_EXPECT_BAD("middle of a step", gw_reducer_allreduce(r.handle, at.data(), nullptr, nullptr));
    size_t size = 0;
    GW_EXPECT_OK(capi::state_size(r.handle, &size));
    std::vector<char> state(size);
    GW_EXPECT_BAD("middle of a step", capi::save_state(r.handle, state.data(), size));
    GW_EXPECT_OK(gw_reducer_ready(r.handle, n - 1, nullptr));
    GW_EXPECT_OK(gw_reducer_wait(r.handle, nullptr, nullptr));
    GW_EXPECT_OK(gw_reducer_allreduce(r.handle, at.data(), nullptr, nullptr));

    gw_stats stats{};
    GW_EXPECT_BAD("gw_stats.size is 0", gw_reducer_stats(r.handle, &stats));
    GW_EXPECT_BAD("stats is null", gw_reducer_stats(r.handle, nullptr));
    GW_EXPECT_BAD("bytes is null", gw_reducer_state_save(r.handle, nullptr, 0, nullptr));
  });
}

TEST(CApiErrors, AnAbsentPeerFailsTheCallWithinTheDeadline) {
  run_ranks(3, 800, [](gw_comm comm, int rank) {
    const Model model;
    capi::Reducer r(comm, "powersgd:rank=2", model);
    if (rank == 2) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1600));
      return;
    }
    auto flat = normal(model.elements(), static_cast<unsigned>(rank));
    auto at = model.addresses(flat.data());
    auto start = steady_clock::now();
    GW_EXPECT_FAILS(GW_COMM_FAILED, "rank 2", gw_reducer_allreduce(r.handle, at.data(), nullptr, nullptr));
    EXPECT_LT(seconds_since(start), 30.0);
    // The failure is final: later calls fail at once.
    start = steady_clock::now();
    float value = 0;
    GW_EXPECT_FAILS(GW_COMM_FAILED, "", capi::sum(comm, value));
    EXPECT_NE(GW_OK, gw_reducer_allreduce(r.handle, at.data(), nullptr, nullptr));
  });
}

TEST(CApiErrors, AbortEndsAWaitingCall) {
  run_ranks(2, 120'000, [](gw_comm comm, int rank) {
    if (rank == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      GW_EXPECT_OK(gw_comm_abort(comm, "the watchdog barked"));
      return;
    }
    float value = 0;
    auto start = steady_clock::now();
    GW_EXPECT_FAILS(GW_COMM_FAILED, "the watchdog barked", capi::sum(comm, value));
    EXPECT_LT(seconds_since(start), 60.0);
  });
}

TEST(CApiErrors, AnotherThreadCancelsACallThatWaitsForRanks) {
  const std::string file =
      "file://" + ::testing::TempDir() + "gradwire-cancelled-" + std::to_string(getpid());
  for (const int rank : {0, 1}) {
    for (const std::string& rendezvous : {file, std::string("local://cancelled")}) {
      volatile int32_t flag = 0;
      const auto start = steady_clock::now();
      std::thread waiting([&] {
        gw_comm comm = nullptr;
        auto options = capi::comm_options(rendezvous.c_str(), rank, 2, GW_HOST, 3'600'000);
        options.cancel = &flag;
        GW_EXPECT_FAILS(GW_COMM_FAILED, "", gw_comm_create(&options, &comm));
      });
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      __atomic_store_n(&flag, 1, __ATOMIC_RELAXED);
      waiting.join();
      EXPECT_LT(seconds_since(start), 30);
    }
  }
}

TEST(CApiErrors, ACancelledCallFailsBeforeItBegins) {
  const volatile int32_t flag = 1;
  const std::string file =
      "file://" + ::testing::TempDir() + "gradwire-cancelled-" + std::to_string(getpid());
  gw_comm comm = nullptr, alone = nullptr;
  GW_EXPECT_OK(capi::create("local://alone", 0, 1, GW_HOST, 1000, &alone));
  const char* const kCancelled = "cancelled before it began";
  auto create = capi::comm_options(file.c_str(), 0, 2, GW_HOST, 3'600'000);
  auto join = capi::comm_options(nullptr, 0, 0, GW_HOST, 3'600'000);
  join.invitation = "127.0.0.1:1";
  for (gw_comm_options* options : {&create, &join}) {
    options->cancel = &flag;
    GW_EXPECT_FAILS(GW_COMM_FAILED, kCancelled, gw_comm_create(options, &comm));
  }
  GW_EXPECT_FAILS(GW_COMM_FAILED, kCancelled, gw_comm_shrink(alone, 3'600'000, &flag, &comm, nullptr, 0));
  GW_EXPECT_OK(gw_comm_destroy(alone));
}

TEST(CApiErrors, RanksThatDisagreeAreToldSo) {
  run_ranks(2, [](gw_comm comm, int rank) {
    std::vector<float> buffer(100 - rank * 40);
    GW_EXPECT_FAILS(GW_COMM_FAILED, "gw_allreduce", capi::sum(comm, buffer));
  });
}

TEST(CApiErrors, TheErrorTextIsPerThread) {
  GW_EXPECT_BAD("comm is null", capi::create(nullptr, 0, 1, GW_HOST, 1000, nullptr));
  std::thread([] {
    EXPECT_STREQ(gw_last_error(), "");
    GW_EXPECT_FAILS(GW_BAD_HANDLE, "is null", gw_comm_abort(nullptr, nullptr));
  }).join();
  gradwire::testing::expect_has(gw_last_error(), {"comm is null"});
}

TEST(CApiErrors, HandlesMayBeDestroyedWhileOtherThreadsUseThem) {
  for (int round = 0; round < 30; ++round) {
    gw_comm comm = single();
    std::vector<std::thread> users;
    for (int k = 0; k < 3; ++k) {
      users.emplace_back([comm] {
        const Model model;
        std::vector<float> flat(model.elements());
        auto tensors = model.tensors(flat.data());
        for (int i = 0; i < 20; ++i) {
          gw_reducer reducer = nullptr;
          gw_status status = capi::create_reducer(comm, "bf16", tensors, nullptr, &reducer);
          if (status == GW_OK) {
            GW_EXPECT_OK(gw_reducer_allreduce(reducer, nullptr, nullptr, nullptr));
            GW_EXPECT_OK(gw_reducer_destroy(reducer));
          } else {
            EXPECT_EQ(status, GW_BAD_HANDLE);
          }
        }
      });
    }
    GW_EXPECT_OK(gw_comm_destroy(comm));
    for (auto& t : users) t.join();
  }
}

// The euro signs of 3 bytes, at three offsets: the text ends between two characters.
TEST(CApiErrors, LongTextsAreTruncatedBetweenCharactersAndMarked) {
  gw_comm comm = single();
  for (const char* before : {"", "x", "xx"}) {
    std::string spec = before;
    for (int i = 0; i < 2000; ++i) spec += "\u20ac";
    float value = 0;
    EXPECT_EQ(gw_allreduce(comm, &value, 1, GW_FLOAT32, GW_AVG, spec.c_str(), nullptr, nullptr),
              GW_BAD_ARGUMENT);
    const std::string text = gw_last_error();
    EXPECT_GE(text.size(), 2040u);
    EXPECT_LT(text.size(), 2048u);
    EXPECT_TRUE(text.ends_with("\u20ac...")) << text.substr(2000);
  }
  GW_EXPECT_OK(gw_comm_destroy(comm));
}

TEST(CApiErrors, AForkedChildIsToldThatTheHandleIsNotItsOwn) {
  gw_comm comm = single();
  pid_t child = fork();
  if (child == 0) {
    float value = 0;
    bool refused = capi::sum(comm, value) == GW_BAD_HANDLE &&
                   std::strstr(gw_last_error(), "fork") != nullptr && gw_comm_destroy(comm) == GW_BAD_HANDLE;
    _exit(refused ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  GW_EXPECT_OK(gw_comm_destroy(comm));
}

}  // namespace
