// Runs operators on streams by the CPU's kernels.
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "tests/device/sim/generator.h"
#include "tests/device/sim/kernels.h"
#include "tests/device/sim/result_shapes.h"
#include "tests/device/sim/simulation.h"

namespace penstock::sim {
namespace {

// Calls `visit` with each tensor of an argument that is defined.
template <class Visit>
void for_each_tensor(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) {
      if (tensor.defined()) visit(tensor);
    }
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      if (tensor && tensor->defined()) visit(*tensor);
    }
  }
}

bool has_mask(const c10::IValue& indices) {
  bool found = false;
  for_each_tensor(indices, [&found](const at::Tensor& tensor) {
    found = found || tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte;
  });
  return found;
}

// CPU tensors with dimensions are arguments of these operators on CUDA, too.
bool takes_cpu_tensors(std::string_view name) {
  for (const char* allowed : {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_",
                              "aten::_unsafe_index", "aten::tensor_split", "aten::_pack_padded_sequence"}) {
    if (name == allowed) return true;
  }
  return false;
}

// Returns the name of an operator with its overload, which lives as long as the process.
const char* full_name(const c10::OperatorHandle& op) {
  static std::mutex mutex;
  static auto* const names = new std::unordered_map<const void*, std::string>;
  const std::lock_guard lock(mutex);
  std::string& name = (*names)[&op.schema()];
  if (name.empty()) name = c10::toString(op.operator_name());
  return name.c_str();
}

// One call of an operator: its arguments as the CPU's kernel takes them, and the tensors of the device that it uses.
class Call {
 public:
  Call(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments)
      : op_(op), schema_(op.schema()), name_(full_name(op)), arguments_(arguments), device_(find_device()) {}

  c10::Device device() const { return device_; }

  // Returns the results, in their order.
  torch::jit::Stack run() {
    const bool wait = depends_on_data();
    const bool has_results = makes_results();
    std::shared_ptr<const ResultShapes> shapes;
    if (!wait && has_results) shapes = result_shapes(op_, arguments_);
    convert_arguments();
    if (!wait && (shapes || !has_results)) return launch(shapes.get());
    return run_after_waiting(wait);
  }

 private:
  c10::Device find_device() const {
    std::optional<c10::Device> device;
    for (const c10::IValue& value : arguments_) {
      for_each_tensor(value, [&](const at::Tensor& tensor) {
        if (!is_on_sim(tensor)) return;
        if (!device) device = tensor.device();
        TORCH_CHECK(*device == tensor.device(), name_,
                    ": Expected all tensors to be on the same device, but found at least two devices, ", *device,
                    " and ", tensor.device());
      });
      if (!device && value.isDevice() && value.toDevice().type() == kSim && value.toDevice().has_index()) {
        device = value.toDevice();
      }
    }
    return device.value_or(c10::Device(kSim, current_device()));
  }

  // Returns true if an accelerator has to tell the host something before the operator returns.
  bool depends_on_data() const {
    for (const c10::Argument& result : schema_.returns()) {
      const bool is_tensor = result.type()->isSubtypeOf(*c10::TensorType::get()) ||
                             result.type()->isSubtypeOf(*c10::ListType::ofTensors());
      if (!is_tensor) return true;
    }
    const std::string_view name(schema_.name());
    if (name == "aten::index" || name == "aten::_unsafe_index") return has_mask(arguments_[1]);
    if (name == "aten::_index_put_impl_") {
      // A single value is filled in under the mask, without its indices.
      const bool fills = arguments_[2].toTensor().numel() == 1 && !arguments_[3].toBool();
      return has_mask(arguments_[1]) && !fills;
    }
    return op_.hasTag(at::Tag::dynamic_output_shape) || op_.hasTag(at::Tag::data_dependent_output);
  }

  bool makes_results() const {
    for (const c10::Argument& result : schema_.returns()) {
      if (result.alias_info() == nullptr) return true;
      TORCH_CHECK(result.alias_info()->isWrite(), "sim: ", name_, " returns a view and has no kernel for this device");
    }
    for (const c10::Argument& argument : schema_.arguments()) {
      if (argument.is_out()) return true;
    }
    return false;
  }

