// The gated delta rule (arXiv 2412.06464), token by token; a chunked kernel computes the same by blocks of tokens.
// T tokens, B sequences, Nk and Nv key and value heads, Dk and Dv their dims.
#include "op.h"

using cpu::Tensor;
using opapi::device_check;
using opapi::require;
using opapi::require_dtype;

namespace {

template <class... Parts>
void require_tiling(bool holds, const Parts&... parts) {
  opapi::require_code(kInnerTilingError, holds, parts...);
}

struct Limits {
  int64_t heads, dim;
};

struct Sizes {
  int64_t tokens, k_heads, v_heads, k_dim, v_dim;
};

Sizes checked_sizes(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& state, const Limits& limits) {
  require(query.dim() == 3 && value.dim() == 3 && state.dim() == 4, "query ", query.sizes(), ", value ", value.sizes(), ", state ", state.sizes());
  Sizes n{query.size(0), query.size(1), value.size(1), query.size(2), value.size(2)};
  require(key.sizes() == query.sizes() && value.size(0) == n.tokens, "query ", query.sizes(), ", key ", key.sizes(), ", value ", value.sizes());
  require(n.tokens > 0, "there is no token");
  require(n.k_heads >= 1 && n.k_heads <= limits.heads && n.v_heads >= 1 && n.v_heads <= limits.heads && n.v_heads % n.k_heads == 0, n.k_heads,
          " key heads, ", n.v_heads, " value heads: a multiple, at most ", limits.heads);
  require(n.k_dim >= 1 && n.k_dim <= limits.dim && n.v_dim >= 1 && n.v_dim <= limits.dim, "head dims ", n.k_dim, " and ", n.v_dim, ", at most ",
          limits.dim);
  require(opapi::tail_of(state.sizes(), 3) == cpu::Ints({n.v_heads, n.v_dim, n.k_dim}), "state ", state.sizes(),
          ": (blocks, Nv, Dv, Dk) = (..., ", n.v_heads, ", ", n.v_dim, ", ", n.k_dim, ")");
  return n;
}

void check_types(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& beta, const Tensor& lengths, const opapi::Input& g,
                 const Tensor& out) {
  for (const Tensor* tensor : {&query, &key, &value, &beta, &out}) require_dtype(*tensor, {cpu::kBFloat16}, "query, key, value, beta or out");
  require_dtype(lengths, {cpu::kInt}, "actualSeqLengths");
  if (g.is_given()) require_dtype(g, {cpu::kFloat}, "g");
}

void check_gates(const Sizes& n, const Tensor& beta, const opapi::Input& g, const Tensor& out) {
  require(beta.sizes() == cpu::Ints({n.tokens, n.v_heads}), "beta ", beta.sizes());
  require(!g.is_given() || g.sizes() == beta.sizes(), "g ", g.is_given() ? g.sizes() : cpu::Ints{}, ", beta ", beta.sizes());
  require(out.sizes() == cpu::Ints({n.tokens, n.v_heads, n.v_dim}), "out ", out.sizes());
}

// What a token gives to each v head, in float32.
struct Token {
  Tensor query, key, value, beta, decay;
  Token(const Sizes& n, int64_t at, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta_TN, const opapi::Input& g_TN)
      : query(q[at].to(cpu::kFloat).repeat_interleave(n.v_heads / n.k_heads, 0)),
        key(k[at].to(cpu::kFloat).repeat_interleave(n.v_heads / n.k_heads, 0)),
        value(v[at].to(cpu::kFloat)),
        beta(beta_TN[at].to(cpu::kFloat)) {
    if (g_TN.is_given()) decay = cpu::op("exp", g_TN[at]);
  }
};

// state (Nv, Dv, Dk) float32; returns what the token reads of the new one, (Nv, Dv), not yet scaled.
Tensor advance(Tensor& state, const Token& token) {
  if (token.decay.defined()) state = state * token.decay.unsqueeze(-1).unsqueeze(-1);
  Tensor seen = cpu::op("matmul", state, token.key.unsqueeze(-1)).squeeze(-1);
  Tensor error = (token.value - seen) * token.beta.unsqueeze(-1);
  state = state + error.unsqueeze(-1) * token.key.unsqueeze(1);
  return cpu::op("matmul", state, token.query.unsqueeze(-1)).squeeze(-1);
}

std::vector<int64_t> lengths_of(const Tensor& lengths, int64_t tokens, int64_t longest) {
  std::vector<int64_t> all;
  int64_t total = 0;
  for (int64_t row = 0; row < lengths.numel(); ++row) {
    all.push_back(static_cast<int64_t>(lengths[row].item()));
    device_check(all.back() >= 0 && all.back() <= longest, "actualSeqLengths holds ", all.back(), ", outside [0, ", longest, "]");
    total += all.back();
  }
  device_check(total == tokens, "actualSeqLengths add up to ", total, ", there are ", tokens, " tokens");
  return all;
}

// Documents before CANN 9.2: bfloat16, contiguous. Then float32 too, and strides between blocks and heads.
void check_state(const Tensor& state) {
  if (emu::settings().cann_version < 920) {
    require_dtype(state, {cpu::kBFloat16}, "stateRef (float32 wants CANN 9.2)");
    opapi::require_contiguous(state, "stateRef");
  } else {
    require_dtype(state, {cpu::kBFloat16, cpu::kFloat}, "stateRef");
    opapi::require_contiguous(state[0][0], "stateRef, its last two axes");
  }
}

}  // namespace

