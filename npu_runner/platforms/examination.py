"""The checks of `npu-runner doctor` before anything is computed. They are the same for every platform that adds none.

Nothing here imports torch: on the hosts that need a doctor that may fail.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

from npu_runner.platforms import find_platform, load, platforms
from npu_runner.platforms.host import Check, Host, Outcome, run_function, run_program
from npu_runner.platforms.platform import Platform

RUNNER_NEEDS = ("torch", "numpy", "huggingface_hub", "safetensors", "pillow", "pydantic", "tqdm", "jinja2",
                "tokenizers", "llguidance")

Packages = Mapping[str, str | None]
"""Distribution (small letters, underscores) to version; None or left out where it is not installed."""


@dataclass(frozen=True)
class Findings:
    """A host, and what its Python has installed."""

    host: Host
    packages: Packages

    @classmethod
    def from_host(cls, host: Host) -> Findings:
        found = run_function(host, installed_packages)
        return cls(host, found.reports[0] if found.reports else {})


class Signs(NamedTuple):
    """Whether a host has a platform's devices, or is set up for them, and what shows it."""

    are_there: bool
    text: str


class Examination:
    """One platform's. `explain` and `if_wrong` are remedies for what is computed afterwards."""

    checks_layers = False
    """Layers of real shapes are compared with the CPU's."""
    if_wrong = "report it with this output"
    operator_cases: tuple[str, str] | None = None
    """The functions that list cases of its operators, as "module:name": each by itself, and graphs and ranks. None: it
    has no such lists."""
    log_variable = ""
    """The variable that names the folder of the vendor's log; "": there is none."""
    reports: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    """Commands whose output belongs to a report, by title."""

    def __init__(self, platform: Platform, findings: Findings):
        self.platform, self.findings = platform, findings
        self.host, self.packages = findings.host, findings.packages

    @property
    def needs(self) -> tuple[str, ...]:
        """Checks that are to be ok before anything can start."""
        return ("import torch", self.platform.name)

    remedy: str = ""
    """The remedy where `Platform.why_unavailable` finds a reason."""

    @property
    def graph_modes(self) -> tuple[str, ...]:
        """The modes that the doctor computes unless the user names one: eager, and the default of a run."""
        return tuple(dict.fromkeys(("eager", self.platform.defaults.graph_mode)))

    def signs(self) -> Signs:
        return Signs(self._reason is None, self._reason or "it can be used")

    def examine(self, num_ranks: int = 1, *, is_eager: bool = False) -> Iterator[Check]:
        """The checks, in the order in which one explains the next. is_eager: no graph is asked for."""
        yield check_packages(self.packages, RUNNER_NEEDS, "npu-runner imports")
        yield self.check_torch(run_function(self.host, import_torch))
        reason = self._reason
        yield Check(self.platform.name, "ok" if reason is None else "failed", reason or "it can be used",
                    "" if reason is None else self.remedy)

    def check_torch(self, outcome: Outcome) -> Check:
        """Whether `import torch` works: it loads the extensions of vendors that are installed, on any platform."""
        if outcome.error is None:
            return Check("import torch", "ok", f"torch {outcome.reports[0]}")
        known = (examination_of(other, self.findings).why_torch_fails(outcome) for other in platforms())
        remedy = next(filter(None, known), "install torch again, in an environment of its own")
        return Check("import torch", "failed", outcome.error, remedy)

    def why_torch_fails(self, outcome: Outcome) -> str:
        """The remedy where this vendor's extension is installed and breaks `import torch`; else an empty text."""
        return ""

    def explain(self, outcome: Outcome, otherwise: str = "see the failed checks above") -> str:
        """The remedy for a computation that failed or hangs."""
        return "give a longer --timeout; else a device hangs" if outcome.is_timeout else otherwise

    def computes(self, dtype: str, *, is_dense: bool) -> bool:
        """Whether layers in this dtype are served on this host; dense: with neither experts nor states."""
        return True

    def why_no_embedded(self) -> str:
        """Why the embedded models are not served on this host; empty where they are."""
        return ""

    @cached_property
    def _reason(self) -> str | None:
        outcome = run_program(self.host, __name__, [self.platform.name])
        return str(outcome.error) if not outcome.reports else outcome.reports[-1]


def examination_of(platform: Platform, findings: Findings) -> Examination:
    found: Examination = load(platform.examination)(platform, findings)
    return found


def check_packages(packages: Packages, needed: tuple[str, ...], who: str, instead: str = "") -> Check:
    """instead: what is said of a torch that is missing."""
    missing = [name for name in needed if packages.get(name) is None]
    if not missing:
        return Check("Python packages", "ok", f"all {len(needed)} are installed")
    others = " ".join(name for name in missing if name != "torch")
    remedies = [f"install torch{instead}"] if "torch" in missing else []
    # Installed packages stay: pip stops rather than replace an image's numpy or torch. Not `pip freeze`: it writes
    # what came from a wheel file as `torch @ file://...`, and that is no constraint.
    remedies += [f"pip list --format=freeze >image.txt; pip install -c image.txt {others}"] if others else []
    return Check("Python packages", "failed", f"{who} {', '.join(missing)}: not installed", "; ".join(remedies))


def installed_packages(reports: str) -> None:
    """Versions of distributions; of two with one name Python imports the first. Imports none of them."""
    import importlib.metadata
    import json
    import re

    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name:  # else its folder is what a broken installation has left
            found.setdefault(re.sub("[-_.]+", "_", name).lower(), distribution.version)
    with open(reports, "a") as file:
        file.write(json.dumps(found) + "\n")


def import_torch(reports: str) -> None:
    """Torch as every user imports it: with the backends that load themselves."""
    import json

    import torch

    with open(reports, "a") as file:
        file.write(json.dumps(torch.__version__) + "\n")


def main(arguments: list[str]) -> None:
    """PLATFORM REPORTS: write why it cannot be used, or null."""
    name, reports = arguments
    reason = find_platform(name).why_unavailable()
    with open(reports, "a") as file:
        file.write(json.dumps(reason) + "\n")
