"""The laws of the layout: a room imports only what stands below it, and the scheduling core knows no tensors."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from npu_runner.platforms import BUILT_IN

ROOT = Path(__file__).parents[2]
# The rooms of the house (packages and modules of npu_runner), lowest floor first: each stands right above the highest
# room that it imports. Rooms of one floor do not import each other.
FLOORS = [
    {"assets", "errors", "processes", "threads"},
    {"platforms", "readers", "request"},
    {"checkpoint", "config", "core", "grammars"},
    {"layers", "prompts", "sampling"},
    {"models", "serving"},
    {"strategies"},
    {"runner"},
    {"engine"},
    {"batch", "llm"},
    {"ray_data", "reports", "tables"},
    {"cli"},
]
# The most pairs of rooms of which one imports the other. A new arrow is a decision: raise this with its reason.
# 111: tables makes rows of files and reads answers (batch, with request, prompts, config and errors), cli calls it.
# 118: reports looks at a job from outside (batch, with request, prompts, config, errors and serving), cli calls it;
# before that batch made the page within a job. 119: llm, a room of its own now, serves calls (serving, prompts).
# 120: prompts asks a process of its own (processes) which fonts of PDFs this host lacks.
# 125: readers (errors) fill rows and parse answers (tables), cli shows them; tables opens documents (serving).
# 126: batch reads the ladders of readers, and judges answers by their parsers (readers).
# 127: batch asks how much memory of the host is free (platforms) before the reference of `verify` loads.
MOST_ARROWS = 127
# The most lines of Python in a room; all the other modules of the package together are "front". A feature pays rent:
# raise a number only with its reason beside it, and lower it whenever the room gets lighter.
# reports: 264 lines of views (metrics, the words and the JSON of a run, the totals of all runs) came from batch.
# platforms, cli, engine: operators by themselves (`doctor --operators`), and a start that compares its own first.
# platforms, runner: limits of CANN's attention (a context, the elements of a layer's keys) bound the start.
# batch: outputs that recorded kernels on CANN 8.5 go on (4).
# sampling: a slot that a sequence joins is zeroed alone, since CANN copies a table to fill some of its rows.
# platforms: vendors' operator packages, which replace functions that we call, are found in their libraries (110).
# processes: a writer takes what waits at once, which made the driver a tenth faster.
# front, platforms, strategies: classes of other packages that still have a renamed member are refused by name.
# platforms, runner: on npu the queries of a row attend together, which reads keys once for all of its drafts (185).
# prompts, serving, request, llm, batch: pages of PDFs and TIFFs are rendered and counted, and given up by document.
# models, strategies, layers, runner: a start compares a network of transformers with transformers' own attention (177).
# readers, tables, cli: readers fill the rows of pages, documents have a file beside rows, answers become Markdown and
# blocks, and `read` runs the steps.
# tables, cli, prompts: sources that are not followed are counted, `read` leaves its own results out, keeps layouts
# whose blocks are answered, and marks documents whose pages were not counted; a side that an option names is exact.
# readers: a tag that never ends is text (2).
# batch, serving, request: PDFium and the fonts are recorded with the first answer to a page of a PDF (79).
# serving: replicas tell each other which pages ended workers, so that a document is given up by the job (53).
# batch, readers: one function opens folders that rows name (16), and fields of readers say which ones are set (4).
# cli, readers: `read --overwrite`, which messages name (6); a comment ends before the next one (1).
# batch, llm, request, engine, prompts, core, runner, tables: labels behind a prompt are scored by a model that
# generates text (270). runner, front: embeddings of images have a second cache in host memory (90).
# request, prompts, strategies, models: transformers' own processors prepare images of families that only it knows.
# models, strategies: their towers, positions of three axes, and an image of noise in the comparison at the start.
# models, strategies, checkpoint: networks of transformers are made without memory and filled by our loader.
# runner, platforms, strategies: graphs of modules that are not ours are each compared with an eager step.
# models: modules of transformers are replaced by ours (models/transformers_fusion.py).
# prompts: the largest image of a processor of transformers is searched from small sizes on (71).
# request, runner, engine: a larger one is refused, and tiles with few tokens count by their pixels (41).
# checkpoint, strategies: a stored tensor that transformers cuts into equal parts is read in parts (44).
# request, sampling, runner, engine, front, batch, prompts, cli: four modes of log probabilities, of all tokens (130).
# runner, engine, models, strategies, checkpoint, core, request, front: hidden states of layers (150).
# platforms: the memory of a device is public (10).
# core, runner: a partly shared last block is copied: which blocks begin alike, and copies that are held (260).
# platforms: attention copies blocks, on cuda by one kernel, on npu by a cache write (48), which runner did before (27).
# llm, prompts: each request may bring labels of its own (17). batch: rows name their own ranges (3).
# batch, cli: copies that alone are missing are written without a model, and `check` names equal rows (52).
# cli, batch, reports: `read` refuses a wrong ladder, report or mode of log probabilities before it opens a page (19).
# sampling: log probabilities of the whole vocabulary go to the host slice by slice, within the profiled memory (27).
# batch, reports, cli, tables, serving, readers: a ladder tries rows again whose answers have a fault (550).
# batch, serving, reports: equal rows are served once, and their answers are copied (417).
# batch, cli: `verify` has transformers score answers, and names two numbers per row (380).
# serving, engine, llm, core, batch: what waits is bounded by tokens; a row is under way once its step is planned (76).
# core, request: a prompt has its tokens as an array, and what two partial blocks share is one operation (11).
# sampling: what follows from params alone is kept for the next row, and one seed is mixed in Python's integers (30).
# serving, prompts, llm: texts are encoded in batches ahead (40). batch, serving: bounds stand in one place (9).
# front: the codes of errors, which a ladder names; batch, prompts, engine, llm: steps and labels that do nothing (61).
# runner, platforms: long prefills, and those of models that pool, are recorded where launching them takes long (208).
# platforms, engine, layers, models, runner, front: a custom all-reduce, and norms that sum over the ranks (360).
# processes, engine: which rank died first, where another one is aborted for it (40).
# platforms: decode attention reads shared blocks once: when that pays, and room for what it adds up (15).
# runner: after a graph without memory, long prefills that cannot fit are not tried (8).
# platforms: what cannot be captured is named for several ranks, too, and leaves no mode of torch_npu on (40).
# prompts: a PDF is opened without its password first, and an upright image has no metadata that turns it (17).
# cli, tables, batch: a refused `read` changes no file, figures are of all runs, earlier results are no sources (80).
# tables: images whose files have changed are refused as documents are, and TIFFs that have several pages now (52).
# models, serving: threads copy a step's images and let go of those that are answered; runs of a size are kept (40).
# serving, engine, prompts: long prompts are checked without loops of Python's and added between steps (36).
# runner, platforms, front: steps of narrow models whose prefills are in no graph are twice as long (14).
MOST_LINES = {
    "platforms": 14885, "batch": 9053, "prompts": 7375, "runner": 5196, "checkpoint": 3957, "serving": 3032,
    "engine": 2662, "tables": 3603, "core": 2413, "grammars": 1997, "models": 3300, "cli": 2299, "layers": 1891,
    "sampling": 1880, "request": 1876, "strategies": 1991, "reports": 1549, "llm": 1504, "front": 1007,
    "processes": 775, "readers": 1001, "assets": 11,
}
# The most imports of this package in one file. A file above it has more than one job.
MOST_OWN_IMPORTS = 20
# Files that still have more. No file joins them.
MANY_OWN_IMPORTS = {
    "npu_runner/batch/job/row_server.py",
    "npu_runner/batch/job/run.py",
    "npu_runner/engine/llm_engine.py",
    "npu_runner/prompts/processor.py",
}
# The most methods and attributes that a vendor's platform has to know: all public members of these classes together.
CONTRACT = {
    "platform": ["Platform"], "attention": ["AttentionBackend"], "devices": ["Memory", "Devices", "Communicators"],
    "gated_delta": ["GatedDeltaBackend", "RingedGatedDelta"], "graphs": ["GraphCompiler"], "ops": ["Ops"],
    "quantised": ["QuantisedOps"], "facts": ["AttentionFacts", "StateFacts"],
}
# An attribute came (fallbacks) for two methods that became one (find_fallbacks), and two for the limits of CANN's
# attention (longest_context, most_elements). One for attention that takes queries of a row together (groups_drafts).
# A method that no vendor writes (memory_info) reads a role for callers. One makes an all-reduce beside the backend's.
# A vendor may copy blocks by a kernel of its own (copy_blocks).
MOST_CONTRACT_METHODS, MOST_CONTRACT_ATTRIBUTES = 87, 37
# Words that a reader of vLLM, PyTorch and CUDA does not know in our meaning, as regular expressions over all sources of
# the package, with the most occurrences. The terms to use stand in CONTRIBUTING.md. No number is ever raised.
MOST_OF_A_WORD = {
    r"\bso (many|much)\b": 0,
    r"\bnobody\b": 0,
    r"\bwhoever\b": 0,
    r"\bsomebody\b": 0,
    r"\bpictures?\b": 0,
    r"\bfew[_ ]rows\b": 0,
    r"(\b|_)products?(\b|_)": 8,
    r"\bdef of\b": 2,
    r"\bdef look\b": 0,
    r"\bdef begin\b": 0,
    r"\bdef note\b": 0,
    r"\b(_?settles?|settled)\b": 1,
    r"\bdef _?takes?\b|\btakes_\w+": 3,
    r"\b(draws?|drawn?|drew)\b": 3,
}
# Openings of docstrings without a subject, with the most docstrings that still have them.
MOST_OF_AN_OPENING = {"What": 0, "Of": 0, "How": 0, "Those": 0, "That": 0, "So": 0, "Likewise": 0, "Such": 0}


@functools.cache
def read(path: Path) -> tuple[list[str], list[str], list[str]]:
    """The modules that a file imports, wherever in the file it does, the strings of its code, and its docstrings, also
    those under fields."""
    found: list[str] = []
    nodes = list(ast.walk(ast.parse(path.read_text())))
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append(node.module)
            if node.module == "npu_runner":
                found += [f"npu_runner.{alias.name}" for alias in node.names]
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    texts: tuple[list[str], list[str]] = [], []
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts[id(node) in docstrings].append(node.value)
    return found, *texts


def imports(path: Path) -> list[str]:
    return read(path)[0]


def all_sources() -> list[Path]:
    return [*(ROOT / "npu_runner").rglob("*.py"), *(ROOT / "strategies").rglob("*.py")]


def sources() -> list[Path]:
    """All but the package's front, which hands out public names and has none of its own."""
    front = ("__init__", "__main__", "sampling_params", "inputs", "outputs")
    return [path for path in all_sources() if path.parent.name != "npu_runner" or path.stem not in front]


