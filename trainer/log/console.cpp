#include "trainer/log/console.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "runtime/util/error.h"
#include "trainer/log/records.h"
#include "trainer/log/summary.h"

namespace gradwire {

int terminal_columns(std::FILE* out, int otherwise) {
  winsize size{};
  if (ioctl(fileno(out), TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  return otherwise;
}

std::string milliseconds(double ms) {
  return std::isnan(ms) ? "-" : fmt::format("{:.{}f}", ms, ms < 10 ? 2 : 1);
}

std::string human_bytes(double bytes) {
  const char* units[] = {"B", "kB", "MB", "GB", "TB"};
  size_t unit = 0;
  while (std::abs(bytes) >= 999.5 && unit + 1 < std::size(units)) {
    bytes /= 1000;
    ++unit;
  }
  if (unit == 0) return fmt::format("{:.0f} B", bytes);
  return fmt::format("{:.{}f} {}", bytes, bytes < 9.995 ? 2 : bytes < 99.95 ? 1 : 0, units[unit]);
}

std::string human_count(double count) {
  if (!std::isfinite(count)) return "-";
  std::string digits = fmt::format("{:.0f}", std::abs(count)), text;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) text += ',';
    text += digits[i];
  }
  return (count <= -0.5 ? "-" : "") + text;
}

std::string human_seconds(double seconds) {
  if (!std::isfinite(seconds) || seconds < 0) return "-";
  if (seconds < 59.95) return fmt::format("{:.1f} s", seconds);
  long whole = std::lround(seconds);
  if (whole < 3600) return fmt::format("{}:{:02}", whole / 60, whole % 60);
  return fmt::format("{}:{:02}:{:02}", whole / 3600, whole / 60 % 60, whole % 60);
}

Console::Console(const TrainConfig& config, std::FILE* out, bool terminal, int64_t log_every,
                 std::string label)
    : config_(config), out_(out), terminal_(terminal), log_every_(log_every), label_(std::move(label)) {}

Console::~Console() {
  erase_bar();
}

void Console::on_run(const RunInfo& info) {
  print(
      fmt::format("{}{}: {} parameters in {} tensors; {}; {}", config_.model.name,
                  config_.model.gelu == Gelu::exact ? "" : fmt::format(", {} GELU", name(config_.model.gelu)),
                  human_count(static_cast<double>(info.parameters)),
                  human_count(static_cast<double>(info.tensors)), config_.compression.to_string(),
                  info.buckets == 0 ? "one rank, nothing to send"
                                    : fmt::format("{} bucket{}, schedule {}", info.buckets,
                                                  info.buckets == 1 ? "" : "s", info.schedule)));
  if (!info.slow_products.empty()) print(fmt::format("Warning: {}", info.slow_products));
  first_step_ = steps_done_ = info.first_step;
  start_ = Clock::now();
}

constexpr std::chrono::seconds kLogPause(5);

void Console::on_step(const StepRecord& step) {
  last_ = step;
  steps_done_ = step.step + 1;
  if (terminal_) {
    if (Clock::now() - drawn_ > std::chrono::milliseconds(100)) draw_bar();
    return;
  }
  const bool due = log_every_ > 0 ? steps_done_ % log_every_ == 0 : Clock::now() - drawn_ >= kLogPause;
  if (!due && steps_done_ != config_.steps && steps_done_ != 1) return;
  drawn_ = Clock::now();
  std::string wire;
  if (step.wire_bytes > 0) {
    wire = fmt::format("  sent {} ({:.2f}x)  waited {} ms", human_bytes(step.wire_bytes),
                       step.dense_bytes / step.wire_bytes, milliseconds(step.exposed_comm_ms));
  }
  print(fmt::format("step {}/{}  loss {:.4f}  lr {:.2e}  {} ms  {} images/s{}", steps_done_, config_.steps,
                    step.loss, step.lr, milliseconds(step.step_ms), human_count(step.images_per_s), wire));
}

void Console::on_group(const GroupRecord& group) {
  const auto plural = [](const std::vector<int>& ranks) { return ranks.size() == 1 ? "" : "s"; };
  std::string who = group.lost.empty() ? "Regrouped without losing a rank" : "";
  for (size_t i = 0; i < group.lost.size(); ++i) {
    const double norm = group.lost_residual_norms[i];
    who += fmt::format("{}rank {}", i == 0 ? "Lost " : ", ", group.lost[i]);
    if (norm > 0) who += fmt::format(" and its residual of norm {:.4g}", norm);
  }
  if (!group.joined.empty())
    who = fmt::format("Rank{} {} joined", plural(group.joined), fmt::join(group.joined, ", "));
  print(fmt::format("{}. {} step {} with {} rank{} ({}), {} images per step, after {}{}{}", who,
                    group.goes_back ? "Returning to" : "Continuing after", group.step, group.ranks.size(),
                    plural(group.ranks), fmt::join(group.ranks, ", "),
                    human_count(static_cast<double>(group.global_batch)), human_seconds(group.seconds),
                    group.why.empty() ? "" : ": ", group.why));
}

void Console::on_replan(const ReplanRecord& replan) {
  const bool same = replan.before == replan.after;
  print(fmt::format("Replanned after step {} in {}, because {}: {}{}; schedule {}, {} ms per step predicted",
                    replan.step, human_seconds(replan.seconds), replan.why, same ? "still " : "",
                    same ? replan.after : fmt::format("{} instead of {}", replan.after, replan.before),
                    replan.schedule, milliseconds(replan.predicted.parts.step_ms)));
}

void Console::on_eval(const EvalRecord& eval) {
  print(fmt::format("epoch {:.4g}  test loss {:.4f}  test accuracy {:.2f} %", eval.epoch, eval.test_loss,
                    100 * eval.test_accuracy));
  if (terminal_ && steps_done_ < config_.steps) draw_bar();
}

void Console::print(const std::string& text) {
  erase_bar();
  std::fprintf(out_, "%s\n", text.c_str());
  std::fflush(out_);
}

void Console::draw_bar() {
  drawn_ = Clock::now();
  double done = static_cast<double>(steps_done_) / static_cast<double>(std::max<int64_t>(1, config_.steps));
  // The finished share of this process's steps. The first of these steps may follow a checkpoint.
  double share = static_cast<double>(steps_done_ - first_step_) /
                 static_cast<double>(std::max<int64_t>(1, config_.steps - first_step_));
  double elapsed = std::chrono::duration<double>(drawn_ - start_).count();
  std::string tail = fmt::format(" {:3.0f} %  step {}/{}  loss {:.4f}  {} images/s  {} left", 100 * done,
                                 steps_done_, config_.steps, last_.loss, human_count(last_.images_per_s),
                                 human_seconds(share > 0 ? elapsed / share - elapsed : NAN));
  int room = terminal_columns(out_, 80) - static_cast<int>(label_.size() + tail.size()) - 3;
  std::string bar;
  if (room >= 8) {
    int width = std::min(room, 40), filled = static_cast<int>(std::lround(done * width));
    bar = fmt::format("[{:#<{}}{:.<{}}]", "", filled, "", width - filled);
  }
  show(label_ + bar + tail);
}

void Console::erase_bar() {
  if (bar_size_ > 0) show("");
}

// Replaces the bar by `line`, cut to the terminal's width, so that it stays in one row. Overwrites the rest
// with blanks, because dumb terminals have no escape sequences.
void Console::show(std::string line) {
  const auto columns = static_cast<size_t>(std::max(1, terminal_columns(out_, 80) - 1));
  size_t size = std::min(line.size(), columns);
  while (size < line.size() && size > 0 && (line[size] & 0xC0) == 0x80) --size;  // inside a character
  line.resize(size);
  line.resize(std::max(size, std::min(bar_size_, columns)), ' ');
  std::fprintf(out_, "\r%s%s", line.c_str(), size == 0 ? "\r" : "");
  std::fflush(out_);
  bar_size_ = size;
}

std::pair<std::string, std::string> shares_text(const RunSummary& summary) {
  const auto share = [](const char* name, double fraction) {
    return fraction < 0.0005 ? "" : fmt::format(", {} {:.1f} %", name, 100 * fraction);
  };
  const auto shares = [&](size_t begin, size_t end) {
    std::string text;
    for (size_t i = begin; i < end; ++i)
      text += share(kStepShares[i].name, summary.shares.*kStepShares[i].time);
    return text;
  };
  const std::string phases = shares(1, kPhases) + shares(0, 1) + share("other", summary.other_share);
  const std::string parallel = shares(kPhases, std::size(kStepShares));
  const std::string first = phases.empty() ? "not measured" : phases.substr(2);
  if (!summary.hidden_of_comm) return {first, ""};
  return {first,
          fmt::format("{}; {:.0f} % of that overlapped with backward",
                      parallel.empty() ? "nothing" : parallel.substr(2), 100 * *summary.hidden_of_comm)};
}

std::string summary_text(const RunSummary& summary) {
  std::string text = fmt::format("{} steps in {}\n", human_count(static_cast<double>(summary.steps)),
                                 human_seconds(summary.seconds));
  const auto row = [&](const char* name, const std::string& value) {
    if (!value.empty()) text += fmt::format("  {:<12} {}\n", name, value);
  };
  const std::string loss = fmt::format("training loss {:.4f}", summary.final_loss);
  row("accuracy", summary.test_accuracy
                      ? fmt::format("{:.2f} % of the test images, {}", 100 * *summary.test_accuracy, loss)
                      : loss);
  // A peak that was measured on a busy machine is too low.
  const bool peak = summary.peak_fraction && *summary.peak_fraction <= 1;
  row("step",
      fmt::format("{} ms, {} images/s, {:.3g} TFLOP/s per device{}", milliseconds(summary.step_ms),
                  human_count(summary.images_per_s), summary.tflops,
                  peak ? fmt::format(", {:.0f} % of the measured peak", 100 * *summary.peak_fraction) : ""));
  const auto [phases, parallel] = shares_text(summary);
  row("of a step", phases);
  row("in parallel", parallel);
  if (summary.ratio) {
    row("sent",
        fmt::format("{} per step and rank{}", human_bytes(summary.wire_bytes),
                    *summary.ratio > 1.005 ? fmt::format(", {:.2f}x less than FP32", *summary.ratio) : ""));
    row("waiting", fmt::format("{} ms of a step for communication", milliseconds(summary.exposed_comm_ms)));
  }
  row("memory", fmt::format("{} per rank at most", human_bytes(static_cast<double>(summary.memory_bytes))));
  text.pop_back();
  return text;
}

std::string prediction_text(const RunSummary& summary) {
  if (!summary.predicted) return "";
  Table table{{"part of a step", "predicted ms", "measured ms", "error"}};
  for (const StepPart& part : kStepParts) {
    const double predicted = summary.predicted->parts.*part.value, measured = summary.measured.*part.value;
    const double error = 100 * (predicted / measured - 1);
    table.push_back({part.name, milliseconds(predicted), milliseconds(measured),
                     std::isfinite(error) ? fmt::format("{:+.0f} %", error) : "-"});
  }
  return fmt::format(
      "Prediction against the medians of the run:\n{}The measured step is {} the predicted 90 % "
      "interval of {} to {} ms",
      table_text(table), summary.predicted->holds(summary.measured.step_ms) ? "inside" : "outside",
      milliseconds(summary.predicted->low_ms), milliseconds(summary.predicted->high_ms));
}

std::string straggler_text(const RunSummary& summary) {
  const auto found = find_straggler(summary.waited_s, summary.seconds);
  if (!found) return "";
  return fmt::format("Rank {} was the straggler: each other rank waited {} longer ({:.0f} % of the run)",
                     found->rank, human_seconds(found->behind_s), 100 * found->share);
}

namespace {

constexpr size_t kMaxRows = 32;  // maximum ranks shown: the ranks with the shortest waits

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
    last_.loss = number_in(json, "loss");
    for (const StepField& f : kStepFields) last_.*f.value = number_in(json, f.key);
    if (std::isfinite(last_.wire_bytes)) total_wire_bytes_ += last_.wire_bytes;
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
    text += fmt::format("  loss {:.4f}{}  {} ms per step  {} images/s", last_.loss,
                        std::isfinite(last_.loss) ? "" : " (diverged)", milliseconds(last_.step_ms),
                        human_count(last_.images_per_s));
  }
  if (last_.wire_bytes > 0) {
    text += fmt::format("  sent {} ({:.2f}x)", human_bytes(last_.wire_bytes),
                        last_.dense_bytes / last_.wire_bytes);
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
  if (world > kMaxRows) {
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return total[a] < total[b]; });
    order.resize(kMaxRows);
  }
  for (const size_t r : order) {
    const auto most =
        static_cast<size_t>(std::max_element(waits[r].begin(), waits[r].end()) - waits[r].begin());
    text += fmt::format(
        "{:<16}{:>10}   {:<22} {:>13}\n", fmt::format("rank {}", r), percent_of(total[r], seconds),
        waits[r][most] > 0 ? fmt::format("rank {}, {} ms per step", most, per_step_ms(waits[r][most])) : "",
        percent_of(awaited[r], seconds * static_cast<double>(world - 1)));
  }
  if (world > kMaxRows) text += fmt::format("({} more ranks, which wait longer)\n", world - kMaxRows);
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
    add("gradwire_loss", "gauge", "Mean training loss of the last step", last_.loss);
    add("gradwire_step_seconds", "gauge", "Time of the last step", last_.step_ms * 1e-3);
    add("gradwire_images_per_second", "gauge", "Images per second of all ranks in the last step",
        last_.images_per_s);
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
