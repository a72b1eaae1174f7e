// Kernels of the simulated device. Most operators run through run_on_stream(), which puts the CPU's kernel on the current
// stream; the others allocate, make views, copy, or are built from operators of the device.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

namespace penstock::sim {

inline bool is_on_sim(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == c10::DeviceType::PrivateUse1;
}

// Launches the CPU's kernel of an operator on the current stream of its arguments' device, and replaces the arguments on
// the stack by the results. The host waits only if a result is not a tensor or if its shape depends on data.
void run_on_stream(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// Calls run_on_stream with an operator of ATen, which need not be the one that was dispatched.
void run_on_stream(const char* name, const char* overload, torch::jit::Stack& stack);

// Enqueues a copy between any two of device, pinned and pageable memory, and waits where CUDA does.
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking);

// Enqueues a copy of bytes on the current stream of the device.
void copy_bytes(c10::Device device, const char* name, void* to, const void* from, std::size_t bytes);

// Changes the size of a storage on the device, keeping its content on the current stream.
void resize_storage(c10::StorageImpl& storage, std::size_t bytes);

// Each registers kernels; the library object has to live for ever.
void register_memory_kernels(torch::Library& library);
void register_layer_kernels(torch::Library& library);
void register_attention(torch::Library& library);
// Lets operators that have a CPU kernel and a composite one use the CPU's, so that results have its bits.
void register_cpu_kernels(torch::Library& library);
// Registers the casts of autocast for the dispatch key AutocastPrivateUse1.
void register_autocast(torch::Library& library);

}  // namespace penstock::sim
