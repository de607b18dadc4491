"""The doctor's last checks: the embedded models answer questions about drawings, each in a process of its own.

    python -m npu_runner.cli.doctor_generation MODEL PLATFORM GRAPH_MODE NUM_RANKS REPORTS

A library that crashes or hangs is then a failed check. Knows nothing of what the host has installed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from npu_runner.assets import DOCTOR, EMBEDDED
from npu_runner.platforms.examination import Examination
from npu_runner.platforms.host import Check, Outcome, run_program


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question about an image or two of assets/doctor. Both models are sure of its answer (every token's log
    probability leads by 10 and more), so a wrong one is a fault and not rounding."""

    images: list[str]
    question: str
    answer: str
    system: str | None

    def conversation(self) -> list[dict[str, Any]]:
        """As OpenAI writes it, with PIL images."""
        from PIL import Image  # not before: the doctor itself runs where nothing is installed, and says so

        images = [{"type": "image", "image": Image.open(DOCTOR / name)} for name in self.images]
        user = {"role": "user", "content": [*images, {"type": "text", "text": self.question}]}
        return [user] if self.system is None else [{"role": "system", "content": self.system}, user]


def read_questions() -> list[Question]:
    """A colour in the second of two images, a colour, a count, a list of several tokens."""
    return [Question(**fields) for fields in json.loads((DOCTOR / "questions.json").read_text())]


def check_generation(examination: Examination, graph_mode: str, num_ranks: int,
                     timeout_seconds: float) -> Iterator[Check]:
    """One check of each embedded model."""
    platform = examination.platform.name
    ranks = f", {num_ranks} ranks" if num_ranks > 1 else ""
    for model in ("shapes-vl", "shapes-hybrid"):  # the dense one first: what it cannot do a hybrid cannot either
        arguments = [model, platform, graph_mode, str(num_ranks)]
        name = f"{model} ({platform}, {graph_mode}{ranks})"
        outcome = run_program(examination.host, __name__, arguments, timeout_seconds)
        yield judge(examination, name, graph_mode, outcome)


def judge(examination: Examination, name: str, graph_mode: str, outcome: Outcome) -> Check:
    """Whether the answers are there, and the right ones."""
    if outcome.error is not None or not outcome.reports:
        return Check(name, "failed", outcome.error or "ended without an answer", examination.explain(outcome))
    answers, graphs = outcome.reports[-1]["answers"], outcome.reports[-1]["graphs"]
    wrong = [f"{question.question!r}: {answer!r} instead of {question.answer!r}"
             for question, answer in zip(read_questions(), answers, strict=True) if answer != question.answer]
    if wrong:
        return Check(name, "failed", f"{len(wrong)} of {len(answers)} answers are wrong: {'; '.join(wrong)}",
                     examination.if_wrong)
    if graph_mode != "eager" and not any(letter.isdigit() for letter in graphs):
        return Check(name, "warning", f"{len(answers)} answers, all right, but no graph was made ({graphs})",
                     examination.explain(outcome, "the log above the answers says why"))
    used = "" if graph_mode == "eager" else f"; graphs for {graphs}"
    return Check(name, "ok", f"{len(answers)} answers, all right{used}")


def answer(model: str, platform: str, graph_mode: str, num_ranks: int) -> dict[str, Any]:
    """Answers to the questions, with settings that fit beside another job on the device."""
    from npu_runner import LLM, SamplingParams

    questions = read_questions()
    settings: dict[str, Any] = {"platform": platform, "graph_mode": graph_mode, "tensor_parallel_size": num_ranks}
    if graph_mode != "eager":
        settings |= {"graph_batch_sizes": (len(questions),), "use_graph_cache": False}
    with LLM(EMBEDDED[model], max_model_len=1024, max_num_seqs=len(questions), kv_cache_bytes=32 << 20,
             vision_cache_bytes=16 << 20, **settings) as llm:
        results = llm.chat([question.conversation() for question in questions],
                           SamplingParams(temperature=0, max_tokens=32), use_tqdm=False)
        return {"answers": [result.text for result in results], "graphs": llm.engine.info.graphs}


def main(arguments: list[str]) -> None:
    model, platform, graph_mode, num_ranks, reports = arguments
    found = answer(model, platform, graph_mode, int(num_ranks))
    with open(reports, "a") as file:
        file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
