// Products of int8: inputs rounded by row, alone or behind a norm or behind silu(gate) * up, and the product with its scales. Sums of
// integers are exact, all else is float32 and rounded once. M rows, K inputs, N outputs.
#include <cmath>

#include "op.h"
#include "rounding.h"

// bool[2], of which null means the default
#define EMU_C_OptFlags(x) const aclBoolArray* x
#define EMU_V_OptFlags(x) [[maybe_unused]] const std::vector<bool>& x
#define EMU_A_OptFlags(x) (x == nullptr ? std::vector<bool>() : x->values)

#define EMU_C_Int32(x) int32_t x
#define EMU_V_Int32(x) [[maybe_unused]] int64_t x
#define EMU_A_Int32(x) x

using cpu::Tensor;
using opapi::require;
using opapi::require_dtype;

namespace {

constexpr int64_t kMostInLastDim = 65535, kInt8InAcl = 2;
constexpr auto kHalves = {cpu::kHalf, cpu::kBFloat16};

bool is_there(const opapi::Input& input) { return input.is_given() && input.numel() > 0; }

cpu::Ints without_last(const Tensor& x) {
  cpu::Ints sizes = x.sizes();
  sizes.pop_back();
  return sizes;
}

void check_rounded(const Tensor& x, const opapi::Input& smooth, const Tensor& y, const Tensor& scale) {
  require_dtype(x, kHalves, "x");
  require_dtype(y, {cpu::kChar}, "y");
  require_dtype(scale, {cpu::kFloat}, "scale");
  require(x.dim() >= 2 && x.dim() <= 8, "x has ", x.dim(), " dimensions");
  opapi::require_same_shape(x, y, "x and y");
  require(scale.sizes() == without_last(x), "scale ", scale.sizes(), ", x ", x.sizes());
  if (!smooth.is_given()) return;
  opapi::require_same_dtype(x, smooth, "x and smoothScales");
  require(smooth.sizes() == cpu::Ints{x.size(-1)}, "smoothScales ", smooth.sizes(), ", x ", x.sizes());
}

Tensor smoothed(const Tensor& wide, const opapi::Input& smooth) { return smooth.is_given() ? wide * smooth.to(cpu::kFloat) : wide; }

}  // namespace

ACLNN(DynamicQuantV2, In(x), Opt(smooth_scales), Opt(group_index), Int(dst_type), Out(y), Out(scale), OptOut(offset)) {
  check_rounded(x, smooth_scales, y, scale);
  require(!is_there(group_index) && !is_there(offset), "groupIndex and asymmetric rounding are not emulated");
  require(dst_type == kInt8InAcl, "dstType is ", dst_type, ": int8 is emulated");
  return [=] {
    auto [values, scales] = opapi::rounded_rows(smoothed(x.to(cpu::kFloat), smooth_scales));
    y.write(values);
    scale.write(scales);
  };
}

// Inputs of one scale for all, or one for each of their features: they are multiplied with it (npu_quantize with div_mode False).
ACLNN(AscendQuantV3, In(x), In(scale), Opt(offset), Flag(sqrt_mode), Text(round_mode), Type(dst_type), Int32(axis), Out(y)) {
  require_dtype(x, {cpu::kFloat, cpu::kHalf, cpu::kBFloat16}, "x");
  require_dtype(y, {cpu::kChar}, "y");
  opapi::require_same_dtype(x, scale, "x and scale");
  opapi::require_same_shape(x, y, "x and y");
  require(dst_type == cpu::kChar && !sqrt_mode && round_mode == "round" && axis == -1, "dstType ", dst_type, ", sqrtMode ", sqrt_mode,
          ", roundMode ", round_mode, ", axis ", axis, ": int8, false, round and -1 are emulated");
  require(scale.dim() == 1 && (scale.size(0) == 1 || scale.size(0) == x.size(-1)), "scale ", scale.sizes(), ", x ", x.sizes());
  if (is_there(offset)) {
    opapi::require_same_dtype(x, offset, "x and offset");
    opapi::require_same_shape(scale, offset, "scale and offset");
  }
  return [=] {
    Tensor wide = x.to(cpu::kFloat) * scale.to(cpu::kFloat);
    if (is_there(offset)) wide = wide + offset.to(cpu::kFloat);
    y.write(cpu::op("clamp", cpu::op("round", wide), -128, 127).to(cpu::kChar));
  };
}

