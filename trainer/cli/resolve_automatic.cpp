// Checks the options of a run with --compression auto.
#include <fmt/format.h>

#include <cmath>

#include "runtime/util/error.h"
#include "trainer/cli/options.h"

namespace gradwire {

void check_automatic(const RunOptions& o, Resolved& out) {
  if (!out.automatic) return;
  auto refuse = [&](const std::string& flag, const std::string& why) {
    throw BadInput(fmt::format("--compression auto and {} cannot be combined: {}; name a spec, such as int8",
                               flag, why));
  };
  if (o.shard_optimizer) refuse("--shard optimizer", "it predicts allreduces, not reduce-scatters");
  if (o.overlap_forward)
    refuse("--overlap-forward", "it predicts steps whose communication ends before the next forward");
  if (o.elastic) refuse("--elastic", "it predicts a fixed number of ranks");
  if (out.config.bucket_mb != std::floor(out.config.bucket_mb)) {
    throw BadInput(
        fmt::format("--bucket-mb {}: --compression auto needs a whole number of MiB", out.config.bucket_mb));
  }
  if (o.dry_run && out.config.ranks() > 1) {
    out.notes.emplace_back(
        "Note: --compression auto chooses when the run starts; the plan below is for --compression fp32");
  }
}

void drop_automatic_of_one_rank(Resolved& out) {
  if (!out.automatic || out.config.ranks() > 1) return;
  out.automatic.reset();
  out.notes.emplace_back("Note: --compression auto has no effect on a single rank, which sends nothing");
}

}  // namespace gradwire
