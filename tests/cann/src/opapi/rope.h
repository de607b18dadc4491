// Rotary embedding, for the operators that fuse it with something else.
#pragma once

#include "op.h"

namespace opapi {

// (-second half, first half), or the same within neighbouring pairs.
Tensor rotate(const Tensor& x, bool is_interleaved);

// x * cos + rotate(x) * sin in float32; cos and sin broadcast to x.
Tensor rope(const Tensor& x, const Tensor& cos, const Tensor& sin, bool is_interleaved);

}  // namespace opapi
