"""A strategy of another package, some of whose tokens make a step fail. Tests install it with an entry point.

`Z` raises, `Q` runs out of memory, `X` kills its process, `K` fails as where another rank was killed, `J` holds the
interpreter's lock for four seconds. How often they do so is a matter of strikes.py.
"""

from __future__ import annotations

import ctypes
import json
import os
from pathlib import Path
from typing import Any

import tokenizers
import torch

from npu_runner.config import RunnerConfig
from npu_runner.errors import EngineDeadError
from npu_runner.prompts.processor import ChatProcessor
from npu_runner.strategies.qwen3 import Qwen3Strategy
from tests.faults.mortal_processor import MortalProcessor
from tests.faults.strikes import die, strikes

MODEL_TYPE = "poisoned"
GIL_SECONDS = 4


def install(site: Path) -> None:
    """What an installer leaves of a package with an entry point, in a folder for PYTHONPATH."""
    info = site / "poisoned-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: poisoned\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[npu_runner.strategies]\n{MODEL_TYPE} = {__name__}:PoisonedStrategy\n")


def poisoned_copy(model: Path, folder: Path) -> Path:
    """The same checkpoint, for this strategy."""
    folder.mkdir()
    for file in model.iterdir():
        if file.name == "config.json":
            config = json.loads(file.read_text())
            (folder / "config.json").write_text(json.dumps({**config, "model_type": MODEL_TYPE}))
        else:
            os.link(file, folder / file.name)
    return folder


class PoisonedStrategy(Qwen3Strategy):
    model_types = (MODEL_TYPE,)

    def processor(self, config: RunnerConfig) -> ChatProcessor:
        plain = super().processor(config)
        return MortalProcessor(plain.model_path, plain.settings)

    def build(self, *arguments: Any, **keywords: Any) -> Any:
        model = super().build(*arguments, **keywords)
        tokenizer = tokenizers.Tokenizer.from_file(str(self.path / "tokenizer.json"))
        faults = {tokenizer.token_to_id(token): fault for token, fault in FAULTS.items()}
        embed = model.embed

        def poisoned(ids_T: torch.Tensor) -> torch.Tensor:
            is_made_up = len(ids_T.unique()) == 1  # as are the steps of a start, whose tokens may be any
            for token, fault in faults.items():
                if not is_made_up and (ids_T == token).any() and strikes():
                    fault()
            x_TD: torch.Tensor = embed(ids_T)
            return x_TD

        model.embed = poisoned
        return model


def _raise() -> None:
    raise ValueError("this token is not for me")


def _run_out_of_memory() -> None:
    torch.empty(1 << 46)  # more than any address space; what the allocator then says is its own


def _lose_a_rank() -> None:
    raise EngineDeadError("rank 1 died (killed by SIGKILL) in a step")


def _hold_the_lock() -> None:
    ctypes.PyDLL(None).sleep(GIL_SECONDS)


FAULTS = {"Z": _raise, "Q": _run_out_of_memory, "X": die, "K": _lose_a_rank, "J": _hold_the_lock}
