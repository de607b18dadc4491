"""Makes the emulated CANN: installs torch_npu into a folder of its own and builds the libraries it wants.

    .venv/bin/python tests/cann/setup_site.py

Everything lands under .cache/ in the checkout. Nothing is done twice: packages by a stamp, objects by the hash of
what they are made of. Knows nothing of what the libraries do.
"""

from __future__ import annotations

import concurrent.futures
import fcntl
import hashlib
import importlib.util
import json
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).resolve().parent
CACHE = HERE.parent.parent / ".cache"
SITE = CACHE / "npu_site"
BUILD = CACHE / "cann"
LIBRARIES = BUILD / "lib"
PRELOADED = LIBRARIES / "liballocator_keys.so"

# torchair imports the others; the torch_npu wheel does not declare them.
PACKAGES = ["torch_npu==2.13.0", "packaging", "protobuf", "decorator", "attrs", "psutil", "pyyaml"]

# Libraries that torch_npu links to; every one is an empty library that leads to libascendcl.so.
SONAMES = ["acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel", "fmk_parser", "ascend_protobuf", "atb", "hccl"]

# What torch_npu calls and may be told "done" without anything being done: logging, profiling and dumps that are off
# here, attributes for the old operator route (refused later, by name).
HARMLESS_TEXT = """
    aclAppLog aclmdlInitDump aclmdlSetDump aclmdlFinalizeDump aclopStartDumpArgs aclopStopDumpArgs MsprofGetHashId
    MsprofRegisterCallback MsprofReportAdditionalInfo MsprofReportApi MsprofReportCompactInfo MsprofSysCycleTime
    aclopSetAttrBool aclopSetAttrDataType aclopSetAttrFloat aclopSetAttrInt aclopSetAttrListBool aclopSetAttrListFloat
    aclopSetAttrListInt aclopSetAttrListListInt aclopSetAttrString aclSetTensorDescName aclSetTensorPlaceMent
    HcclSetConfig
"""
HARMLESS = set(HARMLESS_TEXT.split())


class BuildError(RuntimeError):
    """A compiler or the package installer failed; the message holds its output."""


def run(command: list[str], **options: object) -> str:
    done = subprocess.run(command, capture_output=True, text=True, **options)  # type: ignore[call-overload]
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command[:3])} ... failed:\n{(done.stdout + done.stderr)[-6000:]}")
    if done.stderr:
        print(done.stderr, end="", file=sys.stderr)  # warnings
    return str(done.stdout)


def install_packages() -> None:
    stamp = SITE / ".installed"
    wanted = "\n".join([sys.version.split()[0], *PACKAGES])
    if stamp.exists() and stamp.read_text() == wanted:
        return
    print(f"installing {', '.join(PACKAGES)} into {SITE}", flush=True)
    run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--upgrade", "--target", str(SITE), *PACKAGES])
    stamp.write_text(wanted)


def torch_folder() -> Path:
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise BuildError(f"torch is not installed for {sys.executable}")
    return Path(found.origin).parent


def is_cuda_build(torch: Path) -> bool:
    """Whether this torch is for CUDA, as the one is that PyPI gives to Linux: torch_npu stops at once beside it."""
    return (torch / "lib" / "libtorch_cuda.so").exists()


def digest(*parts: str | bytes) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(part if isinstance(part, bytes) else part.encode())
        total.update(b"\0")
    return total.hexdigest()[:16]


def compile_once(source: Path, target: Path, command: list[str], depends: list[Path]) -> None:
    """Runs `command` unless `target` was made from the same bytes by the same command."""
    key = digest(" ".join(command), *(path.read_bytes() for path in [source, *sorted(depends)]))
    stamp = target.with_name(target.name + ".key")
    if target.exists() and stamp.exists() and stamp.read_text() == key:
        return
    print(f"compiling {source.name}", flush=True)
    stamp.unlink(missing_ok=True)
    run(command)
    stamp.write_text(key)


def compile_all(torch: Path, jobs: int) -> tuple[list[Path], list[Path]]:
    """Objects of the runtime and of the operators."""
    source = HERE / "src"
    vendor = SITE / "torch_npu/include/third_party"
    folders = [vendor / "acl/inc", vendor / "hccl/inc", vendor.parent, torch / "include"]
    # -O0 for the operators: their time goes into ATen, which is optimised already, and they compile three times faster.
    common = [
        "g++",
        "-std=c++20",
        "-fPIC",
        "-Wall",
        "-fvisibility=hidden",
        *(part for f in folders for part in ("-isystem", str(f))),
    ]
    headers = sorted(source.glob("*.h"))
    operator_headers = [*headers, *sorted((source / "opapi").glob("*.h"))]
    tasks, runtime, operators = [], [], []
    for path in sorted((source / "opapi").glob("*.cpp"), key=lambda path: path.stem != "bridge"):  # the slow one first
        operators.append(BUILD / f"opapi_{path.stem}.o")
        # bridge.cpp knows nothing of operators: a change of theirs must not cost half a minute.
        depends = [source / "opapi" / "tensor.h"] if path.stem in ("bridge", "tensor") else operator_headers
        tasks.append((path, operators[-1], [*common, "-O0", "-c", str(path), "-o", str(operators[-1])], depends))
    for path in sorted(source.glob("*.cpp")):
        runtime.append(BUILD / f"{path.stem}.o")
        tasks.append((path, runtime[-1], [*common, "-O1", "-c", str(path), "-o", str(runtime[-1])], headers))
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for future in [pool.submit(compile_once, *task) for task in tasks]:
            future.result()
    return runtime, operators


