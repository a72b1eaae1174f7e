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

constexpr int kVersion = 2;

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

  void number(const json& object, const std::string& path, const char* key, std::optional<double>& value) const {
    double read = 0;
    if (!object.contains(key)) return;
    number(object, path, key, read);
    value = read;
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

// Call visit(key, member) for each number of a stage, a link and a rank.
template <class Stage, class Visit>
void for_each_number_of_stage(Stage& stage, int version, Visit&& visit) {
  visit("forward", stage.forward);
  visit("input", stage.input);
  visit("weight", stage.weight);
  visit("bytes_sent", stage.bytes_sent);
  visit("activation_bytes", stage.activation_bytes);
  visit("unshard", stage.unshard);
  visit("reshard", stage.reshard);
  visit("reduce", stage.reduce);
  if (version < 2) return;
  visit("recompute", stage.recompute);
  visit("weight_bytes", stage.weight_bytes);
  visit("input_bytes", stage.input_bytes);
  visit("parameter_bytes", stage.parameter_bytes);
  visit("gradient_bytes", stage.gradient_bytes);
  visit("accumulated_bytes", stage.accumulated_bytes);
  visit("optimizer_bytes", stage.optimizer_bytes);
  visit("unsharded_bytes", stage.unsharded_bytes);
  visit("forward_workspace", stage.forward_workspace);
  visit("backward_workspace", stage.backward_workspace);
  visit("update_workspace", stage.update_workspace);
  visit("message_bytes", stage.message_bytes);
}

template <class Link, class Visit>
void for_each_number_of_link(Link& link, Visit&& visit) {
  visit("latency", link.latency);
  visit("bandwidth", link.bandwidth);
  visit("send", link.send);
  visit("post", link.post);
  visit("receive", link.receive);
}

template <class Rank, class Visit>
void for_each_number_of_rank(Rank& rank, Visit&& visit) {
  visit("capacity", rank.capacity);
  visit("buffer_bytes", rank.buffer_bytes);
  visit("sent_bytes", rank.sent_bytes);
}

void write(json& object, const char* key, double value) {
  object[key] = value;
}
void write(json& object, const char* key, const std::optional<double>& value) {
  if (value) object[key] = *value;
}

// Reads the numbers of an object, which for_each visits, and refuses other keys but those of `others`.
template <class ForEach>
void read_numbers(const CostsReader& reader, const json& object, const std::string& path,
                  std::vector<std::string> others, const ForEach& for_each) {
  for_each([&](const char* key, auto&) { others.emplace_back(key); });
  reader.require_keys(object, path, others);
  for_each([&](const char* key, auto& value) { reader.number(object, path, key, value); });
}

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
  if (costs.ranks.size() > static_cast<std::size_t>(ranks)) {
    throw ScheduleError(
        concat("the costs have ", costs.ranks.size(), " entries in \"ranks\", but there are ", ranks, "."));
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
    if (stage.recompute) *stage.recompute /= parts;
    stage.activation_bytes /= parts;
    if (stage.weight_bytes) *stage.weight_bytes /= parts;
    for (double* bytes :
         {&stage.parameter_bytes, &stage.gradient_bytes, &stage.accumulated_bytes, &stage.optimizer_bytes,
          &stage.unsharded_bytes, &stage.forward_workspace, &stage.backward_workspace, &stage.update_workspace}) {
      *bytes /= parts;
    }
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
        concat(source, ": ", error.what(), "\n  Hint: write {\"version\": 2, \"stages\": [{\"forward\": 1}]}."));
  }
  const json found = root.is_object() ? root.value("version", json()) : json();
  const int version = found == 1 ? 1 : kVersion;
  std::vector<std::string> keys = {"version", "stages", "links"};
  if (version > 1) keys.emplace_back("ranks");
  reader.require_keys(root, "the file", keys);
  if (found != version) {
    reader.fail("version",
                "should be 1 or 2, but is " + (found.is_null() ? std::string("missing") : found.dump()) + ".");
  }

  Costs costs = defaults;
  if (const json* stages = reader.list(root, "stages")) {
    costs.stages.clear();
    for (std::size_t i = 0; i < stages->size(); ++i) {
      StageCosts& stage = costs.stages.emplace_back(defaults.stage);
      read_numbers(reader, (*stages)[i], concat("stages[", i, "]"), {},
                   [&](auto&& visit) { for_each_number_of_stage(stage, version, visit); });
    }
  }
  if (const json* links = reader.list(root, "links")) {
    std::set<std::pair<int, int>> named;
    for (std::size_t i = 0; i < links->size(); ++i) {
      const json& object = (*links)[i];
      const std::string path = concat("links[", i, "]");
      LinkCosts link = defaults.link;
      read_numbers(reader, object, path, {"from", "to"}, [&](auto&& visit) { for_each_number_of_link(link, visit); });
      const int from = reader.index(object, path, "from");
      const int to = reader.index(object, path, "to");
      if (from == to) reader.fail(path, concat("leads from rank ", from, " to itself."));
      if (!named.emplace(from, to).second) {
        reader.fail(path, concat("names the link from rank ", from, " to rank ", to, " again."));
      }
      costs.links[{from, to}] = link;
    }
  }
  if (const json* ranks = reader.list(root, "ranks")) {
    costs.ranks.clear();
    for (std::size_t i = 0; i < ranks->size(); ++i) {
      RankCosts& rank = costs.ranks.emplace_back(defaults.rank);
      read_numbers(reader, (*ranks)[i], concat("ranks[", i, "]"), {},
                   [&](auto&& visit) { for_each_number_of_rank(rank, visit); });
    }
  }
  return costs;
}

std::string to_json(const Costs& costs) {
  const auto add = [](json& object) {
    return [&object](const char* key, const auto& value) { write(object, key, value); };
  };
  json root = {{"version", kVersion}, {"stages", json::array()}, {"links", json::array()}, {"ranks", json::array()}};
  for (const StageCosts& stage : costs.stages) {
    for_each_number_of_stage(stage, kVersion, add(root["stages"].emplace_back(json::object())));
  }
  for (const auto& [ends, link] : costs.links) {
    json& object = root["links"].emplace_back(json{{"from", ends.first}, {"to", ends.second}});
    for_each_number_of_link(link, add(object));
  }
  for (const RankCosts& rank : costs.ranks) {
    for_each_number_of_rank(rank, add(root["ranks"].emplace_back(json::object())));
  }
  return root.dump(1) + "\n";
}

}  // namespace penstock
