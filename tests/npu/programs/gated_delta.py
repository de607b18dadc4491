"""Gated DeltaNet on the emulated device against its definition in float64: prompts, decode steps, captured steps.

    python -m tests.cann.programs.run_checks tests.npu.programs.gated_delta

Whether decoding goes through the fused operator depends on the CANN; each check holds for both.
"""

from __future__ import annotations

import os
import random
from typing import Any

import torch
from torch import Tensor

from npu_runner.platforms import pick_platform
from npu_runner.platforms.gated_delta import GatedDeltaShape, StateSave
from npu_runner.platforms.step_inputs import AttentionMetadata
from tests.cann.programs.emulation import calls, counters, reset_counters, set_failures
from tests.oracle.gated_delta_layer import GATES, Inputs, Request, Server, Weights, define

SHAPE = GatedDeltaShape(num_k_heads=2, num_v_heads=4, head_k_dim=32, head_v_dim=16, conv_kernel_size=4)
FUSED = "aclnnRecurrentGatedDeltaRule"
EVERY_GATE = "EVERY_GATE" in os.environ
"""Prompts with gates of each kind, and an answer long enough for a state of 16 bits to be off."""


def server(dtype: torch.dtype) -> Server:
    torch.manual_seed(0)
    platform = pick_platform("npu")
    device = platform.devices.set_device(0)
    return Server(platform.make_gated_delta(SHAPE, dtype), SHAPE, Weights.random(SHAPE), device, dtype)


def assert_close(mine: Tensor, expected: Tensor, tolerance: float) -> None:
    error = (mine.cpu().double() - expected).abs().max()
    assert error <= tolerance * max(expected.abs().max().item(), 1e-3), f"off by {error} of {expected.abs().max()}"


def check_prompts_in_chunks_and_what_follows_them() -> None:
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.bfloat16, 3e-2)):
        for gates in GATES if EVERY_GATE else ("mixed",):
            here = server(dtype)
            seqs = [Request(Inputs.random(length, SHAPE, gates).to(dtype), slot)
                    for length, slot in ((150, 5), (71, 0), (20, 9))]
            defined = [define(seq.inputs, here.weights, SHAPE) for seq in seqs]
            outs: list[list[Tensor]] = [[], [], []]
            for cut in ((64, 9, 1), (70, 50, 7)):
                save = StateSave(row=0, offset=64 - seqs[0].num_done, slot=12)
                rows = list(zip(seqs, cut, strict=True))
                for own, out in zip(outs, here.prefill(rows, [save] if seqs[0].num_done == 0 else []), strict=True):
                    own.append(out)
            while any(seq.num_done < len(seq.inputs.x_TC) for seq in seqs):
                rest = [index for index, seq in enumerate(seqs) if seq.num_done < len(seq.inputs.x_TC)]
                for index, out in zip(rest, here.decode([seqs[index] for index in rest], [14, 15]), strict=True):
                    outs[index].append(out)
            for seq, own, expected in zip(seqs, outs, defined, strict=True):
                assert_close(torch.cat(own), expected.out_TVD, tolerance)
                assert_close(here.state[seq.slot], expected.states[-1], tolerance)
                assert_close(here.conv_state[seq.slot], expected.tail(len(seq.inputs.x_TC), 4), 1e-6)
            assert_close(here.state[12], defined[0].states[64], tolerance)


def check_drafts_leave_a_state_each() -> None:
    """Up to eight tokens of a sequence; through the fused operator where it is."""
    is_fused = os.environ.get("CANN_EMU_CANN_VERSION") == "9.2.0"
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.bfloat16, 3e-2)):
        here = server(dtype)
        seqs = [Request(Inputs.random(40, SHAPE).to(dtype), slot) for slot in (5, 0, 9)]
        defined = [define(seq.inputs, here.weights, SHAPE) for seq in seqs]
        outs = [[out] for out in here.prefill([(seq, num) for seq, num in zip(seqs, (9, 1, 4), strict=True)])]
        for counts, kept in (((7, 0, 3), (7, 0, 1)), ((2, 3, 0), (0, 2, 0)), ((0, 5, 1), (0, 5, 0)), ((1, 1, 1),) * 2):
            free = [slot for slot in range(15) if slot not in [seq.slot for seq in seqs]]
            rows = [(seq, [free.pop() for _ in range(num)], keep)
                    for seq, num, keep in zip(seqs, counts, kept, strict=True)]
            reset_counters()
            for own, out in zip(outs, here.decode_drafts(rows), strict=True):
                own.append(out)
            assert (FUSED in calls("launches")) == (is_fused and dtype == torch.bfloat16), calls("launches")
            for own, out in zip(outs, here.decode(seqs, [15]), strict=True):
                own.append(out)
        for seq, own, expected in zip(seqs, outs, defined, strict=True):
            assert_close(torch.cat(own), expected.out_TVD[: seq.num_done], tolerance)
            assert_close(here.state[seq.slot], expected.states[seq.num_done], tolerance)
            assert_close(here.conv_state[seq.slot], expected.tail(seq.num_done, 4), 1e-6)