  at::Tensor convert(const at::Tensor& tensor, bool writes) {
    if (!tensor.defined()) return tensor;
    if (is_on_sim(tensor)) {
      used_.emplace_back(tensor, writes);
      return host_view(tensor, writes);
    }
    TORCH_CHECK(tensor.is_cpu() && !writes && (tensor.dim() == 0 || takes_cpu_tensors(schema_.name())), name_,
                ": Expected all tensors to be on the same device, but found at least two devices, ", device_, " and ",
                tensor.device());
    // Its value is taken when the operator is launched.
    at::Tensor copy = tensor.clone();
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
    return copy;
  }

  void convert_arguments() {
    for (std::size_t i = 0; i < arguments_.size(); ++i) {
      const c10::Argument& argument = schema_.arguments()[i];
      const c10::IValue& value = arguments_[i];
      const bool writes = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
      if (argument.is_out() && value.isTensor()) {
        outs_.push_back(i);
        cpu_.emplace_back(at::empty({0}, value.toTensor().options().device(at::kCPU)));
      } else if (value.isTensor()) {
        cpu_.emplace_back(convert(value.toTensor(), writes));
      } else if (value.isTensorList()) {
        c10::List<at::Tensor> list;
        for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(convert(tensor, writes));
        cpu_.emplace_back(std::move(list));
      } else if (value.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> list;
        for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
          list.push_back(tensor && tensor->defined() ? std::optional(convert(*tensor, writes)) : std::nullopt);
        }
        cpu_.emplace_back(std::move(list));
      } else if (value.isDevice()) {
        cpu_.emplace_back(c10::Device(at::kCPU));
      } else if (argument.name() == "generator") {
        const at::Generator generator = value.isNone() ? default_generator(device_.index()) : value.toGenerator();
        TORCH_CHECK(generator.device() == device_, name_, ": a generator of ", generator.device(), " on ", device_);
        cpu_.emplace_back(generator.get<SimGenerator>()->draw());
      } else {
        cpu_.push_back(value);
      }
    }
  }

  at::Tensor allocate(const TensorShape& shape) const {
    if (!shape.defined) return {};
    return at::empty_strided(shape.sizes, shape.strides, at::TensorOptions().dtype(shape.dtype).device(device_));
  }

  std::vector<Use> uses() const {
    std::vector<Use> uses;
    uses.reserve(used_.size());
    for (const auto& [tensor, writes] : used_) uses.push_back({&tensor, writes});
    return uses;
  }

  // Returns the argument that a result of an in-place or out= operator is.
  const c10::IValue& argument_of(const c10::Argument& result) const {
    for (std::size_t i = 0; i < arguments_.size(); ++i) {
      const auto* const alias = schema_.arguments()[i].alias_info();
      if (alias != nullptr && *alias == *result.alias_info()) return arguments_[i];
    }
    TORCH_CHECK(false, "sim: ", name_, " returns an argument that it does not have");
  }

  torch::jit::Stack launch(const ResultShapes* shapes) {
    for (std::size_t i = 0; i < outs_.size(); ++i) {
      const at::Tensor& out = arguments_[outs_[i]].toTensor();
      out.resize_(shapes->outs[i].sizes);
      cpu_[outs_[i]] = convert(out, /*writes=*/true);
    }
    torch::jit::Stack results;
    std::vector<std::vector<at::Tensor>> views(schema_.returns().size());
    for (std::size_t r = 0; r < schema_.returns().size(); ++r) {
      const c10::Argument& result = schema_.returns()[r];
      if (result.alias_info() != nullptr) {
        results.push_back(argument_of(result));
        continue;
      }
      c10::List<at::Tensor> list;
      for (const TensorShape& shape : shapes->results[r]) {
        const at::Tensor tensor = allocate(shape);
        views[r].push_back(tensor.defined() ? convert(tensor, /*writes=*/true) : tensor);
        list.push_back(tensor);
      }
      if (result.type()->isSubtypeOf(*c10::ListType::ofTensors())) {
        results.emplace_back(std::move(list));
      } else {
        results.emplace_back(list.get(0));
      }
    }
    Simulation& simulation = Simulation::get();
    simulation.count_kernel();
    simulation.launch(current_stream(device_.index()), name_, uses(),
                      [op = op_, cpu = std::move(cpu_), views = std::move(views)]() mutable {
                        op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &cpu);
                        for (std::size_t r = 0; r < views.size(); ++r) store(cpu[r], views[r]);
                      });
    return results;
  }

  // Copies a result of the CPU's kernel to the memory of the device.
  static void store(const c10::IValue& result, std::vector<at::Tensor>& views) {
    for (std::size_t i = 0; i < views.size(); ++i) {
      if (!views[i].defined()) continue;
      const at::Tensor from = result.isTensor() ? result.toTensor() : result.toTensorVector().at(i);
      TORCH_CHECK(from.sizes() == views[i].sizes(), "the result has sizes ", from.sizes(), " rather than ",
                  views[i].sizes(), "; the simulation cannot predict them for this operator");
      views[i].copy_(from);
    }
  }

  torch::jit::Stack run_after_waiting(bool host_waits) {
    Simulation& simulation = Simulation::get();
    const c10::Stream stream = current_stream(device_.index());
    simulation.launch(stream, name_, uses(), [] {});
    if (host_waits) {
      simulation.wait(stream);
    } else {
      simulation.wait_unnoticed(stream);
      simulation.count_simulation_wait(name_);
    }
    std::vector<at::Tensor> outs;
    for (const std::size_t index : outs_) outs.push_back(cpu_[index].toTensor());
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &cpu_);
    for (std::size_t i = 0; i < outs.size(); ++i) {
      const at::Tensor& out = arguments_[outs_[i]].toTensor();
      out.resize_(outs[i].sizes());
      copy_from(outs[i], out, /*non_blocking=*/true);
    }
    torch::jit::Stack results;
    for (std::size_t r = 0; r < schema_.returns().size(); ++r) {
      const c10::Argument& result = schema_.returns()[r];
      results.push_back(result.alias_info() != nullptr ? argument_of(result) : move_to_device(cpu_[r]));
    }
    return results;
  }

  c10::IValue move_to_device(const c10::IValue& value) const {
    const auto move = [this](const at::Tensor& tensor) {
      if (!tensor.defined()) return tensor;
      at::Tensor moved = allocate({.defined = true,
                                   .sizes = tensor.sizes().vec(),
                                   .strides = tensor.strides().vec(),
                                   .dtype = tensor.scalar_type()});
      copy_from(tensor, moved, /*non_blocking=*/true);
      return moved;
    };
    if (value.isTensor()) return move(value.toTensor());
    if (!value.isTensorList()) return value;
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(move(tensor));
    return list;
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  const char* const name_;
  const c10::ArrayRef<c10::IValue> arguments_;
  const c10::Device device_;
  torch::jit::Stack cpu_;
  std::vector<std::pair<at::Tensor, bool>> used_;
  // Indices of the arguments `out`.
  std::vector<std::size_t> outs_;
};

}  // namespace

