#include "bench/commands/collectives_options.h"

#include "collectives/schedule/schedule.h"
#include "trainer/cli/values.h"

namespace gradwire::bench {

std::vector<std::string> schedule_names() {
  std::vector<std::string> names;
  for (ScheduleKind kind : all_schedules()) names.emplace_back(name(kind));
  return names;
}

void add_nccl_tests_flags(CLI::App& command, CollectivesOptions& o) {
  auto bytes = [&](const char* flags, uint64_t& value, const char* what) {
    command.add_option(flags, value, what)
        ->transform(size_value(false))
        ->check(CLI::Range(uint64_t{4}, uint64_t{1} << 36));
  };
  bytes("-b,--minbytes", o.min_bytes, "Smallest size, e.g. 64K");
  bytes("-e,--maxbytes", o.max_bytes, "Largest size");
  command.add_option("-f,--stepfactor", o.factor, "Factor from one size to the next")
      ->check(CLI::Range(2, 1 << 20));
  command.add_option("-n,--iters", o.iterations, "Timed calls")->check(CLI::Range(1, 100000));
  command.add_option("-w,--warmup_iters", o.warmup, "Warm-up calls")->check(CLI::Range(0, 1000000));
  command.add_option("-c,--check", o.check, "0: do not check the results")->check(CLI::Range(0, 1));
  command
      .add_option("-a,--average", o.average,
                  "Time of 0: rank 0, 1: the ranks' mean, 2: the fastest rank, 3: the slowest rank (default)")
      ->check(CLI::Range(0, 3));
  command
      .add_option("-I,--per_iter_timing", o.per_iteration,
                  "1: print minimum, maximum, p99 and deviation of the calls, and p50 and p99 of each rank")
      ->check(CLI::Range(0, 1));
  command
      .add_option("-K,--per_iter_skip", o.skip, "Exclude the first calls from the statistics of the calls")
      ->check(CLI::Range(0, 100000));
  command
      .add_option(
          "-z,--blocking", o.blocking,
          "After each call, 1: wait for the call and all ranks, 2: for the call, 3: as 1, without the "
          "time of the wait for all ranks")
      ->check(CLI::Range(0, 3));
  command
      .add_option("-u,--unalign", o.unalign, "Begin the buffer this many elements after an aligned address")
      ->check(CLI::Range(0, 1 << 20));
}

void add_own_flags(CLI::App& command, CollectivesOptions& o) {
  o.compression = {"fp32", "bf16", "fp8", "powersgd:rank=4"};
  auto schedules = schedule_names();
  schedules.emplace_back("nccl");
  command
      .add_option("--schedule", o.schedules,
                  "Repeatable (default: all but nccl). nccl: NCCL's allreduce, for specs that send FP32")
      ->check(CLI::IsMember(schedules));
  command.add_option("--compression", o.compression, "Compression spec; repeatable");
  command
      .add_option("--transport", o.transports,
                  "local (threads), tcp (processes) or nccl (processes with a GPU each); repeatable "
                  "(default: local and tcp)")
      ->check(CLI::IsMember({"local", "tcp", "nccl"}));
  command.add_option("--ranks", o.ranks, "Number of ranks, unless a launcher started several")
      ->check(CLI::Range(1, 256));
  command.add_option("--per-node", o.per_node, "Ranks per node of hierarchical schedules")
      ->check(CLI::Range(1, 256));
  command
      .add_option("--slice", o.slice_bytes,
                  "Cut messages into slices of about this size, so that exchanges overlap with kernels; 0: "
                  "no overlap")
      ->transform(size_value(false))
      ->check(CLI::Range(uint64_t{0}, uint64_t{1} << 36));
  command.add_option("--device", o.device, "Device of local ranks")->check(CLI::IsMember({"host", "cuda"}));
  command
      .add_option("--rendezvous", o.rendezvous,
                  "Rendezvous of launched ranks: tcp://host:port or file:///path (default: the launcher's)")
      ->type_name("URL");
  command.add_option("--timeout-s", o.timeout_s, "Time for which a rank waits for a peer")
      ->check(CLI::PositiveNumber);
  command.add_flag("--no-baseline", o.no_baseline, "Do not run the allreduce of gloo or NCCL");
  command.add_flag("--child", o.child)->group("");
  add_result_files(command, o.results);
}

}  // namespace gradwire::bench
