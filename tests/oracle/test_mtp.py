"""Drafts of a model's own head: its logits are those of a float64 forward at every place, and answers those of plain
steps. The forward is in mtp_reference.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from npu_runner import LLM, SamplingParams
from npu_runner.request.outputs import RequestOutput
from npu_runner.request.prompt_inputs import PromptInputs
from tests.oracle.mtp_reference import Head64, run_target, with_head
from tests.oracle.running import SMALL, runner_of
from tests.oracle.test_families import prompts_of
from tests.runner.test_several_tokens import knows

GREEDY = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
QUIET = 0.003
"""Makes a head that mostly agrees, see `with_head`."""
LONG = [(index * 7) % 251 for index in range(150)]
ROUNDS: list[dict[str, list[int]]] = [
    {"a-0": [7], "b-1": LONG[20:85], "c-2": LONG},  # one that is cut leaves a snapshot behind 128 tokens
    {"parts behind 100-3": LONG[:100] + LONG[:60]},  # takes one behind 64
    {"parts behind 70-4": LONG[:70] + LONG[20:50], "again-5": LONG},
    {"parts behind 64-6": LONG[:64] + LONG[:40]},  # the pair at the end of the prefix is another one
    {"once more-7": LONG[:90]},
]
TOLERANCE = 1e-4
"""Of the largest logit: ours are float32, and later drafts go on from what earlier ones made."""


def mtp(num: int) -> dict[str, Any]:
    return {"speculative_config": {"method": "mtp", "num_speculative_tokens": num}, "async_scheduling": False}


@dataclass(frozen=True)
class Draft:
    """Of the sequence of a request: its `number`th draft behind the pair at `place`, from 0 on."""

    request_id: str
    place: int
    number: int
    logits_V: Tensor


@contextmanager
def recorded_drafts(llm: LLM) -> Iterator[list[Draft]]:
    """All that the head computes inside, where a row's blocks have a place for it."""
    steps: Any = runner_of(llm).steps
    found: list[Draft] = []
    go_on, most_probable = steps._go_on, steps._most_probable
    logits: list[Tensor] = []

    def note_logits(made_BD: Tensor) -> Tensor:
        logits.append(steps.model.compute_logits(made_BD).float().cpu().clone())
        return most_probable(made_BD)

    def note_rows(made_BD: Tensor, ends: Any, most: int) -> Any:
        names = {seq.slot: seq.request_id for seq in llm.engine.scheduler.running}
        del logits[:]
        proposed = go_on(made_BD, ends, most)
        for number, logits_BV in enumerate(logits):
            for row, (slot, length) in enumerate(zip(ends.slots_B.tolist(), ends.lens_B.tolist(), strict=True)):
                if number < proposed.counts_B[row] and slot in names:
                    found.append(Draft(names[slot], length - 1, number, logits_BV[row]))
        return proposed

    steps._go_on, steps._most_probable = note_rows, note_logits
    try:
        yield found
    finally:
        del steps._go_on, steps._most_probable


class Expected:
    """Logits of drafts behind each place of a sequence."""

    def __init__(self, path: Path, token_ids: Sequence[int], images: Sequence[Any], *, is_raw: bool = False):
        self.head, self.run = Head64(path), run_target(path, token_ids, images)
        self.hidden_TD = self.run.raw_TD if is_raw else self.run.normed_TD
        self.drafts: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def logits(self, place: int, number: int) -> Tensor:
        """(V,)"""
        next_TD, hidden_TD = self.run.embedded_TD[1 : place + 2], self.hidden_TD[: place + 1]
        positions = self.run.positions[..., : place + 1]
        for count in range(number + 1):
            made_TD = self.head(next_TD, hidden_TD, positions)
            logits_V = self.head.logits(made_TD[-1:])[0]
            if count < number:
                next_TD = torch.cat([next_TD, self.head.embedding[logits_V.argmax()][None]])
                hidden_TD = torch.cat([hidden_TD, made_TD[-1:]])
                positions = torch.cat([positions, positions[..., -1:] + 1], dim=-1)
        return logits_V


def assert_drafts_are_the_heads(path: Path, drafts: Sequence[Draft], outputs: dict[str, RequestOutput],
                                prompts: dict[str, tuple[PromptInputs, Sequence[Any]]]) -> None:
    worst = 0.0
    for name, (prompt, images) in prompts.items():
        tokens = [*prompt.token_ids, *outputs[name].token_ids]
        expected = Expected(path, tokens, images)
        of_this = [draft for draft in drafts if draft.request_id == name]
        assert {draft.number for draft in of_this} >= {0}
        for draft in of_this:
            theirs_V = expected.logits(draft.place, draft.number)
            worst = max(worst, float((draft.logits_V - theirs_V).abs().max() / theirs_V.abs().max()))
            assert worst < TOLERANCE, f"{name}, place {draft.place} of {len(tokens)}, draft {draft.number}: {worst:.1e}"


