"""Each release of transformers that serves has the internal names that are used of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full("fetches wheels of PyPI")
RELEASES = ("==5.20.0", "==5.20.2", "==5.21.1", "==5.22.2", "==5.23.0", ">=5.20,<6")
"""The last one is the newest."""
PROGRAM = """
import torch, transformers
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING
from npu_runner.strategies import transformers_internals as internals

config = CONFIG_MAPPING["mixtral"](num_hidden_layers=1, hidden_size=64, intermediate_size=96, vocab_size=100,
                                   num_attention_heads=4, num_key_value_heads=2, num_local_experts=3)
model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
assert not internals.keeps_states(model_class) and internals.calls_attention_by_name(model_class)
network = internals.make_network(model_class, config, "eager", torch.bfloat16)
assert all(parameter.is_meta for parameter in network.parameters())
assert not any(buffer.is_meta for buffer in network.buffers())
found = internals.stored_names(network, ["model.layers.0.block_sparse_moe.experts.2.w3.weight", "lm_head.weight", "x"])
assert found == {"model.layers.0.mlp.experts.2.up_proj.weight": "model.layers.0.block_sparse_moe.experts.2.w3.weight",
                 "lm_head.weight": "lm_head.weight", "x": "x"}, found
layer = network.model.layers[0]
assert internals.experts_of(layer.mlp.experts) == (3, 64, 96) and internals.experts_of(layer.mlp) is None
assert internals.tp_plan(network)["model.layers.*.self_attn.q_proj"] == "colwise"
assert internals.tied_names(network) == {}
with internals.other_attention(network, "sdpa", "eager"):
    assert layer.self_attn.config._attn_implementation == "sdpa"
assert layer.self_attn.config._attn_implementation == "eager"
assert callable(internals.own_attention_function(layer.self_attn)) and callable(internals.eager_mask())

config = CONFIG_MAPPING["gpt2"](n_layer=1, n_embd=64, n_head=4, vocab_size=100)
network = internals.make_network(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config, "eager", torch.float16)
assert internals.tied_names(network) == {"lm_head.weight": "transformer.wte.weight"}
assert internals.stored_names(network, ["wte.weight", "h.0.attn.bias", "h.0.ln_1.weight"]) == {
    "transformer.wte.weight": "wte.weight", "transformer.h.0.ln_1.weight": "h.0.ln_1.weight"}
assert type(network.transformer.h[0].attn.c_attn) is internals.turned_linear()
print(transformers.__version__)
"""


@pytest.mark.parametrize("release", RELEASES)
def test_a_release_has_all_internal_names(release: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path),
               f"transformers{release}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"PyPI does not give the wheel: {done.stderr.strip().splitlines()[-1:]}")
    path = os.pathsep.join((str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])))
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False,
                          env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    found = done.stdout.split()[-1]
    assert not release.startswith("==") or found == release.removeprefix("==")
