// Row-wise operations of attention between its matrix products, in single and double precision, with the widest vector
// instructions of the processor. Rows are padded: columns up to a multiple of kRowPadding may be read and written.
#pragma once

#include <cstdint>

namespace penstock::internal {

inline constexpr std::int64_t kRowPadding = 16;

// A strip of rows in memory.
template <class Real>
struct Rows {
  Real* data;
  std::int64_t rows;
  std::int64_t columns;
  // Distance between rows, in elements: a multiple of kRowPadding, at least `columns`.
  std::int64_t stride;
};

// Bit mask of a strip of rows, 32 columns to a word, for the columns from `first_column` on. A set bit allows
// attention.
struct RowBits {
  const std::uint32_t* words;
  std::int64_t words_per_row;
  std::int64_t first_column;
  std::int64_t columns;
};

// Sets scores without a set bit to -∞.
void mask_scores(Rows<float> scores, RowBits bits);
void mask_scores(Rows<double> scores, RowBits bits);

// A step of the online softmax over rows that come in several runs. Replaces scores by exp(score - maximum), where
// `maximum` is a row's largest score so far; updates `maximum` and `sum` (of the exponentials), and writes to `rescale`
// the factor for the results of earlier runs. A row without an allowed score so far becomes zeros.
void online_softmax_step(Rows<float> scores, float* maximum, float* sum, float* rescale);
void online_softmax_step(Rows<double> scores, double* maximum, double* sum, double* rescale);

// Replaces scores by exp(score - logsumexp). A row with logsumexp +∞ becomes zeros.
void recompute_softmax(Rows<float> scores, const float* logsumexp);
void recompute_softmax(Rows<double> scores, const double* logsumexp);

// Backward of the softmax: replaces gradients of probabilities by p * (gradient - delta).
void softmax_backward(Rows<float> gradients, const float* probabilities, const float* delta);
void softmax_backward(Rows<double> gradients, const double* probabilities, const double* delta);

}  // namespace penstock::internal
