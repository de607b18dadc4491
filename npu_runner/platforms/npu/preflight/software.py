"""Checks of what is installed: toolkit, driver, libraries, Python packages, and whether their versions fit each other.

Pure functions of what was found on the host. Of devices it knows the names of their chips.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from npu_runner.platforms.examination import Packages
from npu_runner.platforms.host import Check, Host, Outcome
from npu_runner.platforms.npu import cann85
from npu_runner.platforms.npu.host_settings import A2, A3
from npu_runner.platforms.npu.preflight.errors import MANY_STREAMS_FROM, NEWER_DRIVER
from npu_runner.platforms.npu.versions import (
    PAIRINGS,
    SHIPPED,
    cann_version,
    driver_version,
    is_85,
    old_cann,
    old_wheel,
    plain,
    recipe_for_85,
    release,
    toolkit_folder,
    wheel_for,
)

# torchair imports these; torch_npu does not declare all of them.
TORCHAIR_NEEDS = ("packaging", "protobuf", "decorator", "attrs", "psutil", "pyyaml", "numpy")
LIBRARIES = ("libascendcl.so", "libhccl.so", "libatb.so")
# By CANN's release notes (of 9.1.0 for 9.0), for 9.2 by vllm-ascend's; another CANN's is at least the lowest.
_OLDEST_DRIVERS: dict[tuple[int, ...], tuple[int, ...]] = {
    (8, 5): (25, 0), (9, 0): (25, 0), (9, 1): (25, 2), (9, 2): (26, 0)}
_FUSED_STATES_FROM = (9, 2)  # CANN's recurrent rule accepts float32 states
_PLAIN_STATES = "Gated DeltaNet decodes in plain operators, fused from CANN 9.2 on"
IMAGE = ("use an image in which they belong together, and upgrade nothing in it (docs/running-on-ascend.md names "
         "images and versions)")

Libraries = Mapping[str, str | None]
"""File name to the loader's complaint; None where it loads."""


def check_toolkit(host: Host, libraries: Libraries) -> Check:
    """Whether set_env.sh was sourced, and its work is still there."""
    name, folder = "CANN environment", toolkit_folder(host.environment)
    complaint = libraries.get("libascendcl.so", "the probe found no answer")
    remedy = f"{source_set_env(host)}, or start through scripts/run_ascend.sh"
    if complaint is not None:
        named = "ASCEND_HOME_PATH is not set" if folder is None else f"ASCEND_HOME_PATH is {folder}"
        return Check(name, "failed", f"libascendcl.so does not load ({complaint}); {named}", remedy)
    if folder is None:
        return Check(name, "warning", "libascendcl.so loads, but ASCEND_HOME_PATH is not set: CANN's version cannot be "
                     "told", remedy)
    missing = _missing_folders(host.environment, folder)
    if missing:
        return Check(name, "failed", f"ASCEND_HOME_PATH is {folder}, but {', '.join(missing)}: torch_npu refuses that",
                     remedy)
    return Check(name, "ok", f"libascendcl.so loads; ASCEND_HOME_PATH is {folder}")


def _missing_folders(environment: Mapping[str, str], toolkit: Path) -> list[str]:
    """The folders that torch_npu needs for its import and that are missing, once ASCEND_HOME_PATH is set."""
    missing = [f"{path} is not there" for path in (toolkit, toolkit / "runtime", toolkit / "compiler")
               if not path.is_dir()]
    operators = environment.get("ASCEND_OPP_PATH")
    if operators is None:
        return [*missing, "ASCEND_OPP_PATH is not set"]
    return missing if Path(operators).is_dir() else [*missing, f"ASCEND_OPP_PATH {operators} is not there"]


