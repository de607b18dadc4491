"""`npu-runner check`: what a job over an input would bring, before the night. Prints counts, limits, prices, and a fit.

Reads rows as a job does. Loads no weights, unless it is asked to answer a sample.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from npu_runner.batch.job.options import BatchOptions
from npu_runner.cli.options import add_some_options, given, read_size
from npu_runner.cli.parser import take_old_spelling
from npu_runner.config import RunnerConfig, from_keywords
from npu_runner.errors import ConfigError

if TYPE_CHECKING:
    from npu_runner.batch.check.run import Checked, Sample
    from npu_runner.batch.check.survey import Survey

_OF_JOB = {
    "allowed_media_dir", "max_row_bytes", "response_schema", "max_thinking_tokens", "repetition_detection",
    "no_repeat_ngram_size", "no_repeat_ngram_window", "no_repeat_ngram_exempt_ids", "data_parallel_size",
    "preprocessing_workers", "preprocessing_timeout", "max_media_bytes", "max_prompt_media_bytes",
    "worker_memory_bytes"}
_MILLION = 1_000_000


def add_check_arguments(parser: argparse.ArgumentParser) -> None:
    """All but those of the model."""
    parser.add_argument("-i", "--input", metavar="FILE", help="the rows of a job; - reads standard input")
    parser.add_argument("old_rows", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="answer N of the rows, evenly spread, and "
                        "say how long the job would take; at least twice --max-num-seqs for a time (default: none)")
    parser.add_argument("--device-memory", type=read_size, metavar="SIZE", help="memory of one device, like 64G: does "
                        "the model fit, by the arithmetic of doctor --fits? With --platform auto, an NPU is assumed")
    parser.add_argument("--input-price", type=float, metavar="X", help="of a million prompt tokens, in any currency")
    parser.add_argument("--output-price", type=float, metavar="X", help="of a million tokens of answers")
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")
    add_some_options(parser, BatchOptions, "as the job is given them", _OF_JOB)


@dataclass(frozen=True)
class _Prices:
    input: float | None
    output: float | None

    def of(self, num_prompt_tokens: int, num_output_tokens: int) -> dict[str, float]:
        """By kind; a price that was not given counts nothing and is left out."""
        found = {"prompts": (self.input, num_prompt_tokens), "answers": (self.output, num_output_tokens)}
        return {kind: price * count / _MILLION for kind, (price, count) in found.items() if price is not None}


def run(arguments: argparse.Namespace) -> int:
    """Print what was found. Returns 0 if all rows would be served, 1 if the model does not fit, 3 if rows fail."""
    take_old_spelling(arguments, "old_rows", "check ROWS")
    if arguments.input is None:
        raise ConfigError("-i/--input: name the file of rows, or - for standard input")
    if arguments.sample < 0:
        raise ConfigError(f"--sample: {arguments.sample} is not a number of rows")
    named = given(arguments, RunnerConfig, BatchOptions) | {"output": "-"}
    config, options = from_keywords(named, RunnerConfig, BatchOptions)
    fits, most_len = True, None
    fit: list[str] = []
    if arguments.device_memory is not None:
        fits, fit, most_len = _fit(config, arguments.device_memory)
    found = _check(config, options, arguments.sample, most_len)
    prices = _Prices(arguments.input_price, arguments.output_price)
    if arguments.json:
        print(json.dumps(as_values(found, prices) | ({"fits": fits} if fit else {}), indent=2))
    else:
        print("\n".join([*as_lines(found, prices), *fit]))
    return 1 if not fits else 3 if found.survey.num_failed else 0


def _check(config: RunnerConfig, options: BatchOptions, num_sampled: int, most_len: int | None) -> Checked:
    from tqdm import tqdm

    from npu_runner.batch.check.run import check_input

    with tqdm(unit=" rows", file=sys.stderr, disable=None, leave=False, desc="prepared") as bar:
        return check_input(config, options, num_sampled=num_sampled, most_model_len=most_len,
                           seen=lambda count: bar.update())


def _fit(config: RunnerConfig, device_bytes: int) -> tuple[bool, list[str], int]:
    """Whether it does, the lines that say it, and how long a sequence may be then."""
    from npu_runner.cli.checkpoint_folder import checkpoint_folder
    from npu_runner.cli.doctor_fits import as_lines as fit_lines
    from npu_runner.cli.doctor_fits import estimate, platform_with_devices

    platform = platform_with_devices(config.platform, "--device-memory")
    with checkpoint_folder(config.model, config.revision) as folder:
        found, remedies = estimate(folder, config.replace(platform=platform.name), platform, device_bytes)
    first, *rest = fit_lines(found, platform.name, remedies)
    return found.fits, [f"fit       {first}", *(f"          {line}" for line in rest)], found.max_model_len


def as_values(found: Checked, prices: _Prices) -> dict[str, Any]:
    survey, sample = found.survey, found.sample
    num_prompt_tokens = sum(survey.prompt_tokens)
    values = survey.to_json() | {"price_at_most": prices.of(num_prompt_tokens, survey.most_output_tokens),
                                 "memory_may_cut_max_model_len": found.memory_may_cut}
    if sample is not None:
        values["sample"] = sample.to_json() | {"price": prices.of(num_prompt_tokens, sample.tokens)}
    return values


def as_lines(found: Checked, prices: _Prices) -> list[str]:
    survey, sample = found.survey, found.sample
    lines = [*_rows(survey), *_sizes(survey)]
    if found.memory_may_cut:
        lines.append("memory    only the device's memory decides whether a start cuts max_model_len; --device-memory "
                     "SIZE or --kv-cache-bytes SIZE says it here")
    num_prompt_tokens = sum(survey.prompt_tokens)
    at_most = prices.of(num_prompt_tokens, survey.most_output_tokens)
    lines += [f"price     at most {_price(at_most)}"] if at_most else []
    if sample is None:
        return lines
    expected = prices.of(num_prompt_tokens, sample.tokens)
    return [*lines, *_sampled(sample), *([f"price     as the sample has it {_price(expected)}"] if expected else [])]


def _rows(survey: Survey) -> list[str]:
    total = survey.num_served + survey.num_failed
    lines = [f"rows      {total:,}: {survey.num_served:,} would be served, {survey.num_failed:,} would fail"]
    for code, count in survey.failures.most_common():
        lines.append(f"fail      {count:,} {code}")
        lines += [f"          line {example.line}, {example.custom_id!r}: {example.message}"
                  for example in survey.examples[code]]
    return lines


def _sizes(survey: Survey) -> list[str]:
    values = survey.to_json()
    if not survey.num_served:
        return []
    prompts, images = values["prompt_tokens"], values["images"]
    lines = [f"prompts   {_range(prompts)} tokens, {prompts['total']:,} in all; max_model_len {survey.max_model_len:,}"]
    if images["total"]:
        lines.append(f"images    {_range(images)} a row, {images['total']:,} in all with {images['tokens']:,} of the "
                     "prompts' tokens; a pair of a video's frames counts as one")
    if survey.most_output_tokens:
        lines.append(f"answers   {survey.num_sequences:,}, of at most {survey.most_output_tokens:,} tokens in all")
    if survey.num_unlimited:
        lines.append(f"          {survey.num_unlimited:,} rows have no max_tokens: answers may fill max_model_len")
    if survey.num_short:
        lines.append(f"          {survey.num_short:,} rows leave less than their max_tokens below max_model_len")
    return lines


def _range(values: dict[str, int]) -> str:
    return (f"{values['least']:,} to {values['most']:,} (median {values['median']:,}, 95 % up to "
            f"{values['95_percent_below']:,})")


def _sampled(sample: Sample) -> list[str]:
    tally = sample.summary.tally
    answers = f"{tally.num_answered} answered, {tally.num_failed} failed"
    shares = "".join(f", {sample.share(count):.1%} {name}" for name, count in (
        ("cut off", tally.num_cut_off), ("repetition", tally.num_repetition), ("unparsed", tally.num_unparsed)))
    lines = [f"sample    {sample.num_rows} rows: {answers}{shares}"]
    if sample.seconds is None:
        lines.append(f"time      too few to say: {sample.num_rows} rows where {2 * sample.batch} are needed, twice the "
                     f"{sample.batch} sequences that are decoded at a time")
        return lines
    least, most = sample.seconds
    return [*lines, f"time      {_duration(least)} to {_duration(most)} for {sample.num_all:,} rows on this host, with "
            f"the start; some {sample.tokens:,} tokens of answers"]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _price(parts: dict[str, float]) -> str:
    shown = {kind: f"{value:,.2f}" if value >= 1 else f"{value:.4f}" for kind, value in parts.items()}
    return " + ".join(f"{value} for {kind}" for kind, value in shown.items())
