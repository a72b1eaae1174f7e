// What attention does to rows of scores between its matrix products, in single and double precision, with the widest
// vectors that the processor has. Rows are padded: columns up to a multiple of kRowPadding may be read and written.
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
  // From a row to the next: a multiple of kRowPadding, at least `columns`.
  std::int64_t stride;
};

// Which entries of a strip of rows count, a bit each, 32 to a word, from the strip's column `first_column` on.
struct RowBits {
  const std::uint32_t* words;
  std::int64_t words_per_row;
  std::int64_t first_column;
  std::int64_t columns;
};

// Sets to -∞ what does not count.
void mask_scores(Rows<float> scores, RowBits bits);
void mask_scores(Rows<double> scores, RowBits bits);

// A step of the softmax over rows that come in pieces. Replaces scores by exp(score - maximum), where `maximum` is a
// row's largest score so far; updates `maximum` and `sum` (of the exponentials), and gives in `rescale` what earlier
// pieces' results are to be multiplied by. A row in which nothing has counted so far gets zeros.
void softmax_step(Rows<float> scores, float* maximum, float* sum, float* rescale);
void softmax_step(Rows<double> scores, double* maximum, double* sum, double* rescale);

// Replaces scores by exp(score - log_sum). With log_sum +∞ a row gets zeros.
void softmax_again(Rows<float> scores, const float* log_sum);
void softmax_again(Rows<double> scores, const double* log_sum);

// The softmax's backward: replaces the gradients of probabilities by p * (gradient - delta).
void softmax_backward(Rows<float> gradients, const float* probabilities, const float* delta);
void softmax_backward(Rows<double> gradients, const double* probabilities, const double* delta);

}  // namespace penstock::internal
