#include "collectives/agreement/statements.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>

#include "collectives/agreement/all_gather.h"
#include "runtime/util/error.h"
#include "runtime/util/mix.h"

namespace gradwire {
namespace {

// Largest number of bytes of a quoted text; longer texts are truncated.
constexpr size_t kQuoted = 256;

std::string clipped(const std::string& text) {
  std::string bytes = text;
  if (bytes.size() >= kQuoted) bytes.replace(kQuoted - 4, bytes.size(), "...");
  bytes.resize(kQuoted);
  return bytes;
}

// Returns the first rank that differs from rank 0 in this column; 0 if no rank differs.
size_t differing_rank(const std::vector<std::vector<uint64_t>>& all, size_t column) {
  for (size_t r = 1; r < all.size(); ++r) {
    if (all[r][column] != all[0][column]) return r;
  }
  return 0;
}

}  // namespace

void agree_on(Transport& transport, const Stream& stream, const std::vector<std::string>& statements,
              const std::string& what) {
  std::vector<uint64_t> digests;
  uint64_t all = 0;
  for (const std::string& statement : statements) {
    digests.push_back(mix(0, statement));
    all = mix(all, statement);
  }
  const auto counts =
      all_gather<uint64_t>(transport, stream, {static_cast<uint64_t>(statements.size()), all}, what);
  if (differing_rank(counts, 0) == 0 && differing_rank(counts, 1) == 0) return;

  // Find the first statement that differs. Some ranks may lack that statement.
  uint64_t least = counts[0][0];
  for (const auto& c : counts) least = std::min(least, c[0]);
  digests.resize(static_cast<size_t>(least));
  const auto theirs = all_gather(transport, stream, digests, what + ", finding what differs");
  size_t at = 0;
  while (at < digests.size() && differing_rank(theirs, at) == 0) ++at;
  const std::string mine = at < statements.size() ? statements[at] : "nothing more";
  const auto texts = all_gather_bytes(transport, stream, clipped(mine), what + ", quoting what differs");
  size_t odd = 1;
  while (odd + 1 < texts.size() && texts[odd] == texts[0]) ++odd;
  const std::string text = fmt::format("ranks disagree: {} has \"{}\" on rank 0, \"{}\" on rank {}", what,
                                       texts[0].c_str(), texts[odd].c_str(), odd);
  transport.abort(text);
  throw CommError(fmt::format("rank {}: {}", transport.rank(), text));
}

}  // namespace gradwire
