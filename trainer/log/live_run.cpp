#include "trainer/log/live_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "runtime/util/error.h"
#include "trainer/log/console.h"
#include "trainer/log/json.h"

namespace gradwire {
namespace {

constexpr size_t kMostRows = 32;  // maximum ranks shown: the ranks with the shortest waits

// Returns the waits, a square matrix with a row per rank. Empty if the JSON is not such a matrix.
std::vector<std::vector<double>> waits_in(const Json& json) {
  const auto rows = json.find("waited_s");
  std::vector<std::vector<double>> waits;
  if (rows == json.end() || !rows->is_array()) return {};
  for (const Json& row : *rows) {
    std::vector<double>& of_rank = waits.emplace_back();
    if (!row.is_array() || row.size() != rows->size()) return {};
    for (const Json& value : row) {
      if (!value.is_number()) return {};
      of_rank.push_back(value.get<double>());
    }
  }
  return waits;
}

// Returns json[key], a number of steps or ranks, clamped to the range of valid logs.
int64_t count_in(const Json& json, const char* key) {
  return std::clamp<int64_t>(field<int64_t>(json, key).value_or(0), 0, int64_t{1} << 53);
}

std::string percent_of(double part, double whole) {
  return fmt::format("{:.0f} %", whole > 0 ? 100 * part / whole : 0.0);
}

}  // namespace

void LiveRun::read(const std::string& line) {
  const Json json = parse_json(line);
  const std::string type = json.is_object() ? field<std::string>(json, "type").value_or("") : "";
  if (!begun_) {
    if (type != "run") throw BadInput("not the log of a run; name the file of `gradwire train --log`");
    begun_ = true;
    const auto model = json.find("model");
    const auto text = [&](const char* key) { return field<std::string>(json, key).value_or("?"); };
    const int64_t ranks = count_in(json, "ranks");
    const auto link = field<std::string>(json, "link");
    title_ = fmt::format(
        "{} on {} rank{} ({}, {}{}), {}, schedule {}",
        model != json.end() && model->is_object() ? field<std::string>(*model, "name").value_or("?") : "?",
        ranks, ranks == 1 ? "" : "s", text("ranks_are"), text("device"),
        link ? ", links emulated at " + *link : "", text("compression"), text("schedule"));
    steps_ = count_in(json, "steps");
  } else if (type == "step") {
    done_ = count_in(json, "step") + 1;
    loss_ = number_in(json, "loss");
    step_ms_ = number_in(json, "step_ms");
    images_per_s_ = number_in(json, "images_per_s");
    wire_bytes_ = number_in(json, "wire_bytes");
    dense_bytes_ = number_in(json, "dense_bytes");
    if (std::isfinite(wire_bytes_)) total_wire_bytes_ += wire_bytes_;
  } else if (type == "waits") {
    WaitRecord record{.step = count_in(json, "step"),
                      .seconds = field<double>(json, "seconds").value_or(0),
                      .waited_s = waits_in(json)};
    if (record.waited_s.empty()) return;
    waited_s_ = record.waited_s;
    waits_.add(record);
  } else if (type == "resume") {
    waits_ = {};
  } else if (type == "shrink" || type == "grow") {  // ranks get new numbers
    waits_ = {};
    waited_s_.clear();
    if (const auto ranks = json.find("ranks"); ranks != json.end() && ranks->is_array())
      ranks_now_ = ranks->size();
  } else if (type == "summary") {
    finished_ = true;
  }
}

std::string LiveRun::text() const {
  std::string text = title_ + (ranks_now_ ? fmt::format(", now {}", *ranks_now_) : "") + "\n";
  text += fmt::format("step {} of {} ({}){}", human_count(static_cast<double>(done_)),
                      human_count(static_cast<double>(steps_)),
                      percent_of(static_cast<double>(done_), static_cast<double>(steps_)),
                      finished_ ? ", finished" : "");
  if (done_ > 0) {
    text += fmt::format("  loss {:.4f}{}  {} ms per step  {} images/s", loss_,
                        std::isfinite(loss_) ? "" : " (diverged)", milliseconds(step_ms_),
                        human_count(images_per_s_));
  }
  if (wire_bytes_ > 0) {
    text += fmt::format("  sent {} ({:.2f}x)", human_bytes(wire_bytes_), dense_bytes_ / wire_bytes_);
  }
  text += "\n";
  const auto waits = waits_.recent_waits();
  if (waits.empty()) return text + "No waits reported yet, or not measured (one rank, CUDA).\n";
  const double seconds = waits_.recent_seconds();
  const auto per_step_ms = [&](double s) {
    return milliseconds(1e3 * s / static_cast<double>(std::max<int64_t>(1, waits_.recent_steps())));
  };
  if (const auto& finding = waits_.finding()) {
    const Straggler& s = finding->straggler;
    text += fmt::format(
        "Rank {} is the straggler: each other rank waits {} ms longer per step ({:.0f} % of the time), since "
        "step {}, {}\n",
        s.rank, per_step_ms(s.behind_s), 100 * s.share, human_count(static_cast<double>(finding->since_step)),
        human_seconds(waits_.finding_age_s()));
  } else {
    text += "No rank is a straggler.\n";
  }
  text += fmt::format("\nof the last {}     waits   most of it for         is waited for\n",
                      human_seconds(seconds));
  const size_t world = waits.size();
  std::vector<double> total(world), awaited(world);
  for (size_t r = 0; r < world; ++r) {
    total[r] = std::accumulate(waits[r].begin(), waits[r].end(), 0.0);
    for (size_t p = 0; p < world; ++p) awaited[p] += waits[r][p];
  }
  std::vector<size_t> order(world);
  std::iota(order.begin(), order.end(), size_t{0});
  if (world > kMostRows) {
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return total[a] < total[b]; });
    order.resize(kMostRows);
  }
  for (const size_t r : order) {
    const auto most =
        static_cast<size_t>(std::max_element(waits[r].begin(), waits[r].end()) - waits[r].begin());
    text += fmt::format(
        "{:<16}{:>10}   {:<22} {:>13}\n", fmt::format("rank {}", r), percent_of(total[r], seconds),
        waits[r][most] > 0 ? fmt::format("rank {}, {} ms per step", most, per_step_ms(waits[r][most])) : "",
        percent_of(awaited[r], seconds * static_cast<double>(world - 1)));
  }
  if (world > kMostRows) text += fmt::format("({} more ranks, which wait longer)\n", world - kMostRows);
  return text;
}