def room_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return "strategies" if parts[0] == "strategies" else parts[1]  # its folder stands beside the package's


@functools.cache
def arrows() -> dict[tuple[str, str], Path]:
    """(room, room that it imports) of all pairs, with a file that does."""
    rooms = {room_of(path) for path in sources()}
    found: dict[tuple[str, str], Path] = {}
    for path in sources():
        for module in imports(path):
            package, _, rest = module.partition(".")
            imported = rest.partition(".")[0]
            if package == "npu_runner" and imported in rooms - {room_of(path)}:
                found[room_of(path), imported] = path.relative_to(ROOT)
    return found


def test_every_room_stands_on_a_floor() -> None:
    assert set().union(*FLOORS) == {room_of(path) for path in sources()}


def test_a_room_imports_only_rooms_on_lower_floors() -> None:
    floor_of = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
    upward = {f"{room} imports {imported}: {path}" for (room, imported), path in arrows().items()
              if floor_of[imported] >= floor_of[room]}
    assert not upward


def test_no_room_stands_higher_than_its_imports_ask() -> None:
    below: dict[str, set[str]] = {room: set() for rooms in FLOORS for room in rooms}
    for room, imported in arrows():
        below[room].add(imported)
    floor_of: dict[str, int] = {}
    for room in TopologicalSorter(below).static_order():  # raises CycleError, which names a circle of rooms
        floor_of[room] = 1 + max((floor_of[imported] for imported in below[room]), default=-1)
    floors: list[set[str]] = [set() for _ in range(1 + max(floor_of.values()))]
    for room, floor in floor_of.items():
        floors[floor].add(room)
    assert floors == FLOORS


