"""`npu-runner verify`: the engine's answers to some rows, scored by transformers in one forward per row.

The engine has ended and its memory is free before the reference loads. Knows nothing of how the result is shown.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from npu_runner.batch.check.reference import Reference
from npu_runner.batch.files.input_file import InputFile
from npu_runner.batch.files.row_book import RowBook
from npu_runner.batch.job.options import BatchOptions
from npu_runner.batch.job.row_server import CheckpointSide, RowServer, server_plan
from npu_runner.batch.rows.openai_response import why_unanswered
from npu_runner.checkpoint.model_config import GatedDeltaNetConfig, ModelConfig, MoEConfig
from npu_runner.config import RunnerConfig
from npu_runner.errors import ConfigError, RequestError
from npu_runner.request.outputs import RequestOutput
from npu_runner.request.prompt_inputs import PromptInputs
from npu_runner.request.sampling_params import SamplingParams
from npu_runner.serving.endpoint import Prepared


class Bounds(NamedTuple):
    """The largest median and gap of a right row. The gap may also be _GAP_OVER_MEDIAN medians."""

    median: float
    gap: float


FLOAT32 = Bounds(1e-3, 1e-3)
# Twice the worst of 200 clean rows, of tiny random checkpoints and of SmolLM2 (docs/batch.md).
BITS_16 = Bounds(0.14, 0.6)
SENSITIVE = Bounds(0.15, 7.0)
"""In 16 bits with experts, of which rounding chooses others, or states, in which it adds up."""
_GAP_OVER_MEDIAN = 4.0


@dataclass(frozen=True, kw_only=True)
class VerifiedRow:
    """`median`: of the differences of its tokens' log probabilities. `gap`: the largest difference between the log
    probabilities that the reference has for its own token and for ours, where the two are not the same."""

    name: str
    num_tokens: int
    median: float
    gap: float
    num_other: int
    """Tokens for which the reference has a more probable one."""
    is_fault: bool


@dataclass(frozen=True, kw_only=True)
class Verified:
    """`left_out`: rows that were not compared, each with the reason."""

    dtype: str
    reference: str
    bounds: Bounds
    rows: list[VerifiedRow]
    left_out: dict[str, str]

    @property
    def num_faults(self) -> int:
        return sum(row.is_fault for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "bounds": self.bounds._asdict(), "num_faults": self.num_faults}


def verify(config: RunnerConfig, options: BatchOptions, *, num_rows: int, max_tokens: int,
           say: Callable[[str], None] = lambda line: None) -> Verified:
    """Compare `num_rows` rows of `options.input`, evenly spread, with at most `max_tokens` tokens each. Raises
    ConfigError before the model is loaded if the reference cannot compute it, and if no row can be compared."""
    side = CheckpointSide(config)
    opened = side.checkpoint
    if config.load_format == "dummy":
        raise ConfigError("verify: load_format dummy has random weights, which the reference does not know")
    if opened.adapter is not None:
        raise ConfigError(f"verify: the reference does not merge adapters; leave lora {opened.adapter.path} out, or "
                          "merge it into a checkpoint")
    if opened.model_config.pooling is not None:
        raise ConfigError("verify: answers are compared, and this model is loaded for numbers that are pooled")
    reference = Reference(opened.path, opened.quantization)
    prepared, left_out = _prepare(config, options, side, num_rows)
    say(f"the model loads; it answers {len(prepared)} rows")
    with side.load(lambda: False, lambda phase: None) as engine:
        dtype, outputs = engine.describe()["dtype"], _answer(engine, side, prepared, max_tokens, left_out)
    del engine
    gc.collect()
    say(f"the reference loads: {reference.source}")
    reference.load()
    bounds, rows = _bounds(dtype, opened.model_config), []
    for each in prepared:
        name = str(each.name)
        if name in outputs:
            try:
                rows.append(_compare(reference, each, outputs[name], bounds))
            except ConfigError as error:
                left_out[name] = str(error)
    if not rows:
        reasons = (f"{name!r} is left out: {why}" for name, why in left_out.items())
        raise ConfigError(f"verify: no row can be compared; {next(reasons, 'the input has none')}")
    return Verified(dtype=dtype, reference=reference.source, bounds=bounds, rows=rows, left_out=left_out)


def _bounds(dtype: str, model_config: ModelConfig) -> Bounds:
    is_sensitive = any(isinstance(layer.mixer, GatedDeltaNetConfig) or isinstance(layer.channel, MoEConfig)
                       for layer in model_config.layers)
    return FLOAT32 if dtype == "float32" else SENSITIVE if is_sensitive else BITS_16


def _prepare(config: RunnerConfig, options: BatchOptions, side: CheckpointSide, num_rows: int
             ) -> tuple[list[Prepared], dict[str, str]]:
    """The rows that are to be answered, in the order of the input, and those that are left out."""
    prepared: list[Prepared] = []
    left_out: dict[str, str] = {}
    with InputFile(options.input) as file:
        scan = file.scan()
        count = min(num_rows, scan.num_rows)
        wanted = np.zeros(scan.num_rows, dtype=bool)
        wanted[np.arange(count) * scan.num_rows // max(1, count)] = True
        book = RowBook(scan, wanted, file.source)
        server = RowServer(server_plan(config, options, file.source, lambda config: side))
        with server:
            server.start(lambda: None, lambda event: None)
            for each in server.prepare(book):
                if each.error is None and isinstance(each.params, SamplingParams):
                    prepared.append(each)
                else:
                    name = f"line {each.line}" if each.name is None else each.name
                    left_out[name] = "its answer is no text" if each.error is None else each.error.message
    return sorted(prepared, key=lambda each: each.number), left_out


def _answer(engine: Any, side: CheckpointSide, prepared: list[Prepared], max_tokens: int, left_out: dict[str, str]
            ) -> dict[str, RequestOutput]:
    """By name. Rows are answered together, as a job answers them."""
    outputs: dict[str, RequestOutput] = {}
    for each in prepared:
        assert isinstance(each.params, SamplingParams), "others are left out"
        most = min(max_tokens, each.params.max_tokens or max_tokens)
        params = side.processor.resolve_params(SamplingParams(temperature=0, max_tokens=most, logprobs=0))
        try:
            engine.add_request(str(each.name), each.prompt, params)
        except RequestError as error:
            left_out[str(each.name)] = error.message
    while engine.has_unfinished_requests():
        for output in engine.step():
            if (reason := why_unanswered(output)) is None:
                outputs[output.request_id] = output
            else:
                left_out[output.request_id] = reason.message
    return outputs


def _compare(reference: Reference, prepared: Prepared, output: RequestOutput, bounds: Bounds) -> VerifiedRow:
    """Raises ConfigError for a row that the reference cannot be shown."""
    assert isinstance(prepared.prompt, PromptInputs), "a row with a text for its answer has one prompt"
    (completion,) = output.completions
    token_ids = completion.token_ids
    theirs_NV = reference.logprobs(prepared.prompt, token_ids)
    theirs_N = theirs_NV.gather(-1, torch.tensor(token_ids)[:, None])[:, 0]
    ours_N = torch.tensor([position.sampled.logprob for position in completion.logprobs or ()])
    median = float((ours_N - theirs_N).abs().median())
    gaps_N = theirs_NV.amax(-1) - theirs_N
    gap = float(gaps_N.max())
    # A number that is none is no difference that fits.
    is_right = median <= bounds.median and gap <= max(bounds.gap, _GAP_OVER_MEDIAN * median)
    return VerifiedRow(name=str(prepared.name), num_tokens=len(token_ids), median=median, gap=gap,
                       num_other=int((gaps_N > 0).sum()), is_fault=not is_right)
