// Mutates the inputs of fuzz_archive for libFuzzer. Most mutations keep the structure of the JSON or the zip, because
// random bytes rarely get past the first check. A JSON value is replaced by another one of the document, or by one that
// is known to cause trouble; a zip is written again around mutated records, with correct checksums.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "penstock/program/error.h"
#include "penstock/program/reader/archive.h"
#include "tests/program/archives.h"

extern "C" std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t size, std::size_t max_size);

namespace penstock::internal::testing {

namespace {

using nlohmann::json;

// Replacement values: numbers, strings and empty containers. The strings are targets of nodes and sizes.
const std::vector<json>& stumbling_blocks() {
  static const auto* const kBlocks = new std::vector<json>{
      nullptr,
      true,
      false,
      json::array(),
      json::object(),
      "",
      0,
      1,
      2,
      -1,
      127,
      65536,
      1 << 30,
      0.5,
      -0.0,
      1e300,
      std::numeric_limits<std::int64_t>::max(),
      std::numeric_limits<std::int64_t>::min(),
      std::numeric_limits<std::uint64_t>::max(),
      {{"as_int", 3}},
      {{"as_ints", {1, -1, 2}}},
      {{"as_none", true}},
      {{"as_float", 2.5}},
      {{"as_bool", true}},
      {{"as_string", "sum"}},
      {{"as_scalar_type", 7}},
      {{"as_sym_int", {{"as_int", 2}}}},
      {{"as_tensors", {{{"name", "x"}}, {{"name", "linear"}}}}},
      {{"as_expr", {{"expr_str", "s0"}, {"hint", {{"as_int", 2}}}}}},
      "s0",
      "2*s0 + 1",
      "Mod(s0, 0)",
      "FloorDiv(s0, s0 - 2)",
      "Max(1, s0**9)",
      "linear",
      "relu",
      "x",
      "torch.ops.aten.add.Tensor",
      "torch.ops.aten.relu_.default",
      "torch.ops.aten.view.default",
      "torch.ops.aten.cat.default",
      "torch.ops.aten.split.Tensor",
      "torch.ops.aten.sym_size.int",
      "torch.ops.aten.dropout.default",
      "torch.ops.aten.batch_norm.default",
      "torch.ops.pippy._pipe_split.default",
      "torch.ops.higher_order.wrap_with_set_grad_enabled",
      "torch.ops.higher_order.cond",
      "_operator.getitem",
      "_operator.floordiv",
      "_operator.pow",
      "_operator.mod",
      "math.ceil",
      "torch.sym_max",
  };
  return *kBlocks;
}

class Mutation {
 public:
  explicit Mutation(unsigned seed) : random_(seed) {}

  std::string input(std::string bytes) {
    if (below(4) == 0) return changed_bytes(std::move(bytes));
    return bytes.starts_with("PK") ? archive(bytes) : document(std::move(bytes));
  }

 private:
  std::size_t below(std::size_t count) { return random_() % count; }
  template <class Items>
  auto& one_of(Items& items) {
    return items[below(items.size())];
  }

  // Mutates a document: as JSON, or as bytes if it is none.
  std::string document(std::string bytes) {
    json value = json::parse(bytes, nullptr, /*allow_exceptions=*/false);
    if (value.is_discarded()) return changed_bytes(std::move(bytes));
    for (std::size_t left = 1 + below(4); left > 0; --left) change(value);
    return value.dump(-1, ' ', false, json::error_handler_t::replace);
  }

  std::string archive(const std::string& bytes) {
    std::vector<Record> records;
    try {
      const Archive archive(bytes, "fuzz");
      for (const std::string& name : archive.records()) records.push_back({.name = name, .bytes = archive.text(name)});
    } catch (const ProgramError&) {
      return changed_bytes(bytes);
    }
    Record& record = one_of(records);
    switch (below(8)) {
      case 0: {
        Record copy = record;
        records.push_back(std::move(copy));
        break;
      }
      case 1: records.erase(records.begin() + (&record - records.data())); break;
      case 2: record.name = changed_bytes(record.name); break;
      case 3: record.claimed_size = static_cast<std::uint32_t>(random_()); break;
      case 4: record.claimed_offset = static_cast<std::uint32_t>(below(bytes.size())); break;
      case 5: record.bytes = changed_bytes(record.bytes); break;
      default: record.bytes = document(record.bytes);
    }
    return testing::zipped(records);
  }

  // A value of the document and its parent, which is null for the document itself.
  struct Place {
    json* value;
    json* parent;
  };
  static void collect(json& value, json* parent, std::vector<Place>& places) {
    places.push_back({&value, parent});
    for (json& inner : value) {
      if (value.is_structured()) collect(inner, &value, places);
    }
  }

  void change(json& whole) {
    std::vector<Place> places;
    collect(whole, nullptr, places);
    const Place place = one_of(places);
    json& value = *place.value;
    const json other = *one_of(places).value;
    switch (below(8)) {
      case 0: value = other; break;
      case 1: value = one_of(stumbling_blocks()); break;
      case 2:
        if (place.parent != nullptr) remove(*place.parent, value);
        break;
      case 3:
        if (place.parent != nullptr && place.parent->is_array()) place.parent->push_back(json(value));
        break;
      case 4:
        if (value.is_object() && other.is_object()) value.update(other);
        break;
      case 5:
        if (value.is_array()) std::shuffle(value.begin(), value.end(), random_);
        break;
      case 6:
        if (value.is_object() && !value.empty()) {
          const auto entry = std::next(value.begin(), static_cast<std::ptrdiff_t>(below(value.size())));
          const std::vector<std::string> names = names_in(places);
          json moved = entry.value();
          value.erase(entry);
          value[other.is_string() ? other.get<std::string>() : one_of(names)] = std::move(moved);
        }
        break;
      default: change_leaf(value);
    }
  }

  void change_leaf(json& value) {
    if (value.is_number()) {
      value = value.is_number_float() ? json(-value.get<double>()) : json(value.get<std::int64_t>() ^ (1 << below(6)));
    } else if (value.is_boolean()) {
      value = !value.get<bool>();
    } else if (value.is_string()) {
      // The structures of inputs and outputs are JSON in a string.
      value = document(value.get<std::string>());
    }
  }

  static void remove(json& parent, const json& value) {
    for (auto it = parent.begin(); it != parent.end(); ++it) {
      if (&*it == &value) {
        parent.erase(it);
        return;
      }
    }
  }

  static std::vector<std::string> names_in(const std::vector<Place>& places) {
    std::vector<std::string> names;
    for (const Place& place : places) {
      if (!place.value->is_object()) continue;
      for (const auto& entry : place.value->items()) names.push_back(entry.key());
    }
    return names;
  }

  static std::string changed_bytes(std::string bytes) {
    std::size_t size = bytes.size();
    bytes.resize(size + 64);
    size = LLVMFuzzerMutate(reinterpret_cast<std::uint8_t*>(bytes.data()), size, bytes.size());
    bytes.resize(size);
    return bytes;
  }

  std::minstd_rand random_;
};

}  // namespace
}  // namespace penstock::internal::testing

extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size, std::size_t max_size,
                                               unsigned seed) {
  const std::string bytes = penstock::Mutation(seed).input({reinterpret_cast<const char*>(data), size});
  if (bytes.size() > max_size) return LLVMFuzzerMutate(data, size, max_size);
  std::ranges::copy(bytes, data);
  return bytes.size();
}
