#include "penstock/schedule/costs.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "penstock/schedule/error.h"
#include "penstock/schedule/json.h"
#include "penstock/base/nearest.h"
#include "penstock/base/text.h"

namespace penstock {
namespace {

using nlohmann::json;

constexpr int kVersion = 1;

// Reads objects of a costs file, and knows where it is for errors.
class CostsReader {
 public:
  explicit CostsReader(std::string source) : source_(std::move(source)) {}

  [[noreturn]] void fail(const std::string& path, const std::string& what) const {
    throw ScheduleError(source_ + ": " + path + " " + what);
  }

  // Refuses a key that is not among `known`.
  void require_keys(const json& object, const std::string& path, const std::vector<std::string>& known) const {
    if (!object.is_object()) fail(path, "should be an object, but is " + std::string(object.type_name()) + ".");
    for (const auto& [key, value] : object.items()) {
      if (std::find(known.begin(), known.end(), key) != known.end()) continue;
      const auto near = nearest(key, known);
      fail(path, "has an unknown key '" + key +
                     "'.\n  Hint: " + (near ? "did you mean " + *near + "?" : "the keys are " + join_or_none(known) + "."));
    }
  }

  void number(const json& object, const std::string& path, const char* key, double& value) const {
    const auto found = object.find(key);
    if (found == object.end()) return;
    if (!found->is_number()) fail(path + "." + key, "should be a number, but is " + found->dump() + ".");
    value = found->get<double>();
    if (!std::isfinite(value) || value < 0)
      fail(path + "." + key, "should be a number that is not negative, but is " + found->dump() + ".");
  }

  int index(const json& object, const std::string& path, const char* key) const {
    const auto found = object.find(key);
    if (found == object.end()) fail(path, std::string("has no '") + key + "', the index of a rank.");
    if (!found->is_number_integer() || found->get<double>() < 0 || found->get<double>() > 1e9) {
      fail(path + "." + key, "should be the index of a rank, but is " + found->dump() + ".");
    }
    return found->get<int>();
  }

  const json* list(const json& root, const char* key) const {
    const auto found = root.find(key);
    if (found == root.end()) return nullptr;
    if (!found->is_array()) fail(key, "should be a list, but is " + std::string(found->type_name()) + ".");
    return &*found;
  }

 private:
  std::string source_;
};

}  // namespace

const LinkCosts& Costs::of_link(int from_rank, int to_rank) const {
  const auto found = links.find({from_rank, to_rank});
  return found == links.end() ? link : found->second;
}

double median(std::vector<double> measured, double if_none) {
  if (measured.empty()) return if_none;
  const auto middle = measured.begin() + static_cast<std::ptrdiff_t>(measured.size() / 2);
  std::nth_element(measured.begin(), middle, measured.end());
  return *middle;
}

void require_fit(const Costs& costs, int stages, int ranks) {
  if (costs.stages.size() > static_cast<std::size_t>(stages)) {
    throw ScheduleError("the costs have " + std::to_string(costs.stages.size()) +
                        " entries in \"stages\", but there are " + std::to_string(stages) + ".");
  }
  for (const auto& [link, times] : costs.links) {
    if (link.first < ranks && link.second < ranks) continue;
    throw ScheduleError("the costs have a link from rank " + std::to_string(link.first) + " to rank " +
                        std::to_string(link.second) + ", but there are " + std::to_string(ranks) + " ranks.");
  }
}

Costs shared_out(const Costs& by_rank, const Placement& placement) {
  Costs result = by_rank;
  result.stages.clear();
  for (const int rank : placement.ranks_by_stage()) {
    const auto parts = static_cast<double>(placement.stages_of(rank).size());
    StageCosts stage = by_rank.of_stage(rank);
    stage.forward /= parts;
    stage.input /= parts;
    stage.weight /= parts;
    stage.bytes_kept /= parts;
    stage.unshard /= parts;
    stage.reshard /= parts;
    stage.reduce /= parts;
    result.stages.push_back(stage);
  }
  return result;
}

Costs parse_costs(std::string_view text, const std::string& source, const Costs& defaults) {
  const CostsReader reader(source);
  json root;
  try {
    root = parse_json(text);
  } catch (const JsonError& error) {
    throw ScheduleError(source + ": " + error.what() + "\n  Hint: {\"version\": 1, \"stages\": [{\"forward\": 1}]}");
  }
  reader.require_keys(root, "the file", {"version", "stages", "links"});
  const json version = root.value("version", json());
  if (version != kVersion) {
    reader.fail("version",
                "should be 1, but is " + (version.is_null() ? std::string("missing") : version.dump()) + ".");
  }

  Costs costs = defaults;
  if (const json* stages = reader.list(root, "stages")) {
    costs.stages.clear();
    for (std::size_t i = 0; i < stages->size(); ++i) {
      const json& object = (*stages)[i];
      const std::string path = "stages[" + std::to_string(i) + "]";
      reader.require_keys(object, path,
                          {"forward", "input", "weight", "bytes_sent", "bytes_kept", "unshard", "reshard", "reduce"});
      StageCosts stage = defaults.stage;
      reader.number(object, path, "forward", stage.forward);
      reader.number(object, path, "input", stage.input);
      reader.number(object, path, "weight", stage.weight);
      reader.number(object, path, "bytes_sent", stage.bytes_sent);
      reader.number(object, path, "bytes_kept", stage.bytes_kept);
      reader.number(object, path, "unshard", stage.unshard);
      reader.number(object, path, "reshard", stage.reshard);
      reader.number(object, path, "reduce", stage.reduce);
      costs.stages.push_back(stage);
    }
  }
  if (const json* links = reader.list(root, "links")) {
    std::set<std::pair<int, int>> named;
    for (std::size_t i = 0; i < links->size(); ++i) {
      const json& object = (*links)[i];
      const std::string path = "links[" + std::to_string(i) + "]";
      reader.require_keys(object, path, {"from", "to", "latency", "bandwidth", "send", "post", "receive"});
      LinkCosts link = defaults.link;
      reader.number(object, path, "latency", link.latency);
      reader.number(object, path, "bandwidth", link.bandwidth);
      reader.number(object, path, "send", link.send);
      reader.number(object, path, "post", link.post);
      reader.number(object, path, "receive", link.receive);
      const int from = reader.index(object, path, "from");
      const int to = reader.index(object, path, "to");
      if (from == to) reader.fail(path, "leads from rank " + std::to_string(from) + " to itself.");
      if (!named.emplace(from, to).second) {
        reader.fail(path,
                    "names the link from rank " + std::to_string(from) + " to rank " + std::to_string(to) + " again.");
      }
      costs.links[{from, to}] = link;
    }
  }
  return costs;
}

}  // namespace penstock
