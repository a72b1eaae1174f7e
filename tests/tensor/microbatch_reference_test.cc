#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <exception>
#include <functional>
#include <iostream>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "penstock/tensor/microbatch.h"
#include "penstock/tensor/nested.h"
#include "tests/tensor/chunks.h"
#include "tests/tensor/pickled.h"
#include "tests/tensor/values.h"

namespace penstock::internal::testing {
namespace {

// Cases written by tests/tensor/microbatch_reference.py, which documents their format.
class Case {
 public:
  explicit Case(const c10::IValue& record) : record_(record.toGenericDict()) {}

  c10::IValue at(const std::string& key) const { return record_.at(key); }
  std::string text_at(const std::string& key) const { return at(key).toStringRef(); }
  bool raised() const { return !text_at("raised").empty(); }
  std::string fault() const { return text_at("fault"); }

  // Converts () or (spec,).
  std::optional<c10::IValue> spec_at(const std::string& key) const {
    const auto& elements = at(key).toTupleRef().elements();
    if (elements.empty()) return std::nullopt;
    return map_leaves(elements[0], [](const c10::IValue& leaf) -> c10::IValue {
      if (leaf.isInt()) return TensorChunkSpec(leaf.toInt());
      if (leaf.isNone()) return leaf;
      if (leaf.toStringRef() == "S") return sum_reducer();
      return Replicate();
    });
  }

 private:
  c10::impl::GenericDict record_;
};

std::vector<Case> cases_of(const std::vector<c10::IValue>& records) {
  return {records.begin(), records.end()};
}
const std::vector<Case>& cases() {
  static const std::vector<Case> kCases = cases_of(read_pickled("PENSTOCK_MICROBATCH", "cases.pt"));
  return kCases;
}
std::vector<Case> merges_of(const Case& split) {
  return cases_of(items(split.at("merges")));
}

// All tensors among the leaves, with their chunks.
struct SplitTensor {
  at::Tensor whole;
  std::vector<at::Tensor> chunks;
};
std::vector<SplitTensor> split_tensors(const c10::IValue& whole, const std::vector<c10::IValue>& chunks) {
  std::vector<SplitTensor> split;
  for (const at::Tensor& tensor : extract_tensor_args(whole)) split.push_back({.whole = tensor, .chunks = {}});
  for (const c10::IValue& chunk : chunks) {
    const std::vector<at::Tensor> parts = extract_tensor_args(chunk);
    EXPECT_EQ(parts.size(), split.size()) << text(chunk) << "\nof " << text(whole);
    for (std::size_t i = 0; i < std::min(parts.size(), split.size()); ++i) split[i].chunks.push_back(parts[i]);
  }
  return split;
}

SplitArgs split(const Case& one) {
  return split_args_kwargs_into_chunks(args_of(one.at("args")), kwargs_of(one.at("kwargs")), one.at("chunks").toInt(),
                                       one.spec_at("args_spec"), one.spec_at("kwargs_spec"));
}

c10::IValue merge(const Case& merge, const Case& split_first) {
  const c10::IValue chunks = merge.at("chunks");
  if (chunks.isList()) return merge_chunks(chunks.toListRef().vec(), merge.spec_at("spec"));
  const SplitArgs ours = split(split_first);
  const bool args = chunks.toStringRef() == "args";
  return merge_chunks(args ? values_of(ours.args) : values_of(ours.kwargs), merge.spec_at("spec"));
}

// The outcome of a call: a value, or the message of a ChunkError. Any other exception is a test failure.
struct Outcome {
  c10::IValue value;
  std::string error;
  std::string other_error;
};
Outcome outcome_of(const std::function<c10::IValue()>& act) {
  Outcome outcome;
  try {
    outcome.value = act();
  } catch (const ChunkError& error) {
    outcome.error = error.what();
  } catch (const c10::Error& error) {
    outcome.other_error = error.what_without_backtrace();
  } catch (const std::exception& error) {
    outcome.other_error = error.what();
  }
  return outcome;
}

std::string spec_text_of(const std::optional<c10::IValue>& spec) {
  return spec ? spec_text(*spec) : "none";
}
std::string name_of(const Case& one) {
  return one.text_at("name") + (one.at("debug").toBool() ? ", debugging" : "") + ": " + text(one.at("args")) + ", " +
         text(one.at("kwargs")) + " in " + std::to_string(one.at("chunks").toInt()) + " by " +
         spec_text_of(one.spec_at("args_spec")) + " and " + spec_text_of(one.spec_at("kwargs_spec"));
}
std::string name_of(const Case& merge, const Case& split_first) {
  return split_first.text_at("name") + ", " + merge.text_at("name") +
         (merge.at("debug").toBool() ? ", debugging" : "") + ": " + text(merge.at("chunks")) + " by " +
         spec_text_of(merge.spec_at("spec"));
}

// Compares outcomes with the expected ones, counts them, and shows the first few that differ.
class Comparison {
 public:
  Comparison(std::string what, bool reference_is_right)
      : what_(std::move(what)), reference_is_right_(reference_is_right) {}