def check_kernels(host: Host, chips: Collection[str]) -> Check:
    """Whether CANN's kernels are those of the devices: there is a folder of them for each kind of chip."""
    name, operators = "kernels", host.environment.get("ASCEND_OPP_PATH")
    wanted = {series.lower() for series in (A2, A3) if any(chip.startswith(series) for chip in chips)}
    if operators is None or not wanted:
        return Check(name, "skipped", "no A2 or A3 device to ask" if operators else "ASCEND_OPP_PATH is not set")
    folder = Path(operators) / "built-in/op_impl/ai_core/tbe/kernel"
    found = sorted(path.name for path in folder.glob("ascend*") if path.is_dir())
    missing = sorted(wanted - set(found))
    if not missing:
        return Check(name, "ok", f"for {', '.join(sorted(wanted))}")
    # A CANN that lays them out elsewhere has none here.
    there = f"there are those for {', '.join(found)}" if found else f"there are none in {folder}"
    return Check(name, "failed" if found else "warning", f"CANN has no kernels for {', '.join(missing)}, {there}: "
                 "operators fail with 561003 or 561112", "take the image of this chip (A2 and A3 have images of their "
                 "own), or install the package of kernels for it")


def check_libatb(host: Host, libraries: Libraries) -> Check:
    complaint = libraries.get("libatb.so", "the probe found no answer")
    if complaint is None:
        return Check("libatb", "ok", "libatb.so loads")
    script = ascend_folder(host) / "nnal/atb/set_env.sh"
    remedy = f"source {script}" if script.is_file() else "install NNAL of CANN's version and source its atb/set_env.sh"
    return Check("libatb", "warning", f"libatb.so does not load ({complaint}); torch_npu then lacks ATB's operators, "
                 "of which npu-runner uses none", remedy)


def check_driver(host: Host, *, is_eager: bool = False) -> Check:
    folder = ascend_folder(host) / "driver"
    version = driver_version(folder)
    if version is None:
        return Check("driver", "warning", f"no version in {folder / 'version.info'}",
                     f"in a container mount it: -v {folder}/lib64:{folder}/lib64 -v {folder}/version.info:"
                     f"{folder}/version.info; on a host install the driver (npu-smi info shows it)")
    cann = cann_version(host.environment)
    oldest = _OLDEST_DRIVERS.get(release(cann or "")[:2], min(_OLDEST_DRIVERS.values()))
    if release(version) < oldest:
        wanted = ".".join(map(str, oldest))
        if is_85(cann) and not is_eager:
            return Check("driver", "failed", f"driver {version}: on CANN {cann} captured graphs take new context "
                         f"lengths from driver {wanted}.RC1 on", "update driver and firmware, or give --enforce-eager")
        return Check("driver", "warning", f"driver {version} is older than {wanted}, which CANN {cann or '9'} wants",
                     "update driver and firmware to those that CANN's release notes name")
    if release(version) < release(MANY_STREAMS_FROM) and not is_eager:
        return Check("driver", "warning", f"driver {version}: below {MANY_STREAMS_FROM} a device has few streams, so "
                     "fewer graphs are captured, and batches without one run eagerly", NEWER_DRIVER)
    return Check("driver", "ok", f"driver {version}")


def check_pair(packages: Packages, cann: str | None = None) -> Check:
    """torch and torch_npu: the first three numbers are the same, or torch_npu's C++ does not fit."""
    name, torch, torch_npu = "torch and torch_npu", packages.get("torch"), packages.get("torch_npu")
    if torch_npu is None:
        found = f"torch_npu is not installed (torch {torch})"
        if cann is None:
            return Check(name, "failed", found, "CANN first: without it torch_npu spoils `import torch` for every "
                         f"platform; or {IMAGE}")
        wheel = wheel_for(plain(torch), cann) if torch else None
        return Check(name, "failed", found, f"pip install --no-deps torch_npu=={wheel}" if wheel else IMAGE)
    if torch is None:
        return Check(name, "failed", f"torch is not installed (torch_npu {torch_npu})", IMAGE)
    found = f"torch {torch}, torch_npu {torch_npu}"
    if release(torch)[:3] != release(torch_npu)[:3]:
        wanted = ".".join(map(str, release(torch_npu)[:3]))
        return Check(name, "failed", f"{found}: torch_npu {torch_npu} is made for torch {wanted}",
                     f"{IMAGE}; something has probably replaced the image's torch")
    too_old = old_wheel(torch_npu)
    if too_old is not None:
        if is_85(cann):
            return Check(name, "failed", too_old.reason, recipe_for_85(torch))
        wheel = wheel_for(plain(torch), cann)
        return Check(name, "failed", too_old.reason,
                     f"pip install --no-deps torch_npu=={wheel}, with its CANN" if wheel else too_old.remedy)
    if not any((pair.torch, pair.torch_npu) == (plain(torch), torch_npu) for pair in PAIRINGS):
        return Check(name, "warning", f"{found}: a pair that is not in the table of known ones",
                     f"known: {', '.join(pair.torch_npu for pair in PAIRINGS)}")
    return Check(name, "ok", found)


