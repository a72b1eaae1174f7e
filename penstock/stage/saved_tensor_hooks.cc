#include "penstock/stage/saved_tensor_hooks.h"

#include <torch/csrc/autograd/engine.h>

#include <atomic>
#include <utility>

#include "penstock/base/mutex.h"

namespace penstock::internal {
namespace {

thread_local SavedTensorHooksScope* innermost = nullptr;

}  // namespace

using torch::autograd::Engine;

// Forwards to another engine. In a process with Python that is Python's, whose saved-tensor hooks stay in effect where
// there is no scope.
class HookingEngine final : public Engine {
 public:
  explicit HookingEngine(Engine& wrapped) : wrapped_(wrapped) {}
  ~HookingEngine() override { stop(); }

  torch::autograd::variable_list execute(const torch::autograd::edge_list& roots,
                                         const torch::autograd::variable_list& inputs, bool keep_graph,
                                         bool create_graph, bool accumulate_grad,
                                         const torch::autograd::edge_list& outputs) override {
    return wrapped_.execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  }
  c10::intrusive_ptr<at::ivalue::Future> execute_with_graph_task(
      const std::shared_ptr<torch::autograd::GraphTask>& graph_task,
      c10::intrusive_ptr<torch::autograd::Node> graph_root, torch::autograd::InputBuffer&& input_buffer) override {
    return wrapped_.execute_with_graph_task(graph_task, std::move(graph_root), std::move(input_buffer));
  }
  std::unique_ptr<torch::autograd::AnomalyMetadata> make_anomaly_metadata() override {
    return wrapped_.make_anomaly_metadata();
  }
  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    return innermost == nullptr ? wrapped_.get_default_saved_variable_hooks() : innermost->make_();
  }

  // Makes this kind of engine the default one. Python replaces the default engine when it is imported, so a process may
  // need several, each for one engine.
  static void install() {
    static Mutex mutex;
    static HookingEngine* current PENSTOCK_GUARDED_BY(mutex) = nullptr;
    const MutexLock lock(mutex);
    Engine& used = Engine::get_default_engine();
    if (current == &used) return;
    // Backwards of other threads may use an engine until the process exits, so none is destroyed.
    current = new HookingEngine(used);
    installed_ = current;
    torch::autograd::set_default_engine_stub([]() -> Engine& { return *installed_; });
  }

 private:
  inline static std::atomic<HookingEngine*> installed_ = nullptr;

  Engine& wrapped_;
};

SavedTensorHooksScope::SavedTensorHooksScope(MakeHooks make) : make_(std::move(make)), outer_(innermost) {
  HookingEngine::install();
  innermost = this;
}

SavedTensorHooksScope::~SavedTensorHooksScope() {
  innermost = outer_;
}

}  // namespace penstock::internal
