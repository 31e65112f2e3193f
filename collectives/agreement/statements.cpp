#include "collectives/agreement/statements.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "collectives/agreement/all_gather.h"
#include "runtime/util/error.h"
#include "runtime/util/mix.h"

namespace gradwire {
namespace {

// The bits that a double holds exactly.
double digest(uint64_t hash) {
  return static_cast<double>(hash >> 11);
}

// A text is sent as this many doubles; longer texts are truncated.
constexpr size_t kTextDoubles = 32;

std::vector<double> packed(std::string text) {
  constexpr size_t kMost = kTextDoubles * sizeof(double) - 1;
  if (text.size() > kMost) text.replace(kMost - 3, text.npos, "...");
  std::vector<double> numbers(kTextDoubles);
  std::memcpy(numbers.data(), text.data(), text.size());
  return numbers;
}

std::string unpacked(const std::vector<double>& numbers) {
  return reinterpret_cast<const char*>(numbers.data());
}

// Returns the first rank that differs from rank 0; 0 if none.
size_t odd_one(const std::vector<std::vector<double>>& all, size_t column) {
  for (size_t r = 1; r < all.size(); ++r) {
    if (all[r][column] != all[0][column]) return r;
  }
  return 0;
}

}  // namespace

void agree_on(Transport& transport, const Stream& stream, const std::vector<std::string>& statements,
              const std::string& what) {
  std::vector<double> digests;
  uint64_t all = 0;
  for (const std::string& statement : statements) {
    digests.push_back(digest(mix(0, statement)));
    all = mix(all, statement);
  }
  const auto counts =
      all_gather(transport, stream, {static_cast<double>(statements.size()), digest(all)}, what);
  if (odd_one(counts, 0) == 0 && odd_one(counts, 1) == 0) return;

  // Find the first statement that differs, which only some ranks may have.
  double least = counts[0][0];
  for (const auto& c : counts) least = std::min(least, c[0]);
  digests.resize(static_cast<size_t>(least));
  const auto theirs = all_gather(transport, stream, digests, what + ", finding what differs");
  size_t at = 0;
  while (at < digests.size() && odd_one(theirs, at) == 0) ++at;
  const std::string mine = at < statements.size() ? statements[at] : "nothing more";
  const auto texts = all_gather(transport, stream, packed(mine), what + ", quoting what differs");
  size_t odd = 1;
  while (odd + 1 < texts.size() && unpacked(texts[odd]) == unpacked(texts[0])) ++odd;
  const std::string text = fmt::format("ranks disagree: {} has \"{}\" on rank 0, \"{}\" on rank {}", what,
                                       unpacked(texts[0]), unpacked(texts[odd]), odd);
  transport.abort(text);
  throw CommError(fmt::format("rank {}: {}", transport.rank(), text));
}

}  // namespace gradwire
