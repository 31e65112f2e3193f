#include "trainer/plan/cluster.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <set>

#include "runtime/util/error.h"
#include "runtime/util/file.h"
#include "trainer/log/records.h"

namespace gradwire {
namespace {

constexpr int kMostSwitchLevels = 4;

// Reads the keys of one JSON object.
class ObjectReader {
 public:
  ObjectReader(const Json& json, std::string path, std::string where)
      : json_(json), path_(std::move(path)), where_(std::move(where)) {
    if (!json.is_object()) fail(fmt::format("{} must be an object", where_.empty() ? "the file" : where_));
  }

  double number(const char* key, double least, double most) {
    const Json& value = get(key);
    const double number = value.is_number() ? value.get<double>() : std::numeric_limits<double>::quiet_NaN();
    if (!(number >= least && number <= most)) {
      fail(fmt::format("{} must be a number from {:g} to {:g}, not {}", full(key), least, most,
                       json_text(value)));
    }
    return number;
  }
  double number_or(const char* key, double least, double most, double fallback) {
    return has(key) ? number(key, least, most) : fallback;
  }
  int whole(const char* key, int least, int most) {
    const Json& value = get(key);
    if (!value.is_number_integer() || value.get<double>() < least || value.get<double>() > most) {
      fail(fmt::format("{} must be a whole number from {} to {}, not {}", full(key), least, most,
                       json_text(value)));
    }
    return value.get<int>();
  }
  std::string text(const char* key) {
    const Json& value = get(key);
    if (!value.is_string()) fail(fmt::format("{} must be a text", full(key)));
    return value.get<std::string>();
  }
  // Returns a list of some of these words; empty if the key is missing.
  std::vector<std::string> words(const char* key, const std::vector<std::string>& legal) {
    std::vector<std::string> out;
    if (!has(key)) return out;
    const Json& list = get(key);
    bool legible = list.is_array();
    for (const Json& entry : list) {
      out.push_back(entry.is_string() ? entry.get<std::string>() : "");
      legible = legible && std::find(legal.begin(), legal.end(), out.back()) != legal.end();
    }
    if (!legible) {
      fail(fmt::format("{} must be a list of some of {}, not {}", full(key), fmt::join(legal, ", "),
                       json_text(list)));
    }
    return out;
  }
  Cluster::Link link() {
    return {.gb_per_s = number("gb_per_s", kSlowest, kFastest),
            .latency_us = number("latency_us", 0, kLongest)};
  }
  ObjectReader object(const char* key) { return {get(key), path_, full(key)}; }
  const Json& get(const char* key) {
    if (!has(key)) fail(fmt::format("{} is missing", full(key)));
    return json_[key];
  }
  bool has(const char* key) {
    known_.insert(key);
    return json_.contains(key);
  }
  const Json& json() const { return json_; }
  std::string full(const std::string& key) const { return where_.empty() ? key : where_ + "." + key; }
  // Throws BadInput if a key was never asked for.
  void finish() const {
    for (const auto& [key, value] : json_.items()) {
      if (known_.count(key) > 0) continue;
      std::string all;
      for (const std::string& name : known_) all += (all.empty() ? "" : ", ") + name;
      fail(fmt::format("unknown key {}; use {}", full(key), all));
    }
  }
  [[noreturn]] void fail(const std::string& what) const {
    throw BadInput(fmt::format("{}: {}", path_, what));
  }

  static constexpr double kSlowest = 1e-6, kFastest = 1e5, kLongest = 1e6;

