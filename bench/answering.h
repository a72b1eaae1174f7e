// Runs a program of bench/: it reads what to measure from standard input, one question a line, and answers each with a line.
#pragma once

#include <chrono>
#include <exception>
#include <iostream>

namespace penstock::internal::bench {

template <class Act>
double seconds(const Act& act) {
  const auto start = std::chrono::steady_clock::now();
  act();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// For main: what `answer_questions` returns, or 1 after an error.
template <class Answer>
int run(const Answer& answer_questions) {
  try {
    return answer_questions();
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}

}  // namespace penstock::internal::bench
