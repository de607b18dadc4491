"""Rules that lead to rules, and a program that asks for them in every way in: it ends well if each is its row's own
error and its neighbours are answered. `python -m tests.oracle.chained_rules FOLDER chat predictor job replicas`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from npu_runner import LLM, SamplingParams
from npu_runner.assets import SHAPES_VL

_OVER: dict[str, Callable[[Any], Any]] = {
    "references": lambda link: link,
    "items": lambda link: {"type": "array", "items": link},
    "anyOf": lambda link: {"anyOf": [{"type": "null"}, link]},
    "oneOf": lambda link: {"oneOf": [link]},
    "allOf": lambda link: {"allOf": [link]},
    "prefixItems": lambda link: {"type": "array", "prefixItems": [link]},
    "properties": lambda link: {"type": "object", "properties": {"a": link}},
    "additionalProperties": lambda link: {"type": "object", "additionalProperties": link},
}
CHAINS = (*_OVER, "rules", "terminals")
_SETTINGS: dict[str, Any] = {"platform": "cpu", "max_num_seqs": 8, "max_model_len": 256, "kv_cache_bytes": 32 << 20}
_LENGTHS = (1000, 2494, 2672)
_CODE = "invalid_structured_outputs"


def chained(kind: str, length: int) -> dict[str, Any]:
    """Fields of StructuredOutputsParams."""
    if kind in _OVER:
        links = {f"d{number}": _OVER[kind]({"$ref": f"#/$defs/d{number + 1}"}) for number in range(length)}
        return {"json": {"$defs": {**links, f"d{length}": {"type": "integer"}}, "$ref": "#/$defs/d0"}}
    name = "r" if kind == "rules" else "T"
    lines = [f"{name}{number}: {name}{number + 1}" for number in range(length)]
    return {"grammar": "\n".join([f"start: {name}0", *lines, f'{name}{length}: "a"'])}


def all_rules() -> list[dict[str, Any]]:
    """And numbers that the library recurses over without end."""
    numbers = {"json": {"type": "integer", "minimum": -(10**21), "maximum": -(10**20)}}
    inside = {"grammar": f"start: %json {json.dumps(numbers['json'])}"}
    return [*(chained(kind, length) for kind in CHAINS for length in _LENGTHS), numbers, inside]


def ask_chat(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=4, ignore_eos=True)]
    params += [SamplingParams(structured_outputs=rule) for rule in all_rules()]
    served = {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 1}
    params += [SamplingParams(structured_outputs={"json": served}, max_tokens=60)]
    talks = [[{"role": "user", "content": "circle"}] for _ in params]
    first, *refused, last = llm.chat(talks, params, return_errors=True)
    assert (first.finish_reason, last.finish_reason) == ("length", "stop"), (first, last)
    for output in refused:
        assert output.completions[0].error_code == _CODE, output


def chat(folder: Path) -> None:
    with LLM(SHAPES_VL, **_SETTINGS, preprocessing_workers=0) as llm:
        ask_chat(llm)


def replicas(folder: Path) -> None:
    with LLM(SHAPES_VL, **_SETTINGS, data_parallel_size=2, preprocessing_workers=1) as llm:
        ask_chat(llm)


def predictor(folder: Path) -> None:
    from npu_runner.ray_data import LLMPredictor

    rules = all_rules()
    predict = LLMPredictor(str(SHAPES_VL), **_SETTINGS, preprocessing_workers=0)
    params = [*({"structured_outputs": rule} for rule in rules), {"max_tokens": 3}]
    columns = predict({"prompt": ["circle"] * len(params), "sampling_params": params})
    errors = list(columns["__inference_error__"])
    assert all(_CODE in error for error in errors[:-1]), errors
    assert not errors[-1]


def job(folder: Path) -> None:
    from npu_runner.cli import main as cli_module

    bodies = [{"prompt": "circle", "structured_outputs": rule} for rule in all_rules()]
    bodies += [{"prompt": "circle", "max_tokens": 3}] * 5
    rows = [{"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
            for number, body in enumerate(bodies)]
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code = cli_module.main(["batch", "-i", str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl"),
                            "--model", str(SHAPES_VL), "--platform", "cpu",
                            "--kv-cache-bytes", "32M", "--progress", "off"])  # fmt: skip
    found = {row["custom_id"]: row for row in map(json.loads, (folder / "out.jsonl").read_text().splitlines())}
    assert (code, len(found)) == (3, len(rows))
    codes = [(found[str(number)]["error"] or {}).get("code") for number in range(len(rows))]
    assert codes == [_CODE] * (len(rows) - 5) + [None] * 5, codes


def main() -> None:
    folder, *ways = sys.argv[1:]
    for way in ways:
        {"chat": chat, "replicas": replicas, "predictor": predictor, "job": job}[way](Path(folder))
    print(f"{len(ways)} ways")


if __name__ == "__main__":
    main()
