"""`npu-runner models`: which model types are served, and how one checkpoint would be served, or why not. Shows page
readers, too.

Asks the strategies, as a start does; has no list of its own. Loads no weights and touches no device.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npu_runner.cli.checkpoint_folder import checkpoint_folder, is_bare_config
from npu_runner.cli.options import add_some_options, named_settings
from npu_runner.cli.parser import Commands, add_command, print_result
from npu_runner.config import RunnerConfig, from_keywords
from npu_runner.errors import ConfigError, RequestError
from npu_runner.platforms import AUTO, find_platform, platforms

if TYPE_CHECKING:
    from npu_runner.checkpoint.quantization import Quantization
    from npu_runner.platforms.platform import Platform
    from npu_runner.strategies import LoadStrategy

_COLUMNS = ("model_type", "images", "videos", "ranks", "prefix_cache", "decode_graphs", "strategy")
_MAKES = {"generate": "text", "embed": "vectors (/v1/embeddings)", "score": "scores (/v1/score, /v1/rerank)",
          "classify": "classes (/v1/classify)"}
OTHERS = "others"
"""It stands for all model types that only transformers knows."""


def add(commands: Commands) -> None:
    parser = add_command(
        commands, "models", run, "list the models that are served, or say whether a checkpoint is",
        "Prints what is served, by model_type. Of a model it says in one line how it would be served, or "
        "why not. Loads no weights and needs no device. Exit status 0: served, 1: not.")
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a checkpoint folder, a hub id or a bare config.json "
                        "(default: the table of all model types)")
    parser.add_argument("--json", action="store_true", help="print what is known as JSON")
    parser.add_argument("--reader", nargs="?", const="", metavar="NAME", help="show the file of a page reader, which "
                        "rows --reader reads (default: list the readers)")
    add_some_options(parser, RunnerConfig, "settings of MODEL", ("revision", "runner", "task"))


def run(arguments: argparse.Namespace) -> int:
    """Print the table, or one line about one model. Returns 1 if that one is not served."""
    settings = named_settings(arguments, RunnerConfig)
    if arguments.reader is not None:
        if arguments.model is not None:
            raise ConfigError(f"--reader shows a page reader and no model; leave {arguments.model!r} out")
        return _show_reader(arguments)
    if arguments.model is not None:
        found = explain(settings)
        print_result(arguments, found, [as_line(found)])
        return 0 if found["served"] else 1
    for name in settings.keys() - {"model"}:
        raise ConfigError(f"--{name} is a setting of a model; name one, or leave it out")
    rows = table()
    print_result(arguments, rows, [] if arguments.json else as_lines(rows))
    return 0


def _show_reader(arguments: argparse.Namespace) -> int:
    from npu_runner.readers.reader import read_reader, shipped_readers  # pydantic, which the table does not need

    if arguments.reader:
        print(read_reader(arguments.reader).to_json())
        return 0
    about = {name: reader.about for name, reader in shipped_readers().items()}
    width = max(map(len, about))
    print_result(arguments, about, [f"{name.ljust(width)}  {line}" for name, line in about.items()])
    return 0


def table() -> list[dict[str, Any]]:
    """The facts of each family, by model_type; last, of all models that are served through transformers."""
    from npu_runner.strategies import strategies_by_model_type
    from npu_runner.strategies.transformers_model import TransformersStrategy

    known = dict(sorted(strategies_by_model_type().items())) | {OTHERS: TransformersStrategy}
    return [{"model_type": model_type, **_facts(strategy)} for model_type, strategy in known.items()]


def _facts(strategy: type[LoadStrategy]) -> dict[str, Any]:
    with_graphs = [platform.name for platform in platforms() if set(platform.graph_modes) - {"eager"}]
    return {
        "images": strategy.is_multimodal, "videos": strategy.accepts_videos, "ranks": strategy.supports_ranks,
        "prefix_cache": _prefix_cache(has_states=strategy.has_states),
        "decode_graphs": with_graphs if strategy.supports_graphs else [],
        "strategy": f"{strategy.__module__}.{strategy.__qualname__}"}


def _prefix_cache(*, has_states: bool) -> str:
    return "snapshots" if has_states else "blocks"


def explain(settings: dict[str, Any]) -> dict[str, Any]:
    """The way in which `settings["model"]` would be served, or the reason why not, in the words of a start."""
    (config,) = from_keywords(settings, RunnerConfig)
    model = config.model
    try:
        with checkpoint_folder(model, config.revision) as folder:
            return {"model": model, "served": True, **_explain(folder, config)}
    except ConfigError as error:
        return {"model": model, "served": False, "reason": str(error)}


def _explain(folder: Path, named: RunnerConfig) -> dict[str, Any]:
    # Imported here: these import torch, and a folder that is no checkpoint is refused without it.
    from npu_runner.checkpoint.formats.reader import DequantisingReader, open_weights
    from npu_runner.checkpoint.quantization import read_quantization
    from npu_runner.strategies import pick_strategy
    from npu_runner.strategies.transformers_model import TransformersStrategy

    strategy = pick_strategy(folder)
    config = strategy.resolve_config(named.replace(model=str(folder)))
    quantization = read_quantization(folder)
    model_config = strategy.model_config_for(config)
    pooling = model_config.pooling
    facts = _facts(type(strategy)) | {"images": strategy.is_multimodal,
                                      "prefix_cache": _prefix_cache(has_states=bool(model_config.state_layers))}
    if not is_bare_config(named.model):
        if pooling is not None and pooling.task == "classify" and _gives_scores(strategy, config):
            facts |= {"scores": True}
        no_videos = strategy.processor(config).why_no_videos
        if facts["videos"] and no_videos is not None:
            facts |= {"videos": False, "why_no_videos": no_videos}
    stored: frozenset[str] | None = None
    if Path(named.model).expanduser().is_dir():  # of a hub id only small files need be there
        with open_weights(folder, quantization) as reader:
            if isinstance(reader, DequantisingReader):
                facts |= {"quantised_weights": reader.forms}
                stored = reader.weight_forms if named.quantization == "auto" else None
    if (method := _arithmetic(quantization, config, stored)) is not None:
        facts |= {"quantization": method}
    return {"model_type": model_config.model_type, "task": "generate" if pooling is None else pooling.task,
            "through_transformers": isinstance(strategy, TransformersStrategy), **facts}


def _gives_scores(strategy: LoadStrategy, config: RunnerConfig) -> bool:
    try:
        strategy.processor(config).check_task("score")
    except RequestError:
        return False
    return True


def _arithmetic(quantization: Quantization | None, config: RunnerConfig, stored: frozenset[str] | None) -> str | None:
    """The arithmetic of quantised weights on the named platform; without one on any, and where it differs. `stored`:
    the forms that weights have; None: their files were not read."""
    from npu_runner.checkpoint.quantization import arithmetic, resolve_format

    setting = resolve_format(quantization, config.quantization)

    def on(platform: Platform) -> str | None:
        forms = [form for form in platform.weight_forms if stored is None or form in stored]
        return arithmetic(quantization, setting, forms)

    if config.platform != AUTO:
        return on(find_platform(config.platform))
    method = arithmetic(quantization, setting, ())
    others = {platform.name: on(platform) for platform in platforms()}
    return method and method + "".join(f"; on {name}: {other}" for name, other in others.items() if other != method)


def as_line(found: dict[str, Any]) -> str:
    """The result of `explain` in one line."""
    if not found["served"]:
        reason = " ".join(found["reason"].split()).removeprefix(f"{found['model']}: ")
        return f"{found['model']}: not served: {reason}"
    way = "through transformers, by" if found["through_transformers"] else "by"
    inputs = ["text", *(kind for kind in ("images", "videos") if found[kind])]
    accepted = " and ".join(filter(None, (", ".join(inputs[:-1]), inputs[-1])))
    makes = " and ".join(_MAKES[task] for task in (found["task"], *["score"] * found.get("scores", False)))
    why_no_videos = f"; no videos: {found['why_no_videos']}" if "why_no_videos" in found else ""
    quantised = ""
    if "quantization" in found:
        weights = f" ({found['quantised_weights']})" if "quantised_weights" in found else ""
        quantised = f"; quantised weights{weights}: {found['quantization']}"
    return (f"{found['model']}: served as {found['model_type']}, {way} {found['strategy']}: {accepted} in, {makes} out"
            f"{why_no_videos}{quantised}")


def as_lines(rows: list[dict[str, Any]]) -> list[str]:
    """The table with its head, in columns, and what the last row stands for."""
    from npu_runner.strategies.transformers_model import REQUIRED, installed_version

    cells = [[name.replace("_", " ") if name != "model_type" else name for name in _COLUMNS],
             *([_cell(row[name]) for name in _COLUMNS] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(_COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    return [*lines, f"{OTHERS}: text models that only transformers knows; they need {REQUIRED}; installed: "
            f"{installed_version() or 'none'}"]


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(value) or "no"
    return {True: "yes", False: "no"}.get(value, str(value))