// A sequence starts from the state of its token number numAcceptedTokens (or the first), and leaves one for each token.
ACLNN(RecurrentGatedDeltaRule, In(query), In(key), In(value), In(beta), Out(state), In(actual_seq_lengths), In(ssm_state_indices), Opt(g), Opt(gk),
      Opt(num_accepted_tokens), Float(scale), Out(out)) {
  check_types(query, key, value, beta, actual_seq_lengths, g, out);
  require_dtype(ssm_state_indices, {cpu::kInt}, "ssmStateIndices");
  require(!gk.is_given(), "gk is not emulated");
  Sizes n = checked_sizes(query, key, value, state, {256, 512});
  check_state(state);
  check_gates(n, beta, g, out);
  require(ssm_state_indices.sizes() == cpu::Ints{n.tokens}, "ssmStateIndices ", ssm_state_indices.sizes(), " for ", n.tokens, " tokens");
  require_tiling(n.tokens <= state.size(0), n.tokens, " tokens and ", state.size(0), " blocks of state: at least one a token");
  if (num_accepted_tokens.is_given()) require_dtype(num_accepted_tokens, {cpu::kInt}, "numAcceptedTokens");
  return [=] {
    opapi::device_check_index(ssm_state_indices, 0, state.size(0), "ssmStateIndices");
    std::vector<int64_t> lengths = lengths_of(actual_seq_lengths, n.tokens, 8);
    std::vector<Tensor> outs;
    int64_t at = 0;
    for (size_t row = 0; row < lengths.size(); ++row) {
      if (lengths[row] == 0) continue;
      int64_t accepted = num_accepted_tokens.is_given() ? static_cast<int64_t>(num_accepted_tokens[static_cast<int64_t>(row)].item()) : 1;
      device_check(accepted >= 1 && accepted <= lengths[row], "numAcceptedTokens holds ", accepted, " of ", lengths[row], " tokens");
      auto slot_of = [&](int64_t token) { return static_cast<int64_t>(ssm_state_indices[token].item()); };
      Tensor current = state[slot_of(at + accepted - 1)].to(cpu::kFloat).clone();
      for (int64_t end = at + lengths[row]; at < end; ++at) {
        outs.push_back(advance(current, Token(n, at, query, key, value, beta, g)) * cpu::Scalar(scale));
        state[slot_of(at)].copy_(current);
      }
    }
    out.write(cpu::op("stack", outs, 0));
  };
}

// Asks -1 <= g <= 0 of its caller, or it may overflow: here that is a fault, so that nobody relies on it.
ACLNN_SINCE(900, ChunkGatedDeltaRule, In(query), In(key), In(value), In(beta), In(initial_state), In(actual_seq_lengths), Float(scale), Opt(g), Out(out),
      Out(final_state)) {
  check_types(query, key, value, beta, actual_seq_lengths, g, out);
  Sizes n = checked_sizes(query, key, value, initial_state, {64, 128});
  require_dtype(initial_state, {cpu::kBFloat16}, "initialState");
  opapi::require_same_dtype(initial_state, final_state, "initialState and finalState");
  check_gates(n, beta, g, out);
  require(initial_state.size(0) == actual_seq_lengths.numel(), "initialState ", initial_state.sizes(), " for ", actual_seq_lengths.numel(), " sequences");
  return [=] {
    if (g.is_given()) {
      double least = cpu::op("min", g).item(), most = cpu::op("max", g).item();
      device_check(least >= -1 && most <= 0, "g holds ", least < -1 ? least : most, ", outside [-1, 0]: the result may overflow");
    }
    std::vector<int64_t> lengths = lengths_of(actual_seq_lengths, n.tokens, n.tokens);
    std::vector<Tensor> outs;
    int64_t at = 0;
    for (size_t row = 0; row < lengths.size(); ++row) {
      Tensor current = initial_state[static_cast<int64_t>(row)].to(cpu::kFloat).clone();
      for (int64_t end = at + lengths[row]; at < end; ++at) {
        outs.push_back(advance(current, Token(n, at, query, key, value, beta, g)) * cpu::Scalar(scale));
      }
      final_state[static_cast<int64_t>(row)].copy_(current);
    }
    out.write(cpu::op("stack", outs, 0));
  };
}