def test_nothing_that_runs_imports_an_oracle_of_the_tests() -> None:
    assert not [path for path in all_sources()
                if any(name.partition(".")[0] == "sentence_transformers" for name in imports(path))]


def test_few_places_import_transformers() -> None:
    """An import costs seconds and hundreds of megabytes in each process, and a family of ours needs none. Two places
    are for callers who ask for it: `LLM.get_tokenizer`, and the reference of `npu-runner verify`."""
    found = {str(path.relative_to(ROOT)) for path in all_sources()
             if any(name.partition(".")[0] == "transformers" for name in imports(path))}
    assert found == {"npu_runner/batch/check/reference.py",
                     "npu_runner/prompts/media/transformers_images.py", "strategies/transformers_model.py",
                     "strategies/transformers_internals.py", "npu_runner/prompts/text/tokenizer.py"}


def test_few_rooms_know_each_other() -> None:
    assert len(arrows()) <= MOST_ARROWS


HOUSES = {
    "batch": ["rows", "files", "job", "check"],  # a row, where rows lie, the job, and its rows before it
    "prompts": ["media", "text", "prompts"],  # what a message shows, what it says, and both in one prompt
    "serving": ["workers", "serving", "replicas"],  # to prepare, what a replica is, to share out
}


@pytest.mark.parametrize("house", HOUSES)
def test_a_room_of_a_package_imports_only_rooms_below_it(house: str) -> None:
    rooms, folder = HOUSES[house], ROOT / "npu_runner" / house
    for path in sorted(folder.rglob("*.py")):
        for module in imports(path):
            parts = module.split(".")
            if parts[:2] == ["npu_runner", house] and len(parts) > 2:
                imported = parts[2] if (folder / parts[2]).is_dir() else house
                assert path.parent.name in rooms, f"{path.name} stands in no room"
                assert rooms.index(imported) <= rooms.index(path.parent.name), f"{path} imports {module}"


