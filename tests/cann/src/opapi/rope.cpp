// Rotary position embedding in the forms CANN has it.
#include "rope.h"

using cpu::Tensor;
using opapi::require;
using opapi::require_dtype;

namespace opapi {

Tensor rotate(const Tensor& x, bool is_interleaved) {
  if (!is_interleaved) {
    std::vector<Tensor> halves = x.chunk(2, -1);
    return cpu::op("cat", std::vector<Tensor>{-halves[1], halves[0]}, -1);
  }
  Tensor pairs = x.unflatten(-1, {-1, 2});
  return cpu::op("stack", std::vector<Tensor>{-pairs.select(-1, 1), pairs.select(-1, 0)}, -1).flatten(-2);
}

Tensor rope(const Tensor& x, const Tensor& cos, const Tensor& sin, bool is_interleaved) {
  Tensor wide = x.to(cpu::kFloat);
  return wide * cos.to(cpu::kFloat) + rotate(wide, is_interleaved) * sin.to(cpu::kFloat);
}

}  // namespace opapi

// query and key are updated in place. What the A2 and A3 devices take: layout BSND (1) or TND (4), mode half, head dim 64 or 128.
namespace {
constexpr int64_t kBsnd = 1, kTnd = 4;
constexpr int64_t kUnifiedBufferBytes = 192 << 10;  // of a core of A2 and A3

// Heads of query and key that a core turns at once, by the rule in the operator's document. Written down for CANN 8.5 alone.
void check_rotary_room(const Tensor& query, int64_t heads) {
  if (emu::settings().cann_version >= 900) return;
  opapi::require_code(kInnerTilingError, heads <= 255, heads, " heads of query and key: at most 255");
  bool is_cast = query.type() == cpu::kBFloat16;
  int64_t last = query.size(-1), bytes = query.element_size(), wide = is_cast ? 4 : bytes;
  int64_t needed = heads * last * wide * 5 + last * bytes * 4 + (is_cast ? last * 8 : 0);
  opapi::require_code(kInnerTilingError, needed <= kUnifiedBufferBytes, heads, " heads of ", last, " need ", needed, " bytes of the ",
                      kUnifiedBufferBytes, " of a core's buffer");
}

opapi::Run apply_rotary(const opapi::Output& query, const opapi::Output& key, const opapi::Input& cos, const opapi::Input& sin,
                        int64_t layout, const std::string& mode) {
  require(layout == kBsnd || layout == kTnd, "layout is ", layout, ", not 1 (BSND) or 4 (TND)");
  require(mode == "half", "rotaryMode is ", mode, ", this device takes half");
  int64_t num_dims = layout == kTnd ? 3 : 4;
  for (const Tensor* tensor : {static_cast<const Tensor*>(&query), static_cast<const Tensor*>(&key),
                               static_cast<const Tensor*>(&cos), static_cast<const Tensor*>(&sin)}) {
    opapi::require_dim(*tensor, num_dims, "query, key, cos or sin");
    require_dtype(*tensor, {cpu::kFloat, cpu::kHalf, cpu::kBFloat16}, "query, key, cos or sin");
    opapi::require_same_dtype(query, *tensor, "query, key, cos and sin");
    require(tensor->numel() > 0, "an empty tensor");
    require(tensor->size(-1) == 64 || tensor->size(-1) == 128, "the head dim is ", tensor->size(-1), ", not 64 or 128");
    for (int64_t dim = 0; dim < num_dims - 2; ++dim) {
      require(tensor->size(dim) == query.size(dim), "query ", query.sizes(), " and ", tensor->sizes(), " differ before the heads");
    }
  }
  require(key.size(-1) == query.size(-1), "query ", query.sizes(), ", key ", key.sizes());
  require(cos.sizes() == sin.sizes() && cos.size(-2) == 1, "cos ", cos.sizes(), ", sin ", sin.sizes(), ": one head each");
  require(cos.size(-1) <= query.size(-1), "cos ", cos.sizes(), ", query ", query.sizes());
  check_rotary_room(query, query.size(-2) + key.size(-2));
  return [=] {
    int64_t rotary_dim = cos.size(-1);
    for (const opapi::Output* x : {&query, &key}) {
      Tensor head = x->narrow(-1, 0, rotary_dim);
      head.copy_(opapi::rope(head, cos, sin, false));
    }
  };
}
}  // namespace

