// The nodes of an export's graph.
#pragma once

#include <new>
#include <nlohmann/json.hpp>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "penstock/program/error.h"
#include "penstock/program/graph.h"
#include "penstock/program/reader/allowed_operators.h"
#include "penstock/program/reader/operands.h"

namespace penstock::internal {

class GraphReader {
 public:
  // `where` begins every error. The graph and the allowed operators outlive the reader.
  GraphReader(std::string where, Graph& graph, const AllowedOperators& allowed)
      : where_(std::move(where)), graph_(&graph), allowed_(&allowed) {}

  // What a graph says of its tensors, until they come.
  void declare(const nlohmann::json& graph);
  // A value under its name. Throws ProgramError for a name that is taken.
  int define(const std::string& name, ValueKind kind, int producer, Scope& scope);
  void read_nodes(const nlohmann::json& graph, Scope& scope, int region);

  // Errors of `act` as errors of a place.
  template <class Act>
  void at(const std::string& place, Act act) const {
    try {
      act();
    } catch (const ProgramError& error) {
      fail(place + ": " + error.what());
    } catch (const c10::Error& error) {
      fail(place + ": " + error.what_without_backtrace());
    } catch (const std::bad_alloc&) {
      throw;
    } catch (const std::exception& error) {
      // Also what the schema's types throw when they are asked for what they do not hold.
      fail(place + ": is not as the schema has it: " + error.what());
    }
  }
  const std::string& where() const { return where_; }
  [[noreturn]] void fail(const std::string& what) const { throw ProgramError(where_ + ": " + what); }

 private:
  int read_call(const std::string& stack);
  void read_node(const nlohmann::json& described, Scope& scope, int region);
  std::vector<Operand> operands_of(const schema::Node& read, const Node& node, const Scope& scope);
  Node::Result result_of(const schema::Argument& output, int producer, Scope& scope);
  void check_results(Node& node);
  // A region is a graph inside of the graph. Its nodes become nodes of the whole, with what holds for them.
  void read_region(const nlohmann::json& described, const std::string& name, Scope& scope, int region);
  int number_of(const Region& region);

  std::string where_;
  Graph* graph_;
  const AllowedOperators* allowed_;
  // By the calls around them and their keys.
  std::unordered_map<std::string, int> calls_;
  // Of the graph that is read and those around it: types of tensors by their names.
  std::vector<std::unordered_map<std::string, TensorType>> declared_;
};

}  // namespace penstock::internal