// One norm that is rounded; y2 and scale2 belong to a second smoothing.
ACLNN(AddRmsNormDynamicQuantV2, In(x1), In(x2), In(gamma), Opt(smooth1), Opt(smooth2), Opt(beta), Double(epsilon), OptFlags(output_mask),
      Out(y1), OptOut(y2), Out(x), Out(scale1), OptOut(scale2)) {
  check_rounded(x1, smooth1, y1, scale1);
  opapi::require_same_dtype(x1, x2, "x1 and x2");
  opapi::require_same_shape(x1, x2, "x1 and x2");
  opapi::require_same_dtype(x1, gamma, "x1 and gamma");
  opapi::require_same_dtype(x1, x, "x1 and x");
  require(gamma.sizes() == cpu::Ints{x1.size(-1)}, "gamma ", gamma.sizes(), ", x1 ", x1.sizes());
  require(!is_there(smooth2) && !is_there(beta), "smoothScale2 and beta are not emulated");
  require(output_mask.empty() || output_mask == std::vector<bool>{true, false}, "outputMask other than {true, false} is not emulated");
  return [=] {
    Tensor sum = (x1.to(cpu::kFloat) + x2.to(cpu::kFloat)).to(x1.type()), wide = sum.to(cpu::kFloat);
    Tensor rstd = cpu::op("rsqrt", cpu::op("mean", wide * wide, cpu::Ints{-1}, true) + cpu::Scalar(epsilon));
    auto [values, scales] = opapi::rounded_rows(smoothed(wide * rstd * gamma.to(cpu::kFloat), smooth1));
    y1.write(values);
    x.write(sum);
    scale1.write(scales);
  };
}