void run_on_stream(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const std::size_t count = op.schema().arguments().size();
  torch::jit::Stack results;
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const c10::AutoGradMode no_grad(false);
    Call call(op, torch::jit::last(*stack, count));
    const c10::DeviceGuard guard(call.device());
    results = call.run();
  }
  torch::jit::drop(*stack, count);
  for (c10::IValue& result : results) stack->push_back(std::move(result));
}

void run_on_stream(const char* name, const char* overload, torch::jit::Stack& stack) {
  run_on_stream(c10::Dispatcher::singleton().findSchemaOrThrow(name, overload), &stack);
}

void register_cpu_kernels(torch::Library& library) {
  using c10::DispatchKey;
  c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
  const auto is_tensor = [](const c10::Argument& argument) {
    return argument.type()->isSubtypeOf(*c10::TensorType::get());
  };
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findSchema(name);
    if (!op || name.getNamespace() != "aten" || name.name == "aten::copy_") continue;
    const bool is_composite = op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd) ||
                              op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutogradNonFunctional);
    if (!is_composite || !op->hasKernelForDispatchKey(DispatchKey::CPU)) continue;
    if (op->hasKernelForDispatchKey(DispatchKey::PrivateUse1)) continue;
    bool is_view = false;
    for (const c10::Argument& result : op->schema().returns()) {
      is_view = is_view || (result.alias_info() != nullptr && !result.alias_info()->isWrite());
    }
    const auto& arguments = op->schema().arguments();
    if (is_view || std::none_of(arguments.begin(), arguments.end(), is_tensor)) continue;
    library.impl(c10::toString(name).substr(std::string_view("aten::").size()).c_str(),
                 torch::CppFunction::makeFromBoxedFunction<&run_on_stream>());
  }
}

}  // namespace penstock::sim
