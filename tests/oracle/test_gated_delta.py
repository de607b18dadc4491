"""The platform's Gated DeltaNet against its definition in float64, and against transformers' functions.

Nv value heads, K and V dims of key and value heads, T tokens.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5 as peer

from npu_runner.errors import ConfigError
from npu_runner.platforms import pick_platform
from npu_runner.platforms.gated_delta import CHUNK_SIZE, GatedDeltaShape, RingedGatedDelta, StateSave
from npu_runner.platforms.torch_gated_delta import TorchGatedDelta
from tests.full_set import examples, only_full
from tests.oracle.gated_delta_layer import (
    GATES,
    NUM_SLOTS,
    Defined,
    Inputs,
    Request,
    Server,
    Weights,
    define,
    next_boundary,
)

SHAPE = GatedDeltaShape(num_k_heads=2, num_v_heads=4, head_k_dim=128, head_v_dim=128, conv_kernel_size=4)
SHAPES = {
    "grouped": SHAPE,
    "ungrouped": GatedDeltaShape(num_k_heads=2, num_v_heads=2, head_k_dim=64, head_v_dim=64, conv_kernel_size=4),
    "uneven": GatedDeltaShape(num_k_heads=1, num_v_heads=3, head_k_dim=64, head_v_dim=128, conv_kernel_size=4),
}
TOLERANCE = 2e-5
"""Of the largest output or state; float32 keeps 2e-6 at the lengths here."""


def make_server(platform_name: str, shape: GatedDeltaShape = SHAPE, dtype: torch.dtype = torch.float32) -> Server:
    torch.manual_seed(0)
    platform = pick_platform(platform_name)
    device = platform.devices.set_device(0)
    try:
        backend = platform.make_gated_delta(shape, dtype)
    except ConfigError as reason:
        pytest.skip(str(reason))
    return Server(backend, shape, Weights.random(shape), device, dtype)


def assert_close(mine: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    error = (mine.cpu().double() - expected).abs().max()
    assert error <= tolerance * max(expected.abs().max().item(), 1e-3), f"off by {error} of {expected.abs().max()}"


def assert_slot(server: Server, slot: int, defined: Defined, length: int) -> None:
    """The slot holds the states after `length` tokens."""
    assert_close(server.state[slot], defined.states[length])
    assert_close(server.tail(slot, length), defined.tail(length, server.shape.conv_kernel_size), 1e-6)


@pytest.mark.parametrize("gates", [
    "mixed", *only_full("gates of one kind each; mixed ones stay, which have all", "usual", "open", "shut")])
def test_a_long_prompt_and_what_follows_it(gates: str, platform_name: str) -> None:
    server = make_server(platform_name)
    length = examples(2100)
    seq = Request(Inputs.random(length, SHAPE, gates), slot=5)
    defined = define(seq.inputs, server.weights, SHAPE)
    out = [*server.prefill([(seq, length // 2 - 50)]), *server.prefill([(seq, length // 2 - 3)])]
    while seq.num_done < length:
        out += server.decode([seq], padding_slots=[14, 15])
    assert_close(torch.cat(out), defined.out_TVD)
    assert_slot(server, 5, defined, length)


@pytest.mark.parametrize("name", ["uneven", *only_full("other shapes; one stays, and all with drafts", "grouped",
                                                       "ungrouped")])
def test_rows_of_any_length_side_by_side_each_from_its_own_state(name: str, platform_name: str) -> None:
    """Random traffic: chunks of 1 to 200 tokens, saves at what boundaries come, decode steps between."""
    shape = SHAPES[name]
    server = make_server(platform_name, shape)
    rng = random.Random(0)
    seqs = [Request(Inputs.random(rng.randint(150, 400), shape, rng.choice(GATES)), slot=slot)
            for slot in (7, 0, 3, 9, 4)]
    defined = [define(seq.inputs, server.weights, shape) for seq in seqs]
    for _ in range(12):
        running = [seq for seq in seqs if seq.num_done < len(seq.inputs.x_TC)]
        begun = [seq for seq in running if seq.num_done]
        starts = [seq.num_done for seq in seqs]
        saved: list[tuple[int, int, int]] = []
        if begun and rng.random() < 0.4:
            results = dict(zip([seq.slot for seq in begun], server.decode(begun, [15]), strict=True))
        else:
            rows = [(seq, min(rng.choice([1, 2, 3, 7, 8, 9, 40, 63, 64, 65, 130, 200]),
                              len(seq.inputs.x_TC) - seq.num_done)) for seq in running]
            saved = choose_saves(rows, rng)
            saves = [StateSave(row=row, offset=end - rows[row][0].num_done, slot=slot) for row, end, slot in saved]
            order = [seq.slot for seq, _ in rows]
            results = dict(zip(order, server.prefill(rows, saves), strict=True))
            saved = [(order[row], end, slot) for row, end, slot in saved]
        for seq, start, expected in zip(seqs, starts, defined, strict=True):
            if seq.slot in results:
                assert_close(results[seq.slot], expected.out_TVD[start : seq.num_done])
                assert_slot(server, seq.slot, expected, seq.num_done)
        for own_slot, end, slot in saved:
            index = next(i for i, seq in enumerate(seqs) if seq.slot == own_slot)
            assert_slot(server, slot, defined[index], end)
    assert torch.isnan(server.state[12]).all(), "a slot that nobody has was written to"


@pytest.mark.parametrize("is_plain", [False, True])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_each_draft_leaves_its_state_in_a_slot_of_its_own(shape: GatedDeltaShape, is_plain: bool,
                                                          platform_name: str) -> None:
    """Steps with up to three drafts a sequence, of which some are kept; plain steps between."""
    server = make_server(platform_name, shape)
    if is_plain:
        server.backend = TorchGatedDelta(shape)
    elif pick_platform(platform_name).state_facts.most_drafts == 0 or isinstance(server.backend, RingedGatedDelta):
        pytest.skip("it verifies no drafts, or leaves no states behind them")
    rng = random.Random(0)
    seqs = [Request(Inputs.random(80, shape, gates), slot=slot)
            for gates, slot in (("usual", 7), ("mixed", 0), ("open", 3), ("shut", 9))]
    defined = [define(seq.inputs, server.weights, shape) for seq in seqs]
    outs = [[out] for out in server.prefill([(seq, 1 + 5 * index) for index, seq in enumerate(seqs)])]
    while min(seq.num_done for seq in seqs) < 60:
        if rng.random() < 0.3:
            found = server.decode(seqs)
        else:
            spares = [slot for slot in range(NUM_SLOTS - 1) if slot not in [seq.slot for seq in seqs]]
            rng.shuffle(spares)
            counts = [min(rng.randint(0, 3), 79 - seq.num_done) for seq in seqs]
            rows = [(seq, [spares.pop() for _ in range(num)], rng.randint(0, num))
                    for seq, num in zip(seqs, counts, strict=True)]
            found = server.decode_drafts(rows)
        for seq, own, out, expected in zip(seqs, outs, found, defined, strict=True):
            own.append(out)
            assert_slot(server, seq.slot, expected, seq.num_done)
    for seq, own, expected in zip(seqs, outs, defined, strict=True):
        assert_close(torch.cat(own), expected.out_TVD[: seq.num_done])
    assert torch.isnan(server.state[NUM_SLOTS - 1]).all(), "a slot that no token had was written to"


def choose_saves(rows: list[tuple[Request, int]], rng: random.Random) -> list[tuple[int, int, int]]:
    """(row, position, slot) of up to two saves: at multiples of the chunk size, or where the row ends."""
    found = []
    for row, (seq, num) in enumerate(rows):
        ends = {*range(next_boundary(seq.num_done), seq.num_done + num, CHUNK_SIZE), seq.num_done + num}
        found.append((row, rng.choice(sorted(ends))))
    chosen = rng.sample(found, min(2, len(found)))
    return [(row, end, slot) for (row, end), slot in zip(chosen, (10, 11), strict=False)]


def test_a_saved_state_serves_another_sequence_with_the_same_beginning(platform_name: str) -> None:
    server = make_server(platform_name)
    first = Request(Inputs.random(300, SHAPE), slot=1)
    server.prefill([(first, 300)], [StateSave(row=0, offset=128, slot=13), StateSave(row=0, offset=256, slot=12)])
    tail = Inputs.random(70, SHAPE, "mixed")
    second = Request(Inputs.cat([first.inputs.part(0, 128), tail]), slot=2, num_done=128)
    server.copy_slot(13, 2)
    expected = define(second.inputs, server.weights, SHAPE)
    out = [*server.prefill([(second, 65)]), *(server.decode([second])[0] for _ in range(5))]
    assert_close(torch.cat(out), expected.out_TVD[128:])


def test_a_chunk_that_is_not_full_gives_what_a_full_one_gives(platform_name: str) -> None:
    """However a prompt is cut: the answer may not depend on who else is in the step."""
    server = make_server(platform_name)
    inputs = Inputs.random(200, SHAPE)
    whole, cut = Request(inputs, slot=0), Request(inputs, slot=1)
    out = server.prefill([(whole, 200)])[0]
    parts = [server.prefill([(cut, num)])[0] for num in (1, 5, 63, 64, 3, 64)]
    assert_close(torch.cat(parts), out.double(), 4e-6)
    assert_close(server.state[1], server.state[0].cpu().double(), 4e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bits_round_inputs_and_outputs_only(dtype: torch.dtype, platform_name: str) -> None:
    server = make_server(platform_name, dtype=dtype)
    inputs = Inputs.random(200, SHAPE).to(dtype)
    seq = Request(inputs, slot=0)
    expected = define(inputs, server.weights, SHAPE)
    out = [*server.prefill([(seq, 180)]), *(server.decode([seq])[0] for _ in range(20))]
    assert_close(torch.cat(out), expected.out_TVD, 3e-2)
    assert server.state.dtype == torch.float32


def test_a_number_that_is_none_stays_in_its_row(platform_name: str) -> None:
    server = make_server(platform_name)
    seqs = [Request(Inputs.random(100, SHAPE), slot=slot) for slot in range(3)]
    expected = [define(seq.inputs, server.weights, SHAPE) for seq in seqs]
    seqs[1].inputs.x_TC[40:] = torch.nan
    out = server.prefill([(seqs[0], 90), (seqs[1], 50), (seqs[2], 3)])
    assert_close(out[0], expected[0].out_TVD[:90])
    assert_close(out[2], expected[2].out_TVD[:3])
    out = server.decode(seqs)
    assert_close(out[0], expected[0].out_TVD[90:91])
    assert_close(out[2], expected[2].out_TVD[3:4])


@pytest.mark.parametrize("save", [StateSave(row=0, offset=60, slot=9), StateSave(row=0, offset=0, slot=9),
                                  StateSave(row=2, offset=64, slot=9)])
def test_a_save_where_no_chunk_ends_is_an_error(save: StateSave, platform_name: str) -> None:
    server = make_server(platform_name)
    rows = [(Request(Inputs.random(100, SHAPE), slot=slot), 90) for slot in (0, 1)]
    with pytest.raises(ValueError, match="saved"):
        server.prefill(rows, [save])


@pytest.mark.parametrize("length", [1, 64, 200])
def test_transformers_says_the_same(length: int, platform_name: str) -> None:
    server = make_server(platform_name)
    inputs = Inputs.random(length + 1, SHAPE)
    seq = Request(inputs, slot=NUM_SLOTS - 1)
    prefilled, decoded = server.prefill([(seq, length)])[0], server.decode([seq])[0]
    weights = server.weights
    conv = peer.causal_conv1d_fn(inputs.x_TC.t()[None], weights.conv_CW, activation="silu")[0].t()
    q, k, v = conv.split([SHAPE.key_size, SHAPE.key_size, SHAPE.value_size], dim=-1)
    g = weights.neg_exp_A_V * torch.nn.functional.softplus(inputs.a_TV + weights.dt_bias_V)
    # transformers before 5.23 wants a key head for each value head; what follows gives the same to a later one.
    group = SHAPE.num_v_heads // SHAPE.num_k_heads
    keys = [x.unflatten(-1, (SHAPE.num_k_heads, -1)).repeat_interleave(group, dim=1)[None] for x in (q, k)]
    arguments = [*keys, v.unflatten(-1, (SHAPE.num_v_heads, -1))[None], g[None], inputs.b_TV.sigmoid()[None]]
    for function in (peer.torch_chunk_gated_delta_rule, peer.torch_recurrent_gated_delta_rule):
        out, state = function(*arguments, output_final_state=True, use_qk_l2norm_in_kernel=True)
        assert_close(torch.cat([prefilled, decoded]), out[0].double())
        assert_close(server.state[seq.slot].mT, state[0].double())