ACLNN(ApplyRotaryPosEmbV2, Out(query), Out(key), In(cos), In(sin), Int(layout), Text(rotary_mode)) {
  return apply_rotary(query, key, cos, sin, layout, rotary_mode);
}

// npu_rotary_mul: x in BNSD, BSND or SBND; cos and sin broadcast to it.
namespace {
struct Axes {
  int64_t batch, heads, sequence;
};

bool rotary_layout_fits(const Tensor& x, const Tensor& cos, int64_t mode, const Axes& axes) {
  int64_t batch = x.size(axes.batch), heads = x.size(axes.heads);
  int64_t cos_batch = cos.size(axes.batch), cos_heads = cos.size(axes.heads);
  if (cos.size(axes.sequence) != x.size(axes.sequence)) return false;
  bool is_shared = cos_batch == 1 && cos_heads == 1;
  if (mode == 1) return is_shared && batch * heads < 1000;
  bool is_by_batch = cos_batch == batch && (cos_heads == 1 || cos_heads == heads);
  return (is_shared || is_by_batch) && batch < 1000 && heads < 1000;
}

void check_rotary_mul(const Tensor& x, const Tensor& cos, const Tensor& sin, int64_t mode, const Tensor& out) {
  require(mode == 0 || mode == 1, "mode is ", mode, ", not 0 (half) or 1 (interleave)");
  opapi::require_dim(x, 4, "x");
  require_dtype(x, {cpu::kFloat, cpu::kHalf, cpu::kBFloat16}, "x");
  opapi::require_same_dtype(x, cos, "x and cos");
  opapi::require_same_dtype(x, sin, "x and sin");
  opapi::require_same_shape(x, out, "x and out");
  opapi::require_same_shape(cos, sin, "cos and sin");
  int64_t head_dim = x.size(-1);
  require(head_dim < 896 && head_dim % 2 == 0, "the head dim is ", head_dim, ", not even and below 896");
  opapi::require_dim(cos, 4, "cos");
  require(cos.size(-1) == head_dim, "cos ", cos.sizes(), ", x ", x.sizes());
  // Nobody says which layout it is: one of BNSD, BSND and SBND has to fit.
  bool fits = rotary_layout_fits(x, cos, mode, {0, 1, 2}) || rotary_layout_fits(x, cos, mode, {0, 2, 1}) ||
              rotary_layout_fits(x, cos, mode, {1, 2, 0});
  require(fits, "cos ", cos.sizes(), " and x ", x.sizes(), " fit no layout: B and N below 1000, cos (1 or B, 1, S, D) or as x; ",
          "interleaved: B * N below 1000, cos (1, 1, S, D)");
}
}  // namespace
// torch_npu calls version 2 where both exist, and version 1 otherwise.
ACLNN(RotaryPositionEmbedding, In(x), In(cos), In(sin), Int(mode), Out(out)) {
  check_rotary_mul(x, cos, sin, mode, out);
  return [=] { out.write(opapi::rope(x, cos, sin, mode == 1)); };
}
ACLNN_SINCE(900, RotaryPositionEmbeddingV2, In(x), In(cos), In(sin), Int(mode), Opt(rotate), Out(out)) {
  check_rotary_mul(x, cos, sin, mode, out);
  require(!rotate.is_given() || rotate.dim() == 2, "rotate has ", rotate.is_given() ? rotate.dim() : 0, " dimensions");
  return [=] {
    if (!rotate.is_given()) return out.write(opapi::rope(x, cos, sin, mode == 1));
    Tensor wide = x.to(cpu::kFloat);
    out.write(wide * cos.to(cpu::kFloat) + cpu::op("matmul", wide, rotate.to(cpu::kFloat)) * sin.to(cpu::kFloat));
  };
}

