"""What `platforms/npu` calls exists in every listed torch_npu, with every keyword: by text, for none is installed.

tests/npu/operator_table/table.json is what the wheels say; `python -m tests.npu.operator_table` makes it anew.
"""

from __future__ import annotations

import importlib
import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest

from npu_runner.platforms.npu.versions import OLD_WHEELS, PAIRINGS
from tests.cann.environment import has_real_cann, installed_wheel, run_python
from tests.full_set import only_full
from tests.npu.operator_table.__main__ import PACKAGE, SOURCES, WHEELS
from tests.npu.operator_table.facts import STORED, fact
from tests.npu.operator_table.uses import Reader, Use
from tests.npu.operator_table.wheels import Wheel

OPTIONAL = {
    "npugraph_ex": "graphs.py asks has_npugraph_ex, and else captures through torchair's reduce-overhead",
    "torch.ops.npu._npu_moe_token_unpermute":
        "torchair.py asks for it: newer wheels trace npu_moe_token_unpermute as this one, older ones as it is",
    "torch.ops.npu.npu_recurrent_gated_delta_rule_in_list":
        "ours, in no wheel: torchair.py defines it before it is registered",
}
"""What a wheel may lack, with everything below it, and what is done there instead."""

SUPPORTED = tuple(pair.torch_npu for pair in PAIRINGS)
_READER = Reader(SOURCES, PACKAGE)
_SCATTER = "npu_scatter_pa_kv_cache"


def missing(wheel: str, uses: Iterable[Use]) -> set[str]:
    """What of `uses` this wheel does not have."""
    found = set()
    for use in uses:
        if use.path not in STORED["names"]:
            found.add(f"{use.path} is not in the table: python -m tests.npu.operator_table")
        elif (text := fact(wheel, use.path)) is None:
            is_somewhere = any(fact(each, use.path) for each in SUPPORTED)
            is_optional = any(use.path == name or use.path.startswith((f"{name}.", f"{name} ")) for name in OPTIONAL)
            found |= set() if is_optional or (use.is_asked and is_somewhere) else {use.path}
        else:
            found |= {f"{use.path}: {problem}" for problem in mismatches(text, use)}
    return found


def mismatches(text: str, use: Use) -> list[str]:
    """What of a call does not fit the parameters in `text`."""
    listed = re.match(r"(?:class )?\((.*?)\)(?: -> .*)?$", text)
    if listed is None or not (use.keywords or use.num_positional):
        return []
    parameters = parameters_of(listed[1])
    names = list(parameters)
    if any(name.startswith("**") for name in names):
        return []
    by_place = next((index for index, name in enumerate(names) if name.startswith("*")), len(names))
    takes_more = any(name.startswith("*") and name != "*" for name in names)
    unknown = [f"no {keyword}" for keyword in use.keywords if keyword not in names]
    too_many = [f"takes {by_place} by place"] if use.num_positional > by_place and not takes_more else []
    given = {*names[:use.num_positional], *use.keywords}
    wanted = [name for name, has_default in parameters.items() if not has_default and name not in given]
    return [*unknown, *too_many, *(f"wants {name}" for name in wanted)]


def parameters_of(text: str) -> dict[str, bool]:
    """Names in a parameter list, Python's or a schema's, and whether each may be left out."""
    parts = [part.strip() for part in re.split(r",\s*(?![^\[(]*[\])])", text)]
    named = {part.partition("=")[0].split()[-1]: "=" in part or part.startswith("*") for part in parts if part}
    named.pop("self", None) if "self" in parts else None
    return named


def test_the_table_has_every_wheel_of_the_version_table_and_the_old_ones() -> None:
    assert set(STORED["wheels"].split()) == set(WHEELS) == {*(pair.torch_npu for pair in PAIRINGS), *OLD_WHEELS}