def symbols(path: Path, flag: str) -> set[str]:
    done = subprocess.run(["nm", "-D", flag, str(path)], capture_output=True, text=True)
    return {line.split()[-1].split("@")[0] for line in done.stdout.splitlines() if line.strip()}


def system_libraries() -> list[Path]:
    """The C and C++ libraries that the loader finds."""
    wanted = {
        "libc",
        "libm",
        "libgcc_s",
        "libstdc++",
        "libpthread",
        "libdl",
        "librt",
        "ld-linux-x86-64",
        "ld-linux-aarch64",
    }
    lines = run(["/sbin/ldconfig", "-p"]).splitlines()
    paths = [Path(line.split("=>")[1].strip()) for line in lines if "=>" in line]
    return [path for path in paths if path.name.split(".so")[0] in wanted]


def missing_symbols(torch: Path, own: list[Path]) -> list[str]:
    """What torch_npu's libraries need and neither torch, the system, Python nor our objects define."""
    package = SITE / "torch_npu"
    wheel = [*package.glob("lib/*.so"), *package.glob("*.so"), *package.glob("dynamo/torchair/core/*.so")]
    python = [Path(sys.executable), *Path(sysconfig.get_config_var("LIBDIR") or "/usr/lib").glob("libpython3*.so*")]
    needed, defined = set(), set()
    for path in wheel:
        needed |= symbols(path, "--undefined-only")
    for path in [*wheel, *system_libraries(), *python, *torch.glob("lib/*.so*")]:
        defined |= symbols(path, "--defined-only")
    for path in own:
        rows = [line.split() for line in run(["nm", "--defined-only", str(path)]).splitlines()]
        defined |= {row[-1] for row in rows if len(row) == 3}
    weak = {"_ITM_deregisterTMCloneTable", "_ITM_registerTMCloneTable", "__gmon_start__"}
    return sorted(name for name in needed - defined - weak if not name.startswith(("Py", "_Py", "_ZTH")))


def stub_source(names: list[str]) -> str:
    """C code: a harmless name answers 0, every other one stops the program and says which name it was."""
    lines = ["// Generated by setup_site.py.", "void cann_emu_missing(const char*);"]
    for name in names:
        body = "return 0;" if name in HARMLESS else f'cann_emu_missing("{name}"); return 0;'
        lines.append(f'__attribute__((visibility("default"))) long {name}(void) {{ {body} }}')
    return "\n".join(lines) + "\n"


def link_library(path: Path, objects: list[Path], *options: str) -> None:
    name = [f"-Wl,-soname,{path.name}", "-Wl,--no-undefined", f"-L{LIBRARIES}"]
    fresh = path.with_suffix(".new")
    run(["g++", "-shared", "-o", str(fresh), *map(str, objects), *name, *options])
    fresh.replace(path)  # programs that run keep the library they loaded


def link(torch: Path, runtime: list[Path], operators: list[Path]) -> None:
    stubs, stubs_object = BUILD / "stubs.c", BUILD / "stubs.o"
    stubs.write_text(stub_source(missing_symbols(torch, runtime)))
    run(["gcc", "-w", "-fPIC", "-c", str(stubs), "-o", str(stubs_object)])
    LIBRARIES.mkdir(exist_ok=True)
    link_library(LIBRARIES / "libascendcl.so", [*runtime, stubs_object], "-lpthread", "-ldl")
    for name in SONAMES:
        link_library(LIBRARIES / f"lib{name}.so", [], "-Wl,--no-as-needed", "-lascendcl")
    link_library(LIBRARIES / "libopapi.so", operators, f"-L{torch}/lib", "-ltorch_cpu", "-lc10", "-lascendcl")
    PRELOADED.unlink(missing_ok=True)
    if is_cuda_build(torch):
        flags = ["-std=c++20", "-Wall", "-O1", "-fPIC", "-shared"]
        run(["g++", *flags, str(HERE / "preload" / "allocator_keys.cpp"), "-o", str(PRELOADED), "-ldl"])
    (LIBRARIES / "libnnopbase.so").unlink(missing_ok=True)
    (LIBRARIES / "libnnopbase.so").symlink_to("libopapi.so")


def setup(jobs: int = 2) -> Path:
    """Returns the folder of the libraries, made if it was not; safe to call from several processes at once."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        install_packages()
        sources = sorted(path for path in HERE.rglob("*") if path.suffix in (".h", ".cpp"))
        torch = torch_folder()
        key = digest(Path(__file__).read_bytes(), sys.version, f"{torch} {is_cuda_build(torch)}",
                     *(path.read_bytes() for path in sources))
        stamp = BUILD / "built.json"
        if stamp.exists() and json.loads(stamp.read_text())["key"] == key:
            return LIBRARIES
        runtime, operators = compile_all(torch, jobs)
        link(torch, runtime, operators)
        stamp.write_text(json.dumps({"key": key}))
    return LIBRARIES


if __name__ == "__main__":
    print(setup())
