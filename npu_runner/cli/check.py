"""`npu-runner check`: validates the rows of a job before it runs. Prints counts, limits, prices, and a memory fit.

Reads rows as a job does. Loads no weights, unless it answers a sample.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from npu_runner.batch.job.options import BatchOptions
from npu_runner.cli.options import add_model_options, add_some_options, read_model_settings, read_size
from npu_runner.cli.parser import Commands, accept_old_spelling, add_command, print_result
from npu_runner.config import RunnerConfig
from npu_runner.errors import ConfigError

if TYPE_CHECKING:
    from npu_runner.batch.check.run import Checked, Sample
    from npu_runner.batch.check.survey import Survey

_JOB_OPTIONS = {
    "allowed_media_dir", "max_row_bytes", "response_schema", "max_thinking_tokens", "repetition_detection",
    "no_repeat_ngram_size", "no_repeat_ngram_window", "no_repeat_ngram_exempt_ids", "data_parallel_size",
    "preprocessing_workers", "preprocessing_timeout", "max_media_bytes", "max_prompt_media_bytes",
    "worker_memory_bytes", "pdf_passwords", "ladder", "ladder_reader"}
_MILLION = 1_000_000


def add(commands: Commands) -> None:
    parser = add_command(
        commands, "check", run, "say which rows of a job would fail, before it runs",
        "Prepares every row as a job does, without weights, and says which would fail and how large the "
        "others are. Exit status 0: every row would be served, 3: some would fail, 1: the model does not fit.")
    parser.add_argument("-i", "--input", metavar="FILE", help="the rows of a job; - reads standard input")
    parser.add_argument("old_rows", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="answer N of the rows, evenly spread, and "
                        "say how long the job would take; at least twice --max-num-seqs for a time (default: none)")
    parser.add_argument("--device-memory", type=read_size, metavar="SIZE", help="memory of one device, like 64G: does "
                        "the model fit, by the arithmetic of doctor --fits? With --platform auto, an NPU is assumed")
    parser.add_argument("--input-price", type=float, metavar="X", help="of a million prompt tokens, in any currency")
    parser.add_argument("--output-price", type=float, metavar="X", help="of a million tokens of answers")
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")
    add_some_options(parser, BatchOptions, "as the job is given them", _JOB_OPTIONS)
    add_model_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the result. Returns 0 if all rows would be served, 1 if the model does not fit, 3 if rows fail."""
    accept_old_spelling(arguments, "old_rows", "check ROWS")
    if arguments.input is None:
        raise ConfigError("-i/--input: name the file of rows, or - for standard input")
    if arguments.sample < 0:
        raise ConfigError(f"--sample: {arguments.sample} is not a number of rows")
    config, options = read_model_settings(arguments, BatchOptions, output="-")
    fits, most_len = True, None
    fit: list[str] = []
    if arguments.device_memory is not None:
        fits, fit, most_len = _fit(config, arguments.device_memory)
    checked = _check(config, options, arguments.sample, most_len)
    survey, sample = checked.survey, checked.sample
    price_at_most = _prices(arguments, survey, survey.most_output_tokens)
    price_of_sample = {} if sample is None else _prices(arguments, survey, sample.tokens)
    values = survey.to_json() | {"price_at_most": price_at_most, "memory_may_cut_max_model_len": checked.memory_may_cut,
                                  "equal_rows": checked.num_equal}
    values |= {} if sample is None else {"sample": sample.to_json() | {"price": price_of_sample}}
    values |= {"fits": fits} if fit else {}
    lines = [*_rows(survey), *_sizes(survey)]
    if checked.num_equal:
        lines.append(f"equal     {checked.num_equal:,} rows equal an earlier one; tokens, prices and times count them, "
                     "and a job copies the answers of those that are greedy or have a seed")
    if checked.memory_may_cut:
        lines.append("memory    only the device's memory decides whether a start cuts max_model_len; --device-memory "
                     "SIZE or --kv-cache-bytes SIZE says it here")
    lines += [f"price     at most {_price(price_at_most)}"] if price_at_most else []
    lines += [] if sample is None else _sampled(sample)
    lines += [f"price     as the sample has it {_price(price_of_sample)}"] if price_of_sample else []
    print_result(arguments, values, [*lines, *fit])
    return 1 if not fits else 3 if survey.num_failed else 0


def _prices(arguments: argparse.Namespace, survey: Survey, num_output_tokens: int) -> dict[str, float]:
    """By kind; a price that was not given counts nothing and is left out."""
    parts = {"prompts": (arguments.input_price, sum(survey.prompt_tokens)),
             "answers": (arguments.output_price, num_output_tokens)}
    return {kind: price * count / _MILLION for kind, (price, count) in parts.items() if price is not None}


def _check(config: RunnerConfig, options: BatchOptions, num_sampled: int, most_len: int | None) -> Checked:
    from tqdm import tqdm

    from npu_runner.batch.check.run import check_input

    with tqdm(unit=" rows", file=sys.stderr, disable=None, leave=False, desc="prepared") as bar:
        return check_input(config, options, num_sampled=num_sampled, most_model_len=most_len,
                           seen=lambda count: bar.update())


def _fit(config: RunnerConfig, device_bytes: int) -> tuple[bool, list[str], int]:
    """Whether the model fits, the lines that say it, and the longest sequence then."""
    from npu_runner.cli.checkpoint_folder import checkpoint_folder
    from npu_runner.cli.doctor_fits import as_lines as fit_lines
    from npu_runner.cli.doctor_fits import estimate, platform_with_devices

    platform = platform_with_devices(config.platform, "--device-memory")
    with checkpoint_folder(config.model, config.revision) as folder:
        found, remedies = estimate(folder, config.replace(platform=platform.name), platform, device_bytes)
    first, *rest = fit_lines(found, platform.name, remedies)
    return found.fits, [f"fit       {first}", *(f"          {line}" for line in rest)], found.max_model_len


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