// npu_mrope: positions choose rows of a cache that holds cos and sin side by side.
namespace {
// cache rows for each token: (T, rotary_dim / 2), from three position rows when sections are given.
Tensor select_sections(const Tensor& rows, const std::vector<int64_t>& sections, int64_t cache_mode) {
  if (cache_mode == 1) {
    Tensor mixed = rows[0].clone();
    for (int64_t axis = 1; axis <= 2; ++axis) {
      mixed.slice(-1, axis, sections[1] * 3, 3).copy_(rows[axis].slice(-1, axis, sections[1] * 3, 3));
    }
    return mixed;
  }
  std::vector<Tensor> parts;
  int64_t start = 0;
  for (size_t axis = 0; axis < sections.size(); ++axis) {
    parts.push_back(rows[static_cast<int64_t>(axis)].narrow(-1, start, sections[axis]));
    start += sections[axis];
  }
  return cpu::op("cat", parts, -1);
}

opapi::Run rope_with_cache(const opapi::Input& positions, const opapi::Input& query, const opapi::Input& key,
                           const opapi::Input& cache, const std::vector<int64_t>& sections, int64_t head_size, bool is_neox,
                           int64_t cache_mode, const opapi::Output& query_out, const opapi::Output& key_out) {
  require_dtype(positions, {cpu::kInt, cpu::kLong}, "positions");
  require_dtype(query, {cpu::kFloat, cpu::kHalf, cpu::kBFloat16}, "queryIn");
  opapi::require_dim(query, 2, "queryIn");
  opapi::require_dim(key, 2, "keyIn");
  opapi::require_dim(cache, 2, "cosSinCache");
  opapi::require_same_dtype(query, key, "queryIn and keyIn");
  opapi::require_same_dtype(query, cache, "queryIn and cosSinCache");
  require(cache_mode == 0 || cache_mode == 1, "cacheMode is ", cache_mode);
  require(positions.dim() == 1 || positions.dim() == 2, "positions ", positions.sizes());
  int64_t rotary_dim = cache.size(1), multiple = query.type() == cpu::kFloat ? 16 : 32;
  require(rotary_dim % multiple == 0 && rotary_dim <= head_size, "rotaryDim is ", rotary_dim, ", head size ", head_size,
          ": a multiple of ", multiple, " and no larger");
  require(query.size(1) % head_size == 0 && key.size(1) % head_size == 0, "queryIn ", query.sizes(), ", headSize ", head_size);
  bool is_mrope = positions.dim() == 2;
  if (is_mrope) {
    int64_t total = 0;
    for (int64_t section : sections) total += section;
    require(total == rotary_dim / 2 && static_cast<int64_t>(sections.size()) == positions.size(0), "mropeSection ",
            sections, ", rotaryDim ", rotary_dim, ", positions ", positions.sizes());
  }
  return [=] {
    opapi::device_check_index(positions, 0, cache.size(0), "positions");
    Tensor rows = cpu::op("index.Tensor", cache.to(cpu::kFloat), std::vector<Tensor>{positions.to(cpu::kLong)});
    std::vector<Tensor> parts = rows.chunk(2, -1);
    Tensor cos = is_mrope ? select_sections(parts[0], sections, cache_mode) : parts[0];
    Tensor sin = is_mrope ? select_sections(parts[1], sections, cache_mode) : parts[1];
    cos = is_neox ? cpu::op("cat", std::vector<Tensor>{cos, cos}, -1) : cos.repeat_interleave(2, -1);
    sin = is_neox ? cpu::op("cat", std::vector<Tensor>{sin, sin}, -1) : sin.repeat_interleave(2, -1);
    for (auto [in, out] : {std::pair(&query, &query_out), std::pair(&key, &key_out)}) {
      Tensor heads = in->to(cpu::kFloat).unflatten(1, {-1, head_size});
      Tensor turned = opapi::rope(heads.narrow(-1, 0, rotary_dim), cos.unsqueeze(1), sin.unsqueeze(1), !is_neox);
      out->write(cpu::op("cat", std::vector<Tensor>{turned, heads.narrow(-1, rotary_dim, head_size - rotary_dim)}, -1).flatten(1));
    }
  };
}
}  // namespace
ACLNN_SINCE(900, RopeWithSinCosCacheV2, In(positions), In(query), In(key), In(cache), OptInts(sections), Int(head_size), Flag(is_neox),
      Int(cache_mode), Out(query_out), Out(key_out)) {
  return rope_with_cache(positions, query, key, cache, sections.value_or(std::vector<int64_t>{}), head_size, is_neox, cache_mode, query_out,
                         key_out);
}
