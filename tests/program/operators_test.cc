// Judges every operator that is registered in the process, by its schema and by reviewed names, and compares the result
// with penstock/program/reader/operators.txt. A version of libtorch with other operators fails the test until they have
// been judged: read what is new, extend the names below where one should be refused or allowed, and write the file anew
// with PENSTOCK_WRITE_OPERATORS=penstock/program/reader/operators.txt.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/jit_type.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <string_view>

#include "penstock/program/error.h"
#include "penstock/program/interpreter/operator_checks.h"
#include "penstock/program/reader/allowed_operators.h"

namespace penstock::internal::testing {

namespace {

constexpr std::string_view kHeader =
    "# Every operator of libtorch 2.13, and whether a program that anybody may have written can call it.\n"
    "# Written and checked by tests/program/operators_test.cc, which has the rules.\n";

// String arguments that select an algorithm, and refer to nothing outside of the program.
constexpr auto kHarmlessTexts = std::to_array<std::string_view>(
    {"norm", "reduce", "rounding_mode", "driver", "interpolation", "UPLO", "approximate", "side", "padding", "ord",
     "assert_msg", "mode", "p", "padding_side", "pad_mode", "indexing", "equation"});

// Internal operators that occur in exports, after run_decompositions() or from the modules of torch.nn. Each of them
// checks its arguments, or has a check in operator_checks.cc, or computes element by element.
constexpr auto kInternal = std::to_array<std::string_view>({"_adaptive_avg_pool2d",
                                                            "_adaptive_avg_pool3d",
                                                            "_aminmax",
                                                            "_assert_async",
                                                            "_assert_scalar",
                                                            "_assert_tensor_metadata",
                                                            "_batch_norm_no_update",
                                                            "_batch_norm_with_update",
                                                            "_batch_norm_with_update_functional",
                                                            "_cast_Byte",
                                                            "_cast_Char",
                                                            "_cast_Double",
                                                            "_cast_Float",
                                                            "_cast_Half",
                                                            "_cast_Int",
                                                            "_cast_Long",
                                                            "_cast_Short",
                                                            "_cdist_forward",
                                                            "_conj",
                                                            "_conj_copy",
                                                            "_conj_physical",
                                                            "_convolution",
                                                            "_convolution_mode",
                                                            "_ctc_loss",
                                                            "_dim_arange",
                                                            "_embedding_bag",
                                                            "_embedding_bag_forward_only",
                                                            "_euclidean_dist",
                                                            "_fft_c2c",
                                                            "_fft_c2r",
                                                            "_fft_r2c",
                                                            "_fused_rms_norm",
                                                            "_grouped_mm",
                                                            "_is_all_true",
                                                            "_is_any_true",
                                                            "_linalg_check_errors",
                                                            "_linalg_det",
                                                            "_linalg_eigh",
                                                            "_linalg_slogdet",
                                                            "_linalg_solve_ex",
                                                            "_linalg_svd",
                                                            "_local_scalar_dense",
                                                            "_log_softmax",
                                                            "_logcumsumexp",
                                                            "_native_batch_norm_legit",
                                                            "_native_batch_norm_legit_functional",
                                                            "_native_batch_norm_legit_no_training",
                                                            "_neg_view",
                                                            "_neg_view_copy",
                                                            "_pad_circular",
                                                            "_pad_enum",
                                                            "_pdist_forward",
                                                            "_prelu_kernel",
                                                            "_reshape_copy",
                                                            "_safe_softmax",
                                                            "_scaled_dot_product_flash_attention_for_cpu",
                                                            "_shape_as_tensor",
                                                            "_softmax",
                                                            "_sparse_mm",
                                                            "_to_copy",
                                                            "_to_cpu",
                                                            "_trilinear",
                                                            "_unsafe_index",
                                                            "_unsafe_index_put",
                                                            "_unsafe_view",
                                                            "_upsample_bicubic2d_aa",
                                                            "_upsample_bilinear2d_aa",
                                                            "_upsample_nearest_exact1d",
                                                            "_upsample_nearest_exact2d",
                                                            "_upsample_nearest_exact3d",
                                                            "_weight_norm",
                                                            "_weight_norm_interface"});

// Public operators that are refused: names, names with an overload, and prefixes that end in *.
const std::map<std::string_view, std::string_view> kRefused{
    {"batch_norm_elemt", "is for one kind of device"},
    {"batch_norm_gather_stats", "is for one kind of device"},
    {"batch_norm_gather_stats_with_counts", "is for one kind of device"},
    {"batch_norm_stats", "is for one kind of device"},
    {"batch_norm_update_stats", "reads beyond its arguments when they do not fit"},
    {"choose_qparams_optimized", "takes time without end for some arguments"},
    {"cudnn_*", "is for one kind of device"},
    {"fbgemm_*", "reads beyond its arguments when they do not fit"},
    {"miopen_*", "is for one kind of device"},
    {"mkldnn_*", "reads beyond its arguments when they do not fit"},
    {"promote_types", "takes numbers for types without a check"},
    {"quantized_*", "reads beyond its arguments when they do not fit"},
    {"range", "divides by a step of zero"},
    {"resize*", "changes the memory of its argument"},
    {"requires_grad_", "changes what its argument is"},
    {"retain_grad", "changes what its argument is"},
    {"set", "changes the memory of its argument"},
    {"set_", "changes the memory of its argument"},
    {"set_data", "changes the memory of its argument"},
    {"sparse_resize*", "changes the memory of its argument"},
    {"sparse_bsc_tensor.ccol_row_value", "trusts the indices of a sparse tensor"},
    {"sparse_bsr_tensor.crow_col_value", "trusts the indices of a sparse tensor"},
    {"sparse_compressed_tensor", "trusts the indices of a sparse tensor"},
    {"sparse_csc_tensor.ccol_row_value", "trusts the indices of a sparse tensor"},
    {"sparse_csr_tensor.crow_col_value", "trusts the indices of a sparse tensor"},
    {"to_mkldnn", "has memory that only one library knows"},
};

bool is_plain(const c10::Type& type) {
  switch (type.kind()) {
    case c10::TypeKind::OptionalType: return is_plain(*type.castRaw<c10::OptionalType>()->getElementType());
    case c10::TypeKind::ListType: return is_plain(*type.castRaw<c10::ListType>()->getElementType());
    case c10::TypeKind::TensorType:
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
    case c10::TypeKind::FloatType:
    case c10::TypeKind::SymFloatType:
    case c10::TypeKind::BoolType:
    case c10::TypeKind::SymBoolType:
    case c10::TypeKind::NumberType:
    case c10::TypeKind::DeviceObjType:
    case c10::TypeKind::GeneratorType:
    case c10::TypeKind::StringType: return true;
    default: return false;
  }
}

bool has_text(const c10::Type& type) {
  if (const auto* optional = type.castRaw<c10::OptionalType>()) return has_text(*optional->getElementType());
  if (const auto* list = type.castRaw<c10::ListType>()) return has_text(*list->getElementType());
  return type.kind() == c10::TypeKind::StringType;
}

bool contains(const auto& names, std::string_view name) {
  return std::ranges::find(names, name) != names.end();
}

// Returns why a program may not call an operator; empty if it may.
std::string reason_to_refuse(const c10::FunctionSchema& schema) {
  constexpr std::string_view kAten = "aten::";
  if (!schema.name().starts_with(kAten)) return "is not one of ATen";
  const std::string_view name = std::string_view(schema.name()).substr(kAten.size());
  for (const c10::Argument& argument : schema.arguments()) {
    const std::string quoted = "'" + argument.name() + "'";
    if (!is_plain(*argument.type())) return "takes " + argument.type()->str() + ", " + quoted;
    if (has_text(*argument.type()) && !contains(kHarmlessTexts, argument.name())) return "takes text, " + quoted;
    const bool is_written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    if (is_written && argument.kwarg_only()) return "writes into a tensor that it is given for its result";
  }
  if (name.find("backward") != std::string_view::npos) return "is a backward, which trusts what a forward has saved";
  if (name.starts_with('_') && !name.starts_with("__") && !contains(kInternal, name)) {
    return "is internal to PyTorch, and trusts its arguments";
  }
  const std::string full = std::string(name) + "." + schema.overload_name();
  for (const auto& [refused, reason] : kRefused) {
    const bool is_it = refused.ends_with('*') ? name.starts_with(refused.substr(0, refused.size() - 1))
                                              : name == refused || full == refused;
    if (is_it) return std::string(reason);
  }
  return "";
}

std::string judgement_of(const c10::OperatorName& name) {
  const auto schema = c10::Dispatcher::singleton().findSchema(name);
  const std::string text = c10::toString(name);
  if (!schema) return "refused " + text + ": has no schema";
  const std::string reason = reason_to_refuse(schema->schema());
  return reason.empty() ? "allowed " + text : "refused " + text + ": " + reason;
}

std::set<std::string> judged_here() {
  std::set<std::string> lines;
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) lines.insert(judgement_of(name));
  return lines;
}

TEST(Operators, AreAllJudged) {
  const std::set<std::string> expected = judged_here();
  if (const char* path = std::getenv("PENSTOCK_WRITE_OPERATORS")) {
    std::ofstream file(path);
    file << kHeader;
    for (const std::string& line : expected) file << line << "\n";
    std::cout << path << " was written; build again.\n";
    return;
  }
  std::set<std::string> found;
  std::istringstream stored{std::string(judged_operators())};
  for (std::string line; std::getline(stored, line);) {
    if (!line.starts_with('#')) found.insert(line);
  }
  for (const std::string& line : expected) EXPECT_TRUE(found.contains(line)) << "not in operators.txt: " << line;
  for (const std::string& line : found) EXPECT_TRUE(expected.contains(line)) << "not by the rules: " << line;
  std::map<std::string, int> by_reason;
  for (const std::string& line : expected) {
    const std::size_t colon = line.find(": ");
    std::string reason = colon == std::string::npos ? "allowed" : line.substr(colon + 2);
    ++by_reason[reason.substr(0, reason.find(','))];
  }
  for (const auto& [reason, count] : by_reason) std::cout << count << "\t" << reason << "\n";
}

TEST(Operators, ThatReachBeyondTheProgramAreRefused) {
  const AllowedOperators allowed;
  for (const char* name : {"from_file", "_print", "_reshape_alias", "_reshape_alias_copy", "_sparse_coo_tensor_unsafe",
                           "_sparse_csr_tensor_unsafe", "resize_", "_test_serialization_subcmul"}) {
    EXPECT_FALSE(allowed.contains({"aten::" + std::string(name), ""})) << name;
  }
  EXPECT_FALSE(allowed.contains({"aten::set_", "source_Storage"}));
  EXPECT_FALSE(allowed.contains({"c10d::send", ""}));
  EXPECT_FALSE(allowed.contains({"aten::not_there", ""}));
  EXPECT_TRUE(allowed.contains({"aten::add", "Tensor"}));
  EXPECT_TRUE(allowed.contains({"aten::scaled_dot_product_attention", ""}));
}

TEST(Operators, AreAllowedByName) {
  const AllowedOperators one({"mine::twice.fast"});
  EXPECT_TRUE(one.contains({"mine::twice", "fast"}));
  EXPECT_FALSE(one.contains({"mine::twice", ""}));
  for (const char* name : {"mine::twice", "torch.ops.mine.twice", "torch.ops.mine.twice.default"}) {
    EXPECT_TRUE(AllowedOperators({name}).contains({"mine::twice", ""})) << name;
  }
  for (const char* name : {"", "twice", "mine::", "::twice", "a b::c"}) {
    try {
      AllowedOperators({name});
      ADD_FAILURE() << name;
    } catch (const ProgramError& error) {
      EXPECT_EQ(error.what(), "'" + std::string(name) +
                                  "' is not the name of an operator.\n  Hint: write it as library::name, such as "
                                  "torchvision::nms.");
    }
  }
}

std::string refusal(const c10::OperatorName& name, std::vector<c10::IValue> arguments) {
  const ArgumentCheck check = find_argument_check(name);
  if (check == nullptr) return "there is no check";
  try {
    check(arguments);
  } catch (const ProgramError& error) {
    return error.what();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

TEST(ArgumentChecks, RefuseViewsBeyondTheMemoryOfATensor) {
  const at::Tensor tensor = at::arange(8);
  const std::vector<std::int64_t> sizes{2, 4};
  constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max() - 1;
  using Ints = std::vector<std::int64_t>;
  for (const char* name : {"aten::as_strided", "aten::as_strided_", "aten::as_strided_copy"}) {
    EXPECT_EQ(refusal({name, ""}, {tensor, sizes, Ints{4, 1}, {}}), "");
    EXPECT_EQ(refusal({name, ""}, {tensor, sizes, Ints{4, 1}, 1}),
              "the view reaches beyond the memory of its tensor, which has room for 8 elements.");
    EXPECT_EQ(refusal({name, ""}, {tensor, sizes, Ints{kHuge, 0}, {}}),
              "the view reaches beyond the memory of its tensor, which has room for 8 elements.");
    EXPECT_EQ(refusal({name, ""}, {tensor, Ints{0, 4}, Ints{kHuge, 1}, {}}), "");
    EXPECT_EQ(refusal({name, ""}, {tensor, Ints{}, Ints{}, 8}), "the view reaches beyond the memory of its tensor.");
    EXPECT_EQ(refusal({name, ""}, {tensor, sizes, Ints{-1, 1}, {}}), "sizes and strides should not be negative.");
    EXPECT_EQ(refusal({name, ""}, {tensor, sizes, Ints{4, 1}, -1}), "the offset should not be negative.");
  }
}

TEST(ArgumentChecks, RefuseIndicesThatAreNotThere) {
  using Ints = std::vector<std::int64_t>;
  EXPECT_NE(refusal({"aten::sparse_coo_tensor", "indices_size"}, {at::full({1, 1}, 100), at::ones({1}), Ints{3}}), "");
  EXPECT_EQ(refusal({"aten::sparse_coo_tensor", "indices_size"}, {at::full({1, 1}, 2), at::ones({1}), Ints{3}}), "");
  const auto bag = [&](const at::Tensor& indices, const at::Tensor& offsets) {
    return refusal({"aten::_embedding_bag", ""},
                   {at::ones({4, 2}), indices, offsets, false, 0, false, c10::IValue(), false, -1});
  };
  EXPECT_EQ(bag(at::tensor({0, 3}), at::tensor({0, 1})), "");
  EXPECT_EQ(bag(at::tensor({0, 4}), at::tensor({0, 1})), "indices should be in [0, 3].");
  EXPECT_EQ(bag(at::tensor({0, 3}), at::tensor({0, 3})), "offsets should be in [0, 2].");
  EXPECT_EQ(bag(at::tensor({0, 3}), at::tensor({0, 2, 1})), "offsets should not decrease.");
  const std::vector<std::int64_t> lengths{1};
  EXPECT_EQ(
      refusal({"aten::ctc_loss", "IntList"}, {at::ones({1, 1, 3}), at::tensor({5}), lengths, lengths, 0, 1, false}),
      "targets should be in [0, 2].");
  EXPECT_EQ(refusal({"aten::lu_unpack", ""}, {at::ones({2, 2}), at::tensor({1, 9}, at::kInt), true, true}),
            "pivots should be in [1, 2].");
}

TEST(ArgumentChecks, RefuseNumbersThatOverflowInAKernel) {
  using Ints = std::vector<std::int64_t>;
  constexpr std::int64_t kQuarter = std::int64_t{1} << 62U;
  const auto repeats = [](const at::Tensor& tensor) {
    return refusal({"aten::repeat_interleave", "Tensor"}, {tensor, c10::IValue()});
  };
  EXPECT_EQ(repeats(at::tensor({2, 0, 3})), "");
  EXPECT_NE(repeats(at::tensor({2, -1})), "");
  EXPECT_EQ(repeats(at::full({4}, kQuarter, at::kLong)), "the repeats should be in [0, 1099511627776].");
  EXPECT_EQ(repeats(at::full({4}, std::int64_t{1} << 40U, at::kLong)),
            "the sum of the repeats should be at most 1099511627776.");
  const auto pool = [](std::int64_t size) {
    return refusal({"aten::max_pool1d", ""}, {at::ones({1, 4}), Ints{size}, Ints{}, Ints{0}, Ints{1}, false});
  };
  EXPECT_EQ(pool(2), "");
  EXPECT_EQ(pool(std::numeric_limits<std::int64_t>::max()),
            "sizes, strides, paddings and dilations of windows should be at most 2147483647.");
}

// The kernel does not wrap negative dimensions.
TEST(ArgumentChecks, CountTheDimensionsOfATransformFromTheFront) {
  std::vector<c10::IValue> arguments{at::ones({4, 2, 3}), std::vector<std::int64_t>{-2}, 0, true};
  find_argument_check({"aten::_fft_r2c", ""})(arguments);
  EXPECT_EQ(arguments[1].toIntVector(), std::vector<std::int64_t>{1});
}

TEST(ArgumentChecks, RefuseGroupsBeyondTheirMatrix) {
  const auto grouped = [](const at::Tensor& offsets) {
    return refusal({"aten::_grouped_mm", ""},
                   {at::ones({4, 2}), at::ones({2, 2, 3}), offsets, c10::IValue(), c10::IValue()});
  };
  EXPECT_EQ(grouped(at::tensor({1, 4}, at::kInt)), "");
  EXPECT_EQ(grouped(at::tensor({1, 5}, at::kInt)), "the offsets of groups should be in [0, 4].");
  EXPECT_EQ(grouped(at::tensor({4, 1}, at::kInt)), "the offsets of groups should not decrease.");
}

// For an expanded tensor, the kernel reads out of bounds.
TEST(ArgumentChecks, GiveTheMedianOfAnExpandedTensor) {
  std::vector<c10::IValue> arguments{at::tensor({1, 2, 3, 4}).expand({3, 4}), 0, false};
  find_argument_check({"aten::median", "dim"})(arguments);
  c10::Dispatcher::singleton().findSchemaOrThrow("aten::median", "dim").callBoxed(&arguments);
  EXPECT_TRUE(at::equal(arguments[0].toTensor(), at::tensor({1, 2, 3, 4})));
}

}  // namespace
}  // namespace penstock::internal::testing
