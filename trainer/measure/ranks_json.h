// The report of examine_ranks() as JSON; docs/formats.md describes the fields.
#pragma once

#include "trainer/log/records.h"
#include "trainer/measure/ranks.h"

namespace gradwire {

// Return the links between the ranks, and the predictions with the choice.
Json ranks_json(const RanksReport& report);
Json prediction_json(const RanksReport& report, const VitConfig& model);

}  // namespace gradwire