def module_name(path: Path) -> str:
    dotted = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    return f"npu_runner.{dotted}" if dotted.startswith("strategies") else dotted


def test_no_file_imports_itself_by_way_of_others() -> None:
    names = {module_name(path): path for path in all_sources()}
    del names["npu_runner"]  # its public names load on first use
    wanted = {name: {module for module in imports(path) if module in names} - {name} for name, path in names.items()}
    list(TopologicalSorter(wanted).static_order())  # raises CycleError, which names the circle


def test_the_core_imports_no_torch() -> None:
    for path in (ROOT / "npu_runner" / "core").glob("*.py"):
        assert not any(module.split(".")[0] == "torch" for module in imports(path)), path.name


def literals(path: Path) -> list[str]:
    return read(path)[1]


def test_no_test_file_imports_another() -> None:
    """Shared parts lie in helper modules beside the tests, named for what they hold. A test file is read alone."""
    files = sorted((ROOT / "tests").rglob("*.py"))
    tests = {path.stem for path in files if path.stem.startswith("test_")}
    found = []
    for path in files:
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if tests & set(re.findall(r"\btest_\w+", text)) else ():
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
                found += [f"{path.relative_to(ROOT)}:{node.lineno}" for name in names if tests & set(name.split("."))]
    assert found == []


