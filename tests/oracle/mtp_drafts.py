"""What tests of drafts of a model's own head have in common: a run, the drafts that the head makes, and those of the
definition.

V vocabulary, T tokens, D hidden size, B rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from npu_runner import LLM, SamplingParams
from npu_runner.request.outputs import RequestOutput
from npu_runner.request.prompt_inputs import PromptInputs
from tests.oracle.mtp_reference import Head64, run_target
from tests.oracle.running import SMALL, runner_of

LONG = [(index * 7) % 251 for index in range(150)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
QUIET = 0.003
"""Makes a head that mostly agrees, see `with_head`."""
TOLERANCE = 1e-4
"""Of the largest logit: ours are float32, and later drafts go on from what earlier ones made."""


def mtp(num: int) -> dict[str, Any]:
    return {"speculative_config": {"method": "mtp", "num_speculative_tokens": num}}


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
    go_on, most_probable = steps._propose, steps._most_probable
    logits: list[Tensor] = []

    def note_logits(made_BD: Tensor) -> Tensor:
        logits.append(steps.model.compute_logits(made_BD).float().cpu().clone())
        return most_probable(made_BD)

    def note_rows(ends: Any, state_slots_B: Tensor, most: int) -> Any:
        names = {seq.slot: seq.request_id for seq in llm.engine.scheduler.running}
        del logits[:]
        proposed = go_on(ends, state_slots_B, most)
        for number, logits_BV in enumerate(logits):
            for row, (slot, length) in enumerate(zip(ends.slots_B.tolist(), ends.lens_B.tolist(), strict=True)):
                if number < proposed.counts_B[row] and slot in names:
                    found.append(Draft(names[slot], length - 1, number, logits_BV[row]))
        return proposed

    steps._propose, steps._most_probable = note_rows, note_logits
    try:
        yield found
    finally:
        del steps._propose, steps._most_probable


class Expected:
    """Logits of drafts behind each place of a sequence."""

    def __init__(self, path: Path, token_ids: Sequence[int], images: Sequence[Any], *, is_raw: bool = False):
        self.head, self.run = Head64(path), run_target(path, token_ids, images)
        self.hidden_TD = self.run.raw_TD if is_raw else self.run.normed_TD
        self.first_TD = self.head(self.run.embedded_TD[1:], self.hidden_TD[:-1], self.run.positions[..., :-1])
        self.made: dict[int, list[Tensor]] = {}

    def logits(self, place: int, number: int) -> Tensor:
        """(V,)"""
        made = self.made.setdefault(place, [self.first_TD[place]])
        while len(made) <= number:
            made.append(self._behind(place, made))
        return self.head.logits(made[number])

    def _behind(self, place: int, made: list[Tensor]) -> Tensor:
        """(D,): the next one; each goes on from what the one before it made, and the token that this names."""
        drafts = [self.head.embedding[self.head.logits(made_D).argmax()] for made_D in made]
        behind = self.run.positions[..., place + 1 : place + 2] + torch.arange(len(made))
        return self.head(torch.cat([self.run.embedded_TD[1 : place + 2], torch.stack(drafts)]),
                         torch.cat([self.hidden_TD[: place + 1], torch.stack(made)]),
                         torch.cat([self.run.positions[..., : place + 1], behind], dim=-1))[-1]


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
        llm.engine.add_request(name, prompt, llm.processor.resolve_params(params))
    while llm.engine.has_unfinished_requests():
        found.update({output.request_id: output for output in llm.engine.step()})
    return found


def assert_ranks_draft_as_one(path: Path, *, platform: str, **ranks: Any) -> None:
    prompts = [PromptInputs(LONG[start : start + 70]) for start in range(4)]
    found = []
    for settings in ({}, ranks):
        with LLM(path, platform=platform, **settings, **mtp(3), **SMALL) as llm:
            tokens = [output.token_ids for output in llm.generate(prompts, GREEDY.replace(max_tokens=30))]
            stats = llm.stats()
            found.append((tokens, stats.num_mtp_drafted, stats.num_mtp_accepted))
    assert found[0] == found[1]
    assert found[1][2] > 0
