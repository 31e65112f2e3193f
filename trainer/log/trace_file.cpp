#include "trainer/log/trace_file.h"

#include <algorithm>
#include <filesystem>

#include "runtime/util/error.h"
#include "runtime/util/file.h"
#include "runtime/util/parse.h"
#include "trainer/log/records.h"

namespace gradwire {
namespace {

// The first rows, in the order of a step's work. Other rows follow.
constexpr const char* kRows[] = {"host thread", "compute", "communicate", "transfers"};

// Returns a time in microseconds, the format's unit, as text. Three decimals preserve nanoseconds, so
// adjacent spans stay adjacent.
std::string microseconds(int64_t ns) {
  return fmt::format("{}{}.{:03}", ns < 0 ? "-" : "", std::abs(ns) / 1000, std::abs(ns) % 1000);
}

Json about(const TraceLabel& label, int64_t step) {
  Json args{{"step", step}};
  for (const auto& [key, value] : label.details) {
    std::visit([&, &key = key](const auto& v) { args[key] = v; }, value);
  }
  return args;
}

Json metadata(const char* kind, int rank, int row, Json args) {
  return {{"name", kind}, {"ph", "M"}, {"pid", rank}, {"tid", row}, {"args", std::move(args)}};
}

}  // namespace

std::string trace_events(int rank, Device device, std::vector<TraceSpan> spans, size_t dropped,
                         double error_us) {
  // Sort parents before children, because readers nest spans by their order.
  std::stable_sort(spans.begin(), spans.end(), [](const TraceSpan& a, const TraceSpan& b) {
    return a.begin_ns != b.begin_ns ? a.begin_ns < b.begin_ns : a.end_ns > b.end_ns;
  });
  std::vector<std::string> rows(std::begin(kRows), std::end(kRows));
  const size_t known = rows.size();
  for (const TraceSpan& span : spans) {
    if (std::find(rows.begin(), rows.end(), span.row) == rows.end()) rows.push_back(span.row);
  }
  std::sort(rows.begin() + static_cast<std::ptrdiff_t>(known), rows.end());

  std::string events;
  auto add = [&](const std::string& event) { events += (events.empty() ? "\n" : ",\n") + event; };
  add(json_text(
      metadata("process_name", rank, 0, {{"name", fmt::format("rank {} ({})", rank, device.name())}})));
  Json clock{{"sort_index", rank}, {"clock_error_us", error_us}};
  if (dropped > 0) clock["dropped_spans"] = dropped;
  add(json_text(metadata("process_sort_index", rank, 0, std::move(clock))));
  for (size_t row = 0; row < rows.size(); ++row) {
    if (std::ranges::count(spans, rows[row], &TraceSpan::row) == 0) continue;
    add(json_text(metadata("thread_name", rank, static_cast<int>(row), {{"name", rows[row]}})));
    add(json_text(metadata("thread_sort_index", rank, static_cast<int>(row), {{"sort_index", row}})));
  }
  for (const TraceSpan& span : spans) {
    const auto row = std::find(rows.begin(), rows.end(), span.row) - rows.begin();
    add(fmt::format(
        "{{\"name\":{},\"cat\":{},\"ph\":\"X\",\"pid\":{},\"tid\":{},\"ts\":{},\"dur\":{},\"args\":{}}}",
        json_text(span.label->name), json_text(span.label->category), rank, row, microseconds(span.begin_ns),
        microseconds(span.end_ns - span.begin_ns), json_text(about(*span.label, span.step))));
  }
  return events;
}

TraceFile::TraceFile(const TrainConfig& config, int rank)
    : config_(config),
      rank_(rank),
      file_(rank == 0 ? OutputFile(config.trace) : OutputFile()),
      parts_(static_cast<size_t>(config.ranks())),
      there_(static_cast<size_t>(config.ranks())) {}

void TraceFile::add(int rank, std::string events, bool complete) {
  std::lock_guard lock(mutex_);
  if (!there_.at(static_cast<size_t>(rank))) parts_[static_cast<size_t>(rank)] = std::move(events);
  if (!complete) return;
  there_[static_cast<size_t>(rank)] = true;
  if (std::find(there_.begin(), there_.end(), false) != there_.end()) return;
  written_ = true;
  try {
    file_.write(document(""));
  } catch (const Error& error) {
    lose_output(config_.trace, error.what());
  }
}

void TraceFile::write_rest(const std::string& error) noexcept {
  try {
    std::lock_guard lock(mutex_);
    if (written_ || config_.trace.empty()) return;
    if (rank_ > 0) {
      // A file cannot be created next to a device or a pipe.
      if (!OutputFile::would_be_regular(config_.trace)) return;
      std::filesystem::path named = config_.trace;
      named.replace_extension(fmt::format("rank{}{}", rank_, named.extension().string()));
      file_ = OutputFile(named.string());
    }
    file_.write(document(error));
    written_ = true;
  } catch (...) {
  }
}

std::string TraceFile::document(const std::string& error) const {
  Json about{{"program", "gradwire " GRADWIRE_VERSION},
             {"model", config_.model.name},
             {"data", config_.data.to_string()},
             {"ranks", config_.ranks()},
             {"ranks_are", config_.processes ? "processes" : "threads"},
             {"device", config_.devices[0].is_host() ? "host" : "cuda"},
             {"compression", config_.compression.to_string()},
             {"bucket_mb", config_.bucket_mb},
             {"batch_size", config_.batch_size},
             {"first_step", config_.trace_steps.begin},
             {"end_step", config_.trace_steps.end}};
  if (!error.empty()) about["error"] = error;
  std::string events;
  for (const std::string& part : parts_) {
    if (!part.empty()) events += (events.empty() ? "" : ",") + part;
  }
  return fmt::format("{{\"displayTimeUnit\":\"ms\",\"otherData\":{},\"traceEvents\":[{}\n]}}\n",
                     json_text(about), events);
}

}  // namespace gradwire
