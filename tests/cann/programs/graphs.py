"""ACL graphs: capture runs nothing, replay runs on what the memory then holds, task groups take new arguments."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch_npu
from torch import Tensor

from .attention_operators import BLOCK, attend, mask
from .emulation import calls, close, error_of, refused, reset_counters
from .fused_operators import draw


def captured(body: Callable[[], None], **options: object) -> torch.npu.NPUGraph:
    torch.npu.synchronize()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, **options):
        body()
    return graph


def check_nothing_runs_while_capturing() -> None:
    a, b = torch.ones(4).npu(), torch.zeros(4).npu()
    graph = captured(lambda: b.add_(a))
    assert b.cpu().tolist() == [0.0] * 4
    graph.replay()
    assert b.cpu().tolist() == [1.0] * 4


def check_replay_reads_what_memory_holds_then() -> None:
    a, b = torch.ones(4).npu(), torch.zeros(4).npu()
    graph = captured(lambda: b.copy_(a * 3))
    a.fill_(5)
    graph.replay()
    assert b.cpu().tolist() == [15.0] * 4
    reset_counters()
    graph.replay()
    graph.replay()
    assert calls("replayed") == {"aclnnMuls": 2, "aclnnInplaceCopy": 2}, calls("replayed")
    assert calls("launches") == {}


def check_a_side_stream_joins_the_capture() -> None:
    a, b = torch.ones(4).npu(), torch.zeros(4).npu()
    side = torch.npu.Stream()

    def body() -> None:
        main = torch.npu.current_stream()
        side.wait_stream(main)
        with torch.npu.stream(side):
            b.add_(a)
        main.wait_stream(side)
        b.mul_(2)

    graph = captured(body)
    assert b.cpu().tolist() == [0.0] * 4
    graph.replay()
    assert b.cpu().tolist() == [2.0] * 4


def check_a_synchronisation_breaks_the_capture() -> None:
    a = torch.ones(4).npu()

    def body() -> None:
        a.add_(1)
        torch.npu.current_stream().synchronize()

    message = error_of(lambda: captured(body))
    assert "error 107027" in message or "error 507903" in message, message


def check_random_numbers_differ_at_each_replay() -> None:
    out = torch.empty(8).npu()
    graph = captured(lambda: out.uniform_())
    graph.replay()
    first = out.cpu()
    graph.replay()
    assert not torch.equal(first, out.cpu())


class Attention:
    """One decode attention whose key lengths the host changes before each replay."""

    def __init__(self) -> None:
        dtype = torch.float16
        self.query, self.key, self.value = (
            draw(*s, dtype=dtype, seed=i) for i, s in enumerate([(2, 4, 64), (4, BLOCK, 128), (4, BLOCK, 128)])
        )
        self.on_device = [x.npu() for x in (self.query, self.key, self.value)]
        self.table, self.mask = torch.tensor([[1, 2], [3, 0]], dtype=torch.int32).npu(), mask()

    def __call__(self, kv_lengths: list[int]) -> Tensor:
        return torch_npu.npu_fused_infer_attention_score(
            *self.on_device,
            atten_mask=self.mask,
            block_table=self.table,
            input_layout="TND",
            block_size=BLOCK,
            actual_seq_lengths=[1, 2],
            actual_seq_lengths_kv=kv_lengths,
            num_heads=4,
            num_key_value_heads=2,
            scale=0.125,
            sparse_mode=3,
        )[0]

    def expected(self, kv_lengths: list[int]) -> Tensor:
        rows = []
        for i, length in enumerate(kv_lengths):
            k, v = (
                x[self.table.cpu()[i].long()].flatten(0, 1)[:length].unflatten(-1, (2, 64))
                for x in (self.key, self.value)
            )
            rows.append(attend(self.query[i : i + 1], k, v, causal=True))
        return torch.cat(rows)


def check_updated_lengths_hold_for_the_next_replay() -> None:
    attention = Attention()
    result: list[Tensor] = []
    graph = captured(lambda: result.append(attention([5, 6])), auto_dispatch_capture=True)
    for lengths in ([7, 100], [200, 1], [256, 128]):
        graph.update(cpu_update_input=[{"actual_seq_lengths_kv": lengths}])
        graph.replay()
        close(result[0], attention.expected(lengths))


def check_an_update_may_follow_the_replay_that_waits_for_it() -> None:
    attention = Attention()
    result: list[Tensor] = []
    graph = captured(lambda: result.append(attention([5, 6])), auto_dispatch_capture=True)
    for lengths in ([9, 10], [150, 3]):
        graph.replay()
        graph.update(cpu_update_input=[{"actual_seq_lengths_kv": lengths}])
        close(result[0], attention.expected(lengths))


def check_an_update_with_wrong_lengths_is_refused() -> None:
    attention = Attention()
    graph = captured(lambda: attention([5, 6]), auto_dispatch_capture=True)
    with refused(561002, "columns"):
        graph.update(cpu_update_input=[{"actual_seq_lengths_kv": [5, 1000]}])


def check_a_replay_that_nobody_updates_times_out() -> None:
    attention = Attention()
    graph = captured(lambda: attention([5, 6]), auto_dispatch_capture=True)
    graph.replay()
    with refused(507046, "event"):
        torch.npu.synchronize()
    graph.update(cpu_update_input=[{"actual_seq_lengths_kv": [5, 6]}])
    torch.npu.synchronize()


def check_a_replay_keeps_the_addresses_of_its_capture() -> None:
    """A cache that is allocated once more gets nothing of it. Where the first one is gone, the replay faults."""
    cache = torch.zeros(1 << 23).npu()
    graph = captured(lambda: cache[:4].add_(1))
    first, cache = cache, torch.zeros(1 << 23).npu()
    graph.replay()
    assert (first[:4].tolist(), cache[:4].tolist()) == ([1.0] * 4, [0.0] * 4)
    del first
    torch.npu.empty_cache()
    graph.replay()
    with refused(507035, "memory"):
        torch.npu.synchronize()
