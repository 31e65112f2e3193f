// Runs a target over its seeds and its corpus, unchanged and with mutations drawn from a fixed seed.
//
//   fuzz_tests TARGET [--corpus DIR] [--mutations N] [--seed S] [--seconds S] [--save FILE]
//                     [--write-seeds DIR]
//   fuzz_tests --list
//
// GRADWIRE_FULL_SWEEPS makes five times as many mutations.
//
// A defect ends the program with the text of an exception or with a sanitizer's report. The file of --save
// (default failed-TARGET.bin) then holds the input, to be added to the corpus.
#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <random>
#include <string>

#include "tests/fuzz/targets.h"
#include "tests/support/thinned.h"

namespace {

using gradwire::fuzz::Bytes;
using gradwire::fuzz::Target;
using Random = std::mt19937_64;

size_t below(Random& random, size_t bound) {
  return bound == 0 ? 0 : random() % bound;
}

// Makes one small change, as caused by truncation, a bad disk, another version or an attacker.
void mutate(Bytes& bytes, const std::vector<Bytes>& others, Random& random) {
  const size_t at = below(random, bytes.size());
  const auto here = bytes.begin() + static_cast<std::ptrdiff_t>(at);
  switch (random() % 9) {
    case 0:  // flip a bit
      if (!bytes.empty()) bytes[at] ^= static_cast<uint8_t>(1u << random() % 8);
      break;
    case 1:  // replace a byte
      if (!bytes.empty()) bytes[at] = static_cast<uint8_t>(random());
      break;
    case 2:  // truncate the input
      bytes.resize(at);
      break;
    case 3: {  // write an extreme integer
      static constexpr uint64_t kLimits[] = {
          0,           1, 0x7f, 0xff, 0xffff, 0x7fffffff, 0xffffffff, uint64_t{1} << 40, ~uint64_t{0} >> 1,
          ~uint64_t{0}};
      const uint64_t value = kLimits[random() % std::size(kLimits)];
      const size_t width = size_t{1} << random() % 4;
      if (at + width <= bytes.size()) std::memcpy(bytes.data() + at, &value, width);
      break;
    }
    case 4: {  // replace a decimal number
      static constexpr const char* kNumbers[] = {
          "0", "-1", "18446744073709551615", "9223372036854775808", "1e999", "null", "[]", "\"\"", "0.5"};
      const std::string_view number = kNumbers[random() % std::size(kNumbers)];
      auto first = here;
      while (first != bytes.end() && (*first < '0' || *first > '9')) ++first;
      auto last = first;
      while (last != bytes.end() && *last >= '0' && *last <= '9') ++last;
      const auto place = bytes.erase(first, last);
      bytes.insert(place, number.begin(), number.end());
      break;
    }
    case 5: {  // remove a piece
      const size_t length = below(random, std::min<size_t>(bytes.size() - at + 1, 64));
      bytes.erase(here, here + static_cast<std::ptrdiff_t>(length));
      break;
    }
    case 6: {  // duplicate a piece
      const size_t length = below(random, std::min<size_t>(bytes.size() - at + 1, 64));
      const Bytes piece(here, here + static_cast<std::ptrdiff_t>(length));
      bytes.insert(here, piece.begin(), piece.end());
      break;
    }
    case 7: {  // insert random bytes
      Bytes piece(below(random, 16));
      for (uint8_t& byte : piece) byte = static_cast<uint8_t>(random());
      bytes.insert(here, piece.begin(), piece.end());
      break;
    }
    case 8: {  // append the end of another input
      const Bytes& other = others[random() % others.size()];
      bytes.resize(at);
      const auto from = static_cast<std::ptrdiff_t>(below(random, other.size() + 1));
      bytes.insert(bytes.end(), other.begin() + from, other.end());
      break;
    }
  }
}

void write(const std::string& path, const Bytes& bytes) {
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
}

[[noreturn]] void usage(const std::string& why) {
  std::fprintf(stderr,
               "fuzz_tests: %s; usage: fuzz_tests TARGET [--corpus DIR] [--mutations N] [--seed S] "
               "[--seconds S] [--save FILE] [--write-seeds DIR]; targets:",
               why.c_str());
  for (const Target& target : gradwire::fuzz::kTargets) {
    std::fprintf(stderr, " %.*s", static_cast<int>(target.name.size()), target.name.data());
  }
  std::fprintf(stderr, "\n");
  std::exit(2);
}

uint64_t number(const std::string& flag, const std::string& text) {
  uint64_t value = 0;
  const auto [at, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || at != text.data() + text.size())
    usage(flag + " '" + text + "' is not a number");
  return value;
}

struct Options {
  std::string corpus = {}, seeds = {}, save = {};
  uint64_t mutations = 1000, seed = 1, seconds = 0;
};

// Reads pairs of a flag and its value.
Options parse(int argc, char** argv) {
  Options o{.save = "failed-" + std::string(argv[1]) + ".bin"};
  const std::map<std::string, std::string*> texts = {
      {"--corpus", &o.corpus}, {"--save", &o.save}, {"--write-seeds", &o.seeds}};
  const std::map<std::string, uint64_t*> numbers = {
      {"--mutations", &o.mutations}, {"--seed", &o.seed}, {"--seconds", &o.seconds}};
  for (int i = 2; i < argc; i += 2) {
    const std::string flag = argv[i], value = argv[i + 1];
    if (texts.contains(flag)) {
      *texts.at(flag) = value;
    } else if (numbers.contains(flag)) {
      *numbers.at(flag) = number(flag, value);
    } else {
      usage("no option '" + flag + "'");
    }
  }
  if (gradwire::testing::full_sweeps()) o.mutations *= 5;
  return o;
}

// Returns the files of a folder, in the order of their names.
std::vector<Bytes> files_of(const std::string& folder) {
  std::error_code error;
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) paths.push_back(entry.path());
  if (error) usage(folder + ": " + error.message());
  std::sort(paths.begin(), paths.end());
  std::vector<Bytes> files;
  for (const auto& path : paths) {
    std::ifstream file(path, std::ios::binary);
    files.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  return files;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 2 && std::string_view(argv[1]) == "--list") {
    for (const Target& each : gradwire::fuzz::kTargets) {
      std::printf("%.*s\n", static_cast<int>(each.name.size()), each.name.data());
    }
    return 0;
  }
  if (argc < 2 || argc % 2 != 0) usage("give a target, and a value for each option");
  const Target* target = nullptr;
  for (const Target& each : gradwire::fuzz::kTargets) {
    if (each.name == argv[1]) target = &each;
  }
  if (target == nullptr) usage(std::string("no target '") + argv[1] + "'");
  const Options o = parse(argc, argv);
  std::vector<Bytes> inputs = target->seeds();
  for (size_t i = 0; i < inputs.size(); ++i) {
    target->run(inputs[i]);
    if (!o.seeds.empty()) write(o.seeds + "/seed-" + std::to_string(i), inputs[i]);
  }
  if (!o.corpus.empty()) {
    for (Bytes& file : files_of(o.corpus)) inputs.push_back(std::move(file));
  }
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(o.seconds);
  Random random(o.seed);
  uint64_t run = 0;
  auto try_one = [&](const Bytes& input) {
    try {
      target->run(input);
    } catch (const std::exception& error) {
      write(o.save, input);
      std::fprintf(stderr, "fuzz_tests: %s: input %llu, saved as %s: %s\n", argv[1],
                   static_cast<unsigned long long>(run), o.save.c_str(), error.what());
      std::exit(1);
    }
    ++run;
  };
  for (const Bytes& input : inputs) try_one(input);
  for (uint64_t i = 0; o.seconds > 0 ? std::chrono::steady_clock::now() < end : i < o.mutations; ++i) {
    Bytes input = inputs[random() % inputs.size()];
    for (size_t k = 1 + random() % 4; k > 0; --k) mutate(input, inputs, random);
    try_one(input);
  }
  std::printf("%.*s: %zu inputs, %llu runs\n", static_cast<int>(target->name.size()), target->name.data(),
              inputs.size(), static_cast<unsigned long long>(run));
}
