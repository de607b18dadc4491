"""A checkpoint's scales for keys and values in FP8: under which names they are found, which layer they go to, what a
start says, and what it refuses. Kernels that use them are compared in tests/cuda.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from npu_runner import LLM, strategies
from npu_runner.checkpoint.formats.reader import open_weights
from npu_runner.checkpoint.quantization import Quantization, kv_cache_scheme, read_quantization
from npu_runner.config import RunnerConfig
from npu_runner.errors import ConfigError, WeightsError
from npu_runner.layers.attention import PagedAttention, load_kv_scales
from npu_runner.platforms import find_platform
from npu_runner.platforms.cpu.attention import CpuAttention
from npu_runner.runner.estimate import Estimate, estimate_memory
from npu_runner.runner.settings import Settings, resolve_settings
from npu_runner.strategies import pick_strategy, transformers_model
from npu_runner.strategies.base import LoadStrategy
from scripts.quantised.writing import quantise
from tests.oracle.running import SMALL, runner_of
from tests.oracle.scaled_caches import NAMES, SCHEME, scaled_checkpoint, scales_of, with_scales

MODULES = [f"model.layers.{layer}.self_attn" for layer in range(3)]


@pytest.mark.parametrize("names", NAMES)
def test_scales_are_found_under_each_name(names: str, checkpoint: Any, tmp_path: Path) -> None:
    path = scaled_checkpoint(checkpoint("qwen3"), tmp_path / "made", names=names)
    with open_weights(path, read_quantization(path)) as reader:
        found = [reader.kv_scales(module) for module in MODULES]
        assert reader.kv_scales("model.layers.3.self_attn") is None
    right = [scales_of(layer) for layer in range(3)]
    assert found == ([(values, values) for _, values in right] if names == "one for both" else right)


@pytest.mark.parametrize(("model_type", "prefix"), [("qwen3", "model.layers"),
                                                    ("qwen3_5", "model.language_model.layers")])
def test_each_layer_is_given_its_own(model_type: str, prefix: str, checkpoint: Any, tmp_path: Path,
                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the family calls them; layers without a cache have none."""
    taken: list[list[float]] = []
    monkeypatch.setattr(CpuAttention, "with_kv_scales", lambda self, scales_2: taken.append(scales_2.tolist()) or self)
    plain = checkpoint(model_type)
    path = scaled_checkpoint(plain, tmp_path / "made", prefix=prefix, num_layers=4)
    with LLM(path, platform="cpu", **SMALL) as llm:
        model, strategy = runner_of(llm).model, runner_of(llm).strategy
        with open_weights(path, read_quantization(path)) as reader:
            num_layers = sum(isinstance(module, PagedAttention) for module in model.modules())
            assert not taken, "the cpu platform keeps keys and values in the model's dtype"
            renamed = strategy.renamed(reader.names)
            assert load_kv_scales(model, reader, renamed, torch.device("cpu")) == (num_layers, num_layers)
    config = json.loads((path / "config.json").read_text())
    kinds = config.get("text_config", config)["layer_types"]
    assert taken == [list(scales_of(layer)) for layer, kind in enumerate(kinds) if kind == "full_attention"]


