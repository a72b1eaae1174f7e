// Stages of every kind of graph that autograd makes, each run whole and in halves.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <ostream>
#include <string>
#include <vector>

#include "tests/stage/functions.h"
#include "tests/stage/stages.h"

namespace penstock::internal::testing {
namespace {

struct Case {
  std::string name;
  Stage stage;

  friend void PrintTo(const Case& one, std::ostream* out) { *out << one.name; }
};

class EveryStage : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    if (GetParam().name == "SparseWeight" || GetParam().name == "NestedTensors") {
      PENSTOCK_ON_CPU_ALONE("the simulated device has no sparse or nested tensors");
    }
  }
};

TEST_P(EveryStage, GivesTheSameInHalves) {
  expect_same_in_halves(GetParam().stage);
}

TEST_P(EveryStage, GivesTheSameInHalvesOfSeveralMicrobatches) {
  Stage stage = GetParam().stage;
  stage.microbatches = 3;
  expect_same_in_halves(stage);
}

const at::Tensor kX = numbers({4, 6}, 1);
const at::Tensor kY = numbers({4, 6}, 2);
const at::Tensor kW = numbers({6, 6}, 3);
const at::Tensor kV = numbers({6, 6}, 4);
const at::Tensor kB = numbers({6}, 5);
const at::Tensor kImages = numbers({2, 4, 5, 5}, 6);
const at::Tensor kFilters = numbers({4, 4, 3, 3}, 7);

// In each case, `in` are the inputs and `p` the parameters.
std::vector<Case> products() {
  return {
      {"Linear",
       {[](auto& in, auto& p) -> Tensors { return {at::linear(at::linear(in[0], p[0], p[1]).relu(), p[0])}; },
        {kX},
        {kW, kB}}},
      {"LinearOnThreeDimensions",
       {[](auto& in, auto& p) -> Tensors { return {at::linear(in[0], p[0], p[1])}; }, {numbers({2, 3, 6})}, {kW, kB}}},
      {"Mm", {[](auto& in, auto& p) -> Tensors { return {in[0].mm(p[0]).sin().mm(p[0])}; }, {kX}, {kW}}},
      {"ParameterTimesInput", {[](auto& in, auto& p) -> Tensors { return {p[0].mm(in[0].t())}; }, {kX}, {kW}}},
      {"Bmm",
       {[](auto& in, auto& p) -> Tensors { return {in[0].bmm(p[0])}; }, {numbers({3, 4, 6})}, {numbers({3, 6, 2})}}},
      {"Baddbmm",
       {[](auto& in, auto& p) -> Tensors { return {at::baddbmm(p[1], in[0], p[0])}; },
        {numbers({3, 4, 6})},
        {numbers({3, 6, 6}), kB}}},
      {"Addbmm",
       {[](auto& in, auto& p) -> Tensors { return {at::addbmm(in[1], in[0], p[0])}; },
        {numbers({3, 4, 6}), kX},
        {numbers({3, 6, 6})}}},
      {"Mv", {[](auto& in, auto& p) -> Tensors { return {in[0].mv(p[0])}; }, {kX}, {kB}}},
      {"Addmv", {[](auto& in, auto& p) -> Tensors { return {at::addmv(in[0], p[0], p[1])}; }, {kB}, {kW, kB}}},
      {"Dot", {[](auto& in, auto& p) -> Tensors { return {in[0].dot(p[0])}; }, {kB}, {kB}}},
      {"Bilinear",
       {[](auto& in, auto& p) -> Tensors { return {at::bilinear(in[0], in[1], p[0], p[1])}; },
        {kX, kY},
        {numbers({3, 6, 6}), numbers({3})}}},
      {"Einsum", {[](auto& in, auto& p) -> Tensors { return {at::einsum("bi,ij->bj", {in[0], p[0]})}; }, {kX}, {kW}}},
      {"Convolution",
       {[](auto& in, auto& p) -> Tensors { return {at::conv2d(in[0], p[0], p[1])}; },
        {kImages},
        {kFilters, numbers({4})}}},
      {"ConvolutionOfDoubles",
       {[](auto& in, auto& p) -> Tensors { return {at::conv2d(in[0], p[0], p[1])}; },
        {kImages.to(at::kDouble)},
        {kFilters.to(at::kDouble), numbers({4}, 1, at::kDouble)}}},
      {"GroupedConvolution",
       {[](auto& in, auto& p) -> Tensors { return {at::conv2d(in[0], p[0], p[1], 1, 1, 1, /*groups=*/4)}; },
        {kImages},
        {numbers({4, 1, 3, 3}), numbers({4})}}},
      {"TransposedConvolution",
       {[](auto& in, auto& p) -> Tensors { return {at::conv_transpose2d(in[0], p[0], p[1])}; },
        {kImages},
        {kFilters, numbers({4})}}},
      {"ConvolutionWithAParameterAsItsImage",
       {[](auto& in, auto& p) -> Tensors { return {at::conv2d(p[0], in[0])}; }, {kFilters}, {kImages}}},
      {"SparseWeight",
       {[](auto& in, auto& p) -> Tensors { return {at::mm(p[0].to_sparse(), in[0])}; }, {numbers({6, 4})}, {kW}}},
  };
}