def check_cann_version(host: Host, packages: Packages) -> Check:
    name, torch_npu, cann = "CANN version", packages.get("torch_npu"), cann_version(host.environment)
    wanted = [pair.cann for pair in (*PAIRINGS, *SHIPPED) if pair.torch_npu == torch_npu]
    if cann is None:
        folder = toolkit_folder(host.environment)
        return Check(name, "warning", "no version of CANN is to be found", source_set_env(host) if folder is None else
                     f"a complete toolkit has {folder}/<arch>-linux/ascend_toolkit_install.info; install it again")
    too_old = old_cann(cann, torch_npu, packages.get("torch"))
    if too_old is not None:
        return Check(name, "failed", *too_old)
    if is_85(cann):
        recipe = "" if torch_npu else f"; a wheel for 8.5: {recipe_for_85(packages.get('torch'))}"
        return Check(name, "warning", f"CANN {cann}: {cann85.UNVERIFIED}; {cann85.SCOPE}",
                     f"install CANN {PAIRINGS[0].cann} if you can{recipe}")
    if torch_npu is None:
        return Check(name, "skipped", f"CANN {cann}; no torch_npu to compare it with")
    found = f"CANN {cann}" if release(cann) >= _FUSED_STATES_FROM else f"CANN {cann} ({_PLAIN_STATES})"
    if not wanted:
        return Check(name, "warning", f"{found}; which one torch_npu {torch_npu} wants is not in the table",
                     "see the release notes of torch_npu")
    if any(release(cann)[:2] == release(known)[:2] for known in wanted):
        return Check(name, "ok", f"{found}, as torch_npu {torch_npu} wants")
    # TorchNPU's release notes call every CANN from 9.0 on compatible; operators are only promised from its own on.
    return Check(name, "warning", f"{found}; torch_npu {torch_npu} was published for {' or '.join(wanted)}",
                 f"install CANN {wanted[0]}, or {IMAGE}")


def import_remedy(outcome: Outcome) -> str:
    """The remedy for an import of torch_npu that fails."""
    text = outcome.output
    if "static TLS" in text:
        return "load the library that is named first: export LD_PRELOAD=<its full path>"
    if "Duplicated key" in text:
        return ("torch is built for CUDA, and torch_npu does not load beside that: install the CPU build of the same "
                f"version (torch's own installation page has the command), or {IMAGE}")
    if "undefined symbol" in text:
        return f"torch_npu does not fit torch or CANN: {IMAGE}"
    if "cannot open shared object file" in text or "set_env.sh" in text:
        return ("source the toolkit's set_env.sh (scripts/run_ascend.sh does); where there is no NPU, uninstall "
                "torch_npu or export TORCH_DEVICE_BACKEND_AUTOLOAD=0")
    return "docs/running-on-ascend.md has the usual causes; python -c 'import torch_npu' shows the whole message"


def source_set_env(host: Host) -> str:
    """The command with which this host gets CANN's variables."""
    script = next((path for path in set_env_scripts(ascend_folder(host)) if path.is_file()), None)
    if script is not None:
        return f"source {script}"
    return f"install CANN (no set_env.sh below {ascend_folder(host)}) or source the set_env.sh of its folder"


def ascend_folder(host: Host) -> Path:
    """Where driver and toolkit are installed by default."""
    return host.software / "Ascend"


def set_env_scripts(installation: Path) -> list[Path]:
    """Where toolkits up to 8.3 and from 8.5 on put it."""
    return [installation / "ascend-toolkit/set_env.sh", installation / "cann/set_env.sh",
            *sorted(installation.glob("cann-*/set_env.sh"), reverse=True)]
