"""The prompt of a reader that its authors publish: read at run time from their package, since it is their text.

Another interpreter imports the package, so that nothing of it runs in this process. Knows no readers by name.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass

from npu_runner.errors import ConfigError
from npu_runner.readers.reader import PageReader, PromptCard, PromptSource

_MOST_SECONDS = 30.0
_MOST_BYTES = 1 << 20
_CODE = """import importlib, importlib.metadata, json, sys
package, module, constant, answer = sys.argv[1:]
value = getattr(importlib.import_module(module), constant)
text = value() if callable(value) else value
if not isinstance(text, str):
    raise TypeError(f"{module}.{constant} is no text")
with open(int(answer), "w") as file:
    json.dump({"version": importlib.metadata.version(package), "text": text}, file)
"""


@dataclass(frozen=True, kw_only=True)
class ReaderPrompt:
    """The text of a reader's prompt, and its origin: a package and its version; None: it is the reader's own."""

    text: str
    package: str | None = None
    version: str | None = None

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


def prompt_of(reader: PageReader, python: str | None) -> ReaderPrompt:
    """The reader's prompt. `python`: the interpreter that has the package; None: our own. Raises ConfigError with the
    line that makes a file of the prompt."""
    source = reader.prompt_from
    if source is None:
        assert reader.prompt is not None, "the model has one of the two"
        return ReaderPrompt(text=reader.prompt)
    file = f"{reader.name}.txt"
    if isinstance(source, PromptCard):
        raise ConfigError(f"reader {reader.name}: its prompt stands in the model card of {source.card} alone; copy it "
                          f"into a file with  cat > {file}  and name that: --prompt-file {file}")
    interpreter = python or sys.executable
    try:
        return _read(source, interpreter)
    except (OSError, ValueError) as error:
        program = (f"import {source.module} as m; p = m.{source.constant}; "
                   f'open("{file}", "w", encoding="utf-8").write(p() if callable(p) else p)')
        line = (f"python3 -m venv prompt && prompt/bin/pip install {source.package} && prompt/bin/python -c "
                f"{shlex.quote(program)}")
        raise ConfigError(f"reader {reader.name}: its prompt is {source.constant} of the package {source.package}, "
                          f"which {interpreter} does not give ({error}); name the Python that has it with "
                          f"--prompt-python, or make a file once for --prompt-file {file}:\n    {line}") from error


def _read(source: PromptSource, python: str) -> ReaderPrompt:
    """Raises ValueError where the interpreter ends otherwise, and OSError where there is none."""
    # Files and not pipes: a pipe that a child of the child keeps open would be waited for.
    with tempfile.TemporaryFile() as answer, tempfile.TemporaryFile() as words:
        command = [python, "-I", "-c", _CODE, source.package, source.module, source.constant, str(answer.fileno())]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=words,
                              pass_fds=[answer.fileno()], start_new_session=True) as child:
            try:
                status = child.wait(_MOST_SECONDS)
            except BaseException as error:
                os.killpg(child.pid, signal.SIGKILL)  # with all that it has started: it has a session of its own
                if isinstance(error, subprocess.TimeoutExpired):
                    raise ValueError(f"it took longer than {_MOST_SECONDS:g} s") from None
                raise
        if status != 0:
            words.seek(max(0, words.seek(0, os.SEEK_END) - 400))
            said = words.read().decode("utf-8", "replace").strip().splitlines()
            raise ValueError(said[-1] if said else f"exit status {status}")
        answer.seek(0)
        data = answer.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"its text has more than {_MOST_BYTES} bytes")
    found = json.loads(data)
    return ReaderPrompt(text=found["text"], package=source.package, version=found["version"])
