"""The answers of a job, at work or not: its output, and the error file that its manifest names."""

from __future__ import annotations

import os
from pathlib import Path

from npu_runner.batch.files.answer_file import AnswerFile
from npu_runner.batch.files.durable import clear_file_errors
from npu_runner.batch.files.manifest import Manifest
from npu_runner.errors import ConfigError


class JobOutput(AnswerFile):
    """Raises ConfigError where there is no such file."""

    def __init__(self, name: str, max_row_bytes: int):
        output = Path(os.path.realpath(name))
        self.name = name
        self.manifest = Manifest.load(output)
        error_file = None if self.manifest is None else self.manifest.error_file
        errors = None if error_file is None else output.parent / error_file
        self.read_names: list[tuple[str, str | Path | None]] = [("answers", name), ("error file", errors)]
        """What is read, for the check of places."""
        with clear_file_errors(f"answers {name}"):
            if not output.is_file():
                raise ConfigError(f"answers {name}: there is no such file")
        super().__init__([output, *([] if errors is None else [errors])], max_row_bytes=max_row_bytes,
                         titles=[f"answers {name}", f"error file {errors}"])
