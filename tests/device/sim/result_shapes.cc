#include "tests/device/sim/result_shapes.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <c10/core/DefaultDtype.h>

#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "tests/device/sim/simulation.h"

namespace penstock::sim {
namespace {

// Number of remembered calls. Shapes that change from call to call would fill the memory otherwise.
constexpr std::size_t kRemembered = 20'000;

// The part of a call's arguments that shapes of results depend on, as bytes.
class Key {
 public:
  Key(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
    add(&op.schema());
    add(c10::typeMetaToScalarType(c10::get_default_dtype()));
    for (const c10::IValue& value : arguments) add_value(value);
  }
  bool is_complete() const { return complete_; }
  const std::string& bytes() const { return bytes_; }

 private:
  template <class T>
  void add(const T& value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  template <class Range>
  void add_range(const Range& range) {
    add(range.size());
    for (const auto& value : range) add(value);
  }
  void add_tensor(const at::Tensor& tensor) {
    add('T');
    if (!tensor.defined()) return;
    add(tensor.scalar_type());
    add(tensor.device().type());
    add(tensor.unsafeGetTensorImpl()->is_wrapped_number());
    add_range(tensor.sizes());
    add_range(tensor.strides());
  }
  void add_value(const c10::IValue& value) {
    if (value.isTensor()) {
      add_tensor(value.toTensor());
    } else if (value.isTensorList()) {
      const auto tensors = value.toTensorVector();
      add(tensors.size());
      for (const at::Tensor& tensor : tensors) add_tensor(tensor);
    } else if (value.isOptionalTensorList()) {
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
        add_tensor(tensor ? *tensor : at::Tensor());
      }
      add(']');
    } else if (value.isInt()) {
      add('i');
      add(value.toInt());
    } else if (value.isDouble()) {
      add('d');
      add(value.toDouble());
    } else if (value.isBool()) {
      add(value.toBool());
    } else if (value.isNone()) {
      add('N');
    } else if (value.isIntList()) {
      add_range(value.toIntVector());
    } else if (value.isDoubleList()) {
      add_range(value.toDoubleVector());
    } else if (value.isBoolList()) {
      for (const bool element : value.toBoolList()) add(element);
      add(']');
    } else if (value.isString()) {
      add_range(value.toStringRef());
    } else if (value.isDevice() || value.isGenerator()) {
      add('D');
    } else {
      complete_ = false;
    }
  }

  std::string bytes_;
  bool complete_ = true;
};

// Returns a tensor of the same shape on the Meta device, or on the CPU with values that few operators refuse.
at::Tensor stand_in(const at::Tensor& tensor, c10::DeviceType device) {
  if (!tensor.defined()) return tensor;
  const auto options = at::TensorOptions().dtype(tensor.dtype()).device(device);
  at::Tensor result;
  if (device == at::kMeta) {
    result = at::empty_strided(tensor.sizes(), tensor.strides(), options);
  } else if (!tensor.device().is_privateuseone()) {
    result = tensor.clone();
  } else {
    const std::size_t bytes = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.element_size());
    const auto count = static_cast<std::int64_t>(bytes / tensor.element_size());
    const bool is_number = tensor.is_floating_point() || tensor.is_complex();
    result = (is_number ? at::ones({count}, options) : at::zeros({count}, options))
                 .as_strided(tensor.sizes(), tensor.strides());
  }
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) result.unsafeGetTensorImpl()->set_wrapped_number(true);
  return result;
}

torch::jit::Stack stand_ins(c10::ArrayRef<c10::IValue> arguments, c10::DeviceType device) {
  torch::jit::Stack stack;
  for (const c10::IValue& value : arguments) {
    if (value.isTensor()) {
      stack.emplace_back(stand_in(value.toTensor(), device));
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(stand_in(tensor, device));
      stack.emplace_back(std::move(list));
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
        list.push_back(tensor && tensor->defined() ? std::optional(stand_in(*tensor, device)) : std::nullopt);
      }
      stack.emplace_back(std::move(list));
    } else if (value.isDevice()) {
      stack.emplace_back(c10::Device(device));
    } else if (value.isGenerator()) {
      stack.emplace_back();
    } else {
      stack.push_back(value);
    }
  }
  return stack;
}

