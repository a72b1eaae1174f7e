#include "penstock/schedule/costs.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "penstock/base/nearest.h"
#include "penstock/base/text.h"
#include "penstock/schedule/error.h"
#include "penstock/schedule/json.h"

namespace penstock {
namespace {

using internal::concat;
using nlohmann::json;

constexpr int kVersion = 1;

// Reads the objects of a costs file. Its errors name the file and the path of the wrong entry.
class CostsReader {
 public:
  explicit CostsReader(std::string source) : source_(std::move(source)) {}

  [[noreturn]] void fail(const std::string& path, const std::string& what) const {
    throw ScheduleError(concat(source_, ": ", path, " ", what));
  }

  // Fails on a key that is not among `known`.
  void require_keys(const json& object, const std::string& path, const std::vector<std::string>& known) const {
    if (!object.is_object()) fail(path, "should be an object, but is " + std::string(object.type_name()) + ".");
    for (const auto& [key, value] : object.items()) {
      if (std::find(known.begin(), known.end(), key) != known.end()) continue;
      const auto near = internal::nearest(key, known);
      fail(path,
           concat("has an unknown key '", key, "'.\n  Hint: ",
                  near ? concat("did you mean ", *near, "?") : concat("the keys are ", internal::join(known), ".")));
    }
  }

  void number(const json& object, const std::string& path, const char* key, double& value) const {
    const auto found = object.find(key);
    if (found == object.end()) return;
    if (!found->is_number()) fail(path + "." + key, "should be a number, but is " + found->dump() + ".");
    value = found->get<double>();
    if (!std::isfinite(value) || value < 0)
      fail(path + "." + key, "should be a non-negative number, but is " + found->dump() + ".");
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
    throw ScheduleError(
        concat("the costs have ", costs.stages.size(), " entries in \"stages\", but there are ", stages, "."));
  }
  for (const auto& [link, times] : costs.links) {
    if (link.first < ranks && link.second < ranks) continue;
    throw ScheduleError(concat("the costs have a link from rank ", link.first, " to rank ", link.second,
                               ", but there are ", ranks, " ranks."));
  }
}

Costs split_rank_costs(const Costs& by_rank, const Placement& placement) {
  Costs result = by_rank;
  result.stages.clear();
  for (const int rank : placement.ranks_by_stage()) {
    const auto parts = static_cast<double>(placement.stages_of(rank).size());
    StageCosts stage = by_rank.of_stage(rank);
    stage.forward /= parts;
    stage.input /= parts;
    stage.weight /= parts;
    stage.activation_bytes /= parts;
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
    root = internal::parse_json(text);
  } catch (const internal::JsonError& error) {
    throw ScheduleError(
        concat(source, ": ", error.what(), "\n  Hint: write {\"version\": 1, \"stages\": [{\"forward\": 1}]}."));
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
      const std::string path = concat("stages[", i, "]");
      reader.require_keys(
          object, path,
          {"forward", "input", "weight", "bytes_sent", "activation_bytes", "unshard", "reshard", "reduce"});
      StageCosts stage = defaults.stage;
      reader.number(object, path, "forward", stage.forward);
      reader.number(object, path, "input", stage.input);
      reader.number(object, path, "weight", stage.weight);
      reader.number(object, path, "bytes_sent", stage.bytes_sent);
      reader.number(object, path, "activation_bytes", stage.activation_bytes);
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
      const std::string path = concat("links[", i, "]");
      reader.require_keys(object, path, {"from", "to", "latency", "bandwidth", "send", "post", "receive"});
      LinkCosts link = defaults.link;
      reader.number(object, path, "latency", link.latency);
      reader.number(object, path, "bandwidth", link.bandwidth);
      reader.number(object, path, "send", link.send);
      reader.number(object, path, "post", link.post);
      reader.number(object, path, "receive", link.receive);
      const int from = reader.index(object, path, "from");
      const int to = reader.index(object, path, "to");
      if (from == to) reader.fail(path, concat("leads from rank ", from, " to itself."));
      if (!named.emplace(from, to).second) {
        reader.fail(path, concat("names the link from rank ", from, " to rank ", to, " again."));
      }
      costs.links[{from, to}] = link;
    }
  }
  return costs;
}

}  // namespace penstock