  void add(const Case& one, const std::string& name, const c10::IValue& expected,
           const std::function<c10::IValue()>& ours) {
    if (one.fault().empty() != reference_is_right_) return;
    if (!reference_is_right_) ++counts_["where it " + one.fault()];
    ++counts_[one.raised() ? "refused" : "answered"];
    const DebugMask debug(one.at("debug").toBool());
    const std::string differs = difference_of(one, expected, outcome_of(ours));
    if (differs.empty()) return;
    if (++different_ <= kShown) ADD_FAILURE() << name << "\n" << differs;
  }

  void finish() const {
    EXPECT_EQ(different_, 0) << "The first " << kShown << " are shown.";
    std::cout << what_ << (reference_is_right_ ? "" : " that PyTorch gets wrong") << ":";
    for (const auto& [outcome, count] : counts_) std::cout << " " << count << " " << outcome << ";";
    std::cout << "\n";
    EXPECT_TRUE(counts_.contains("answered"));
    EXPECT_TRUE(counts_.contains("refused"));
  }

 private:
  static constexpr int kShown = 5;

  static std::string difference_of(const Case& one, const c10::IValue& expected, const Outcome& ours) {
    if (!ours.other_error.empty()) return "no ChunkError, but: " + ours.other_error;
    const bool refused = !ours.error.empty();
    if (one.raised()) {
      return refused ? "" : "should raise: " + one.text_at("raised") + "\nours answers: " + text(ours.value);
    }
    return refused ? "should answer: " + text(expected) + "\nours refuses:  " + ours.error
                   : difference(expected, ours.value);
  }

