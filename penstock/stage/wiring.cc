#include "penstock/stage/wiring.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "penstock/base/text.h"

namespace penstock {

using internal::concat;

Wiring::Wiring(int stages) {
  if (stages < 1) throw StageError(concat("there are ", stages, " stages; there should be at least 1."));
  arguments_.resize(static_cast<std::size_t>(stages));
  find_links();
}

void Wiring::connect(int stage, std::vector<StageOutput> arguments) {
  if (stage < 1 || stage >= stages()) {
    throw StageError(concat("stage ", stage, " cannot be connected: of ", stages(), " stages, 1 to ", stages() - 1,
                            " take outputs of others."));
  }
  std::set<StageOutput> seen;
  for (const StageOutput& argument : arguments) {
    const std::string name = concat("output ", argument.output, " of stage ", argument.stage);
    if (argument.stage < 0 || argument.stage >= stage || argument.output < 0) {
      throw StageError(
          concat("stage ", stage, " cannot take ", name, ": it takes outputs, from 0 on, of stages before it."));
    }
    if (!seen.insert(argument).second) {
      throw StageError(concat("stage ", stage, " takes ", name,
                              " twice; once is enough, as it can use an argument as often as it likes."));
    }
  }
  arguments_[static_cast<std::size_t>(stage)] = std::move(arguments);
  find_links();
}

void Wiring::find_links() {
  // Keyed by (to, from), which is their order.
  std::map<std::pair<int, int>, Link> links;
  const auto link = [&](int from, int to) -> Link& {
    return links.try_emplace({to, from}, Link{.from = from, .to = to, .values = std::vector<StageOutput>()})
        .first->second;
  };
  // The stage from which the next consumer gets a value: the one that computes it, then the last that took it.
  std::map<StageOutput, int> sources;
  for (int stage = 1; stage < stages(); ++stage) {
    Link& chain = link(stage - 1, stage);
    const auto& arguments = arguments_[static_cast<std::size_t>(stage)];
    if (!arguments) {
      chain.values = std::nullopt;
      continue;
    }
    for (const StageOutput& value : *arguments) {
      // A stage that takes all outputs of the previous one is the first consumer of each.
      const auto next = static_cast<std::size_t>(value.stage) + 1;
      const bool next_takes_all = static_cast<int>(next) < stage && !arguments_[next];
      const int first = next_takes_all ? value.stage + 1 : value.stage;
      const int from = sources.try_emplace(value, first).first->second;
      link(from, stage).values->push_back(value);
      sources[value] = stage;
    }
  }
  links_.clear();
  for (auto& [key, found] : links) links_.push_back(std::move(found));
}

std::vector<Wiring::Link> Wiring::links_to(int stage) const {
  std::vector<Link> found;
  std::copy_if(links_.begin(), links_.end(), std::back_inserter(found),
               [stage](const Link& link) { return link.to == stage; });
  return found;
}

std::vector<Wiring::Link> Wiring::links_from(int stage) const {
  std::vector<Link> found;
  std::copy_if(links_.begin(), links_.end(), std::back_inserter(found),
               [stage](const Link& link) { return link.from == stage; });
  return found;
}

}  // namespace penstock
