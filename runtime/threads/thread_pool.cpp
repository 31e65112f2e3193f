#include "runtime/threads/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "runtime/threads/thread.h"
#include "runtime/util/environment.h"
#include "runtime/util/error.h"
#include "runtime/util/file.h"
#include "runtime/util/parse.h"

namespace gradwire {
namespace {

std::atomic<int>& threads_setting() {
  static std::atomic<int> threads{[] {
    if (const char* text = environment("GRADWIRE_THREADS")) {
      if (const auto given = parse_number(text, 1, 4096)) return *given;
      throw BadInput("GRADWIRE_THREADS='{}' is not a number from 1 to 4096", text);
    }
    const int cpus = cpus_by_affinity(), quota = cpus_by_quota();
    return quota > 0 ? std::min(cpus, quota) : cpus;
  }()};
  return threads;
}

// One parallel_for in flight. Ranges are assigned by index; the thread that finishes the last range wakes the
// caller.
struct Job {
  int64_t count, grain, ranges;
  const std::function<void(int64_t, int64_t)>* body;
  int64_t next = 0;  // guarded by the pool's mutex, as are all members below
  int64_t unfinished;
  std::exception_ptr error;
};

class Pool {
 public:
  explicit Pool(int workers) {
    // Callers also compute, so the pool works with fewer workers than requested, even with none, but more
    // slowly.
    try {
      try {
        for (int i = 0; i < workers; ++i) workers_.emplace_back("a thread that computes", [this] { work(); });
      } catch (const OutOfResources& error) {
        print_error_line(fmt::format("computes with {} of {} threads: {}", workers_.size() + 1, workers + 1,
                                     error.what()));
      }
    } catch (const std::bad_alloc&) {  // also of the line: threads already use the pool
    }
  }
  ~Pool() {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (Thread& worker : workers_) worker.join();
  }

  void run(Job& job) {
    std::unique_lock lock(mutex_);
    jobs_.push_back(&job);
    wake_.notify_all();
    while (take_one(lock, job)) {
    }
    done_.wait(lock, [&] { return job.unfinished == 0; });
    if (job.error) std::rethrow_exception(job.error);
  }

 private:
  // Runs one range of `job`; returns false when all ranges are assigned. The lock is held on entry and exit.
  bool take_one(std::unique_lock<std::mutex>& lock, Job& job) {
    if (job.next == job.ranges) return false;
    int64_t begin = job.next++ * job.grain;
    if (job.next == job.ranges) jobs_.erase(std::find(jobs_.begin(), jobs_.end(), &job));
    lock.unlock();
    std::exception_ptr error;
    try {
      (*job.body)(begin, std::min(job.count, begin + job.grain));
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    if (error && !job.error) job.error = error;
    if (--job.unfinished == 0) done_.notify_all();
    return true;
  }

  void work() {
    const DefaultFloatMode mode;
    std::unique_lock lock(mutex_);
    while (true) {
      wake_.wait(lock, [&] { return stop_ || !jobs_.empty(); });
      if (stop_) return;
      take_one(lock, *jobs_.front());
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::deque<Job*> jobs_;
  std::vector<Thread> workers_;
  bool stop_ = false;
};

std::atomic<int> active_callers{0};

}  // namespace

int host_threads() {
  return threads_setting().load(std::memory_order_relaxed);
}

void set_host_threads(int threads) {
  if (threads < 1) throw BadInput("set_host_threads: need at least 1 thread, got {}", threads);
  threads_setting().store(threads, std::memory_order_relaxed);
}

void parallel_for(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& body) {
  if (count <= 0) return;
  const DefaultFloatMode mode;
  grain = std::max<int64_t>(1, grain);
  int64_t ranges = (count + grain - 1) / grain;
  struct Active {
    int before = active_callers.fetch_add(1, std::memory_order_relaxed);
    ~Active() { active_callers.fetch_sub(1, std::memory_order_relaxed); }
  } active;
  int threads = host_threads();
  if (ranges == 1 || threads == 1 || active.before + 1 >= threads) {
    for (int64_t begin = 0; begin < count; begin += grain) body(begin, std::min(count, begin + grain));
    return;
  }
  // The pool is leaked on purpose: host streams may still compute while static destructors run.
  static Pool* pool = new Pool(std::max(1, host_threads() - 1));
  Job job{count, grain, ranges, &body, 0, ranges, nullptr};
  pool->run(job);
}

}  // namespace gradwire