std::string LiveRun::metrics() const {
  std::string text;
  const auto add = [&](const char* name, const char* type, const char* help, double value) {
    if (std::isinf(value)) return;
    text += fmt::format("# HELP {0} {1}\n# TYPE {0} {2}\n{0} {3}\n", name, help, type,
                        std::isnan(value) ? "NaN" : fmt::to_string(value));
  };
  add("gradwire_steps_total", "counter", "Optimizer steps done", static_cast<double>(done_));
  add("gradwire_steps_planned", "gauge", "Optimizer steps of the whole run", static_cast<double>(steps_));
  add("gradwire_finished", "gauge", "1 when the run has ended normally", finished_ ? 1 : 0);
  if (done_ > 0) {
    add("gradwire_loss", "gauge", "Mean training loss of the last step", loss_);
    add("gradwire_step_seconds", "gauge", "Time of the last step", step_ms_ * 1e-3);
    add("gradwire_images_per_second", "gauge", "Images per second of all ranks in the last step",
        images_per_s_);
    add("gradwire_sent_bytes_total", "counter", "Sent by rank 0 in the steps of this log", total_wire_bytes_);
  }
  if (waited_s_.empty()) return text;
  const char* name = "gradwire_waited_seconds_total";
  text +=
      fmt::format("# HELP {0} Time for which rank has waited for data of peer\n# TYPE {0} counter\n", name);
  for (size_t r = 0; r < waited_s_.size(); ++r) {
    for (size_t p = 0; p < waited_s_.size(); ++p) {
      if (p != r) text += fmt::format("{}{{rank=\"{}\",peer=\"{}\"}} {}\n", name, r, p, waited_s_[r][p]);
    }
  }
  const auto& finding = waits_.finding();
  add("gradwire_straggler_rank", "gauge", "The straggler's rank; -1: none",
      finding ? finding->straggler.rank : -1);
  add("gradwire_straggler_share", "gauge",
      "The fraction of the time for which other ranks wait longer than the straggler",
      finding ? finding->straggler.share : 0);
  return text;
}

}  // namespace gradwire
