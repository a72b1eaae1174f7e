// Fixtures for nested values, shared by the tests of all layers: values built by hand and at random, comparison of two
// values, and checks of error messages.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/jit_type.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <limits>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "penstock/tensor/nested.h"

namespace penstock::internal::testing {

inline c10::IValue tuple(std::vector<c10::IValue> elements) {
  return c10::ivalue::Tuple::create(std::move(elements));
}

inline c10::IValue list(const std::vector<c10::IValue>& elements) {
  c10::impl::GenericList values(c10::AnyType::get());
  for (const c10::IValue& element : elements) values.push_back(element);
  return values;
}

using Items = std::vector<std::pair<c10::IValue, c10::IValue>>;
inline c10::IValue dict(const Items& items) {
  c10::impl::GenericDict values(c10::AnyType::get(), c10::AnyType::get());
  for (const auto& [key, value] : items) values.insert(key, value);
  return values;
}

// Returns a named tuple. All fields are declared as tensors, as only their names matter here.
inline c10::IValue named_tuple(const std::string& name, const std::vector<std::string>& fields,
                               std::vector<c10::IValue> elements) {
  const std::vector<c10::TypePtr> types(elements.size(), c10::TensorType::get());
  return c10::ivalue::Tuple::createNamed(std::move(elements), c10::TupleType::createNamed(name, fields, types));
}

// Returns 0, 1, 2, … in the shape.
inline at::Tensor counting(at::IntArrayRef shape, at::ScalarType dtype = at::kFloat) {
  return at::arange(c10::multiply_integers(shape), dtype).view(shape);
}

// Returns all properties of a tensor that tests compare, in one line.
inline std::string text(const at::Tensor& tensor) {
  if (!tensor.defined()) return "undefined tensor";
  constexpr std::int64_t kShown = 32;
  std::ostringstream out;
  out << tensor.scalar_type() << tensor.sizes() << " strides " << tensor.strides()
      << (tensor.requires_grad() ? " requires grad" : "") << " =";
  const at::Tensor values = tensor.detach().reshape(-1);
  for (std::int64_t i = 0; i < std::min(values.numel(), kShown); ++i) out << " " << values[i].item();
  if (values.numel() > kShown) out << " …";
  return out.str();
}

inline std::string text(const c10::IValue& value) {
  if (value.isTensor()) return text(value.toTensor());
  std::ostringstream out;
  if (value.isTuple() || value.isList()) {
    const auto elements = value.isTuple() ? value.toTupleRef().elements().vec() : value.toListRef().vec();
    out << (value.isTuple() ? "(" : "[");
    for (const c10::IValue& element : elements) out << text(element) << ", ";
    out << (value.isTuple() ? ")" : "]");
  } else if (value.isGenericDict()) {
    out << "{";
    for (const auto& item : value.toGenericDict()) out << text(item.key()) << ": " << text(item.value()) << ", ";
    out << "}";
  } else {
    out << value.tagKind() << " " << value;
  }
  return out.str();
}

inline bool same_bits(const at::Tensor& one, const at::Tensor& other) {
  const at::Tensor a = one.detach().cpu().clone(at::MemoryFormat::Contiguous);
  const at::Tensor b = other.detach().cpu().clone(at::MemoryFormat::Contiguous);
  return a.nbytes() == b.nbytes() && (a.nbytes() == 0 || std::memcmp(a.data_ptr(), b.data_ptr(), a.nbytes()) == 0);
}

inline bool identical(const at::Tensor& one, const at::Tensor& other) {
  if (one.defined() != other.defined()) return false;
  if (!one.defined()) return true;
  return one.scalar_type() == other.scalar_type() && one.sizes() == other.sizes() && one.strides() == other.strides() &&
         one.requires_grad() == other.requires_grad() && same_bits(one, other);
}

// Returns the name of a named tuple and the names of its fields, or nothing for any other tuple.
inline std::vector<std::string> names_of(const c10::IValue& tuple) {
  // type() needs the type of each tensor inside, which an undefined tensor does not have.
  for (const at::Tensor& tensor : extract_tensor_args(tuple)) {
    if (!tensor.defined()) return {};
  }
  const auto type = tuple.toTupleRef().type<c10::TupleType>();
  if (!type->schema()) return {};
  std::vector<std::string> names{type->name()->qualifiedName()};
  for (const c10::Argument& field : type->schema()->arguments()) names.push_back(field.name());
  return names;
}

// Returns the first difference between two values with its path, or an empty text. Compares dicts without regard to
// order, NaN as equal to NaN, and tensors with their strides and requires_grad.
inline std::string difference(const c10::IValue& expected, const c10::IValue& found, const std::string& path = "") {
  const auto differ = [&] {
    return (path.empty() ? "the whole value" : path) + "\nexpected: " + text(expected) + "\nfound:    " + text(found) +
           "\n";
  };
  if (expected.tagKind() != found.tagKind()) return differ();
  if (expected.isTensor()) return identical(expected.toTensor(), found.toTensor()) ? "" : differ();
  const auto first_of = [&](const auto& one, const auto& other) -> std::string {
    if (one.size() != other.size()) return differ();
    for (std::size_t i = 0; i < one.size(); ++i) {
      std::string inside = difference(one[i], other[i], path + "[" + std::to_string(i) + "]");
      if (!inside.empty()) return inside;
    }
    return "";
  };
  if (expected.isTuple()) {
    if (names_of(expected) != names_of(found)) return differ();
    return first_of(expected.toTupleRef().elements().vec(), found.toTupleRef().elements().vec());
  }
  if (expected.isList()) return first_of(expected.toListRef().vec(), found.toListRef().vec());
  if (expected.isGenericDict()) {
    const auto one = expected.toGenericDict();
    const auto other = found.toGenericDict();
    if (one.size() != other.size()) return differ();
    for (const auto& item : one) {
      const auto same_key = other.find(item.key());
      if (same_key == other.end()) return differ();
      std::string inside = difference(item.value(), same_key->value(), path + "[" + text(item.key()) + "]");
      if (!inside.empty()) return inside;
    }
    return "";
  }
  if (expected.isDouble()) {
    const auto bits = [](const c10::IValue& number) { return std::bit_cast<std::uint64_t>(number.toDouble()); };
    return bits(expected) == bits(found) ? "" : differ();
  }
  return expected == found ? "" : differ();
}

// For EXPECT_TRUE: succeeds if there is no difference.
inline ::testing::AssertionResult same(const c10::IValue& expected, const c10::IValue& found) {
  const std::string first = difference(expected, found);
  return first.empty() ? ::testing::AssertionSuccess() : ::testing::AssertionFailure() << "they differ in " << first;
}

// Expects that `act` throws an Error with exactly this message.
template <class Error, class Act>
void expect_error(const Act& act, const std::string& message) {
  try {
    act();
    ADD_FAILURE() << "no error, instead of: " << message;
  } catch (const Error& error) {
    EXPECT_EQ(error.what(), message);
  }
}

inline std::uint64_t from_environment(const char* name, std::uint64_t default_value) {
  const char* text = std::getenv(name);
  return text == nullptr ? default_value : std::strtoull(text, nullptr, 10);
}

// Random numbers that are the same with every standard library, unlike those of its distributions.
class Random {
 public:
  // Each case has its own stream, so that it does not depend on the number of cases in a run.
  Random(std::uint64_t seed, std::uint64_t number) : engine_(seed * 1'000'003 + number) {}