def test_the_reader_finds_what_a_person_finds() -> None:
    """By grep, once; one of each kind, so that a reader that goes blind is noticed."""
    found = {use.path for use in _READER.uses}
    for path in ("torch.ops.air.npu_fused_infer_attention_score", "torch.npu.set_compile_mode",
                 "torchair.CompilerConfig().experimental_config.frozen_parameter", "torchair.inference.cache_compile",
                 "npugraph_ex options.use_graph_pool", "torch.ops.npu.npu_scatter_pa_kv_cache_functional",
                 "torchair._acl_concrete_graph.graph_pass.register_inplaceable_npu_op"):
        assert path in found, path
    (scatter,) = [use for use in _READER.uses if use.path == f"torch_npu.{_SCATTER}" and use.keywords]
    assert "cache_mode" in scatter.keywords
    text = "".join(path.read_text() for path in SOURCES.rglob("*.py"))
    for name in set(re.findall(r"torch_npu\.(npu_\w+)", text)):
        assert f"torch_npu.{name}" in found, name
    for name in set(re.findall(r"^[^#\"]*\btorch\.npu\.(\w+)", text, re.MULTILINE)):
        assert f"torch.npu.{name}" in found, name


@pytest.mark.parametrize("wheel", SUPPORTED)
def test_what_every_vendors_memory_takes_of_its_module_is_in_this_wheel(wheel: str) -> None:
    sources = [(SOURCES.parent / name).read_text() for name in ("devices.py", "transfers.py")]
    names = set(re.findall(r"\bself\._(?:module|device)\.(\w+)", "".join(sources)))
    assert {"mem_get_info", "Event"} <= names
    assert [name for name in names if fact(wheel, f"torch.npu.{name}") is None] == []


@pytest.mark.parametrize("wheel", [pair.torch_npu for pair in PAIRINGS])
def test_everything_that_is_used_is_in_this_wheel(wheel: str) -> None:
    assert missing(wheel, _READER.uses) == set()


@pytest.mark.parametrize("wheel", [pair.torch_npu for pair in PAIRINGS])
def test_max_autotune_writes_the_cache_as_it_is_read(wheel: str) -> None:
    """The shipped converter of some wheels drops cache_mode and writes PA_NZ: there we bring our own, or refuse."""
    name = f"torch.ops.npu.{_SCATTER}_functional"
    shipped = fact(wheel, f"GE converter of {name}")
    assert shipped is not None
    assert "cache_mode" in shipped or name in _READER.converters


@pytest.mark.parametrize("wheel", OLD_WHEELS)
def test_old_wheels_are_refused_for_these_reasons(wheel: str) -> None:
    expected = {f"torch_npu.{_SCATTER}: no cache_mode",
                "torchair._acl_concrete_graph.graph_pass.register_inplaceable_npu_op"}
    router, rule = "npu_moe_gating_top_k_softmax_v2", "npu_recurrent_gated_delta_rule"
    gate_up = "grouped_matmul_swiglu_quant_v2"
    expected |= {f"torch_npu.{router}", f"torch.ops.npu.{router}",
                 f"torchair._ge_concrete_graph.ge_converter.custom.{router}"}
    if wheel in ("2.7.1", "2.8.0"):  # of CANN 8.3
        expected |= {"torchair.CompilerConfig().as_dict", "torchair.CompilerConfig().debug.aclgraph.clone_input",
                     f"torch_npu.{rule}", f"torch.ops.npu.{rule}", f"torch.ops.npu.{rule}_functional",
                     f"torch_npu.npu_{gate_up}", f"torch.ops.npu.npu_{gate_up}",
                     f"torchair._ge_concrete_graph.ge_converter.custom.{gate_up}"}
    assert missing(wheel, _READER.uses) == expected


def test_what_is_optional_is_missing_somewhere_and_used() -> None:
    for name in OPTIONAL:
        assert any(fact(wheel, name) is None for wheel in WHEELS), f"every wheel has {name}"
        assert any(use.path == name for use in _READER.uses)


