#include "penstock/stage/modules.h"

#include <torch/csrc/jit/runtime/graph_executor.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "penstock/base/text.h"
#include "penstock/stage/checkpoint.h"
#include "penstock/stage/recomputation.h"
#include "penstock/stage/wiring.h"
#include "penstock/tensor/nested.h"

namespace penstock {

using internal::concat;

namespace {

using torch::nn::AnyModule;
using torch::nn::AnyValue;

AnyValue call(AnyModule& module, const Args& args, const Kwargs& kwargs) {
  if (!kwargs.empty()) {
    throw StageError(concat("a torch::nn module takes no keyword arguments, and there is '", kwargs.begin()->first,
                            "'.\n  Hint: stage_module(module, function) lets a function of yours pass them."));
  }
  for (std::size_t i = 0; i < args.size(); ++i) {
    if (args[i].isTensor()) continue;
    throw StageError(concat("argument ", i, " of a torch::nn module: found ", describe(args[i]),
                            ", expected a tensor.\n  Hint: stage_module(module, function) takes any."));
  }
  const auto tensor = [&](std::size_t index) { return args[index].toTensor(); };
  switch (args.size()) {
    case 1: return module.any_forward(tensor(0));
    case 2: return module.any_forward(tensor(0), tensor(1));
    case 3: return module.any_forward(tensor(0), tensor(1), tensor(2));
    case 4: return module.any_forward(tensor(0), tensor(1), tensor(2), tensor(3));
    default:
      throw StageError(concat("a torch::nn module takes one to four tensors here, not ", args.size(),
                              ".\n  Hint: stage_module(module, function) takes any number."));
  }
}

template <class Tuple>
bool take(AnyValue& value, c10::IValue& result) {
  const Tuple* const found = value.try_get<Tuple>();
  if (found == nullptr) return false;
  result = *found;
  return true;
}

c10::IValue value_of(AnyValue value) {
  using at::Tensor;
  c10::IValue result;
  if (take<Tensor>(value, result) || take<std::tuple<Tensor, Tensor>>(value, result) ||
      take<std::tuple<Tensor, Tensor, Tensor>>(value, result) ||
      take<std::tuple<Tensor, Tensor, Tensor, Tensor>>(value, result)) {
    return result;
  }
  throw StageError(concat("a torch::nn module returns a tensor or a tuple of two to four here, and this one returned ",
                          c10::demangle(value.type_info().name()),
                          ".\n  Hint: stage_module(module, function) lets a function of yours turn it into a "
                          "c10::IValue."));
}

// Returns the tensors that a module returned, as the arguments of the next one.
Args args_of(const c10::IValue& value) {
  if (!value.isTuple()) return {value};
  Args args;
  for (const c10::IValue& element : value.toTupleRef().elements()) args.push_back(element);
  return args;
}

AnyValue call_checkpointed(const AnyModule& module, const Args& args, const Kwargs& kwargs) {
  return checkpoint(
      [module, kwargs](const c10::IValue& values) {
        AnyModule copy = module;
        return call(copy, args_of(values), kwargs);
      },
      c10::IValue(c10::ivalue::Tuple::create(args)));
}

}  // namespace

StageModule stage_module_without_forward(const torch::nn::Module& module) {
  StageModule result;
  for (const auto& item : module.named_parameters()) result.parameters.emplace_back(item.key(), item.value());
  for (const auto& item : module.named_buffers()) result.buffers.emplace_back(item.key(), item.value());
  return result;
}

StageModule stage_module(torch::nn::Sequential sequential, const SequentialOptions& options) {
  if (sequential->is_empty()) throw StageError("a stage's Sequential is empty.");
  if (options.checkpoint_every < 0) {
    throw StageError(concat("SequentialOptions::checkpoint_every is ", options.checkpoint_every,
                            "; expected 1 for all modules, n for every n-th, or 0 for none."));
  }
  StageModule result = stage_module_without_forward(*sequential);
  result.forward = [sequential = std::move(sequential), every = options.checkpoint_every](const Args& args,
                                                                                          const Kwargs& kwargs) {
    torch::nn::Sequential copy = sequential;
    auto module = copy->begin();
    const auto is_checkpointed = [&] { return every > 0 && (module - copy->begin() + 1) % every == 0; };
    AnyValue value = is_checkpointed() ? call_checkpointed(*module, args, kwargs) : call(*module, args, kwargs);
    for (++module; module != copy->end(); ++module) {
      value = is_checkpointed() ? call_checkpointed(*module, args_of(value_of(std::move(value))), {})
                                : module->any_forward(std::move(value));
    }
    return value_of(std::move(value));
  };
  return result;
}

StageModule stage_module(AnyModule module) {
  if (module.is_empty()) throw StageError("a stage's AnyModule is empty.");
  StageModule result = stage_module_without_forward(*module.ptr());
  result.forward = [shared = std::make_shared<AnyModule>(std::move(module))](const Args& args, const Kwargs& kwargs) {
    return value_of(call(*shared, args, kwargs));
  };
  return result;
}

StageModule stage_module(torch::jit::Module module) {
  StageModule result;
  for (const auto& item : module.named_parameters()) result.parameters.emplace_back(item.name, item.value);
  for (const auto& item : module.named_buffers()) result.buffers.emplace_back(item.name, item.value);
  result.forward = [module = std::move(module)](const Args& args, const Kwargs& kwargs) {
    torch::jit::Module copy = module;
    // The optimizer changes what later calls save, so that a recomputation would not match its forward.
    std::optional<torch::jit::GraphOptimizerEnabledGuard> unoptimized;
    if (internal::RecomputedPartScope::is_open()) unoptimized.emplace(false);
    return copy.forward(args, std::unordered_map<std::string, c10::IValue>(kwargs.begin(), kwargs.end()));
  };
  return result;
}

}  // namespace penstock
