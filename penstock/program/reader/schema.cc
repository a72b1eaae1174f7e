#include "penstock/program/reader/schema.h"

#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

#include "penstock/base/text.h"
#include "penstock/program/error.h"
#include "penstock/program/reader/size_expression.h"

namespace penstock::internal {

at::ScalarType dtype_of(schema::ScalarType code) {
  switch (code) {
    case schema::ScalarType::BYTE: return at::ScalarType::Byte;
    case schema::ScalarType::CHAR: return at::ScalarType::Char;
    case schema::ScalarType::SHORT: return at::ScalarType::Short;
    case schema::ScalarType::INT: return at::ScalarType::Int;
    case schema::ScalarType::LONG: return at::ScalarType::Long;
    case schema::ScalarType::HALF: return at::ScalarType::Half;
    case schema::ScalarType::FLOAT: return at::ScalarType::Float;
    case schema::ScalarType::DOUBLE: return at::ScalarType::Double;
    case schema::ScalarType::COMPLEXHALF: return at::ScalarType::ComplexHalf;
    case schema::ScalarType::COMPLEXFLOAT: return at::ScalarType::ComplexFloat;
    case schema::ScalarType::COMPLEXDOUBLE: return at::ScalarType::ComplexDouble;
    case schema::ScalarType::BOOL: return at::ScalarType::Bool;
    case schema::ScalarType::BFLOAT16: return at::ScalarType::BFloat16;
    case schema::ScalarType::UINT16: return at::ScalarType::UInt16;
    case schema::ScalarType::UINT32: return at::ScalarType::UInt32;
    case schema::ScalarType::UINT64: return at::ScalarType::UInt64;
    case schema::ScalarType::FLOAT8E4M3FN: return at::ScalarType::Float8_e4m3fn;
    case schema::ScalarType::FLOAT8E5M2: return at::ScalarType::Float8_e5m2;
    case schema::ScalarType::FLOAT8E4M3FNUZ: return at::ScalarType::Float8_e4m3fnuz;
    case schema::ScalarType::FLOAT8E5M2FNUZ: return at::ScalarType::Float8_e5m2fnuz;
    case schema::ScalarType::FLOAT8E8M0FNU: return at::ScalarType::Float8_e8m0fnu;
    case schema::ScalarType::UNKNOWN: break;
  }
  throw ProgramError(concat("there is no dtype with code ", static_cast<int>(code), "."));
}

at::Layout layout_of(schema::Layout code) {
  switch (code) {
    case schema::Layout::Strided: return at::Layout::Strided;
    case schema::Layout::SparseCoo: return at::Layout::Sparse;
    case schema::Layout::SparseCsr: return at::Layout::SparseCsr;
    case schema::Layout::SparseCsc: return at::Layout::SparseCsc;
    case schema::Layout::SparseBsr: return at::Layout::SparseBsr;
    case schema::Layout::SparseBsc: return at::Layout::SparseBsc;
    case schema::Layout::_mkldnn: return at::Layout::Mkldnn;
    case schema::Layout::Unknown: break;
  }
  throw ProgramError(concat("there is no layout with code ", static_cast<int>(code), "."));
}

at::MemoryFormat memory_format_of(schema::MemoryFormat code) {
  switch (code) {
    case schema::MemoryFormat::ContiguousFormat: return at::MemoryFormat::Contiguous;
    case schema::MemoryFormat::ChannelsLast: return at::MemoryFormat::ChannelsLast;
    case schema::MemoryFormat::ChannelsLast3d: return at::MemoryFormat::ChannelsLast3d;
    case schema::MemoryFormat::PreserveFormat: return at::MemoryFormat::Preserve;
    case schema::MemoryFormat::Unknown: break;
  }
  throw ProgramError(concat("there is no memory format with code ", static_cast<int>(code), "."));
}

at::Device device_of(const schema::Device& device) {
  if (device.get_type() == "meta") return at::kCPU;
  try {
    std::string text = device.get_type();
    if (device.get_index()) text += concat(":", *device.get_index());
    return at::Device(text);
  } catch (const c10::Error&) {
    throw ProgramError(concat("there is no device '", device.get_type(), "'."));
  }
}

Dimension dimension_of(const schema::SymInt& size) {
  if (size.tag() == schema::SymInt::Tag::AS_INT) return {.example = size.get_as_int()};
  const schema::SymExpr& expression = size.get_as_expr();
  Dimension dimension{.expression = read_size_expression(expression.get_expr_str())};
  const auto& hint = expression.get_hint();
  if (hint && hint->tag() == schema::SymExprHint::Tag::AS_INT) dimension.example = hint->get_as_int();
  return dimension;
}

TensorType type_of(const schema::TensorMeta& meta) {
  TensorType type{.dtype = dtype_of(meta.get_dtype()),
                  .device = device_of(meta.get_device()),
                  .layout = layout_of(meta.get_layout()),
                  .requires_grad = meta.get_requires_grad()};
  for (const schema::SymInt& size : meta.get_sizes()) {
    type.sizes.push_back(dimension_of(size));
    if (type.sizes.back().example < 0) throw ProgramError("a tensor has a negative size.");
  }
  for (const schema::SymInt& stride : meta.get_strides()) type.strides.push_back(dimension_of(stride).example);
  return type;
}

std::int64_t static_size(const schema::SymInt& number) {
  if (number.tag() == schema::SymInt::Tag::AS_INT) return number.get_as_int();
  throw ProgramError(concat("found the size ", number.get_as_expr().get_expr_str(), ", expected a static one."));
}

std::string model_name(const Archive& archive) {
  constexpr std::string_view kFolder = "models/";
  constexpr std::string_view kEnding = ".json";
  std::vector<std::string> names;
  for (const std::string& record : archive.records()) {
    if (record.starts_with(kFolder) && record.ends_with(kEnding)) {
      names.push_back(record.substr(kFolder.size(), record.size() - kFolder.size() - kEnding.size()));
    }
  }
  if (names.size() == 1) return names.front();
  if (std::find(names.begin(), names.end(), "model") != names.end()) return "model";
  if (names.empty()) {
    throw ProgramError(archive.name() +
                       ": has no program: there is no record models/*.json in it.\n  Hint: write the .pt2 with "
                       "torch.export.save of PyTorch 2.8 or later.");
  }
  throw ProgramError(concat(archive.name(), ": has several programs (", join(names), "), and none is called 'model'."));
}

}  // namespace penstock::internal
