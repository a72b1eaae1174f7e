// The operators that a program may call. An export comes from anybody, so a program calls only what computes on its
// arguments: nothing that opens files, prints, takes memory as it is, or trusts arguments that nobody has checked.
//
// operators.txt has every operator of this version of libtorch, allowed or refused, with the reason. An operator that is not
// in it is refused.
#pragma once

#include <ATen/core/operator_name.h>

#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace penstock::internal {

class AllowedOperators {
 public:
  // Allows `more` besides: "library::name" for all overloads, "library::name.overload" for one. "torch.ops.library.name", as
  // exports have it, is the same. Throws ProgramError for a text that is no such name.
  explicit AllowedOperators(const std::vector<std::string>& more = {});

  bool contains(const c10::OperatorName& name) const;

 private:
  std::set<std::string, std::less<>> more_;
};

// Returns operators.txt: a line "allowed NAME" or "refused NAME: REASON" for each operator; lines with # are comments.
std::string_view judged_operators();

}  // namespace penstock::internal
