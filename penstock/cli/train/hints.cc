#include "penstock/cli/train/hints.h"

#include <stdexcept>
#include <string>

#include "penstock/train/data.h"
#include "penstock/train/nonfinite.h"

namespace penstock::cli {
namespace {

using internal::DataError;
using internal::NonFiniteError;

std::string hint_for(NonFiniteError::Reason reason) {
  switch (reason) {
    case NonFiniteError::Reason::Step:
      return "\n  Hint: look at the data, lower --learning-rate or --clip, or skip such steps with --on-nonfinite "
             "skip.";
    case NonFiniteError::Reason::NoTargets:
      return "\n  Hint: see --ignore-index, or skip such steps with --on-nonfinite skip.";
    case NonFiniteError::Reason::TooManySkipped: return "\n  Hint: --max-skipped N allows more skipped steps in a row.";
    case NonFiniteError::Reason::Evaluation: break;
  }
  return "";
}

}  // namespace

int with_option_hints(const std::function<int()>& act) {
  try {
    return act();
  } catch (const NonFiniteError& error) {
    throw std::runtime_error(error.what() + hint_for(error.reason()));
  } catch (const DataError& error) {
    if (error.reason() != DataError::Reason::TextTooShort) throw;
    throw std::runtime_error(error.what() + std::string("\n  Hint: --length N makes the sequences shorter."));
  }
}

}  // namespace penstock::cli