def test_nobody_above_a_platform_asks_which_one_it_is() -> None:
    """Outside platforms/ no code has a platform's name for a string, asks a tensor where it lies, or imports a vendor's
    folder; a docstring may explain what a default is."""
    for path in [path for path in sources() if room_of(path) != "platforms"]:
        assert not BUILT_IN.keys() & set(literals(path)), path
        assert "device.type" not in path.read_text(), path
        vendors = {module.split(".")[2] for module in imports(path) if module.startswith("npu_runner.platforms.")}
        assert not BUILT_IN.keys() & vendors, path


def test_a_platform_loads_no_torch_before_it_is_used() -> None:
    """The doctor looks at hosts where that fails, and the process that shares out devices is to open none."""
    code = ("import sys; from npu_runner.platforms import platforms; names = [each.name for each in platforms()]; "
            "print(*names, {'torch', 'torch_npu', 'triton'} & set(sys.modules))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "npu cuda cpu set()\n"


def test_no_file_is_too_long_to_read() -> None:
    long = {str(path.relative_to(ROOT)): count for path in sources()
            if (count := len(path.read_text().splitlines())) > 500}
    assert not long


def lines_of_rooms() -> Counter[str]:
    counts: Counter[str] = Counter()
    for path in all_sources():
        room = room_of(path)
        folder = ROOT / ("strategies" if room == "strategies" else f"npu_runner/{room}")
        counts[room if folder.is_dir() else "front"] += len(path.read_text().splitlines())
    return counts


def test_no_room_gets_heavier() -> None:
    heavy = {room: count for room, count in lines_of_rooms().items() if count > MOST_LINES[room]}
    assert not heavy, "leave something out, or raise MOST_LINES with the reason beside the number"


def test_no_file_imports_half_the_house() -> None:
    own = {str(path.relative_to(ROOT)): len({name for name in imports(path) if name.startswith("npu_runner.")})
           for path in sources()}
    many = {path for path, count in own.items() if count > MOST_OWN_IMPORTS}
    assert many == MANY_OWN_IMPORTS, "a file that joins is to be split; one that left is to be struck from the list"


def contract_members() -> tuple[int, int]:
    """The public methods and attributes of the classes that a vendor implements."""
    num_methods = num_attributes = 0
    for module, classes in CONTRACT.items():
        body = ast.parse((ROOT / "npu_runner" / "platforms" / f"{module}.py").read_text()).body
        found = [node for node in body if isinstance(node, ast.ClassDef) and node.name in classes]
        assert len(found) == len(classes), f"a class of {module} has another name now"
        for node in found:
            num_methods += sum(isinstance(each, ast.FunctionDef) and each.name[0] != "_" for each in node.body)
            num_attributes += sum(isinstance(each, ast.AnnAssign) and ast.unparse(each.target)[0] != "_"
                                  for each in node.body)
    return num_methods, num_attributes


def test_a_vendor_has_few_members_to_write() -> None:
    num_methods, num_attributes = contract_members()
    assert num_methods <= MOST_CONTRACT_METHODS
    assert num_attributes <= MOST_CONTRACT_ATTRIBUTES


@functools.cache
def text_of_the_house() -> str:
    kernels = (ROOT / "npu_runner").rglob("*.cu")
    return "\n".join(path.read_text() for path in (*all_sources(), *kernels))


@pytest.mark.parametrize("pattern", MOST_OF_A_WORD)
def test_the_fields_words_replace_our_own(pattern: str) -> None:
    assert len(re.findall(pattern, text_of_the_house(), re.IGNORECASE)) <= MOST_OF_A_WORD[pattern]


@pytest.mark.parametrize("opening", MOST_OF_AN_OPENING)
def test_a_docstring_has_a_subject(opening: str) -> None:
    docstrings = [text for path in all_sources() for text in read(path)[2]]
    assert sum(text.split(maxsplit=1)[:1] == [opening] for text in docstrings) <= MOST_OF_AN_OPENING[opening]
