// Rows rounded to int8 by their largest values, as several operators do it.
#pragma once

#include <utility>

#include "op.h"

namespace opapi {

// int8, and what they are to be multiplied with. A row of zeros stays zeros.
inline std::pair<cpu::Tensor, cpu::Tensor> rounded_rows(const cpu::Tensor& wide) {
  cpu::Tensor scale = cpu::op("amax", cpu::op("abs", wide), cpu::Ints{-1}, true) / cpu::Scalar(127.0);
  cpu::Tensor divisor = scale.masked_fill(cpu::op("eq.Scalar", scale, 0.0), 1.0);
  return {cpu::op("round", wide / divisor).to(cpu::kChar), scale.squeeze(-1)};
}

}  // namespace opapi