namespace {

// What the documents of npu_quant_matmul list for each dtype of the output.
void check_scales(const Tensor& scale, const opapi::Input& pertoken, const opapi::Input& bias, const Tensor& out) {
  require_dtype(out, {cpu::kHalf, cpu::kBFloat16, cpu::kInt}, "out");
  bool has_rows = is_there(pertoken);
  if (out.type() == cpu::kBFloat16) {
    require_dtype(scale, {cpu::kFloat, cpu::kBFloat16}, "scale");
  } else if (out.type() == cpu::kHalf) {
    require(has_rows, "a float16 output without pertokenScale wants an int64 scale, which is not emulated");
    require_dtype(scale, {cpu::kFloat}, "scale");
  } else {
    require_dtype(scale, {cpu::kFloat, cpu::kBFloat16}, "scale");
    require(!has_rows, "pertokenScale with an int32 output");
  }
  if (!is_there(bias)) return;
  if (out.type() == cpu::kInt) require_dtype(bias, {cpu::kInt}, "bias");
  else require_dtype(bias, {cpu::kInt, cpu::kBFloat16, cpu::kFloat}, "bias");
}

constexpr int64_t kFractalWidth = 32;

void check_matrices(const Tensor& x1, const opapi::Input& x2, const Tensor& out) {
  require_dtype(x1, {cpu::kChar}, "x1");
  require_dtype(x2, {cpu::kChar}, "x2");
  require(x1.dim() >= 2 && x1.dim() <= 6 && x2.dim() == 2, "x1 ", x1.sizes(), ", x2 ", x2.sizes(), ": x2 of two dimensions is emulated");
  require(x1.size(-1) == x2.size(0), "x1 ", x1.sizes(), " times x2 ", x2.sizes());
  require(x1.size(-1) <= kMostInLastDim && x2.size(1) <= kMostInLastDim, "x1 ", x1.sizes(), ", x2 ", x2.sizes(), ": last dims are at most 65535");
  if (x2.is_fractal()) opapi::require_fractal(x2, kFractalWidth, "x2");
  require(x2.is_contiguous() || x2.transpose(0, 1).is_contiguous(), "x2 ", x2.sizes(), " is neither contiguous nor transposed");
  cpu::Ints sizes = without_last(x1);
  sizes.push_back(x2.size(1));
  require(out.sizes() == sizes, "out ", out.sizes(), ", x1 ", x1.sizes(), ", x2 ", x2.sizes());
}

struct Product {
  opapi::Input x1, x2, x1_scale, x2_scale, y_scale, x1_offset, x2_offset, y_offset, bias;
};

// An int32 bias is added to the sum of integers, a float one behind the scales.
opapi::Run quant_matmul(const Product& given, bool transposes, int64_t group_size, const opapi::Output& out) {
  const auto [x1, x2, x1_scale, x2_scale, y_scale, x1_offset, x2_offset, y_offset, bias] = given;
  check_matrices(x1, x2, out);
  check_scales(x2_scale, x1_scale, bias, out);
  int64_t outputs = x2.size(1), rows = x1.numel() / x1.size(-1);
  require(!transposes && group_size == 0, "transposes by flag and groups are not emulated");
  require(!is_there(y_scale) && !is_there(x1_offset) && !is_there(x2_offset) && !is_there(y_offset), "yScale and offsets are not emulated");
  require(x2_scale.dim() == 1 && (x2_scale.size(0) == 1 || x2_scale.size(0) == outputs), "scale ", x2_scale.sizes(), " for ", outputs, " outputs");
  if (is_there(x1_scale)) {
    require_dtype(x1_scale, {cpu::kFloat}, "pertokenScale");
    require(x1_scale.sizes() == cpu::Ints{rows}, "pertokenScale ", x1_scale.sizes(), " for ", rows, " rows");
  }
  if (is_there(bias)) require(bias.sizes() == cpu::Ints{outputs}, "bias ", bias.sizes(), " for ", outputs, " outputs");
  return [=, x1 = x1, x2 = x2, x1_scale = x1_scale, x2_scale = x2_scale, bias = bias] {
    // float64 holds every sum of products of int8.
    Tensor sums = cpu::op("mm", x1.to(cpu::kDouble).reshape({rows, x1.size(-1)}), x2.plain().to(cpu::kDouble));
    bool adds_integers = is_there(bias) && bias.type() == cpu::kInt;
    if (adds_integers) sums = sums + bias.to(cpu::kDouble);
    Tensor scaled = sums.to(cpu::kFloat);
    if (out.type() != cpu::kInt) {
      scaled = scaled * x2_scale.to(cpu::kFloat);
      if (is_there(x1_scale)) scaled = scaled * x1_scale.unsqueeze(-1);
      if (is_there(bias) && !adds_integers) scaled = scaled + bias.to(cpu::kFloat);
    } else {
      scaled = sums;
    }
    out.write(scaled.reshape(out.sizes()));
  };
}

}  // namespace

ACLNN(QuantMatmulV5, In(x1), In(x2), Opt(x1_scale), In(x2_scale), Opt(y_scale), Opt(x1_offset), Opt(x2_offset), Opt(y_offset), Opt(bias),
      Flag(transpose_x1), Flag(transpose_x2), Int(group_size), Out(out)) {
  return quant_matmul({x1, x2, x1_scale, x2_scale, y_scale, x1_offset, x2_offset, y_offset, bias}, transpose_x1 || transpose_x2, group_size, out);
}
// torch_npu calls it where x2 lies in FRACTAL_NZ.
ACLNN(QuantMatmulWeightNz, In(x1), InAnyLayout(x2), Opt(x1_scale), In(x2_scale), Opt(y_scale), Opt(x1_offset), Opt(x2_offset), Opt(y_offset), Opt(bias),
      Flag(transpose_x1), Flag(transpose_x2), Int(group_size), Out(out)) {
  require(x2.is_fractal(), "x2 does not lie in FRACTAL_NZ");
  return quant_matmul({x1, x2, x1_scale, x2_scale, y_scale, x1_offset, x2_offset, y_offset, bias}, transpose_x1 || transpose_x2, group_size, out);
}

