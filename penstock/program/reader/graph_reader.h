// Reads the nodes of an export's graph, and those of its nested graphs.
#pragma once

#include <new>
#include <nlohmann/json.hpp>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "penstock/base/text.h"
#include "penstock/program/error.h"
#include "penstock/program/graph.h"
#include "penstock/program/reader/allowed_operators.h"
#include "penstock/program/reader/operands.h"

namespace penstock::internal {

class GraphReader {
 public:
  // Every error begins with `where`. The graph and the allowed operators have to outlive the reader.
  GraphReader(std::string where, Graph& graph, const AllowedOperators& allowed)
      : where_(std::move(where)), graph_(&graph), allowed_(&allowed) {}

  // Reads the tensor metadata of a graph, which define() attaches to its values.
  void declare(const nlohmann::json& graph);
  // Adds a value and returns its index. Throws ProgramError for a name that is taken.
  int define(const std::string& name, ValueKind kind, int producer, Scope& scope);
  // Reads the nodes of a graph into the whole program's graph. Names are resolved in `scope`.
  void read_nodes(const nlohmann::json& graph, Scope& scope, int region);

  // Calls `act` and rethrows its exceptions as errors at a place.
  template <class Act>
  void at(const std::string& place, Act act) const {
    try {
      act();
    } catch (const ProgramError& error) {
      fail(concat(place, ": ", error.what()));
    } catch (const c10::Error& error) {
      fail(concat(place, ": ", error.what_without_backtrace()));
    } catch (const std::bad_alloc&) {
      throw;
    } catch (const std::exception& error) {
      // The schema's types throw various exceptions when they do not contain what they are asked for.
      fail(concat(place, ": does not match the schema: ", error.what()));
    }
  }
  const std::string& where() const { return where_; }
  [[noreturn]] void fail(const std::string& message) const { throw ProgramError(concat(where_, ": ", message)); }

 private:
  // Reads "L__self__blocks.0.linear1@1,blocks.0.linear1,torch.nn.modules.linear.Linear;…", outermost call first, and
  // returns the index of the innermost call.
  int read_call(const std::string& stack);
  void read_node(const nlohmann::json& described, Scope& scope, int region);
  std::vector<Operand> operands_of(const schema::Node& read, const Node& node, const Scope& scope);
  Node::Result result_of(const schema::Argument& output, int producer, Scope& scope);
  void check_results(Node& node);
  // Reads a nested graph, which a higher-order operator calls. Its nodes become nodes of the program's graph, with a
  // region that has their grad mode and autocast.
  void read_region(const nlohmann::json& described, const std::string& name, Scope& scope, int region);
  int index_of(const Region& region);

  std::string where_;
  Graph* graph_;
  const AllowedOperators* allowed_;
  // Indices of module calls, by the enclosing call and the key in the export.
  std::unordered_map<std::string, int> calls_;
  // Types of tensors by name, for the graph that is being read and those that enclose it.
  std::vector<std::unordered_map<std::string, TensorType>> declared_;
};

}  // namespace penstock::internal
