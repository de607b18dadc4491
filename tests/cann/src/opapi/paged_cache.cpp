// Writing keys and values into a paged cache.
#include "rope.h"

using cpu::Tensor;
using opapi::device_check;
using opapi::require;
using opapi::require_dtype;

namespace {

// One token's heads go to row `slot` of a cache; a slot is block * block_size + offset.
struct Slots {
  Tensor block, offset;
  Slots(const Tensor& slots, int64_t num_blocks, int64_t block_size) {
    opapi::device_check_index(slots, 0, num_blocks * block_size, "slotMapping");
    Tensor flat = slots.to(cpu::kLong);
    block = cpu::op("floor_divide", flat, block_size);
    offset = cpu::op("remainder", flat, block_size);
  }
};

// cache (blocks, block_size, heads, head_dim), or any view that flattens to it
void write_norm(const Tensor& values, Tensor cache, const Tensor& slots) {
  Slots at(slots, cache.size(0), cache.size(1));
  cache.index_put_({at.block, at.offset}, values.reshape({values.size(0), cache.size(2), cache.size(3)}));
}

// cache (blocks, heads * head_dim / c0, block_size, c0)
void write_nz(const Tensor& values, Tensor cache, const Tensor& slots) {
  int64_t c0 = cache.size(3);
  Slots at(slots, cache.size(0), cache.size(2));
  // index_put_ with the indices around a full dimension puts the indexed dimension first: (T, heads * head_dim / c0, c0).
  cache.permute({0, 2, 1, 3}).index_put_({at.block, at.offset}, values.reshape({values.size(0), -1, c0}));
}

void check_cache(const char* name, const Tensor& values, const Tensor& cache, bool is_nz) {
  opapi::require_contiguous(values, name);
  opapi::require_contiguous(cache, name);
  opapi::require_same_dtype(values, cache, name);
  opapi::require_dim(cache, 4, name);
  opapi::require_dim(values, 3, name);
  int64_t row = values.size(1) * values.size(2);
  if (is_nz) {
    require(cache.size(1) * cache.size(3) == row && cache.size(3) * cache.element_size() == 32, name, ": tokens ", values.sizes(),
            ", PA_NZ cache ", cache.sizes(), ": (blocks, heads * head_dim / c0, block_size, c0), c0 of 32 bytes");
  } else {
    require(cache.size(2) == values.size(1) && cache.size(3) == values.size(2), name, ": tokens ", values.sizes(), ", cache ",
            cache.sizes(), ": (blocks, block_size, heads, head_dim)");
  }
}

void check_type(const Tensor& key) {
  if (emu::settings().cann_version < 900) {
    require_dtype(key, {cpu::kHalf, cpu::kBFloat16, cpu::kChar}, "key");
  } else {
    require_dtype(key, {cpu::kFloat, cpu::kHalf, cpu::kBFloat16, cpu::kChar, cpu::kByte, cpu::kShort, cpu::kInt}, "key");
  }
}

// A slot that is written twice holds nothing that the document promises: here it faults under CANN 8.5. Block 0 is left out, for
// the steps that a runner makes up to measure memory; what they write is never read.
void check_slots_differ(const Tensor& slots, int64_t block_size) {
  if (emu::settings().cann_version >= 900 || slots.numel() < 2) return;
  Tensor sorted = cpu::ops("sort.stable", slots.flatten(), true, -1, false)[0];
  int64_t pairs = sorted.numel() - 1;
  Tensor lower = sorted.narrow(0, 0, pairs), upper = sorted.narrow(0, 1, pairs);
  Tensor is_repeated = cpu::op("logical_and", cpu::op("eq", lower, upper), lower >= cpu::Scalar(block_size));
  device_check(!cpu::op("any", is_repeated).truth(), "slotMapping names a slot twice: ", slots.numel(), " slots");
}

}  // namespace

ACLNN(ScatterPaKvCache, In(key), Out(key_cache), In(slot_mapping), In(value), Out(value_cache), Opt(compress_lens),
      Opt(compress_seq_offsets), Opt(seq_lens), Text(cache_mode), Text(scatter_mode), OptInts(strides), OptInts(offsets)) {
  bool is_nz = cache_mode == "PA_NZ";
  require(is_nz || cache_mode.empty() || cache_mode == "Norm", "cacheMode is ", cache_mode);
  require(!compress_lens.is_given() && !compress_seq_offsets.is_given() && !seq_lens.is_given(),
          "compressed caches are not emulated");
  check_type(key);
  opapi::require_same_dtype(key, value, "key and value");
  check_cache("key", key, key_cache, is_nz);
  check_cache("value", value, value_cache, is_nz);
  require(key.size(0) == value.size(0) && key.size(1) == value.size(1), "key ", key.sizes(), ", value ", value.sizes());
  int64_t num_slots = key_cache.size(0) * key_cache.size(is_nz ? 2 : 1);
  opapi::require_code(kInnerTilingError, key.size(0) <= num_slots, key.size(0), " tokens, the cache has ", num_slots, " slots");
  require_dtype(slot_mapping, {cpu::kInt, cpu::kLong}, "slotMapping");
  opapi::require_dim(slot_mapping, 1, "slotMapping");
  opapi::require_contiguous(slot_mapping, "slotMapping");
  require(slot_mapping.size(0) == key.size(0), slot_mapping.size(0), " slots for ", key.size(0), " tokens");
  return [=] {
    if (!is_nz) check_slots_differ(slot_mapping, key_cache.size(1));
    (is_nz ? write_nz : write_norm)(key, key_cache, slot_mapping);
    (is_nz ? write_nz : write_norm)(value, value_cache, slot_mapping);
  };
}

