"""Two ranks in processes of their own give what one gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from npu_runner import LLM
from tests.families import FAMILIES, RANKS, sees_images, split_by
from tests.oracle.image_prompts import LAYOUTS, make_prompts
from tests.oracle.running import MAX_NEW_TOKENS, SMALL, greedy, need_devices
from tests.oracle.scheduled_prompts import text_prompts

pytestmark = pytest.mark.ranks


@pytest.fixture(autouse=True)
def _two_devices(platform_name: str) -> None:
    need_devices(platform_name)


FAST, OTHERS = split_by(RANKS)


@pytest.mark.parametrize("model_type", FAST)
def test_two_ranks_equal_one(model_type: str, checkpoint: Any, platform_name: str, capfd: pytest.CaptureFixture[str]
                             ) -> None:
    assert_equal_one(model_type, checkpoint, platform_name)
    assert "Warning" not in capfd.readouterr().err, "ranks use no function that torch has given up"


@pytest.mark.full("families that go the way of one in the fast set (tests/families.py)")
@pytest.mark.parametrize("model_type", OTHERS)
def test_two_ranks_of_other_families_equal_one(model_type: str, checkpoint: Any, platform_name: str) -> None:
    assert_equal_one(model_type, checkpoint, platform_name)


# Of seven experts the last rank has one less than the others. On four ranks some steps choose none of a rank's.
WHOLE_EXPERTS = [(name, num_ranks) for name, family in FAMILIES.items() if family.has_experts for num_ranks in (2, 4)]
WHOLE_FAST = [("qwen3_5_moe", 2)]


@pytest.mark.parametrize(("model_type", "num_ranks"), WHOLE_FAST)
def test_ranks_with_whole_experts_equal_one(model_type: str, num_ranks: int, checkpoint: Any, platform_name: str
                                            ) -> None:
    assert_whole_experts_equal_one(model_type, num_ranks, checkpoint, platform_name)


@pytest.mark.full("two and four processes start for each family; one family on two ranks stays")
@pytest.mark.parametrize(("model_type", "num_ranks"), [case for case in WHOLE_EXPERTS if case not in WHOLE_FAST])
def test_ranks_with_whole_experts_of_other_families_equal_one(model_type: str, num_ranks: int, checkpoint: Any,
                                                              platform_name: str) -> None:
    assert_whole_experts_equal_one(model_type, num_ranks, checkpoint, platform_name)


def assert_whole_experts_equal_one(model_type: str, num_ranks: int, checkpoint: Any, platform_name: str) -> None:
    need_devices(platform_name, num_ranks)
    changes = {"num_experts": 7}
    if num_ranks == 4 and FAMILIES[model_type].has_states:
        changes |= {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
    assert_equal_one(model_type, checkpoint, platform_name, changes, tensor_parallel_size=num_ranks,
                     enable_expert_parallel=True)


def assert_equal_one(model_type: str, checkpoint: Any, platform_name: str, changes: dict[str, Any] | None = None,
                     **settings: Any) -> None:
    path: Path = checkpoint(model_type, **{**FAMILIES[model_type].ranks, **(changes or {})})

    def run(**settings: Any) -> list[list[int]]:
        with LLM(path, platform=platform_name, max_num_batched_tokens=64, **settings, **SMALL) as llm:
            prompts = make_prompts(llm, LAYOUTS[:7])[0] if sees_images(model_type) else text_prompts(llm)
            return [output.token_ids for output in llm.generate(prompts, greedy())]

    alone = run()
    assert run(**{"tensor_parallel_size": 2, **settings}) == alone
    assert all(len(tokens) == MAX_NEW_TOKENS for tokens in alone)


@pytest.mark.slow
@pytest.mark.full("two ranks compile at once on two cores; two ranks without graphs stay, as do graphs on npu")
def test_two_ranks_with_graphs_equal_one_without(checkpoint: Any, platform_name: str) -> None:
    path: Path = checkpoint("qwen3", num_hidden_layers=1)

    def run(**settings: Any) -> list[list[int]]:
        with LLM(path, platform=platform_name, **settings, **{**SMALL, "max_num_seqs": 4}) as llm:
            graphs = llm.engine.info.graphs.partition("; prefills")[0]
            assert graphs == ("4" if "graph_mode" in settings else "eager")
            return [output.token_ids for output in llm.generate(text_prompts(llm), greedy())]

    alone = run(enforce_eager=True)
    assert run(tensor_parallel_size=2, graph_mode="reduce-overhead", graph_batch_sizes=(4,)) == alone
