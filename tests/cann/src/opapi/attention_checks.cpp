// What aclnnFusedInferAttentionScore asks of its arguments (documents of versions 3 and 4, Atlas A2 and A3, no quantisation).
// Arguments outside the documented sets are refused with 161002, lists and shapes that do not fit together with 561002.
#include "attention.h"

using cpu::Tensor;

namespace opapi {
namespace {

template <class... Parts>
void require_tiling(bool holds, const Parts&... parts) {
  require_code(kInnerTilingError, holds, parts...);
}

int64_t head_dim_of(const Tensor& x, const std::string& layout, int64_t heads) {
  return layout == "BSH" ? x.size(-1) / heads : x.size(-1);
}

void check_types(const AttentionCall& call) {
  if (call.query.type() == cpu::kFloat) {
    // EMULATION EXTENSION: no Ascend kernel takes float32 here; tests that compare in float32 switch it on.
    require(emu::settings().allows_fp32_attention, "query is float32; the kernel takes float16 and bfloat16",
            " (CANN_EMU_ALLOW_FP32_ATTENTION=1 lets the emulation take it)");
  } else {
    require_dtype(call.query, {cpu::kHalf, cpu::kBFloat16}, "query");
  }
  for (const Input* tensor : {&call.key, &call.value}) require_same_dtype(call.query, *tensor, "query, key and value");
  require_same_dtype(call.query, call.out, "query and attentionOut");
  for (const Input* tensor : {&call.query, &call.key, &call.value}) require_contiguous(*tensor, "query, key or value");
}

void check_heads(const AttentionCall& call) {
  require(call.num_heads > 0 && call.num_kv_heads > 0 && call.num_heads % call.num_kv_heads == 0, call.num_heads, " heads, ",
          call.num_kv_heads, " key heads: not a multiple");
  require(call.num_heads <= 256 && call.num_heads / call.num_kv_heads <= 64, call.num_heads, " heads, ", call.num_kv_heads,
          " key heads: at most 256, and 64 for each key head");
  int64_t axis = call.layout == "TND" ? 1 : call.layout == "BSND" ? 2 : call.layout == "BNSD" ? 1 : -1;
  if (axis < 0) return;
  require(call.query.size(axis) == call.num_heads, "query ", call.query.sizes(), " in ", call.layout, ", numHeads ", call.num_heads);
  require(call.block_table.is_given() || call.key.size(axis) == call.num_kv_heads, "key ", call.key.sizes(), " in ", call.layout,
          ", numKeyValueHeads ", call.num_kv_heads);
}

void check_head_dim(const AttentionCall& call) {
  int64_t q = head_dim_of(call.query, call.layout, call.num_heads);
  int64_t k = call.key.dim() == 3 && (call.block_table.is_given() || call.layout == "BSH") ? call.key.size(-1) / call.num_kv_heads
                                                                                             : call.key.size(-1);
  require_tiling(q == k, "query has head dim ", q, ", key ", k);
  require_tiling(call.key.sizes() == call.value.sizes(), "key ", call.key.sizes(), ", value ", call.value.sizes());
  require_tiling(q * call.query.element_size() % 32 == 0, "head dim ", q, " is not aligned to 32 bytes");
  if (call.layout == "TND") {
    require_tiling(q <= 256, "head dim ", q, " in TND, at most 256");
  } else {
    require_tiling(q <= 512, "head dim ", q, ", at most 512");
  }
  require_tiling(call.num_heads == call.num_kv_heads || q <= 256, "head dim ", q, " with grouped heads, at most 256");
  require_tiling(call.out.sizes() == call.query.sizes(), "attentionOut ", call.out.sizes(), ", query ", call.query.sizes());
}

void check_running_totals(const std::vector<int64_t>& totals, int64_t rows, const char* name) {
  require_tiling(!totals.empty() && totals.size() <= 4096, name, " holds ", totals.size(), " numbers: 1 to 4096");
  int64_t previous = 0;
  for (int64_t total : totals) {
    require_tiling(total >= previous, name, " is not a list of running totals: ", totals);
    previous = total;
  }
  require_tiling(previous == rows, name, " ends with ", previous, ", there are ", rows, " rows");
}

// One number for every sequence, or one for all of them.
std::vector<int64_t> lengths_by_batch(const std::optional<std::vector<int64_t>>& given, int64_t batch, int64_t limit, const char* name) {
  std::vector<int64_t> lengths = given.value_or(std::vector<int64_t>(batch, limit));
  if (lengths.size() == 1) lengths.assign(batch, lengths.front());
  require_tiling(static_cast<int64_t>(lengths.size()) >= batch, name, " holds ", lengths.size(), " numbers for ", batch, " sequences");
  lengths.resize(batch);
  for (int64_t length : lengths) require_tiling(length >= 0 && length <= limit, name, " holds ", length, ", outside [0, ", limit, "]");
  return lengths;
}

// What op-plugin's document says of one query, and of keys in pages.
constexpr int64_t kMostKeysOfOneQuery = 262144, kMostPagedElements = 0x7fffffff;

void check_paged(const AttentionCall& call) {
  require_dtype(call.block_table, {cpu::kInt}, "blockTable");
  require_contiguous(call.block_table, "blockTable");
  require_tiling(call.block_table.dim() == 2 && call.block_table.size(0) == call.num_sequences, "blockTable ",
                 call.block_table.sizes(), " for ", call.num_sequences, " sequences");
  int64_t limit = call.layout == "TND" ? 128 : 512;
  require_tiling(call.block_size >= 16 && call.block_size <= limit && call.block_size % 16 == 0, "blockSize is ", call.block_size,
                 ": a multiple of 16 up to ", limit);
  require_tiling(call.key.dim() == 3 || (call.key.dim() == 4 && (call.layout == "BNSD" || call.layout == "TND")), "key cache ",
                 call.key.sizes(), ": (blocks, block_size, H), or for BNSD and TND (blocks, heads, block_size, D)");
  int64_t block_axis = call.key.dim() == 3 ? 1 : 2;
  require_tiling(call.key.size(block_axis) == call.block_size, "key cache ", call.key.sizes(), ", blockSize ", call.block_size);
  require_tiling(call.key.dim() == 4 || call.key.size(2) <= 65535, "key cache ", call.key.sizes(), ": H is at most 65535");
  require_tiling(call.key.dim() == 3 || call.key.size(1) == call.num_kv_heads, "key cache ", call.key.sizes(), ", ", call.num_kv_heads, " key heads");
  require_tiling(call.key.numel() <= kMostPagedElements, "key cache ", call.key.sizes(), ": its elements are counted in int32");
  int64_t longest = 0;
  for (int64_t batch = 0; batch < call.num_sequences; ++batch) {
    int64_t length = call.kv_lengths[batch];
    require_tiling(length >= 0, "actualSeqLengthsKv holds ", length);
    require_tiling(call.query_length(batch) > 1 || length <= kMostKeysOfOneQuery, "one query reads ", length, " keys, at most ",
                   kMostKeysOfOneQuery);
    longest = std::max(longest, (length + call.block_size - 1) / call.block_size);
  }
  require_tiling(call.block_table.size(1) >= longest, "blockTable has ", call.block_table.size(1), " columns, a sequence needs ", longest);
}

// What CANN 8.5 takes in TND and later ones do not ask. As many query heads as key heads go through a tiling of their own.
void check_tnd_of_85(const AttentionCall& call, int64_t inner_precise) {
  if (emu::settings().cann_version >= 900 || call.layout != "TND") return;
  bool is_paged = call.block_table.is_given(), is_half = call.query.type() == cpu::kHalf;
  require_tiling(!is_paged || call.block_size == 128, "blockSize is ", call.block_size, " in TND, CANN 8.5 documents 128");
  bool has_equal_heads = call.num_heads == call.num_kv_heads;
  int64_t head_dim = head_dim_of(call.query, call.layout, call.num_heads);
  require_tiling((!has_equal_heads && call.sparse_mode != 4) || head_dim == 64 || head_dim == 128, "head dim ", head_dim,
                 " in TND with equal heads or sparseMode 4: must be same equal 192/128/64");
  if (!has_equal_heads) return;
  require_tiling(!is_half || (!is_paged && !call.mask.is_given() && inner_precise != 0),
                 "float16 in TND with equal heads: without pages and mask, and innerPrecise other than 0");
  // 8.5's code takes this, its document does not say so: a start that tries it must be able to hear no.
  require_tiling(!is_paged, "equal heads in TND over a paged cache are not documented before CANN 9.0");
}

// The operator's document names head dims 128 and 192 in TND; that others work over a paged cache is known by report only. So a
// version may be met that takes less: CANN_EMU_PAGED_HEAD_DIMS, a list as "128,192", says what this one takes.
void check_paged_head_dim(const AttentionCall& call) {
  static const std::string taken = [] {
    const char* value = std::getenv("CANN_EMU_PAGED_HEAD_DIMS");
    return value == nullptr || *value == '\0' ? std::string() : "," + std::string(value) + ",";
  }();
  if (taken.empty() || call.layout != "TND") return;
  int64_t head_dim = head_dim_of(call.query, call.layout, call.num_heads);
  require_tiling(taken.find("," + std::to_string(head_dim) + ",") != std::string::npos, "head dim ", head_dim,
                 " in TND with a paged cache; CANN_EMU_PAGED_HEAD_DIMS names what is taken");
}

// The same without pages: CANN_EMU_PLAIN_TND=0 says that this version takes none in TND, as nobody has shown that 8.5 does.
void check_plain_tnd(const AttentionCall& call) {
  static const char* const value = std::getenv("CANN_EMU_PLAIN_TND");
  bool is_taken = value == nullptr || std::string(value) != "0";
  require_tiling(is_taken || call.layout != "TND", "TND without a paged cache; CANN_EMU_PLAIN_TND says whether it is taken");
}

// A band: from pre_tokens before a query's own place to next_tokens behind it.
void check_band(const AttentionCall& call) {
  int64_t longest = 0;
  for (int64_t batch = 0; batch < call.num_sequences; ++batch) {
    longest = std::max(longest, call.query_length(batch));
    if (call.layout != "TND") continue;
    require_tiling(call.pre_tokens >= -call.query_length(batch) && call.next_tokens >= -call.kv_length(batch), "sparseMode 4 in TND: preTokens ",
                   call.pre_tokens, " and nextTokens ", call.next_tokens, " for ", call.query_length(batch), " queries and ",
                   call.kv_length(batch), " keys");
  }
  require_tiling(call.pre_tokens + call.next_tokens >= 0, "sparseMode 4: preTokens ", call.pre_tokens, " and nextTokens ", call.next_tokens,
                 " have nothing in common");
  // Documented as without effect, and so without an error: the kernel would silently attend to everything.
  require_tiling(longest > 1, "sparseMode and preTokens have no effect where queries are of length 1");
}

void check_mask(const AttentionCall& call) {
  bool is_band = call.sparse_mode == 4;
  require(call.sparse_mode == 0 || call.sparse_mode == 3 || is_band, "sparseMode ", call.sparse_mode, " is not emulated");
  if (is_band) check_band(call);
  if (call.sparse_mode == 3 || is_band) {
    require_tiling(call.mask.is_given() && call.mask.dim() >= 2 && call.mask.numel() == 2048 * 2048 && call.mask.size(-1) == 2048 &&
                       call.mask.size(-2) == 2048,
                   "sparseMode 3 and 4 need a mask of 2048 by 2048, not ", describe(call.mask));
    for (int64_t batch = 0; batch < call.num_sequences; ++batch) {
      require_tiling(call.query_length(batch) <= call.kv_length(batch), "sparseMode 3 or 4: sequence ", batch, " has ",
                     call.query_length(batch), " queries and ", call.kv_length(batch), " keys");
    }
  }
  if (!call.mask.is_given()) return;
  require_dtype(call.mask, {cpu::kBool, cpu::kChar, cpu::kByte}, "attenMask");
  require_contiguous(call.mask, "attenMask");
  if (call.sparse_mode != 0) return;
  require_tiling(call.layout != "TND", "TND takes sparseMode 0 without a mask, or 3 and 4 with one");
  int64_t rows = call.query.size(call.layout == "BNSD" ? 2 : 1);
  int64_t columns = call.block_table.is_given() ? call.block_table.size(1) * call.block_size : call.key.size(call.layout == "BNSD" ? 2 : 1);
  int64_t dims = call.mask.dim();
  bool is_shaped = (dims == 3 || (dims == 4 && call.mask.size(1) == 1)) &&
                   (call.mask.size(0) == 1 || call.mask.size(0) == call.num_sequences) && call.mask.size(-2) >= rows &&
                   call.mask.size(-1) >= columns;
  require_tiling(is_shaped, "attenMask ", call.mask.sizes(), " with sparseMode 0: (1 or B, 1, ", rows, ", ", columns, ")");
}

using Lengths = std::optional<std::vector<int64_t>>;

// TND: the lengths say how many sequences there are.
void set_running_lengths(AttentionCall& call, const Lengths& q_lengths, const Lengths& kv_lengths) {
  require_tiling(q_lengths.has_value() && kv_lengths.has_value(), "TND needs actualSeqLengths and actualSeqLengthsKv");
  check_running_totals(*q_lengths, call.query.size(0), "actualSeqLengths");
  call.num_sequences = static_cast<int64_t>(q_lengths->size());
  call.q_lengths = *q_lengths;
  call.kv_lengths = *kv_lengths;
  require_tiling(call.kv_lengths.size() == q_lengths->size(), "actualSeqLengthsKv holds ", call.kv_lengths.size(),
                 " numbers, actualSeqLengths ", q_lengths->size());
  if (call.has_running_kv_totals()) check_running_totals(call.kv_lengths, call.key.size(0), "actualSeqLengthsKv");
}

void set_lengths_by_batch(AttentionCall& call, const Lengths& q_lengths, const Lengths& kv_lengths) {
  int64_t axis = call.layout == "BNSD" ? 2 : 1;
  bool is_paged = call.block_table.is_given();
  call.num_sequences = call.query.size(0);
  call.q_lengths = lengths_by_batch(q_lengths, call.num_sequences, call.query.size(axis), "actualSeqLengths");
  require_tiling(is_paged || call.key.size(0) == call.num_sequences, "query ", call.query.sizes(), ", key ", call.key.sizes());
  int64_t limit = is_paged ? call.block_table.size(-1) * call.block_size : call.key.size(axis);
  call.kv_lengths = lengths_by_batch(kv_lengths, call.num_sequences, limit, "actualSeqLengthsKv");
}

}  // namespace

void refuse_given(std::initializer_list<Input> arguments) {
  for (const Input& argument : arguments) {
    require(!argument.is_given(), "quantisation, padding, prefix, pse, rope and sink arguments are not emulated, one is ",
            describe(argument));
  }
}

AttentionCall checked_call(const Input& query, const std::vector<Input>& key, const std::vector<Input>& value, const Input& mask,
                           const Input& block_table, const std::optional<std::vector<int64_t>>& q_lengths,
                           const std::optional<std::vector<int64_t>>& kv_lengths, int64_t num_heads, double scale,
                           int64_t pre_tokens, int64_t next_tokens, const std::string& layout, int64_t num_kv_heads,
                           int64_t sparse_mode, int64_t inner_precise, int64_t block_size, bool wants_lse, const Output& out, const Output& lse) {
  require(key.size() == 1 && value.size() == 1, "lists of ", key.size(), " keys and ", value.size(), " values are not emulated");
  require(layout == "TND" || layout == "BSND" || layout == "BNSD" || layout == "BSH", "inputLayout ", layout, " is not emulated");
  require_dim(query, layout == "TND" || layout == "BSH" ? 3 : 4, "query");
  require(inner_precise >= 0 && inner_precise <= 3, "innerPrecise is ", inner_precise);
  AttentionCall call{query, key.front(), value.front(), mask, block_table, out, lse, {}, {}, layout};
  call.num_heads = num_heads;
  call.num_kv_heads = num_kv_heads == 0 ? num_heads : num_kv_heads;
  call.sparse_mode = sparse_mode;
  call.pre_tokens = pre_tokens;
  call.next_tokens = next_tokens;
  call.block_size = block_size;
  call.scale = scale;
  call.wants_lse = wants_lse;
  check_types(call);
  check_heads(call);
  check_head_dim(call);
  require(!block_table.is_given() || kv_lengths.has_value(), "a paged cache needs actualSeqLengthsKv");
  if (layout == "TND") {
    require(call.num_heads == call.num_kv_heads || inner_precise == 0, "TND with grouped heads takes innerPrecise 0, not ", inner_precise);
    set_running_lengths(call, q_lengths, kv_lengths);
  } else {
    set_lengths_by_batch(call, q_lengths, kv_lengths);
  }
  check_tnd_of_85(call, inner_precise);
  if (block_table.is_given()) {
    check_paged_head_dim(call);
    check_paged(call);
  } else {
    check_plain_tnd(call);
  }
  check_mask(call);
  return call;
}

// By its document of v8.5.0, which later ones repeat.
AttentionCall checked_varlen_call(const Input& query, const Input& key, const Input& value,
                                  const std::optional<std::vector<int64_t>>& q_totals,
                                  const std::optional<std::vector<int64_t>>& kv_totals, int64_t num_heads, double scale,
                                  const std::string& layout, const Output& out) {
  constexpr size_t kMostSequences = 2048;
  constexpr int64_t kMostRows = 1 << 20, kMostHeadDim = 768;
  require(layout == "TND", "inputLayout is ", layout, ", not TND");
  require_dtype(query, {cpu::kHalf, cpu::kBFloat16, cpu::kFloat}, "query");
  for (const Input* tensor : {&key, &value}) {
    require_same_dtype(query, *tensor, "query, key and value");
    require_dim(*tensor, 3, "key or value");
  }
  require_dim(query, 3, "query");
  AttentionCall call{query, key, value, {}, {}, out, {}, {}, {}, layout};
  call.num_heads = num_heads;
  call.num_kv_heads = key.size(1);
  call.scale = scale;
  check_heads(call);
  int64_t head_dim = query.size(2);
  require_tiling(head_dim == key.size(2) && head_dim >= value.size(2) && head_dim <= kMostHeadDim, "head dims ", head_dim, ", ", key.size(2),
                 " and ", value.size(2), ": query's and key's equal, value's no larger, at most ", kMostHeadDim);
  require_tiling(query.size(0) <= kMostRows && key.size(0) <= kMostRows, query.size(0), " queries, ", key.size(0), " keys: at most 1M");
  require_tiling(key.size(0) == value.size(0) && key.size(1) == value.size(1), "key ", key.sizes(), ", value ", value.sizes());
  require(q_totals.has_value() && kv_totals.has_value(), "TND needs actualSeqQLen and actualSeqKvLen");
  require_tiling(q_totals->size() == kv_totals->size() && q_totals->size() <= kMostSequences, "actualSeqQLen holds ", q_totals->size(),
                 " numbers, actualSeqKvLen ", kv_totals->size(), ": as many, at most ", kMostSequences);
  check_running_totals(*q_totals, query.size(0), "actualSeqQLen");
  check_running_totals(*kv_totals, key.size(0), "actualSeqKvLen");
  call.num_sequences = static_cast<int64_t>(q_totals->size());
  call.q_lengths = *q_totals;
  call.kv_lengths = *kv_totals;
  return call;
}

}  // namespace opapi
