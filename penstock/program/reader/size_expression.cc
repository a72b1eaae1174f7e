#include "penstock/program/reader/size_expression.h"

#include <charconv>
#include <utility>
#include <vector>

#include "penstock/base/text.h"

namespace penstock::internal {
namespace {

using Linear = SizeExpression::Linear;

struct Term {
  std::string text;
  std::optional<Linear> linear = std::nullopt;
  bool is_sum = false;

  // Returns the text for use as a factor or an exponent.
  std::string as_factor() const { return is_sum ? concat("(", text, ")") : text; }
};

std::optional<Linear> sum_of(const Linear& left, const Linear& right) {
  Linear sum{.symbol = left.symbol.empty() ? right.symbol : left.symbol};
  const bool has_one_symbol = left.symbol.empty() || right.symbol.empty() || left.symbol == right.symbol;
  if (!has_one_symbol || __builtin_add_overflow(left.factor, right.factor, &sum.factor) ||
      __builtin_add_overflow(left.offset, right.offset, &sum.offset)) {
    return std::nullopt;
  }
  return sum;
}

std::optional<Linear> product_of(const Linear& left, const Linear& right) {
  if (!left.symbol.empty()) return right.symbol.empty() ? product_of(right, left) : std::nullopt;
  Linear product{.symbol = right.symbol};
  if (__builtin_mul_overflow(left.offset, right.factor, &product.factor) ||
      __builtin_mul_overflow(left.offset, right.offset, &product.offset)) {
    return std::nullopt;
  }
  return product;
}

template <class Combine>
std::optional<Linear> combined(const std::vector<Term>& terms, Linear neutral, Combine combine) {
  std::optional<Linear> result = std::move(neutral);
  for (const Term& term : terms) {
    if (!result || !term.linear) return std::nullopt;
    result = combine(*result, *term.linear);
  }
  return result;
}

class Reader {
 public:
  explicit Reader(std::string_view text) : text_(text) {}

  // Returns none unless the whole text is an expression.
  std::optional<Term> read() {
    std::optional<Term> term = expression();
    return text_.empty() ? term : std::nullopt;
  }

 private:
  bool take(std::string_view prefix) {
    if (!text_.starts_with(prefix)) return false;
    text_.remove_prefix(prefix.size());
    return true;
  }

  std::string_view take_until(char end) {
    const std::string_view found = text_.substr(0, text_.find(end));
    text_.remove_prefix(found.size());
    return found;
  }

  std::optional<Term> expression() {
    // Real sizes are simple; a malicious archive could nest deep enough to overflow the stack.
    constexpr int kDeepest = 100;
    if (depth_ >= kDeepest) return std::nullopt;
    ++depth_;
    const std::string name(take_until('('));
    std::optional<Term> term;
    if (take("(")) term = name == "Symbol" ? symbol() : name == "Integer" ? integer() : call(name);
    --depth_;
    return term && take(")") ? term : std::nullopt;
  }

  // Reads "'s77', positive=True".
  std::optional<Term> symbol() {
    if (!take("'")) return std::nullopt;
    const std::string name(take_until('\''));
    take_until(')');
    return Term{.text = name, .linear = Linear{.symbol = name, .factor = 1}};
  }

  std::optional<Term> integer() {
    const std::string_view digits = take_until(')');
    std::int64_t number = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
    if (error != std::errc() || end != digits.data() + digits.size()) return std::nullopt;
    return Term{.text = std::string(digits), .linear = Linear{.offset = number}};
  }

  std::optional<Term> call(const std::string& name) {
    std::vector<Term> terms;
    do {
      std::optional<Term> term = expression();
      if (!term) return std::nullopt;
      terms.push_back(*std::move(term));
    } while (take(", "));
    if (name == "Add") {
      return Term{.text = sum_text(terms), .linear = combined(terms, {}, sum_of), .is_sum = true};
    }
    if (name == "Mul") return Term{.text = joined(terms, "*"), .linear = combined(terms, {.offset = 1}, product_of)};
    if (name == "Pow") return Term{.text = joined(terms, "**")};
    if (name == "FloorDiv") return Term{.text = joined(terms, "//"), .is_sum = true};
    std::vector<std::string> arguments;
    for (const Term& term : terms) arguments.push_back(term.text);
    return Term{.text = concat(name, "(", join(arguments), ")")};
  }

  static std::string sum_text(const std::vector<Term>& terms) {
    std::string text;
    for (const Term& term : terms) {
      if (text.empty()) {
        text = term.text;
      } else {
        text += term.text.starts_with('-') ? " - " + term.text.substr(1) : " + " + term.text;
      }
    }
    return text;
  }

  static std::string joined(const std::vector<Term>& terms, std::string_view by) {
    std::string text;
    for (const Term& term : terms) text.append(text.empty() ? "" : by).append(term.as_factor());
    return text;
  }

  std::string_view text_;
  int depth_ = 0;
};

}  // namespace

SizeExpression read_size_expression(std::string_view text) {
  std::optional<Term> term = Reader(text).read();
  if (!term) return {.text = std::string(text), .linear = std::nullopt};
  return {.text = std::move(term->text), .linear = std::move(term->linear)};
}

}  // namespace penstock::internal