// silu(half) * the other of sums of integers, group by group, rounded by row again. Rows behind the last group are not written.
ACLNN(DequantSwigluQuantV2, In(x), Opt(weight_scale), Opt(activation_scale), Opt(bias), Opt(quant_scale), Opt(quant_offset), Opt(group_index),
      Flag(activate_left), Text(quant_mode), Int(dst_type), Text(round_mode), Int(activate_dim), Int(swiglu_mode), Double(clamp_limit),
      Double(glu_alpha), Double(glu_bias), Out(y), Out(scale)) {
  require_dtype(x, {cpu::kInt}, "x of other types than int32 is not emulated: x");
  require_dtype(y, {cpu::kChar}, "y");
  require_dtype(scale, {cpu::kFloat}, "scale");
  require(x.dim() == 2 && x.numel() > 0, "x ", x.sizes(), " has not 2 dimensions, or is empty");
  int64_t rows = x.size(0), width = x.size(1);
  require(width % 64 == 0 && width <= 7232, "x ", x.sizes(), ": its last dim is a multiple of 64, at most 7232");
  require(is_there(group_index) && group_index.dim() == 1, "groupIndex of one dimension has to be given");
  require_dtype(group_index, {cpu::kLong}, "groupIndex");
  require(is_there(weight_scale), "weightScale has to be given where x is int32");
  require_dtype(weight_scale, {cpu::kFloat}, "weightScale");
  require(weight_scale.sizes() == cpu::Ints({group_index.size(0), width}), "weightScale ", weight_scale.sizes(), ", groupIndex ", group_index.sizes(),
          ", x ", x.sizes());
  require(is_there(activation_scale), "x without activationScale is not emulated");
  require_dtype(activation_scale, {cpu::kFloat}, "activationScale");
  // CANN's document has (rows), op-plugin's (rows, 1). The tiling of A2 and A3 compares the number of elements alone.
  require(activation_scale.numel() == rows, "activationScale ", activation_scale.sizes(), ", x ", x.sizes());
  require(y.sizes() == cpu::Ints({rows, width / 2}) && scale.sizes() == cpu::Ints{rows}, "y ", y.sizes(), ", scale ", scale.sizes(), ", x ", x.sizes());
  require(!is_there(bias) && !is_there(quant_scale) && !is_there(quant_offset), "bias, quantScale and quantOffset are not emulated");
  require(quant_mode == "dynamic" && dst_type == kInt8InAcl && round_mode == "rint" && activate_dim == -1 && swiglu_mode == 0, "quantMode ", quant_mode,
          ", dstType ", dst_type, ", roundMode ", round_mode, ", activateDim ", activate_dim, ", swigluMode ", swiglu_mode,
          ": dynamic, int8, rint, -1 and 0 are emulated");
  return [=] {
    int64_t row = 0;
    for (int64_t group = 0; group < group_index.size(0); ++group) {
      auto count = static_cast<int64_t>(group_index[group].item());
      opapi::device_check(count >= 0 && row + count <= rows, "groupIndex leads to row ", row + count, ", x has ", rows);
      if (count > 0) {
        Tensor wide = x.narrow(0, row, count).to(cpu::kFloat) * weight_scale[group] * activation_scale.reshape({rows, 1}).narrow(0, row, count);
        Tensor left = wide.narrow(1, 0, width / 2), right = wide.narrow(1, width / 2, width / 2);
        auto [values, scales] = opapi::rounded_rows(activate_left ? cpu::op("silu", left) * right : left * cpu::op("silu", right));
        y.narrow(0, row, count).copy_(values);
        scale.narrow(0, row, count).copy_(scales);
      }
      row += count;
    }
    // The kernel steps from row to row by whole 64 outputs, and its broadcast of 256 bytes overwrites scales of few short rows
    // (dequant_swiglu_quant.h of ops-nn): a device computes other scales without a word, here there is none.
    bool is_spoilt = width / 2 % 64 != 0 || rows * (width / 2) < 256;
    if (is_spoilt) row = 0;
    if (row < rows) scale.narrow(0, row, rows - row).fill_(std::nan(""));
  };
}
