"""The wheel in an environment of its own: it answers, and it serves a model that only another package knows.

torch and the other dependencies come from the environment of the tests, by a .pth file; the package does not.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from npu_runner import __version__

ROOT = Path(__file__).parents[1]
SHAPES_VL = ROOT / "npu_runner" / "assets" / "shapes-vl"
# L tokens, D width, V vocabulary, H head dim
WIDTH, DEPTH, VOCABULARY = 32, 2, 576
PROMPT, NUM_NEW = [5, 9, 300, 41, 7], 12

PLUGIN = '''
"""A family that npu_runner does not know: a config with names of its own, and a network that is none of ours."""

from npu_runner.checkpoint.files import require_json
from npu_runner.layers.attention import PagedAttention
from npu_runner.checkpoint.model_config import AttentionConfig, LayerConfig, MLPConfig, ModelConfig, RopeConfig
from npu_runner.layers.weights_loader import load_weights
from npu_runner.strategies import LoadStrategy
from torch import nn


class Bag(nn.Module):
    """Attention without positions, and nothing else."""

    def __init__(self, config, context):
        super().__init__()
        width, vocabulary = config.hidden_size, config.vocab_size
        self.table = nn.Embedding(vocabulary, width, dtype=context.dtype, device=context.device)
        self.mix = nn.ModuleList(nn.Linear(width, 3 * width, bias=False, dtype=context.dtype, device=context.device)
                                 for _ in range(config.num_layers))
        self.attention = nn.ModuleList(PagedAttention(i, 1, width, context) for i in range(config.num_layers))
        self.head = nn.Linear(width, vocabulary, bias=False, dtype=context.dtype, device=context.device)

    def embed(self, input_ids_T):
        return self.table(input_ids_T)

    def forward(self, x_TD, positions, metadata, deepstack=None):
        for mix, attention in zip(self.mix, self.attention):
            q, k, v = (part[:, None] for part in mix(x_TD).chunk(3, dim=-1))
            x_TD = x_TD + attention(q, k, v, metadata).flatten(-2)
        return x_TD

    def compute_logits(self, hidden_BD):
        return self.head(hidden_BD)


class BagStrategy(LoadStrategy):
    def read_config(self):
        raw = require_json(self.path, "config.json")
        layer = LayerConfig(mixer=AttentionConfig(), channel=MLPConfig(intermediate_size=raw["width"]))
        return ModelConfig(
            model_type="bag", vocab_size=raw["symbols"], hidden_size=raw["width"], num_heads=1, num_kv_heads=1,
            head_dim=raw["width"], layers=(layer,) * raw["depth"], max_position_embeddings=512, rms_norm_eps=1e-6,
            tie_word_embeddings=False, rope=RopeConfig(), dtype="float32",
        )

    def build(self, model_config, num_positions, context):
        return Bag(model_config, context)

    def load_weights(self, model, reader, model_config):
        return load_weights(model, reader)
'''

SERVE = """
import json, sys
import npu_runner
from npu_runner import LLM, SamplingParams

model, prompt, count = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
found = []
for num_replicas in (1, 2):  # two are processes of their own
    with LLM(model, platform="cpu", kv_cache_bytes=1 << 20, max_num_seqs=4, data_parallel_size=num_replicas) as llm:
        (result,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))
    found.append(list(result.token_ids))
print(json.dumps({"file": npu_runner.__file__, "token_ids": found}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: building leaves folders behind."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("npu_runner", "strategies"):  # a link in the first leads to the second
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", "wheels", "."]
    subprocess.run(command, cwd=folder, check=True)
    (built,) = (folder / "wheels").glob(f"npu_runner-{__version__}-*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The python of an environment that holds the wheel and a package with a strategy."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv" / "bin" / "python"
    packages = Path(_output([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder))
    plugin = folder / "plugin"
    plugin.mkdir()
    (plugin / "bag_of_words.py").write_text(PLUGIN)
    (plugin / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools>=77"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "bag-of-words"\nversion = "1"\n'
        '[project.entry-points."npu_runner.strategies"]\nbag = "bag_of_words:BagStrategy"\n'
        '[tool.setuptools]\npy-modules = ["bag_of_words"]\n'
    )
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"]
    subprocess.run([*install, str(wheel), str(plugin)], cwd=folder, check=True)
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def _output(command: list[str], folder: Path) -> str:
    # The tests' own PYTHONPATH and current folder would hide what is missing from the wheel.
    done = subprocess.run(command, cwd=folder, env={"PATH": "/usr/bin:/bin", "OMP_WAIT_POLICY": "PASSIVE"},
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.full("builds the package; only what packs it can break it")
def test_the_wheel_holds_what_is_no_python_file(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    kept = [path for path in (ROOT / "npu_runner").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {str(path.relative_to(ROOT)) for path in kept} <= names
    assert {"npu_runner/py.typed", "npu_runner/assets/shapes-vl/model.safetensors", "npu_runner/strategies/base.py",
            "npu_runner/assets/doctor/questions.json", "npu_runner/assets/doctor/5.png"} <= names


@pytest.mark.slow
@pytest.mark.full("builds and installs the package; only what packs it can break it")
def test_the_installed_command_answers(environment: Path, tmp_path: Path) -> None:
    command = [str(environment.parent / "npu-runner"), "generate", "--platform", "cpu", "--max-tokens", "8"]
    assert _output([*command, "Which shapes are there?"], tmp_path)


@pytest.mark.slow
@pytest.mark.full("builds and installs two packages; only the contract of strategies can break it")
def test_a_package_with_public_names_alone_serves_a_family_of_its_own(environment: Path, tmp_path: Path) -> None:
    weights = make_checkpoint(tmp_path / "checkpoint")
    printed = _output([str(environment), "-c", SERVE, str(tmp_path / "checkpoint"), json.dumps(PROMPT), str(NUM_NEW)],
                      tmp_path)
    result = json.loads(printed.splitlines()[-1])
    assert Path(result["file"]).is_relative_to(environment.parents[1])
    assert result["token_ids"] == [reference(weights)] * 2


def make_checkpoint(folder: Path) -> dict[str, Tensor]:
    folder.mkdir()
    torch.manual_seed(0)
    weights = {"table.weight": torch.randn(VOCABULARY, WIDTH), "head.weight": torch.randn(VOCABULARY, WIDTH)}
    weights |= {f"mix.{index}.weight": torch.randn(3 * WIDTH, WIDTH) / 4 for index in range(DEPTH)}
    save_file(weights, folder / "model.safetensors")
    config = {"model_type": "bag", "symbols": VOCABULARY, "width": WIDTH, "depth": DEPTH}
    (folder / "config.json").write_text(json.dumps(config))
    for path in SHAPES_VL.glob("*token*"):
        shutil.copy(path, folder)
    for path in SHAPES_VL.glob("chat_template*"):
        shutil.copy(path, folder)
    return weights


def reference(weights: dict[str, Tensor]) -> list[int]:
    """Greedy tokens of the same network, the whole text anew for each."""
    tokens = list(PROMPT)
    for _ in range(NUM_NEW):
        x_LD = weights["table.weight"][tokens]
        for index in range(DEPTH):
            q, k, v = (part[None] for part in (x_LD @ weights[f"mix.{index}.weight"].T).chunk(3, dim=-1))
            x_LD = x_LD + F.scaled_dot_product_attention(q, k, v, is_causal=True)[0]
        tokens.append(int((x_LD[-1] @ weights["head.weight"].T).argmax()))
    return tokens[len(PROMPT):]