std::vector<Case> together() {
  return {
      {"LayerNorm",
       {[](auto& in, auto& p) -> Tensors {
          return {std::get<0>(at::native_layer_norm(in[0].sin(), {6}, p[0], p[1], 1e-5)).cos()};
        },
        {kX},
        {kB, kB}}},
      {"GroupNorm",
       {[](auto& in, auto& p) -> Tensors { return {at::group_norm(in[0], 2, p[0], p[1])}; },
        {kImages},
        {numbers({4}), numbers({4}, 2)}}},
      {"BatchNorm",
       {[](auto& in, auto& p) -> Tensors {
          return {at::batch_norm(in[0], p[0], p[1], {}, {}, /*training=*/true, 0.1, 1e-5, false)};
        },
        {kImages},
        {numbers({4}), numbers({4}, 2)}}},
      {"RmsNorm", {[](auto& in, auto& p) -> Tensors { return {at::rms_norm(in[0], {6}, p[0])}; }, {kX}, {kB}}},
      {"Prelu", {[](auto& in, auto& p) -> Tensors { return {at::prelu(in[0], p[0])}; }, {kX}, {kB}}},
      {"Cat", {[](auto& in, auto& p) -> Tensors { return {at::cat({in[0], p[0], in[0].sin()})}; }, {kX}, {kW}}},
      {"Stack", {[](auto& in, auto& p) -> Tensors { return {at::stack({in[0], p[0], p[0].sin()})}; }, {kW}, {kW}}},
      {"Attention",
       {[](auto& in, auto& p) -> Tensors { return {at::scaled_dot_product_attention(in[0], p[0], p[1])}; },
        {numbers({1, 2, 4, 8})},
        {numbers({1, 2, 4, 8}, 2), numbers({1, 2, 4, 8}, 3)}}},
      {"CustomFunction",
       {[](auto& in, auto& p) -> Tensors {
          const Tensors two = TwoProducts::apply(in[0], p[0]);
          return {two[0].sin() + two[1]};
        },
        {kW},
        {kV}}},
      {"CustomFunctionWithOneOutputInUse",
       {[](auto& in, auto& p) -> Tensors { return {TwoProducts::apply(in[0], p[0])[1]}; }, {kW}, {kV}}},
      {"CustomFunctionThatHandsOnWhatArrives",
       {[](auto& in, auto& p) -> Tensors { return {Sum::apply(in[0], p[0])}; }, {kW}, {kV}}},
      {"Broadcast", {[](auto& in, auto& p) -> Tensors { return {in[0].sin() * p[0] + p[0]}; }, {kX}, {kB}}},
      {"Where", {[](auto& in, auto& p) -> Tensors { return {at::where(in[0] > 0, in[0], p[0])}; }, {kX}, {kB}}},
  };
}

// The input, the first hidden state and cell, and two pairs of weights with their biases.
std::vector<Case> rnns() {
  return {
      {"Lstm",
       {[](auto& in, auto& p) -> Tensors {
          const auto [out, h, c] = at::lstm(in[0], {in[1], in[2]}, p, true, 1, 0.0, /*train=*/true, false, false);
          return {out, h, c};
        },
        {numbers({3, 2, 5}), numbers({1, 2, 4}), numbers({1, 2, 4}, 2)},
        {numbers({16, 5}), numbers({16, 4}), numbers({16}), numbers({16}, 2)}}},
      {"LstmOfDoubles",
       {[](auto& in, auto& p) -> Tensors {
          const auto [out, h, c] = at::lstm(in[0], {in[1], in[2]}, p, true, 1, 0.0, /*train=*/true, false, false);
          return {out, h, c};
        },
        {numbers({3, 2, 5}, 1, at::kDouble), numbers({1, 2, 4}, 1, at::kDouble), numbers({1, 2, 4}, 2, at::kDouble)},
        {numbers({16, 5}, 1, at::kDouble), numbers({16, 4}, 1, at::kDouble), numbers({16}, 1, at::kDouble),
         numbers({16}, 2, at::kDouble)}}},
      {"Gru",
       {[](auto& in, auto& p) -> Tensors {
          const auto [out, h] = at::gru(in[0], in[1], p, true, 1, 0.0, /*train=*/true, false, false);
          return {out, h};
        },
        {numbers({3, 2, 5}), numbers({1, 2, 4})},
        {numbers({12, 5}), numbers({12, 4}), numbers({12}), numbers({12}, 2)}}},
  };
}

