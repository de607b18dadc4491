"""pyarrow, which only Parquet and Hugging Face's folders need: imported by whoever reads or writes one, or named."""

from __future__ import annotations

from typing import Any

from npu_runner.errors import ConfigError


def pyarrow_for(what: str, otherwise: str = "") -> Any:
    """The module. Raises ConfigError where it is not installed. `what` is read or written: "Parquet". `otherwise`: what
    the user can do without it."""
    try:
        import pyarrow
    except ImportError as error:
        raise ConfigError(f"{what} goes through pyarrow, which is not there ({error}); pip install 'pyarrow>=17'"
                          f"{otherwise and f', or {otherwise}'}") from error
    return pyarrow