OTHER_MISTAKES = [
    ("kernels.py", "torch_npu._npu_reshape_and_cache(", "torch_npu._npu_reshape_cache(",
     "torch_npu._npu_reshape_cache is not in the table"),
    ("kernels.py", "actual_seq_qlen=totals", "actual_seq_lengths=totals",
     "torch_npu.npu_fusion_attention: no actual_seq_lengths"),
    ("attention.py", '{"pre_tokens": window', '{"tokens_before": window',
     "torch_npu.npu_fused_infer_attention_score: no tokens_before"),
    ("graphs.py", "torch.npu.graph_pool_handle()", "torch.npu.graph_pool(1)", "torch.npu.graph_pool is not in"),
    ("torchair.py", '"npu_scatter_pa_kv_cache_functional",', '"npu_scatter_kv",',
     "torch.ops.npu.npu_scatter_kv is not in"),
    ("experts.py", "row_idx_type=0", "row_type=0", "torch_npu.npu_moe_init_routing_v2: no row_type"),
    ("experts.py", "group_list_type=_list_type(counts),", "list_type=_list_type(counts),",
     "torch_npu.npu_grouped_matmul: no list_type"),
    ("ops.py", "torch_npu.npu_swiglu(", 'getattr(torch_npu, "npu_swish", None)(', "torch_npu.npu_swish is not in"),
    ("gated_delta.py", "ssm_state_indices=slots_T", "slots=slots_T",
     "torch_npu.npu_recurrent_gated_delta_rule: no slots"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("file", "old", "new", "reported"),
    [
        ("kernels.py", 'cache_mode="Norm"', 'cache_modus="Norm"', f"torch_npu.{_SCATTER}: no cache_modus"),
        ("attention.py", "block_table=tables_BW", "page_table=tables_BW",
         "torch.ops.air.npu_fused_infer_attention_score: no page_table"),
        ("ops.py", "npu_rms_norm(x, weight, eps)", "npu_rms_norm(x)", "torch_npu.npu_rms_norm: wants gamma"),
        ("ops.py", "npu_swiglu(gate_up_T2I)", "npu_swiglu(gate_up_T2I, -1, 2)",
         "torch_npu.npu_swiglu: takes 2 by place"),
        ("ops.py", "torch_npu.npu_swiglu(", "torch_npu.npu_swish(", "torch_npu.npu_swish is not in the table"),
        ("graphs.py", '"clone_input": False', '"clone_inputs": False', "npugraph_ex options.clone_inputs is not in"),
        ("graphs.py", "clone_input = False", "clones = False",
         "torchair.CompilerConfig().debug.aclgraph.clones is not in"),
        ("torchair.py", "mutated_arg=[3]", "mutates=[3]",
         "npugraph_ex._acl_concrete_graph.graph_pass.register_inplaceable_npu_op: no mutates"),
        ("torchair.py", 'ops.npu, "_npu_moe_token_unpermute")', 'ops.npu, "_npu_moe_unpermute")',
         "torch.ops.npu._npu_moe_unpermute is not in"),
        ("ops.py", "torch_npu.npu_rms_norm(x, weight, eps)", 'getattr(torch_npu, "npu_rms_norm", None)(x)',
         "torch_npu.npu_rms_norm: wants gamma"),
        *only_full("the same kinds of mistakes elsewhere", *OTHER_MISTAKES),
    ],
)  # fmt: skip
def test_a_mistake_is_reported(file: str, old: str, new: str, reported: str, tmp_path: Path) -> None:
    shutil.copytree(SOURCES, tmp_path / "npu", ignore=shutil.ignore_patterns("__pycache__"))
    text = (tmp_path / "npu" / file).read_text()
    assert old in text, f"{file} no longer has {old}: put a mistake into what it has now"
    (tmp_path / "npu" / file).write_text(text.replace(old, new))
    found = missing("2.13.0", Reader(tmp_path / "npu", PACKAGE).uses)
    assert any(problem.startswith(reported) for problem in found), found


def lacking(names: Iterable[str]) -> set[str]:
    """Those of torch's own names that the installed torch does not have."""
    return {name for name in names if not _is_there(name)}


def _is_there(name: str) -> bool:
    home, _, attribute = name.rpartition(".")
    return hasattr(importlib.import_module(home), attribute)


def test_what_torch_itself_is_asked_for_is_spelled_as_torch_has_it(tmp_path: Path) -> None:
    """Such a name may be missing in an older torch; one that the installed torch lacks too is a slip."""
    assert _READER.asked_of_torch == {"torch._functorch.config.error_on_custom_op_aliasing"}
    assert lacking(_READER.asked_of_torch) == set()
    shutil.copytree(SOURCES, tmp_path / "npu", ignore=shutil.ignore_patterns("__pycache__"))
    graphs = tmp_path / "npu/graphs.py"
    graphs.write_text(graphs.read_text().replace('"error_on_custom_op_aliasing"', '"error_on_op_aliasing"'))
    assert lacking(Reader(tmp_path / "npu", PACKAGE).asked_of_torch) == {"torch._functorch.config.error_on_op_aliasing"}


CONVERTERS = """
@register_fx_node_ge_converter(torch.ops.npu.npu_one.default)
def one(x, *, meta_outputs=None): ...

def several(x, weight, *, bias=None, meta_outputs=None): ...

register_fx_node_ge_converter(torch.ops.npu.npu_two.default)(several)
three = register_fx_node_ge_converter(torch.ops.npu.npu_three.default)(several)
four = register_fx_node_ge_converter(torch.ops.npu.npu_four.List)(several)
five = register_fx_node_ge_converter(torch.ops.npu.npu_five.default)(from_elsewhere)
"""


def test_converters_that_are_registered_by_a_call_are_seen(tmp_path: Path) -> None:
    folder = tmp_path / "torch_npu/dynamo/torchair/_ge_concrete_graph/ge_converter/custom"
    folder.mkdir(parents=True)
    (folder / "some.py").write_text(CONVERTERS)
    wheel, several = Wheel(tmp_path), "(x, weight, *, bias=None, meta_outputs=None)"
    found = {name: wheel.fact(f"GE converter of torch.ops.npu.npu_{name}") for name in ("one", "two", "three", "four")}
    assert found == {"one": "(x, *, meta_outputs=None)", "two": several, "three": several, "four": None}
    for each in SUPPORTED:
        text = fact(each, "GE converter of torch.ops.npu.npu_grouped_matmul")
        assert text is not None, each
        assert "group_list" in parameters_of(text.strip("()")), each


@pytest.mark.npu
@pytest.mark.slow
@pytest.mark.full("reads a wheel for seconds; what we call is compared with the table")
@pytest.mark.skipif(has_real_cann(), reason="another torch_npu may be installed there")
def test_the_table_says_what_the_installed_wheel_says() -> None:
    """2.13.0's text is here; what it says of operators is what torch itself has once torch_npu is imported."""
    wheel, paths = Wheel(installed_wheel()), list(STORED["names"])
    assert {path: wheel.fact(path) for path in paths} == {path: fact("2.13.0", path) for path in paths}
    names = [path.removeprefix("torch.ops.npu.") for path in paths
             if path.startswith("torch.ops.npu.") and fact("2.13.0", path) is not None]
    program = ("import json, sys, torch, torch_npu\n"
               "print(json.dumps({n: [a.name for a in getattr(torch.ops.npu, n).default._schema.arguments] "
               "for n in sys.argv[1:]}))")
    done = run_python(["-c", program, *names], forked=True)
    assert done.returncode == 0, done.stderr
    for name, arguments in json.loads(done.stdout.splitlines()[-1]).items():
        text = fact("2.13.0", f"torch.ops.npu.{name}")
        assert text is not None
        listed = re.match(r"\((.*?)\) -> ", text)
        assert listed is not None
        # torch calls `self` of a schema `input`.
        written = ["input" if parameter == "self" else parameter for parameter in parameters_of(listed[1])]
        known = ["input" if argument == "self" else argument for argument in arguments]
        assert [parameter for parameter in written if parameter != "*"] == known, name