  // Returns a number in [low, high].
  std::int64_t between(std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(engine_() % static_cast<std::uint64_t>(high - low + 1));
  }
  bool percent(int chance) { return between(1, 100) <= chance; }
  template <class Range>
  auto element_of(const Range& range) {
    return range[static_cast<std::size_t>(engine_() % std::size(range))];
  }

 private:
  std::mt19937_64 engine_;
};

// All dtypes of CPU tensors that at::empty can create and a conversion can fill.
inline constexpr std::array kDtypes = {at::kFloat, at::kDouble, at::kHalf,         at::kBFloat16,
                                       at::kLong,  at::kInt,    at::kShort,        at::kChar,
                                       at::kByte,  at::kBool,   at::kComplexFloat, at::kComplexDouble};

// Returns a tensor of numbers from -20 to 19, with any strides, and most often with `rows` rows.
inline at::Tensor random_tensor(Random& random, std::int64_t rows) {
  std::vector<std::int64_t> shape;
  for (std::int64_t rank = random.element_of(std::array{0, 1, 2, 2, 3, 3, 4, 5}); rank > 0; --rank) {
    shape.push_back(random.percent(4) ? 0 : random.between(1, 5));
  }
  if (!shape.empty() && random.percent(80)) shape[0] = rows;
  at::Tensor tensor = at::empty(shape, at::kInt);
  for (std::int64_t i = 0; i < tensor.numel(); ++i) {
    tensor.data_ptr<std::int32_t>()[i] = static_cast<std::int32_t>(random.between(-20, 19));
  }
  tensor = tensor.to(random.element_of(kDtypes));
  if (shape.size() > 1 && random.percent(30)) {
    const std::int64_t other = random.between(1, tensor.dim() - 1);
    tensor = tensor.transpose(0, other).clone().transpose(0, other);
  }
  if (at::isFloatingType(tensor.scalar_type()) && random.percent(30)) tensor.requires_grad_();
  return tensor;
}

inline c10::IValue random_plain(Random& random) {
  switch (random.between(0, 5)) {
    case 0: return random.between(-5, 5);
    case 1: return static_cast<double>(random.between(-9, 9)) / 4;
    case 2: return random.percent(50);
    case 3: return random.element_of(std::array<const char*, 3>{"", "relu", "it's"});
    case 4: return std::numeric_limits<double>::quiet_NaN();
    default: return {};
  }
}

// Returns tuples, named or not, lists and dicts, nested up to `depth`, with tensors and other leaves.
inline c10::IValue random_value(Random& random, std::int64_t rows, int depth) {  // NOLINT(misc-no-recursion): a tree
  if (depth == 0 || random.percent(40)) {
    return random.percent(70) ? c10::IValue(random_tensor(random, rows)) : random_plain(random);
  }
  std::vector<c10::IValue> elements;
  for (std::int64_t count = random.between(0, 3); count > 0; --count) {
    elements.push_back(random_value(random, rows, depth - 1));
  }
  std::vector<std::string> names{"ids", "mask", "a b", "it's"};
  names.resize(elements.size());
  switch (random.between(0, 4)) {
    case 0: return tuple(elements);
    case 1: return named_tuple("Output", names, elements);
    case 2: return list(elements);
    default: break;
  }
  Items items;
  const bool by_number = random.percent(20);
  for (std::size_t i = 0; i < elements.size(); ++i) {
    items.emplace_back(by_number ? c10::IValue(static_cast<std::int64_t>(i * 7)) : c10::IValue(names[i]), elements[i]);
  }
  return dict(items);
}

}  // namespace penstock::internal::testing
