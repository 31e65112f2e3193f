#include "trainer/cli/plan.h"

#include <cmath>
#include <cstdio>

#include "runtime/util/file.h"
#include "trainer/plan/plan.h"

namespace gradwire {

void plan(const PlanOptions& options) {
  OutputFile file(options.json);
  PlanRequest request{.cluster = read_cluster(options.cluster),
                      .ranks = options.ranks.value_or(1),
                      .model = named_model(options.model),
                      .batch_size = options.batch_size,
                      .specs = options.compression,
                      .bucket_mb = {}};
  for (double mb : options.bucket_mb) request.bucket_mb.push_back(std::llround(std::ceil(mb)));
  const Plan made = make_plan(request);
  std::fputs(plan_text(request, made).c_str(), stdout);
  file.write(plan_json(request, made));
}

}  // namespace gradwire