 private:
  const Json& json_;
  const std::string path_, where_;
  std::set<std::string> known_;
};

Cluster::Generation read_generation(ObjectReader& from) {
  const std::string text = from.text("generation");
  const std::pair<const char*, Cluster::Generation> names[] = {{"volta", Cluster::Generation::volta},
                                                               {"ampere", Cluster::Generation::ampere},
                                                               {"hopper", Cluster::Generation::hopper},
                                                               {"blackwell", Cluster::Generation::blackwell}};
  for (const auto& [name, generation] : names) {
    if (text == name) return generation;
  }
  from.fail(fmt::format("gpu.generation must be volta, ampere, hopper or blackwell, not '{}'", text));
}

void read_gpu(ObjectReader from, Cluster& cluster) {
  cluster.generation = read_generation(from);
  cluster.tflops = from.number("tflops", 1e-3, 1e6);
  cluster.memory_gb_per_s = from.number("memory_gb_per_s", 1e-3, 1e6);
  if (from.has("kernels_ns_per_element")) {
    ObjectReader kernels = from.object("kernels_ns_per_element");
    for (const auto& [spec, value] : kernels.json().items()) {
      cluster.kernels_ns_per_element[spec] = kernels.number(spec.c_str(), 0, 1e6);
    }
  }
  from.finish();
}

// Reads the links inside a node: the key `nvlink` or the key `pcie`.
void read_node(ObjectReader& from, Cluster& cluster) {
  cluster.nvlink = from.has("nvlink");
  if (cluster.nvlink == from.has("pcie")) from.fail("give one of nvlink and pcie");
  ObjectReader link = from.object(cluster.nvlink ? "nvlink" : "pcie");
  cluster.gpu = link.link();
  if (!cluster.nvlink && link.has("gpus_per_root")) {
    cluster.gpus_per_root = link.whole("gpus_per_root", 1, cluster.gpus_per_node);
    cluster.root_gb_per_s = link.number("root_gb_per_s", ObjectReader::kSlowest, ObjectReader::kFastest);
    if (cluster.gpus_per_node % cluster.gpus_per_root != 0) {
      link.fail(fmt::format("pcie.gpus_per_root must divide gpus_per_node, {}", cluster.gpus_per_node));
    }
  }
  link.finish();
}

void read_network(ObjectReader& from, const std::string& path, Cluster& cluster) {
  if (!from.has("nic")) return;
  ObjectReader nic = from.object("nic");
  cluster.nics = nic.whole("per_node", 1, 1024);
  cluster.nic = nic.link();
  nic.finish();
  if (!from.has("switches")) return;
  const Json& levels = from.get("switches");
  if (!levels.is_array() || levels.size() > kMostSwitchLevels) {
    from.fail(fmt::format("switches must be a list of at most {} levels", kMostSwitchLevels));
  }
  for (const Json& entry : levels) {
    ObjectReader level(entry, path, fmt::format("switches[{}]", cluster.switches.size()));
    const int nodes = level.whole("nodes", 1, 1 << 20);
    const int below = cluster.switches.empty() ? 1 : cluster.switches.back().nodes;
    if (nodes % below != 0)
      level.fail(fmt::format("{} must be a multiple of {}", level.full("nodes"), below));
    cluster.switches.push_back({nodes, level.number("oversubscription", 1, 1e6)});
    level.finish();
  }
}

void read_nccl(ObjectReader from, Cluster& cluster) {
  cluster.nccl.launch_us = from.number_or("launch_us", 0, ObjectReader::kLongest, 0);
  if (from.has("channels")) cluster.nccl.channels = from.whole("channels", 1, 1024);
  cluster.nccl.nvls_gb_per_s =
      from.number_or("nvls_gb_per_s", ObjectReader::kSlowest, ObjectReader::kFastest, 0);
  cluster.nccl.algorithms = from.words("algorithms", {"ring", "tree", "nvls", "nvls_tree"});
  cluster.nccl.network_protocols = from.words("network_protocols", {"ll", "ll128", "simple"});
  from.finish();
}

}  // namespace

Cluster parse_cluster(const std::string& text, const std::string& path) {
  const Json json = parse_json(text);
  if (json.is_discarded()) throw BadInput(fmt::format("{}: not a JSON file", path));
  ObjectReader from(json, path, "");
  Cluster cluster;
  cluster.name = from.text("name");
  if (from.has("source")) cluster.source = from.text("source");
  cluster.gpus_per_node = from.whole("gpus_per_node", 1, 1024);
  read_gpu(from.object("gpu"), cluster);
  read_node(from, cluster);
  read_network(from, path, cluster);
  if (from.has("nccl")) read_nccl(from.object("nccl"), cluster);
  from.finish();
  return cluster;
}

Cluster read_cluster(const std::string& path) {
  return parse_cluster(read_regular_file(path), path);
}

int Cluster::symmetric_ranks(int ranks) const {
  int group = gpus_per_node;
  for (const Level& level : switches) {
    if (level.nodes * gpus_per_node >= ranks) break;
    group = level.nodes * gpus_per_node;
  }
  return std::min(group, ranks);
}

void check_ranks(const Cluster& cluster, int ranks) {
  const int per_node = cluster.gpus_per_node;
  if (ranks > per_node && ranks % per_node != 0) {
    throw BadInput(fmt::format("--ranks {} do not fill nodes of {} GPUs ({}); use {} or {}", ranks, per_node,
                               cluster.name, ranks / per_node * per_node, (ranks / per_node + 1) * per_node));
  }
  if (ranks <= per_node) return;
  if (cluster.nics == 0) {
    throw BadInput(
        fmt::format("--ranks {} need {} nodes, and the cluster file has no key nic; add one, or "
                    "use at most {} ranks",
                    ranks, ranks / per_node, per_node));
  }
  for (const Cluster::Level& level : cluster.switches) {
    const int below = level.nodes * per_node;
    if (ranks <= below || ranks % below == 0) continue;
    throw BadInput(fmt::format("--ranks {} do not fill switches of {} nodes, {} ranks ({}); use {} or {}",
                               ranks, level.nodes, below, cluster.name, ranks / below * below,
                               (ranks / below + 1) * below));
  }
}

}  // namespace gradwire