TensorShape shape_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  return {
      .defined = true, .sizes = tensor.sizes().vec(), .strides = tensor.strides().vec(), .dtype = tensor.scalar_type()};
}

// Runs the operator on stand-ins. Throws what the operator throws.
ResultShapes shapes_on(c10::DeviceType device, const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
  const c10::FunctionSchema& schema = op.schema();
  torch::jit::Stack stack = stand_ins(arguments, device);
  std::vector<at::Tensor> outs;
  for (std::size_t i = 0; i < stack.size(); ++i) {
    const c10::Argument& argument = schema.arguments()[i];
    if (argument.is_out() && stack[i].isTensor()) outs.push_back(stack[i].toTensor());
    // Trials do not draw from the CPU's default generator.
    if (device == at::kCPU && argument.name() == "generator") {
      stack[i] = at::make_generator<at::CPUGeneratorImpl>(std::uint64_t{0});
    }
  }
  const auto key = device == at::kMeta ? c10::DispatchKey::Meta : c10::DispatchKey::CPU;
  op.redispatchBoxed(c10::DispatchKeySet(key), &stack);
  ResultShapes shapes;
  for (std::size_t r = 0; r < schema.returns().size(); ++r) {
    shapes.results.emplace_back();
    if (schema.returns()[r].alias_info() != nullptr) continue;
    if (stack[r].isTensor()) {
      shapes.results.back().push_back(shape_of(stack[r].toTensor()));
    } else {
      for (const at::Tensor& tensor : stack[r].toTensorVector()) shapes.results.back().push_back(shape_of(tensor));
    }
  }
  for (const at::Tensor& out : outs) shapes.outs.push_back(shape_of(out));
  return shapes;
}

struct Memory {
  std::mutex mutex;
  std::unordered_map<std::string, std::shared_ptr<const ResultShapes>> shapes;
  // Operators that have shown to lack a Meta kernel.
  std::unordered_set<const void*> without_meta;
};

Memory& memory() {
  static auto* const instance = new Memory;
  return *instance;
}

std::optional<ResultShapes> find_shapes(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
  bool has_meta = true;
  {
    const std::lock_guard lock(memory().mutex);
    has_meta = !memory().without_meta.contains(&op.schema());
  }
  // Casts of an enclosing autocast are for the operator's caller.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  if (has_meta) {
    try {
      return shapes_on(at::kMeta, op, arguments);
    } catch (const c10::NotImplementedError&) {
      Simulation::get().note_without_meta(c10::toString(op.operator_name()));
      const std::lock_guard lock(memory().mutex);
      memory().without_meta.insert(&op.schema());
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): the trial below may know better
    }
  }
  try {
    return shapes_on(at::kCPU, op, arguments);
  } catch (const std::exception&) {
    // The arguments may be wrong, or the trial's values: running the operator shows which.
    return std::nullopt;
  }
}

}  // namespace

std::shared_ptr<const ResultShapes> result_shapes(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
  const Key key(op, arguments);
  if (key.is_complete()) {
    const std::lock_guard lock(memory().mutex);
    const auto found = memory().shapes.find(key.bytes());
    if (found != memory().shapes.end()) return found->second;
  }
  std::optional<ResultShapes> shapes = find_shapes(op, arguments);
  if (!shapes) return nullptr;
  auto result = std::make_shared<const ResultShapes>(*std::move(shapes));
  if (key.is_complete()) {
    const std::lock_guard lock(memory().mutex);
    if (memory().shapes.size() >= kRemembered) memory().shapes.clear();
    memory().shapes.emplace(key.bytes(), result);
  }
  return result;
}

}  // namespace penstock::sim
