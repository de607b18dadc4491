// The few functions of GE that torch_npu reaches outside a graph session: strings, and whether an operator exists.
// Graph sessions themselves are replaced in Python (ge/); every other GE symbol stops the program by name.
#include <cstdlib>

#include "emulation.h"
#pragma GCC visibility push(default)  // GE's headers do not say that their classes are exported
#include "graph/ascend_string.h"
#include "graph/operator_factory.h"

namespace ge {

AscendString::AscendString(const char_t* const name) : name_(std::make_shared<std::string>(name == nullptr ? "" : name)) {}

const char_t* AscendString::GetString() const { return name_ == nullptr ? "" : name_->c_str(); }

bool AscendString::operator<(const AscendString& other) const { return std::string(GetString()) < other.GetString(); }

bool AscendString::operator==(const AscendString& other) const { return std::string(GetString()) == other.GetString(); }

// torchair asks this to choose between newer and older operators: a current CANN has them all.
bool OperatorFactory::IsExistOp(const char_t* const) { return true; }

}  // namespace ge
#pragma GCC visibility pop
