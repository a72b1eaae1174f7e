#include "penstock/tensor/attention/rows.h"

#include <array>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <numbers>

namespace penstock::internal {
namespace {

// Every function here is inlined into the entries at the end, which are compiled for different processors. Vectors are
// passed by reference, as the calling convention for vectors by value differs between processors.
#define PENSTOCK_INLINE inline __attribute__((always_inline))

constexpr std::size_t kVectorBytes = 64;

// Vectors of reals and of integers of the same width, and constants of the real type for exp.
template <class Real>
struct Of;
template <>
struct Of<float> {
  using Vector __attribute__((vector_size(kVectorBytes))) = float;
  using Integers __attribute__((vector_size(kVectorBytes))) = std::uint32_t;
  using Integer = std::uint32_t;
  static constexpr int kMantissa = 23;
  static constexpr int kBias = 127;
  static constexpr int kDegree = 7;
  // ln 2 in two parts, the first short enough that an integer multiple of it is exact.
  static constexpr float kLn2High = 0.693359375F;  // NOLINT(modernize-use-std-numbers): a part of it
  static constexpr float kLn2Low = -2.12194440e-4F;
  static constexpr float kSmallest = -87.0F;
};
template <>
struct Of<double> {
  using Vector __attribute__((vector_size(kVectorBytes))) = double;
  using Integers __attribute__((vector_size(kVectorBytes))) = std::uint64_t;
  using Integer = std::uint64_t;
  static constexpr int kMantissa = 52;
  static constexpr int kBias = 1023;
  static constexpr int kDegree = 13;
  // NOLINTNEXTLINE(modernize-use-std-numbers): a part of it
  static constexpr double kLn2High = 6.93147180369123816490e-01;
  static constexpr double kLn2Low = 1.90821492927058770002e-10;
  static constexpr double kSmallest = -708.0;
};

template <class Real>
using Vector = typename Of<Real>::Vector;
template <class Real>
using Integers = typename Of<Real>::Integers;
template <class Real>
constexpr std::int64_t kLanes = kVectorBytes / sizeof(Real);
template <class Real>
constexpr Real kNothing = -std::numeric_limits<Real>::infinity();

static_assert(kLanes<float> == kRowPadding);

template <class Real>
PENSTOCK_INLINE void load(Vector<Real>& vector, const Real* from) {
  std::memcpy(&vector, from, sizeof(vector));
}

template <class Real>
PENSTOCK_INLINE void store(Real* to, const Vector<Real>& vector) {
  std::memcpy(to, &vector, sizeof(vector));
}

// Returns the coefficients of exp's Taylor series, from the highest.
template <class Real>
constexpr auto taylor_coefficients() {
  std::array<Real, Of<Real>::kDegree + 1> coefficients{};
  Real factorial = 1;
  for (int i = 0; i <= Of<Real>::kDegree; ++i) {
    if (i > 0) factorial *= static_cast<Real>(i);
    coefficients[static_cast<std::size_t>(Of<Real>::kDegree - i)] = 1 / factorial;
  }
  return coefficients;
}

// Replaces x by exp(x) = 2^n exp(r), with n an integer and |r| at most ln(2) / 2. Valid for x up to a little above 0.
// Results below the smallest normal number become 0; NaN stays NaN.
template <class Real>
PENSTOCK_INLINE void exponentiate(Vector<Real>& x) {
  using Type = Of<Real>;
  constexpr auto kCoefficients = taylor_coefficients<Real>();
  // Adding this number rounds to an integer, which is then in the lowest bits.
  constexpr Real kRound = static_cast<Real>(3LL << (Type::kMantissa - 1));
  Vector<Real> round = {};
  round += kRound;
  const Vector<Real> rounded = x * std::numbers::log2e_v<Real> + round;
  const Vector<Real> whole = rounded - round;
  Integers<Real> exponent;
  Integers<Real> round_bits;
  std::memcpy(&exponent, &rounded, sizeof(exponent));
  std::memcpy(&round_bits, &round, sizeof(round_bits));
  exponent = (exponent - round_bits + Type::kBias) << Type::kMantissa;
  Vector<Real> power;
  std::memcpy(&power, &exponent, sizeof(power));

  const Vector<Real> rest = x - whole * Type::kLn2High - whole * Type::kLn2Low;
  Vector<Real> sum = {};
  sum += kCoefficients[0];
  for (std::size_t i = 1; i < kCoefficients.size(); ++i) sum = sum * rest + kCoefficients[i];
  const Vector<Real> zero = {};
  x = x < Type::kSmallest ? zero : sum * power;
}

template <class Real>
PENSTOCK_INLINE void mask_scores_with(Rows<Real> scores, RowBits bits) {
  using Integer = typename Of<Real>::Integer;
  constexpr std::int64_t kLaneMask = (std::int64_t{1} << kLanes<Real>)-1;
  Integers<Real> lane = {};
  for (std::int64_t i = 0; i < kLanes<Real>; ++i) lane[i] = static_cast<Integer>(i);
  Vector<Real> nothing = {};
  nothing += kNothing<Real>;
  for (std::int64_t row = 0; row < scores.rows; ++row) {
    const std::uint32_t* words = bits.words + row * bits.words_per_row;
    Real* at = scores.data + row * scores.stride + bits.first_column;
    std::int64_t column = 0;
    for (; column + kLanes<Real> <= bits.columns; column += kLanes<Real>) {
      const std::int64_t counts = (words[column / 32] >> (column % 32)) & kLaneMask;
      if (counts == kLaneMask) continue;
      Vector<Real> vector;
      load(vector, at + column);
      const Integers<Real> selected = ((Integers<Real>{} + static_cast<Integer>(counts)) >> lane) & 1;
      vector = selected != 0 ? vector : nothing;
      store(at + column, vector);
    }
    for (; column < bits.columns; ++column) {
      if (((words[column / 32] >> (column % 32)) & 1U) == 0) at[column] = kNothing<Real>;
    }
  }
}

// Fills a row's padding with -∞, and returns the end of the padding.
template <class Real>
PENSTOCK_INLINE std::int64_t pad(Real* row, std::int64_t columns) {
  const std::int64_t end = (columns + kRowPadding - 1) / kRowPadding * kRowPadding;
  for (std::int64_t column = columns; column < end; ++column) row[column] = kNothing<Real>;
  return end;
}

template <class Real>
PENSTOCK_INLINE Real largest_of(const Real* row, std::int64_t end, Real largest) {
  Vector<Real> largest_lanes = {};
  largest_lanes += largest;
  for (std::int64_t column = 0; column < end; column += kLanes<Real>) {
    Vector<Real> vector;
    load(vector, row + column);
    largest_lanes = vector > largest_lanes ? vector : largest_lanes;
  }
  for (std::int64_t i = 0; i < kLanes<Real>; ++i) largest = largest_lanes[i] > largest ? largest_lanes[i] : largest;
  return largest;
}

// Replaces a row by exp(row - shift), and returns the sum.
template <class Real>
PENSTOCK_INLINE Real exponentiate_row(Real* row, std::int64_t end, Real shift) {
  Vector<Real> sums = {};
  for (std::int64_t column = 0; column < end; column += kLanes<Real>) {
    Vector<Real> vector;
    load(vector, row + column);
    vector -= shift;
    exponentiate<Real>(vector);
    sums += vector;
    store(row + column, vector);
  }
  Real sum = 0;
  for (std::int64_t i = 0; i < kLanes<Real>; ++i) sum += sums[i];
  return sum;
}

template <class Real>
PENSTOCK_INLINE void online_softmax_step_with(Rows<Real> scores, Real* maximum, Real* sum, Real* rescale) {
  for (std::int64_t row = 0; row < scores.rows; ++row) {
    Real* at = scores.data + row * scores.stride;
    const std::int64_t end = pad(at, scores.columns);
    const Real before = maximum[row];
    const Real largest = largest_of(at, end, before);
    rescale[row] = before == largest ? 1 : std::exp(before - largest);
    maximum[row] = largest;
    // A row without an allowed score needs a finite shift, so that -∞ becomes 0; NaN still becomes NaN.
    const Real shift = largest == kNothing<Real> ? 0 : largest;
    sum[row] = sum[row] * rescale[row] + exponentiate_row(at, end, shift);
  }
}

template <class Real>
PENSTOCK_INLINE void recompute_softmax_with(Rows<Real> scores, const Real* logsumexp) {
  for (std::int64_t row = 0; row < scores.rows; ++row) {
    Real* at = scores.data + row * scores.stride;
    exponentiate_row(at, pad(at, scores.columns), logsumexp[row]);
  }
}

template <class Real>
PENSTOCK_INLINE void softmax_backward_with(Rows<Real> gradients, const Real* probabilities, const Real* delta) {
  for (std::int64_t row = 0; row < gradients.rows; ++row) {
    Real* at = gradients.data + row * gradients.stride;
    const Real* p = probabilities + row * gradients.stride;
    // The results in the padding are never used.
    for (std::int64_t column = 0; column < gradients.columns; column += kLanes<Real>) {
      Vector<Real> gradient;
      Vector<Real> probability;
      load(gradient, at + column);
      load(probability, p + column);
      store<Real>(at + column, probability * (gradient - delta[row]));
    }
  }
}

template <class Real>
struct Entries {
  void (*mask_scores)(Rows<Real>, RowBits);
  void (*online_softmax_step)(Rows<Real>, Real*, Real*, Real*);
  void (*recompute_softmax)(Rows<Real>, const Real*);
  void (*softmax_backward)(Rows<Real>, const Real*, const Real*);
};

// Defines the entries, compiled for one kind of processor.
// NOLINTBEGIN(bugprone-macro-parentheses): an attribute cannot have any
#define PENSTOCK_ENTRIES(Processor, target)                                                                   \
  template <class Real>                                                                                       \
  struct Processor {                                                                                          \
    target static void mask_scores(Rows<Real> scores, RowBits bits) {                                         \
      mask_scores_with(scores, bits);                                                                         \
    }                                                                                                         \
    target static void online_softmax_step(Rows<Real> scores, Real* maximum, Real* sum, Real* rescale) {      \
      online_softmax_step_with(scores, maximum, sum, rescale);                                                \
    }                                                                                                         \
    target static void recompute_softmax(Rows<Real> scores, const Real* logsumexp) {                          \
      recompute_softmax_with(scores, logsumexp);                                                              \
    }                                                                                                         \
    target static void softmax_backward(Rows<Real> gradients, const Real* probabilities, const Real* delta) { \
      softmax_backward_with(gradients, probabilities, delta);                                                 \
    }                                                                                                         \
    static constexpr Entries<Real> kEntries = {&mask_scores, &online_softmax_step, &recompute_softmax,        \
                                               &softmax_backward};                                            \
  }
// NOLINTEND(bugprone-macro-parentheses)

PENSTOCK_ENTRIES(Any, );
#if defined(__x86_64__)
PENSTOCK_ENTRIES(Avx2, __attribute__((target("avx2,fma"))));
PENSTOCK_ENTRIES(Avx512, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma"))));
#endif

template <class Real>
const Entries<Real>& entries() {
#if defined(__x86_64__)
  static const Entries<Real>& chosen = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                                               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")
                                           ? Avx512<Real>::kEntries
                                       : __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")
                                           ? Avx2<Real>::kEntries
                                           : Any<Real>::kEntries;
  return chosen;
#else
  return Any<Real>::kEntries;
#endif
}

}  // namespace

void mask_scores(Rows<float> scores, RowBits bits) {
  entries<float>().mask_scores(scores, bits);
}
void mask_scores(Rows<double> scores, RowBits bits) {
  entries<double>().mask_scores(scores, bits);
}

void online_softmax_step(Rows<float> scores, float* maximum, float* sum, float* rescale) {
  entries<float>().online_softmax_step(scores, maximum, sum, rescale);
}
void online_softmax_step(Rows<double> scores, double* maximum, double* sum, double* rescale) {
  entries<double>().online_softmax_step(scores, maximum, sum, rescale);
}

void recompute_softmax(Rows<float> scores, const float* logsumexp) {
  entries<float>().recompute_softmax(scores, logsumexp);
}
void recompute_softmax(Rows<double> scores, const double* logsumexp) {
  entries<double>().recompute_softmax(scores, logsumexp);
}

void softmax_backward(Rows<float> gradients, const float* probabilities, const float* delta) {
  entries<float>().softmax_backward(gradients, probabilities, delta);
}
void softmax_backward(Rows<double> gradients, const double* probabilities, const double* delta) {
  entries<double>().softmax_backward(gradients, probabilities, delta);
}

}  // namespace penstock::internal
