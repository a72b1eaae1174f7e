// The operators that a program may call. An export may come from an untrusted source, so a program calls only operators
// that compute on their arguments: none that opens files, prints, returns uninitialised memory, or trusts unchecked
// arguments.
//
// operators.txt lists every operator of this version of libtorch as allowed, or as refused with the reason. An operator
// that is not listed is refused.
#pragma once

#include <ATen/core/operator_name.h>

#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace penstock::internal {

class AllowedOperators {
 public:
  // Allows `additional` operators too: "library::name" for all overloads, "library::name.overload" for one. The form of
  // exports, "torch.ops.library.name", is accepted as well. Throws ProgramError for a text that is no such name.
  explicit AllowedOperators(const std::vector<std::string>& additional = {});

  bool contains(const c10::OperatorName& name) const;

 private:
  std::set<std::string, std::less<>> additional_;
};

// Returns the text of operators.txt: a line "allowed NAME" or "refused NAME: REASON" for each operator. Lines that
// start with # are comments.
std::string_view judged_operators();

}  // namespace penstock::internal