  std::string what_;
  bool reference_is_right_;
  std::map<std::string, int> counts_;
  int different_ = 0;
};

c10::IValue expected_split(const Case& one) {
  return tuple({one.at("split_args"), one.at("split_kwargs")});
}
c10::IValue split_value(const Case& one) {
  const SplitArgs chunks = split(one);
  return tuple({list(values_of(chunks.args)), list(values_of(chunks.kwargs))});
}
c10::IValue expected_merge(const Case& merge) {
  return merge.raised() ? c10::IValue() : merge.at("result").toTupleRef().elements()[0];
}

// Runs the cases in which PyTorch is right, or those in which it is wrong.
void compare_splits(bool reference_is_right) {
  Comparison comparison("splits", reference_is_right);
  for (const Case& one : cases()) {
    comparison.add(one, name_of(one), expected_split(one), [&] { return split_value(one); });
  }
  comparison.finish();
}
void compare_merges(bool reference_is_right) {
  Comparison comparison("merges", reference_is_right);
  for (const Case& one : cases()) {
    for (const Case& merged : merges_of(one)) {
      comparison.add(merged, name_of(merged, one), expected_merge(merged), [&] { return merge(merged, one); });
    }
  }
  comparison.finish();
}

TEST(MicrobatchReference, SplitsEveryCaseAlike) {
  compare_splits(true);
}
TEST(MicrobatchReference, MergesEveryCaseAlike) {
  compare_merges(true);
}
TEST(MicrobatchReference, IsWrongOnSomeSplitsWhichOursGetsRight) {
  compare_splits(false);
}
TEST(MicrobatchReference, IsWrongOnSomeMergesWhichOursGetsRight) {
  compare_merges(false);
}

// All tensors of a case that PyTorch splits, with our chunks and PyTorch's.
struct BothSplits {
  std::vector<SplitTensor> ours;
  std::vector<SplitTensor> references;
};
BothSplits split_by_both(const Case& one) {
  const SplitArgs ours = split(one);
  // Keyword arguments sorted by name, as Kwargs are.
  const auto by_name = [](const c10::IValue& dict) { return to_value(kwargs_of(dict)); };
  std::vector<c10::IValue> references_kwargs = items(one.at("split_kwargs"));
  std::transform(references_kwargs.begin(), references_kwargs.end(), references_kwargs.begin(), by_name);
  const auto both = [&](const std::vector<c10::IValue>& args, const std::vector<c10::IValue>& kwargs) {
    std::vector<SplitTensor> tensors = split_tensors(one.at("args"), args);
    const std::vector<SplitTensor> more = split_tensors(by_name(one.at("kwargs")), kwargs);
    tensors.insert(tensors.end(), more.begin(), more.end());
    return tensors;
  };
  return {.ours = both(values_of(ours.args), values_of(ours.kwargs)),
          .references = both(items(one.at("split_args")), references_kwargs)};
}

TEST(MicrobatchReference, HasTheSameViewsOfTheSameStorage) {
  int views = 0;
  for (const Case& one : cases()) {
    if (one.raised() || one.at("debug").toBool()) continue;
    const auto [ours, references] = split_by_both(one);
    for (std::size_t i = 0; i < ours.size(); ++i) {
      for (std::size_t chunk = 0; chunk < ours[i].chunks.size(); ++chunk) {
        const at::Tensor& view = ours[i].chunks[chunk];
        ASSERT_TRUE(view.is_alias_of(ours[i].whole)) << name_of(one) << "\n" << text(view);
        ASSERT_EQ(view.storage_offset(), references[i].chunks[chunk].storage_offset()) << name_of(one) << "\n"
                                                                                       << text(view);
        ++views;
      }
    }
  }
  std::cout << views << " views\n";
  EXPECT_GT(views, 0);
}

TEST(MicrobatchReference, AndOursReadTheGradientsOfALeafsChunks) {
  int gradients = 0;
  for (const Case& one : cases()) {
    if (one.raised() || one.at("debug").toBool()) continue;
    at::Tensor total = at::zeros({}, at::kDouble);
    std::vector<at::Tensor> read;
    for (const auto& [whole, chunks] : split_by_both(one).ours) {
      for (const at::Tensor& chunk : chunks) {
        if (!whole.requires_grad() || chunk.is_same(whole)) continue;
        total = total + (chunk.to(at::kDouble) * static_cast<double>(read.size() + 1)).sum();
        read.push_back(chunk);
      }
    }
    if (read.empty()) continue;
    total.backward();
    for (std::size_t i = 0; i < read.size(); ++i) {
      const at::Tensor expected = at::full_like(read[i].detach(), static_cast<double>(i + 1));
      ASSERT_TRUE(read[i].grad().defined()) << name_of(one) << "\n" << text(read[i]);
      ASSERT_TRUE(at::equal(read[i].grad(), expected))
          << name_of(one) << "\nexpected: " << text(expected) << "\nfound:    " << text(read[i].grad());
      ++gradients;
    }
  }
  std::cout << gradients << " gradients\n";
  EXPECT_GT(gradients, 0);
}

}  // namespace
}  // namespace penstock::internal::testing