BAD = {
    "of each head": (torch.ones(2), r"k_scale holds F32 \[2\], and a scale of keys or values in FP8 is one number"),
    "zero": (torch.zeros(1), "k_scale holds 0.0, which is no scale"),
    "no number": (torch.tensor(torch.nan), "k_scale holds nan, which is no scale"),
    "integers": (torch.ones(1, dtype=torch.int32), "k_scale holds I32"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_what_is_no_scale_is_an_error_that_names_it(kind: str, checkpoint: Any, tmp_path: Path) -> None:
    scale, message = BAD[kind]
    quantise(checkpoint("qwen3"), tmp_path / "made", "fp8-dynamic", group_size=8)
    path = with_scales(tmp_path / "made", {f"{MODULES[0]}.k_scale": scale, f"{MODULES[0]}.v_scale": torch.ones(1),
                                           f"{MODULES[1]}.k_scale": torch.ones(1)})
    with open_weights(path, read_quantization(path)) as reader:
        with pytest.raises(WeightsError, match=message):
            reader.kv_scales(MODULES[0])
        with pytest.raises(WeightsError, match=r"layers\.1\.self_attn\.v_scale is missing"):
            reader.kv_scales(MODULES[1])


def on_cuda(path: Path, **settings: Any) -> tuple[LoadStrategy, RunnerConfig]:
    return pick_strategy(path), RunnerConfig(model=str(path), platform="cuda", max_model_len=256).replace(**settings)


def estimated(path: Path, **settings: Any) -> Estimate:
    return estimate_memory(*on_cuda(path, **settings), find_platform("cuda"), 64 << 30)


def settled(path: Path, **settings: Any) -> Settings:
    strategy, config = on_cuda(path, **settings)
    return resolve_settings(config, strategy.model_config_for(config), find_platform("cuda"), read_quantization(path))


def test_auto_takes_the_scheme_of_the_checkpoint_where_the_platform_keeps_it(
        checkpoint: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = scaled_checkpoint(checkpoint("qwen3"), tmp_path / "made")
    of_fp8 = estimated(path)
    wide = estimated(path, kv_cache_dtype="bfloat16", dtype="bfloat16")
    assert of_fp8.settings.describe()["kv_cache_dtype"] == "float8_e4m3fn"
    assert 2 * of_fp8.bytes_per_block == wide.bytes_per_block
    assert "kv_cache_dtype" not in wide.settings.describe()
    assert wide.settings.kv_cache_dtype == "bfloat16"
    assert settled(path, attention_backend="flashinfer", dtype="bfloat16").kv_cache_dtype == "bfloat16"
    with caplog.at_level("INFO"), LLM(path, platform="cpu", **SMALL) as llm:
        assert "kv_cache_dtype" not in llm.engine.describe()
    (line,) = [each for each in caplog.messages if each.startswith("quantised weights")]
    assert line.endswith("; 6 scales of the KV cache are not used")


SCHEMES: dict[str, tuple[Any, str]] = {
    "int8": (SCHEME | {"type": "int"}, "kv_cache_scheme: int of 8 bits, strategy tensor"),
    "of each head": (SCHEME | {"strategy": "attn_head"}, "kv_cache_scheme: float of 8 bits, strategy attn_head"),
    "asymmetric": (SCHEME | {"symmetric": False}, "float of 8 bits, strategy tensor, asymmetric"),
    "dynamic": (SCHEME | {"dynamic": True}, "float of 8 bits, strategy tensor, dynamic"),
    "4 bits": (SCHEME | {"num_bits": 4}, "float of 4 bits, strategy tensor"),
    "a word": ("per_head", "kv_cache_scheme 'per_head'"),
}  # fmt: skip


@pytest.mark.parametrize("kind", SCHEMES)
def test_another_scheme_is_refused_with_fp8_and_unused_with_auto(kind: str, checkpoint: Any, tmp_path: Path) -> None:
    scheme, words = SCHEMES[kind]
    path = scaled_checkpoint(checkpoint("qwen3"), tmp_path / "made", scheme=scheme)
    assert settled(path).kv_cache_dtype == settled(path).dtype
    with pytest.raises(ConfigError) as refused:
        settled(path, kv_cache_dtype="fp8")
    assert "kv_cache_dtype fp8: the checkpoint's keys and values are to be kept otherwise" in str(refused.value)
    assert words in str(refused.value)


def test_which_schemes_are_fp8_with_one_scale() -> None:
    def scheme_of(method: str, **settings: Any) -> str | None:
        return kv_cache_scheme(Quantization(method=method, settings=settings))

    assert kv_cache_scheme(None) is None
    assert scheme_of("fp8") is scheme_of("compressed-tensors", kv_cache_scheme=None) is scheme_of("modelslim") is None
    assert scheme_of("fp8", kv_cache_scheme="static") == "fp8"
    assert scheme_of("compressed-tensors", kv_cache_scheme={"num_bits": 8, "type": "float", "dynamic": False}) == "fp8"
    assert scheme_of("modelslim", kv_cache_type="C8") == "modelslim, 'C8'"


def test_a_dtype_that_is_not_the_models_is_refused(checkpoint: Any) -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype float16: keys and values are kept in the model's dtype, flo"):
        LLM(checkpoint("qwen3"), platform="cpu", kv_cache_dtype="float16", **SMALL)


def test_a_network_of_transformers_keeps_fp8_with_its_own_scales(checkpoint: Any, tmp_path: Path,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    """Its layers are the same PagedAttention under other names, so kernels differ in nothing."""
    pytest.importorskip("transformers")
    path, taken = scaled_checkpoint(checkpoint("qwen3"), tmp_path / "made"), []
    monkeypatch.setattr(strategies, "find_strategy", lambda model_type: None)
    monkeypatch.setattr(CpuAttention, "with_kv_scales", lambda self, scales_2: taken.append(scales_2.tolist()) or self)
    assert settled(path).kv_cache_dtype == settled(path, kv_cache_dtype="fp8").kv_cache_dtype == "float8_e4m3fn"
    with pytest.raises(ConfigError, match="kv_cache_dtype fp8: platform cpu keeps them in the model's dtype"):
        LLM(path, platform="cpu", kv_cache_dtype="fp8", **SMALL)
    with LLM(path, platform="cpu", **SMALL) as llm, open_weights(path, read_quantization(path)) as reader:
        model, strategy = runner_of(llm).model, runner_of(llm).strategy
        assert isinstance(strategy, transformers_model.TransformersStrategy)
        named = strategy.named(reader)
        assert load_kv_scales(model, named, strategy.renamed(named.names), torch.device("cpu")) == (3, 3)
    assert taken == [list(scales_of(layer)) for layer in range(3)]