def run(llm: LLM, prompts: dict[str, PromptInputs], params: SamplingParams = GREEDY) -> dict[str, RequestOutput]:
    found: dict[str, RequestOutput] = {}
    for name, prompt in prompts.items():
        llm.engine.add_request(name, prompt, params)
    while llm.engine.has_unfinished_requests():
        found.update({output.request_id: output for output in llm.engine.step()})
    return found


def test_drafts_of_prompts_and_answers_are_those_of_the_definition(checkpoint: Any, tmp_path: Path) -> None:
    """Of rows together, whose prompts are cut into chunks; then behind prefixes that the cache has, where others go on
    with other tokens. Of the drafts of a step, which are given here, some are kept. A head that read the state before
    the last norm would give other logits."""
    path = with_head(checkpoint("qwen3_5_text"), tmp_path / "head")
    prompts = {name: PromptInputs(tokens) for names in ROUNDS for name, tokens in names.items()}
    with LLM(path, platform="cpu", max_num_batched_tokens=64, **SMALL) as llm:
        plain = run(llm, prompts)
    with LLM(path, platform="cpu", max_num_batched_tokens=64, **mtp(3), **SMALL) as llm:
        knows(llm, [plain[name] for name in sorted(plain, key=lambda name: int(name.rpartition("-")[2]))], 3, 0.3)
        outputs: dict[str, RequestOutput] = {}
        with recorded_drafts(llm) as drafts:
            for names in ROUNDS:
                outputs |= run(llm, {name: prompts[name] for name in names})
        stats = llm.stats()
    assert {name: output.token_ids for name, output in outputs.items()} == {
        name: output.token_ids for name, output in plain.items()}
    assert {name: output.num_cached_tokens for name, output in outputs.items() if output.num_cached_tokens} == {
        "parts behind 70-4": 64, "again-5": 128, "once more-7": 64}
    assert stats.num_draft_tokens > stats.num_accepted_tokens > 10
    assert {draft.number for draft in drafts} == {0, 1, 2}
    assert_drafts_are_the_heads(path, drafts, outputs, {name: (prompt, []) for name, prompt in prompts.items()})
    tokens = [*prompts["b-1"].token_ids, *outputs["b-1"].token_ids]
    raw_V, normed_V = (Expected(path, tokens, [], is_raw=is_raw).logits(20, 0) for is_raw in (True, False))
    assert (raw_V - normed_V).abs().max() > 100 * TOLERANCE * normed_V.abs().max()


def test_a_head_that_agrees_has_its_drafts_kept(checkpoint: Any, tmp_path: Path) -> None:
    """Greedy and drawn, with a schema and without; answers are those of plain steps, in fewer of them."""
    path = with_head(checkpoint("qwen3_5_text"), tmp_path / "head", quiet=QUIET)
    params = [GREEDY.replace(max_tokens=30), GREEDY.replace(temperature=0.7, seed=3, max_tokens=20),
              GREEDY.replace(structured_outputs={"regex": "[a-z]{9,12}(,[0-9]{3})*"}, max_tokens=20, ignore_eos=False),
              GREEDY.replace(repetition_penalty=1.2, max_tokens=20)]
    prompts = [PromptInputs(LONG[start : start + 5]) for start in range(len(params))]
    found = []
    for settings in ({}, mtp(3)):
        with LLM(path, platform="cpu", **settings, **SMALL) as llm:
            found.append([output.token_ids for output in llm.generate(prompts, params)])
            stats = llm.stats()
    assert found[0] == found[1]
    assert stats.num_mtp_drafted > stats.num_mtp_accepted > 20
    assert stats.num_draft_tokens == stats.num_mtp_drafted + stats.num_forced_drafted


@pytest.mark.full("pictures, experts and Qwen3-Next; text alone stays, and pictures with the embedded model")
@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_5_moe_text", "qwen3_next"])
def test_drafts_of_other_families_are_those_of_the_definition(model_type: str, checkpoint: Any, tmp_path: Path) -> None:
    path = with_head(checkpoint(model_type), tmp_path / "head")
    with LLM(path, platform="cpu", max_num_batched_tokens=64, **mtp(2), **SMALL) as llm:
        found, images = prompts_of(llm, model_type)
        prompts = {f"r-{index}": prompt for index, prompt in enumerate(found)}
        with recorded_drafts(llm) as drafts:
            outputs = run(llm, prompts)
    assert_drafts_are_the_heads(path, drafts, outputs, {
        name: (prompt, shown) for (name, prompt), shown in zip(prompts.items(), images, strict=True)})