std::vector<Case> graphs() {
  return {
      {"Split",
       {[](auto& in, auto& p) -> Tensors {
          const Tensors s = (in[0] * p[0]).split(2, 1);
          return {s[0] * s[2], s[1]};
        },
        {kX},
        {kB}}},
      {"Unbind",
       {[](auto& in, auto& p) -> Tensors {
          const Tensors s = in[0].mm(p[0]).unbind();
          return {s[0] * s[2], s[3] + p[1]};
        },
        {kX},
        {kW, kB}}},
      {"UnbindOfAParameter",
       {[](auto& in, auto& p) -> Tensors {
          const Tensors s = p[0].unbind();
          return {in[0] * s[0] + s[1], s[2]};
        },
        {kX},
        {kW}}},
      {"MaximumWithIndices",
       {[](auto& in, auto& p) -> Tensors {
          const auto [values, indices] = in[0].mm(p[0]).max(1);
          return {values, indices};
        },
        {kX},
        {kW}}},
      {"ParameterUsedTwice",
       {[](auto& in, auto& p) -> Tensors { return {in[0].mm(p[0]).sin().mm(p[0])}; }, {kX}, {kW}}},
      {"ParameterUsedInEveryWay",
       {[](auto& in, auto& p) -> Tensors {
          at::Tensor x = in[0].mm(p[0]) * p[0].sum(0);
          x = TwoProducts::apply(x, p[0].narrow(0, 0, 4))[0];
          x = at::cat({x, p[0]}) + p[0].exp().mean();
          return {x.mm(p[0]), p[0] * 3, p[0]};
        },
        {kX},
        {kW}}},
      {"NoInputNeedsAGradient",
       {[](auto& in, auto& p) -> Tensors { return {in[0].mm(p[0]).sin().mm(p[1])}; }, {kX}, {kW, kV}, {false}}},
      {"NoInput", {[](auto& /*in*/, auto& p) -> Tensors { return {p[0].mm(p[1])}; }, {}, {kW, kV}}},
      {"OutputOfABiasOnly", {[](auto& in, auto& p) -> Tensors { return {in[0].mm(p[0]), p[1] * 2}; }, {kX}, {kW, kB}}},
      {"OutputThatIsAParameter",
       {[](auto& in, auto& p) -> Tensors { return {in[0].mm(p[0]), p[0], p[0]}; }, {kX}, {kW}}},
      {"ChainBeforeAParameter",
       {[](auto& in, auto& p) -> Tensors {
          return {in[0].mm(p[0].t().pow(2).sigmoid().mm(p[1])) + p[1].t().exp().sum(0)};
        },
        {kX},
        {kW, kV}}},
      {"OneInputLeadsThroughAnother",
       {[](auto& in, auto& p) -> Tensors {
          const at::Tensor x = in[0].mm(p[0]);
          return {(x * in[1]).mm(p[1]) + x};
        },
        {kX, kY},
        {kW, kV}}},
      {"InputWithoutGradientAmongOthers",
       {[](auto& in, auto& p) -> Tensors { return {in[0].mm(p[0]) + in[1].mm(p[0])}; }, {kX, kY}, {kW}, {true, false}}},
      {"InPlaceOnAView",
       {[](auto& in, auto& p) -> Tensors {
          at::Tensor x = in[0].mm(p[0]);
          x.select(1, 0).mul_(p[1].sum());
          x.narrow(1, 1, 2).add_(1);
          return {x};
        },
        {kX},
        {kW, kB}}},
      {"ViewOfWhatIsWrittenTo",
       {[](auto& in, auto& p) -> Tensors {
          at::Tensor x = in[0] * p[0];
          const at::Tensor view = x.narrow(1, 1, 3);
          x.mul_(p[0]);
          return {view, x};
        },
        {kX},
        {kB}}},
      {"InPlaceOnAnInput",
       {[](auto& in, auto& p) -> Tensors {
          const at::Tensor& x = in[0];
          x.mul_(p[0]);
          x.relu_();
          return {x.mm(p[1])};
        },
        {kX},
        {kB, kW}}},
      {"InPlaceOnAViewOfAnInput",
       {[](auto& in, auto& p) -> Tensors {
          in[0].select(0, 1).mul_(p[0]);
          in[0].t()[0].copy_(p[1]);
          return {in[0].sin()};
        },
        {kX},
        {kB, numbers({4})}}},
      {"InPlaceOnAnInputThatNeedsNoGradient",
       {[](auto& in, auto& p) -> Tensors {
          in[0].select(0, 1).mul_(p[0]);
          in[1].add_(in[0]);
          return {in[1].sin()};
        },
        {kX, kY},
        {kB},
        {false, true}}},
      {"TransposedInPlace",
       {[](auto& in, auto& p) -> Tensors {
          const at::Tensor& x = in[0];
          x.t_();
          return {p[0].mm(x)};
        },
        {kX},
        {kW}}},
      {"InputCopiedIntoAParametersProduct",
       {[](auto& in, auto& p) -> Tensors {
          at::Tensor x = p[0] * 2;
          x.narrow(0, 0, 4).copy_(in[0]);
          return {x * p[0]};
        },
        {kX},
        {kW}}},
      {"ViewOutputs",
       {[](auto& in, auto& p) -> Tensors {
          const at::Tensor x = in[0].mm(p[0]);
          return {x.t(), x.narrow(0, 1, 2), x.view({2, 12})};
        },
        {kX},
        {kW}}},
      {"OutputsThatAreInputs",
       {[](auto& in, auto& p) -> Tensors { return {in[0], in[0].view({-1}), in[0], in[1], in[0].mm(p[0])}; },
        {kX, kY},
        {kW}}},
      {"OnlyAnInputForOutput", {[](auto& in, auto& /*p*/) -> Tensors { return {in[0]}; }, {kX}, {kW}}},
      {"SameOutputThrice",
       {[](auto& in, auto& p) -> Tensors {
          const at::Tensor x = in[0].mm(p[0]);
          return {x, x, x.sin(), x};
        },
        {kX},
        {kW}}},
      {"OutputsThatNeedNoGradient",
       {[](auto& in, auto& p) -> Tensors { return {in[0].detach(), in[0] > 0, at::Tensor(), in[0].mm(p[0]), in[1]}; },
        {kX, kY},
        {kW},
        {true, false}}},
      {"IntegersAndFlags",
       {[](auto& in, auto& p) -> Tensors { return {at::embedding(p[0], in[1]) * in[0] + in[2], in[1]}; },
        {kX, counting({4}, at::kLong), kX > 0},
        {kW}}},
      {"UndefinedInput", {[](auto& in, auto& p) -> Tensors { return {in[1].mm(p[0])}; }, {at::Tensor(), kX}, {kW}}},
      {"InputThatIsNotUsed", {[](auto& in, auto& p) -> Tensors { return {in[1].mm(p[0])}; }, {kX, kY}, {kW}}},
      {"ParameterThatIsNotUsed", {[](auto& in, auto& p) -> Tensors { return {in[0].mm(p[1])}; }, {kX}, {kV, kW}}},
      {"OutputsWithoutAGradient",
       {[](auto& in, auto& p) -> Tensors { return {in[0].mm(p[0]), in[1].mm(p[1]), in[0] * in[1]}; },
        {kX, kY},
        {kW, kV},
        {},
        {1}}},
      {"NoGradientAtAll", {[](auto& in, auto& p) -> Tensors { return {in[0].mm(p[0])}; }, {kX}, {kW}, {}, {0}}},
      {"ComplexNumbers",
       {[](auto& in, auto& p) -> Tensors { return {at::real(in[0].mm(p[0]) * p[1])}; },
        {numbers({4, 6}, 1, at::kComplexFloat)},
        {kW.to(at::kComplexFloat), kB}}},
      {"OtherDtypes",
       {[](auto& in, auto& p) -> Tensors { return {(in[0].to(at::kDouble) * p[0]).mm(p[1])}; },
        {kX},
        {kB, kW.to(at::kDouble)}}},
      {"Loss",
       {[](auto& in, auto& p) -> Tensors { return {at::mse_loss(in[0].mm(p[0]), in[1]), in[0].mm(p[0])}; },
        {kX, kY},
        {kW},
        {true, false},
        {1}}},
      {"NestedTensors",
       {[](auto& in, auto& p) -> Tensors {
          const at::Tensor x = at::_nested_tensor_from_tensor_list({in[0], in[1]});
          return {at::linear(x, p[0], p[1]).to_padded_tensor(0)};
        },
        {kX, kW},
        {kV, kB}}},
  };
}

std::string name_of(const ::testing::TestParamInfo<Case>& info) {
  return info.param.name;
}

INSTANTIATE_TEST_SUITE_P(WithProducts, EveryStage, ::testing::ValuesIn(products()), name_of);
INSTANTIATE_TEST_SUITE_P(WithGradientsThatComeTogether, EveryStage, ::testing::ValuesIn(together()), name_of);
INSTANTIATE_TEST_SUITE_P(WithAnRnn, EveryStage, ::testing::ValuesIn(rnns()), name_of);
INSTANTIATE_TEST_SUITE_P(WithAGraph, EveryStage, ::testing::ValuesIn(graphs()), name_of);

}  // namespace
}  // namespace penstock::internal::testing
