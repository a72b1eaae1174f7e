// Operators on the device against the CPU: results, gradients, and what they cost in waits.
#include <functional>
#include <string>

#include "tests/device/sim/sim_test.h"

namespace penstock::sim {
namespace {

using Tensors = std::vector<at::Tensor>;

// A computation on tensors of one device.
struct Computation {
  const char* name;
  std::vector<at::Tensor> (*function)(at::Device device);
};

void PrintTo(const Computation& computation, std::ostream* out) {
  *out << computation.name;
}

// Returns the same values on every device.
at::Tensor values(at::Device device, at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat) {
  std::int64_t count = 1;
  for (const std::int64_t size : sizes) count *= size;
  return at::arange(count, at::kDouble).mul(0.7).add(1).sin().mul(3).to(dtype).view(sizes).to(device);
}
at::Tensor indices(at::Device device, at::IntArrayRef sizes, std::int64_t bound) {
  std::int64_t count = 1;
  for (const std::int64_t size : sizes) count *= size;
  return at::arange(count).mul(7).remainder(bound).view(sizes).to(device);
}

// Returns the result of a function of one tensor, and the gradient of its sum of squares.
Tensors with_gradient(at::Device device, at::IntArrayRef sizes, const std::function<at::Tensor(const at::Tensor&)>& f,
                      at::ScalarType dtype = at::kFloat) {
  at::Tensor x = values(device, sizes, dtype).requires_grad_(true);
  const at::Tensor y = f(x);
  y.pow(2).sum().backward();
  return {y.detach(), x.grad()};
}

const Computation kComputations[] = {
    {"Elementwise",
     [](at::Device d) {
       return with_gradient(d, {4, 6},
                            [](const at::Tensor& x) { return at::gelu(x.exp().tanh() + x.sigmoid() * 2 - x); });
     }},
    {"Relu", [](at::Device d) { return with_gradient(d, {4, 6}, [](const at::Tensor& x) { return x.relu(); }); }},
    {"Where",
     [](at::Device d) {
       return with_gradient(d, {4, 6}, [](const at::Tensor& x) { return at::where(x > 0, x, x * 3); });
     }},
    {"MaskedFill",
     [](at::Device d) {
       return with_gradient(d, {4, 6}, [](const at::Tensor& x) { return x.masked_fill(x > 0, 2.5); });
     }},
    {"Reductions",
     [](at::Device d) {
       return with_gradient(d, {5, 700}, [](const at::Tensor& x) {
         return at::cat({x.sum(1), x.mean(1), x.amax(1), x.var(1), x.logsumexp(1), x.prod(1, false), x.norm(2, {1})});
       });
     }},
    {"CumsumAndSort",
     [](at::Device d) {
       return with_gradient(d, {6, 9}, [](const at::Tensor& x) {
         const auto [sorted, order] = x.sort(1, /*descending=*/true);
         const auto [top, where] = x.topk(3, 1);
         return at::cat({x.cumsum(1), sorted, top, order.to(x.dtype()), where.to(x.dtype())}, 1);
       });
     }},
    {"Joining",
     [](at::Device d) {
       return with_gradient(d, {6, 8}, [](const at::Tensor& x) {
         const auto parts = x.chunk(2, 1);
         const auto rows = x.split(2);
         return at::cat({at::stack({parts[0], parts[1]}).view({-1}), at::cat({rows[2], rows[0]}).view({-1}),
                         x.t().reshape({-1}), x.unfold(1, 2, 2).reshape({-1}), x.flip({0}).view({-1})});
       });
     }},
    {"Indexing",
     [](at::Device d) {
       return with_gradient(d, {6, 8}, [d](const at::Tensor& x) {
         const at::Tensor rows = indices(d, {5}, 6);
         at::Tensor written = x.clone();
         written.index_put_({rows}, x.index({rows.flip({0})}), /*accumulate=*/true);
         return at::cat({x.index({rows}), x.index_select(0, rows), x.gather(0, indices(d, {5, 8}, 6)), written,
                         x.clone().scatter_add(0, indices(d, {6, 8}, 6), x), x.index({x.select(1, 0) > 0}),
                         x.index_add(0, rows, x.narrow(0, 0, 5))});
       });
     }},
    {"Embedding",
     [](at::Device d) {
       return with_gradient(d, {9, 4}, [d](const at::Tensor& x) { return at::embedding(x, indices(d, {3, 5}, 9)); });
     }},
    {"LayerNorm",
     [](at::Device d) {
       return with_gradient(d, {4, 16}, [d](const at::Tensor& x) {
         return at::layer_norm(x, {16}, values(d, {16}), values(d, {16})) + at::rms_norm(x, {16});
       });
     }},
    {"BatchNorm",
     [](at::Device d) {
       at::Tensor mean = values(d, {4});
       at::Tensor variance = values(d, {4}).abs();
       Tensors results = with_gradient(d, {6, 4, 5}, [&](const at::Tensor& x) {
         return at::batch_norm(x, values(d, {4}), values(d, {4}), mean, variance, /*training=*/true, 0.1, 1e-5, false);
       });
       results.insert(results.end(), {mean, variance});
       return results;
     }},
    {"GroupNorm",
     [](at::Device d) {
       return with_gradient(d, {2, 4, 6},
                            [d](const at::Tensor& x) { return at::group_norm(x, 2, values(d, {4}), values(d, {4})); });
     }},
    {"Convolution",
     [](at::Device d) {
       return with_gradient(d, {2, 4, 9, 9}, [d](const at::Tensor& x) {
         const at::Tensor y = at::conv2d(x, values(d, {6, 2, 3, 3}), values(d, {6}), 1, 1, 1, /*groups=*/2);
         return at::max_pool2d(y, {2, 2}) + at::avg_pool2d(y, {2, 2});
       });
     }},
    {"TransposedConvolution",
     [](at::Device d) {
       return with_gradient(d, {2, 4, 9}, [d](const at::Tensor& x) {
         return at::conv_transpose1d(x, values(d, {4, 3, 5}), values(d, {3}), 2);
       });
     }},
    {"Losses",
     [](at::Device d) {
       return with_gradient(d, {6, 10}, [d](const at::Tensor& x) {
         const at::Tensor classes = indices(d, {6}, 10);
         return at::stack({at::cross_entropy_loss(x, classes), at::nll_loss(at::log_softmax(x, 1), classes),
                           at::mse_loss(x, values(d, {6, 10})), at::l1_loss(x, x * 2),
                           at::smooth_l1_loss(x, x.flip({0})),
                           at::binary_cross_entropy_with_logits(x, x.sigmoid().detach()),
                           at::cross_entropy_loss(x, classes, {}, at::Reduction::Sum, -100, /*label_smoothing=*/0.1)});
       });
     }},
    {"MatrixProducts",
     [](at::Device d) {
       return with_gradient(d, {3, 8, 8}, [](const at::Tensor& x) {
         return x.matmul(x.transpose(1, 2)) + x.bmm(x) + at::einsum("bij,bjk->bik", {x, x}) +
                at::linear(x, x[0], x[0][0]);
       });
     }},
    {"MatrixProductsInBfloat16",
     [](at::Device d) {
       return with_gradient(d, {8, 8}, [](const at::Tensor& x) { return x.mm(x.t()).softmax(-1) + x; }, at::kBFloat16);
     }},
    {"Float16",
     [](at::Device d) {
       return with_gradient(d, {8, 8}, [](const at::Tensor& x) { return (x * 2 + 1).tanh(); }, at::kHalf);
     }},
    {"Float64",
     [](at::Device d) {
       return with_gradient(d, {8, 8}, [](const at::Tensor& x) { return x.mm(x).tanh(); }, at::kDouble);
     }},
    {"ComplexViews",
     [](at::Device d) {
       return with_gradient(d, {4, 6, 2}, [](const at::Tensor& x) {
         const at::Tensor z = at::view_as_complex(x);
         return at::cat({at::view_as_real(z * z.conj()), at::view_as_real(z.mul(c10::complex<double>(0, 1)))});
       });
     }},
    {"Casts",
     [](at::Device d) {
       const at::Tensor x = values(d, {4, 6});
       return Tensors{x.to(at::kBFloat16), x.to(at::kHalf), x.to(at::kDouble), x.to(at::kInt), x > 0, x.to(at::kLong)};
     }},
    {"InPlace",
     [](at::Device d) {
       at::Tensor x = values(d, {4, 6});
       x.add_(1).mul_(2).clamp_(-3, 3).t_().squeeze_().unsqueeze_(0);
       x.select(1, 2).zero_();
       at::Tensor y = at::empty({0}, x.options());
       at::mul_out(y, x, x);
       at::add_out(x, x, y);
       return Tensors{x, y};
     }},
    {"Factories",
     [](at::Device d) {
       const auto options = at::TensorOptions(d);
       return Tensors{at::arange(0, 7, 0.5, options),
                      at::linspace(0, 1, 9, options),
                      at::eye(4, options),
                      at::full({3}, 2, options.dtype(at::kLong)),
                      at::tril_indices(3, 3, 0, options.dtype(at::kLong)),
                      at::ones({4, 4}, options).triu(1)};
     }},
    {"DynamicShapes",
     [](at::Device d) {
       const at::Tensor x = values(d, {5, 7});
       return Tensors{x.nonzero(), x.masked_select(x > 0), std::get<0>(at::_unique2(indices(d, {20}, 6))),
                      at::bincount(indices(d, {20}, 6)), indices(d, {4}, 3).repeat_interleave(indices(d, {4}, 3))};
     }},
    {"Lists",
     [](at::Device d) {
       Tensors a;
       Tensors b;
       for (const std::int64_t size : {3, 5, 8}) {
         a.push_back(values(d, {size}));
         b.push_back(values(d, {size}) * 2);
       }
       at::_foreach_add_(a, b);
       at::_foreach_mul_(a, 2.0);
       at::_foreach_addcdiv_(a, b, at::_foreach_add(at::_foreach_abs(b), 1.0), 0.5);
       at::_foreach_lerp_(a, b, 0.25);
       for (const at::Tensor& norm : at::_foreach_norm(a)) a.push_back(norm);
       for (const at::Tensor& root : at::_foreach_sqrt(at::_foreach_abs(b))) a.push_back(root);
       return a;
     }},
    {"FusedOptimizers",
     [](at::Device d) {
       const auto some = [&] { return Tensors{values(d, {8}), values(d, {3, 3})}; };
       const auto zeros = [&] { return Tensors{at::zeros({8}, d), at::zeros({3, 3}, d)}; };
       Tensors parameters = some();
       Tensors gradients = some();
       Tensors averages = zeros();
       Tensors squares = zeros();
       const Tensors steps{at::ones({}, d), at::ones({}, d)};
       at::_fused_adam_(parameters, gradients, averages, squares, {}, steps, 0.1, 0.9, 0.999, 0.0, 1e-8, false, false);
       at::_fused_adamw_(parameters, gradients, averages, squares, {}, steps, 0.1, 0.9, 0.999, 0.1, 1e-8, false, false);
       at::_fused_sgd_(parameters, gradients, averages, 0.1, 0.9, 0.01, 0.0, true, false, false);
       parameters.insert(parameters.end(), averages.begin(), averages.end());
       return parameters;
     }},
    {"Interpolation",
     [](at::Device d) {
       return with_gradient(d, {1, 2, 4, 4}, [](const at::Tensor& x) {
         return at::upsample_bilinear2d(x, {7, 7}, false) + at::pad(at::upsample_nearest2d(x, {5, 5}), {1, 1, 1, 1});
       });
     }},
    {"ScatterAndRoll",
     [](at::Device d) {
       return with_gradient(d, {6, 8}, [d](const at::Tensor& x) {
         return x.roll(2, 1) + at::zeros({6, 8}, x.options()).scatter(1, indices(d, {6, 8}, 8), x) + x.repeat({1, 1});
       });
     }},
};

class EveryComputation : public SimTest, public testing::WithParamInterface<Computation> {};

TEST_P(EveryComputation, HasTheBitsOfTheCpu) {
  const Tensors found = GetParam().function(d1);
  for (const at::Tensor& tensor : found) EXPECT_EQ(tensor.device(), d1);
  EXPECT_TRUE(same_bits(found, GetParam().function(at::kCPU)));
}

// Nothing but the copies of arguments waits.
TEST_P(EveryComputation, NeedsNoWaitOfTheSimulation) {
  const std::uint64_t before = counters().simulation_waits;
  GetParam().function(d0);
  EXPECT_EQ(counters().simulation_waits, before);
  if (HasFailure()) {
    for (const std::string& name : simulation_waits()) ADD_FAILURE() << name;
  }
}

INSTANTIATE_TEST_SUITE_P(Operators, EveryComputation, testing::ValuesIn(kComputations),
                         [](const auto& test) { return std::string(test.param.name); });

class Attention : public SimTest {};

struct AttentionCase {
  bool causal = false;
  at::ScalarType mask = at::ScalarType::Undefined;
  bool grouped = false;
  at::ScalarType dtype = at::kFloat;
};

Tensors attend(at::Device device, const AttentionCase& options) {
  const std::int64_t heads = options.grouped ? 2 : 4;
  at::Tensor query = values(device, {2, 4, 40, 16}, options.dtype).requires_grad_(true);
  at::Tensor key = values(device, {2, heads, 40, 16}, options.dtype).mul(0.5).detach().requires_grad_(true);
  std::optional<at::Tensor> mask;
  if (options.mask == at::kBool) mask = values(device, {40, 40}) > -2;
  if (options.mask == at::kFloat) mask = values(device, {2, 1, 40, 40}).to(options.dtype);
  const at::Tensor out =
      at::scaled_dot_product_attention(query, key, key, mask, 0.0, options.causal, /*scale=*/0.3, options.grouped);
  out.pow(2).sum().backward();
  return {out.detach(), query.grad(), key.grad()};
}

TEST_F(Attention, HasTheBitsOfTheCpu) {
  for (const AttentionCase& options : {AttentionCase{}, AttentionCase{.causal = true}, AttentionCase{.mask = at::kBool},
                                       AttentionCase{.mask = at::kFloat}, AttentionCase{.grouped = true},
                                       AttentionCase{.causal = true, .dtype = at::kBFloat16}}) {
    SCOPED_TRACE(testing::Message() << "causal " << options.causal << ", mask " << options.mask << ", grouped "
                                    << options.grouped << ", " << options.dtype);
    const std::uint64_t before = counters().host_waits;
    const Tensors found = attend(d0, options);
    EXPECT_LE(counters().host_waits - before, 3U);  // copies of the arguments
    EXPECT_TRUE(same_bits(found, attend(at::kCPU, options)));
  }
}

TEST_F(Attention, DropsByTheGeneratorOfTheDevice) {
  const auto attend_with_seed = [&](std::uint64_t seed) {
    at::Generator generator = at::globalContext().defaultGenerator(d0);
    generator.set_current_seed(seed);
    const at::Tensor query = values(d0, {2, 4, 8, 16});
    return at::scaled_dot_product_attention(query, query, query, {}, /*dropout_p=*/0.5);
  };
  const at::Tensor first = attend_with_seed(1);
  EXPECT_TRUE(same_bits({attend_with_seed(1)}, {first}));
  EXPECT_FALSE(same_bits({attend_with_seed(2)}, {first}));
}

}  // namespace
}  // namespace penstock::sim
