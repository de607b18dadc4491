"""Makes the replica of a job on another host: of a plan that has come from the driver, and of what this host has.

What this host lacks is a ConfigError with its name, before any model is loaded.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from npu_runner.batch.job.row_server import RowServer, ServerPlan
from npu_runner.errors import ConfigError

_REMEDY = "leave --shared-input out, and rows travel with their bytes"


@dataclass(frozen=True, kw_only=True)
class SharedInput:
    """The input as the driver sees it."""

    path: str
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class RemotePlan:
    """A plan without descriptors. `shared_input`: what its source reads; None where rows bring their bytes."""

    server: ServerPlan
    name: str
    shared_input: SharedInput | None = None

    def __call__(self) -> RowServer:
        """Called on the other host."""
        host = f"{self.name} on host {socket.gethostname()}"
        if not Path(self.server.config.model).is_dir():
            raise ConfigError(f"{host}: there is no folder {self.server.config.model}; put the model where every host "
                              "sees it under the same path")
        media = self.server.media.allowed_dir
        if media is not None and not Path(media).is_dir():
            raise ConfigError(f"{host}: there is no folder {media} (allowed_media_dir); pictures are read where the "
                              "replica is")
        if self.shared_input is not None:
            _look_at(self.shared_input, host)
        return RowServer(self.server, self.name)


def _look_at(shared: SharedInput, host: str) -> None:
    """Another file of the same size is known by the checksums of its rows."""
    try:
        with open(shared.path, "rb") as file:
            found = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise ConfigError(f"{host}: input {shared.path} cannot be read ({error.strerror}); {_REMEDY}") from error
    if found < shared.num_bytes:
        raise ConfigError(f"{host}: input {shared.path} has {found} bytes there and {shared.num_bytes} here; {_REMEDY}")