// Splits qkv, normalises q and k, turns them, writes k and v into PA_NZ caches. Quantised caches are not emulated.
namespace {

struct QkvSizes {
  int64_t tokens, heads, head_dim, num_q, num_k, num_v;
};

QkvSizes checked_sizes(const Tensor& qkv, const cpu::Ints& qkv_size, const cpu::Ints& head_nums) {
  require(qkv_size.size() == 4 && head_nums.size() == 3, "qkvSize has ", qkv_size.size(), " numbers, headNums ", head_nums.size());
  QkvSizes n{qkv_size[0] * qkv_size[1], qkv_size[2], qkv_size[3], head_nums[0], head_nums[1], head_nums[2]};
  require(n.num_k == n.num_v && n.heads == n.num_q + n.num_k + n.num_v, "headNums ", head_nums, ", qkvSize ", qkv_size);
  require(n.head_dim == 128, "the head dim is ", n.head_dim, ", not 128");
  require(qkv.sizes() == cpu::Ints({n.tokens, n.heads * n.head_dim}), "qkv ", qkv.sizes(), ", qkvSize ", qkv_size);
  return n;
}

void check_qkv_arguments(const QkvSizes& n, const Tensor& qkv, const Tensor& cos, const Tensor& sin, const Tensor& index,
                         const std::vector<Tensor>& same_type, const std::vector<Tensor>& caches) {
  require_dtype(qkv, {cpu::kHalf, cpu::kBFloat16}, "qkv");
  require(cos.sizes() == cpu::Ints({n.tokens, n.head_dim}) && sin.sizes() == cos.sizes(), "cos ", cos.sizes(), ", sin ", sin.sizes());
  for (const Tensor& tensor : same_type) opapi::require_same_dtype(qkv, tensor, "qkv and gamma, cos, sin, qOut or the caches");
  require_dtype(index, {cpu::kLong}, "index");
  require(index.sizes() == cpu::Ints({n.tokens}), "index ", index.sizes(), " for ", n.tokens, " tokens");
  for (const Tensor& cache : caches) {
    opapi::require_same_dtype(qkv, cache, "qkv and the caches");
    require(cache.dim() == 4 && cache.size(3) == 16 && cache.size(1) == n.num_k * n.head_dim / 16, "cache ", cache.sizes(),
            ": (blocks, heads * head_dim / 16, block_size, 16)");
  }
}

Tensor normed_and_turned(const Tensor& x, const Tensor& gamma, double epsilon, const Tensor& cos, const Tensor& sin) {
  Tensor normed = x * cpu::op("rsqrt", (x * x).mean(-1, true) + cpu::Scalar(epsilon)) * gamma.to(cpu::kFloat);
  return opapi::rope(normed, cos.unsqueeze(1), sin.unsqueeze(1), false);
}

}  // namespace

ACLNN_SINCE(900, QkvRmsNormRopeCache, In(qkv), In(q_gamma), In(k_gamma), In(cos), In(sin), In(index), Out(q_out), Out(k_cache), Out(v_cache),
      Opt(k_scale), Opt(v_scale), Opt(k_offset), Opt(v_offset), Ints(qkv_size), Ints(head_nums), Double(epsilon), Text(cache_mode),
      OptOut(q_before), OptOut(k_before), OptOut(v_before)) {
  require(cache_mode == "PA_NZ", "cacheMode is ", cache_mode, ", not PA_NZ");
  require(!k_scale.is_given() && !v_scale.is_given() && !k_offset.is_given() && !v_offset.is_given(), "quantised caches are not emulated");
  QkvSizes n = checked_sizes(qkv, qkv_size, head_nums);
  check_qkv_arguments(n, qkv, cos, sin, index, {q_gamma, k_gamma, cos, sin, q_out}, {k_cache, v_cache});
  return [=] {
    Tensor heads = qkv.to(cpu::kFloat).reshape({n.tokens, n.heads, n.head_dim});
    Tensor q = normed_and_turned(heads.narrow(1, 0, n.num_q), q_gamma, epsilon, cos, sin).to(qkv.type());
    Tensor k = normed_and_turned(heads.narrow(1, n.num_q, n.num_k), k_gamma, epsilon, cos, sin).to(qkv.type());
    Tensor v = heads.narrow(1, n.num_q + n.num_k, n.num_v).to(qkv.type());
    q_out.write(q.reshape(q_out.sizes()));
    Tensor rows = cpu::op("nonzero", index >= cpu::Scalar(0)).flatten();  // -1 marks a token that is not stored
    Tensor slots = index.index_select(0, rows);
    write_nz(k.index_select(0, rows), k_cache, slots);
    write_nz(v.index_select(0, rows), v_cache, slots);
    if (q_before.is_given()) q_before.write(q.flatten(1));
    if (k_before.is_given()) k_before.write(k.flatten(1));
    if (v_before.is_given()) v_before.write(v.flatten(1));
  };
}
