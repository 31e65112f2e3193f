#include "collectives/codec/powersgd_choice.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <string_view>

#include "collectives/agreement/all_gather.h"
#include "runtime/environment.h"
#include "runtime/error.h"

namespace gradwire {
namespace {

constexpr const char* kVariable = "GRADWIRE_POWERSGD_PRODUCTS";
constexpr const char *kFused = "fused", *kLibrary = "library";

enum class Request : uint8_t { automatic, fused, library };
Request requested() {
  const char* value = environment("GRADWIRE_POWERSGD_PRODUCTS");
  const std::string_view text = value != nullptr ? value : "auto";
  if (text == "auto") return Request::automatic;
  if (text == kFused) return Request::fused;
  if (text == kLibrary) return Request::library;
  throw BadInput(fmt::format("{}='{}' is none of auto, fused and library", kVariable, text));
}

const char* name(PowerSgdPass::Kind kind) {
  switch (kind) {
    case PowerSgdPass::project:
      return "project";
    case PowerSgdPass::project_onto:
      return "project_onto";
    default:
      return "back_project";
  }
}

// Returns the size, in elements, of an array that holds the matrices' parts at `offset`.
template <typename Count>
int64_t extent(const MatrixTable& table, int64_t MatrixDescriptor::*offset, const Count& count) {
  int64_t end = 0;
  for (const MatrixDescriptor& d : table.host()) end = std::max(end, d.*offset + count(d));
  return end;
}

// Returns the microseconds of one run: the least of several. The first run is a warm-up.
double time_us(const Stream& stream, const std::function<void()>& run) {
  constexpr int kTimes = 3, kRuns = 4;
  Event begin = Event::create_timer(stream.device()), end = Event::create_timer(stream.device());
  run();
  double best = std::numeric_limits<double>::infinity();
  for (int time = 0; time < kTimes; ++time) {
    begin.record(stream);
    for (int i = 0; i < kRuns; ++i) run();
    end.record(stream);
    end.synchronize();
    best = std::min(best, 1e3 * elapsed_ms(begin, end) / kRuns);
  }
  return best;
}

}  // namespace

std::string PowerSgdPass::text() const {
  std::map<std::array<int32_t, 3>, int> shapes;
  for (const MatrixDescriptor& d : table->host()) ++shapes[{d.rows, d.cols, d.rank}];
  std::string text = fmt::format("{}{}", name(kind), forms_m ? " with residual" : "");
  for (const auto& [shape, count] : shapes)
    text += fmt::format(" {}*{}x{}r{}", count, shape[0], shape[1], shape[2]);
  return text;
}

PassTimes model_times(const PowerSgdPass& pass) {
  // Microseconds per million elements of M, fitted to 151 and 9 matrices at ranks 1 to 64 on an H200
  // (docs/results/2026-11-26-gpu). Kernels that sum over rows read M again for every eight columns of P.
  constexpr double kLaunchUs = 2.5, kLeastProductUs = 5;
  constexpr int kColumnsAtOnce = 8;
  const int rank = pass.table->max_rank();
  const double rereads = (rank + kColumnsAtOnce - 1) / kColumnsAtOnce - 1;
  double fused = 0, product = 6.1 + 0.026 * rank;
  switch (pass.kind) {
    case PowerSgdPass::project:
      fused = (pass.forms_m ? 3.9 : 1.2) + 0.31 * rank;
      product = 6.1 + 0.073 * rank;
      break;
    case PowerSgdPass::project_onto:
      fused = pass.forms_m ? 4.7 + 6.0 * rereads : 1.0 + 1.3 * rereads;
      break;
    case PowerSgdPass::back_project:
      fused = 1.0 + 1.3 * rereads;
      break;
  }
  const auto millions = 1e-6 * static_cast<double>(pass.table->elements());
  double library_us = pass.forms_m ? millions * (2.8 + 0.055 * rank) + 3 * kLaunchUs : kLaunchUs;
  for (const MatrixDescriptor& d : pass.table->host())
    library_us += std::max(kLeastProductUs, 1e-6 * d.rows * d.cols * product);
  return {.fused_us = millions * fused + kLaunchUs, .library_us = library_us};
}

PassTimes measure_times(const Stream& stream, const PowerSgdPass& pass, ThinProducts& library) {
  const MatrixTable& table = *pass.table;
  const Device device = stream.device();
  auto zeros = [&](int64_t count) {
    Buffer buffer = make_buffer<float>(device, count);
    fill_zero(stream, buffer.data(), buffer.bytes());
    return buffer;
  };
  const int64_t elements =
      extent(table, &MatrixDescriptor::offset, [](const auto& d) { return int64_t{d.rows} * d.cols; });
  const int64_t ps =
      extent(table, &MatrixDescriptor::p_offset, [](const auto& d) { return int64_t{d.rows} * d.rank; });
  const int64_t qs =
      extent(table, &MatrixDescriptor::q_offset, [](const auto& d) { return int64_t{d.cols} * d.rank; });
  const Buffer grad = zeros(elements), residual = zeros(pass.forms_m ? elements : 0), p = zeros(ps),
               q = zeros(qs);
  const Buffer pending_p = zeros(pass.forms_m ? ps : 0), pending_q = zeros(pass.forms_m ? qs : 0);
  const Buffer marks = make_buffer<int32_t>(device, table.count());
  fill_zero(stream, marks.data(), marks.bytes());
  float* m = pass.forms_m ? residual.as<float>() : nullptr;
  const PendingFactors pending{.p = pass.forms_m ? pending_p.as<const float>() : nullptr,
                               .q = pending_q.as<const float>()};
  PassTimes times;
  if (pass.kind == PowerSgdPass::project) {
    const PowerSgdProject args{.table = &table,
                               .grad = grad.as<const float>(),
                               .residual = m,
                               .pending = pending,
                               .q = q.as<const float>(),
                               .p = p.as<float>()};
    times.fused_us = time_us(stream, [&] { powersgd_project(stream, args); });
    times.library_us =
        time_us(stream, [&] { by_library::powersgd_project(stream, args, library, marks.as<int32_t>()); });
  } else if (pass.kind == PowerSgdPass::project_onto) {
    const PowerSgdProjectOnto args{.table = &table,
                                   .grad = grad.as<const float>(),
                                   .residual = m,
                                   .pending = pending,
                                   .p = p.as<const float>(),
                                   .q = q.as<float>()};
    times.fused_us = time_us(stream, [&] { powersgd_project_onto(stream, args); });
    times.library_us = time_us(
        stream, [&] { by_library::powersgd_project_onto(stream, args, library, marks.as<int32_t>()); });
  } else {
    const PowerSgdBackProject args{.table = &table,
                                   .m = grad.as<const float>(),
                                   .p = p.as<const float>(),
                                   .q = q.as<float>(),
                                   .flags = marks.as<const int32_t>()};
    times.fused_us = time_us(stream, [&] { powersgd_back_project(stream, args); });
    times.library_us = time_us(stream, [&] { by_library::powersgd_back_project(stream, args, library); });
  }
  stream.synchronize();
  return times;
}

bool find_or_measure(TuningFile& file, const std::string& device, const std::string& library,
                     const PowerSgdPass& pass, const std::function<PassTimes()>& measure) {
  const TuningFile::Key key{device, fmt::format("powersgd 1, {}", library), pass.text()};
  const std::optional<std::string> found = file.find(key);
  if (found == kFused || found == kLibrary) return *found == kLibrary;
  const bool faster = measure().library_is_faster();
  file.add(key, faster ? kLibrary : kFused);
  return faster;
}

std::vector<ThinProducts*> choose_products(const BucketContext& c, const std::vector<PowerSgdPass>& passes) {
  std::vector<ThinProducts*> chosen(passes.size());
  const Device device = c.transport->device();
  ThinProducts* const library = thin_products(device);
  const Request request = requested();
  // The host has no library except a test's stand-in.
  if (passes.empty() || (device.is_host() && library == nullptr)) return chosen;
  if (request == Request::library && library == nullptr) {
    throw BadInput(fmt::format("{}=library, but {}; install it, or take auto or fused", kVariable,
                               thin_products_obstacle(device)));
  }
  std::vector<double> mine(passes.size(), 0.0);
  for (size_t i = 0; c.transport->rank() == 0 && library != nullptr && i < passes.size(); ++i) {
    const PowerSgdPass& pass = passes[i];
    bool faster = request == Request::library;
    if (request == Request::automatic) {
      TuningFile* const file = TuningFile::shared();
      faster = file == nullptr ? model_times(pass).library_is_faster()
                               : find_or_measure(*file, library->device_name(device), library->name(), pass,
                                                 [&] { return measure_times(c.stream, pass, *library); });
    }
    mine[i] = faster ? 1.0 : 0.0;
  }
  if (c.transport->world() > 1)
    mine = all_gather(*c.transport, c.stream, mine, c.name + ", choosing PowerSGD's products").front();
  for (size_t i = 0; i < passes.size(); ++i) {
    if (mine[i] == 0.0) continue;
    if (library == nullptr) {
      throw BadInput(
          fmt::format("rank 0 takes PowerSGD's products from a library, but on rank {} {}; install it, or "
                      "set {}=fused on rank 0",
                      c.transport->rank(), thin_products_obstacle(device), kVariable));
    }
    chosen[i] = library;
  }
  return chosen;
}

std::string described_products(const std::vector<PowerSgdPass>& passes,
                               const std::vector<ThinProducts*>& libraries) {
  std::string text;
  for (size_t i = 0; i < passes.size(); ++i) {
    if (libraries[i] == nullptr) continue;
    text += text.empty() ? fmt::format("; products by {}: ", libraries[i]->name()) : ", ";
    text += name(passes[i].kind);
  }
  return text;
}

}  // namespace gradwire