def check_long_decoding_keeps_its_state() -> None:
    """A state of 16 bits would be off by a hundredth after a thousand tokens; the inputs' rounding is the same here."""
    here = server(torch.bfloat16)
    length = 600 if EVERY_GATE else 100
    seq = Request(Inputs.random(length, SHAPE, "open").to(torch.bfloat16), slot=3)
    defined = define(seq.inputs, here.weights, SHAPE)
    out = here.prefill([(seq, 8)])
    while seq.num_done < length:
        out += here.decode([seq])
    assert_close(torch.cat(out), defined.out_TVD, 3e-2)
    assert here.state.dtype == torch.float32


def check_the_fused_operator_is_taken_where_it_takes_float32_states() -> None:
    cann_version = os.environ.get("CANN_EMU_CANN_VERSION")
    for dtype in (torch.bfloat16, torch.float32):
        here = server(dtype)
        seq = Request(Inputs.random(4, SHAPE).to(dtype), slot=1)
        here.prefill([(seq, 3)])
        reset_counters()
        here.decode([seq])
        is_fused = dtype == torch.bfloat16 and cann_version == "9.2.0"
        assert (FUSED in calls("launches")) == is_fused, calls("launches")
        assert (here.backend.name == "fused") == is_fused, here.backend.name


def check_an_operator_that_fails_is_not_taken() -> None:
    set_failures(f"{FUSED}:1:561002")
    here = server(torch.bfloat16)
    set_failures("")
    assert here.backend.name == "torch"
    assert "561002" in here.backend.refusal  # type: ignore[attr-defined]


def captured(here: Server, rows: int) -> tuple[Any, dict[str, Tensor]]:
    """A decode step of `rows` rows captured in a graph, and its inputs."""
    device, dtype = here.device, here.dtype
    inputs = {
        "x": torch.zeros(rows, SHAPE.num_channels, dtype=dtype, device=device),
        "a": torch.zeros(rows, SHAPE.num_v_heads, dtype=dtype, device=device),
        "b": torch.zeros(rows, SHAPE.num_v_heads, dtype=dtype, device=device),
        "slots": torch.arange(rows, dtype=torch.int32, device=device),
    }
    nothing = torch.empty(0)
    metadata = AttentionMetadata(False, nothing, nothing, nothing, state_slots_B=inputs["slots"])
    # The graph reads them at each replay: they live as long as what is returned.
    inputs |= {name: getattr(here.weights, name).to(device) for name in ("conv_CW", "neg_exp_A_V", "dt_bias_V")}

    def step() -> Tensor:
        qkv_TC = here.backend.convolve(inputs["x"], inputs["conv_CW"], here.conv_state, metadata)
        return here.backend.delta_rule(qkv_TC, inputs["a"], inputs["b"], inputs["neg_exp_A_V"], inputs["dt_bias_V"],
                                       here.state, metadata)

    with torch.inference_mode():
        step()
        torch.npu.synchronize()
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            inputs["out"] = step()
    return graph, inputs


def check_a_captured_step_reads_its_slots_and_copies_no_pool() -> None:
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.bfloat16, 3e-2)):
        here = server(dtype)
        rng = random.Random(0)
        seqs = [Request(Inputs.random(12, SHAPE).to(dtype), slot) for slot in (7, 2, 11)]
        defined = {seq.slot: define(seq.inputs, here.weights, SHAPE) for seq in seqs}
        graph, inputs = captured(here, 3)
        outs = {seq.slot: [out] for seq, out in zip(seqs, here.prefill([(seq, 5) for seq in seqs]), strict=True)}
        for _ in range(5):
            rng.shuffle(seqs)
            part = Inputs.cat([seq.inputs.part(seq.num_done, seq.num_done + 1) for seq in seqs]).to(dtype)
            for name, value in (("x", part.x_TC), ("a", part.a_TV), ("b", part.b_TV)):
                inputs[name].copy_(value)
            inputs["slots"].copy_(torch.tensor([seq.slot for seq in seqs], dtype=torch.int32))
            reset_counters()
            graph.replay()
            torch.npu.synchronize()
            found = counters()
            moved = sum(entry["bytes"] for name, entry in found.get("copies", {}).items() if name.startswith("d2d"))
            assert moved < here.state.nbytes / 2, "the pool is copied"
            assert "ai_cpu" not in found, found
            assert "sorted" not in found, found
            for row, seq in enumerate(seqs):
                outs[seq.slot].append(inputs["out"][row:row + 1].cpu())
                seq.num_done += 1
        for slot, own in outs.items():
            assert_close(torch.cat(own), defined[slot].out_TVD[:10], tolerance)
