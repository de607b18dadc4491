"""Every text or image family that transformers has is equal to it through the generic strategy, or refused by name.

What must not happen is a family that is served and answers otherwise: that is what the refusals are for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError

from npu_runner import LLM, strategies
from npu_runner.config import RunnerConfig
from npu_runner.errors import ModelError, RequestError
from npu_runner.models.transformers_check import FLOAT32_BOUNDS, HALF_BOUNDS, Distances
from npu_runner.strategies import transformers_model
from tests.oracle import reference
from tests.oracle.foreign_checkpoints import (
    SERVED,
    SERVED_IMAGES,
    foreign_config,
    make_foreign_checkpoint,
    small_config,
)
from tests.oracle.foreign_image_prompts import ask, assert_all_rows_equal, assert_equals_transformers
from tests.oracle.image_checkpoints import (
    NotMade,
    make_image_checkpoint,
    make_processor,
    picture,
    save_processor,
    write_names_of_processor,
)
from tests.oracle.replaced_modules import IN_DOCS, kinds
from tests.oracle.running import SMALL, assert_equals_reference, assert_prompt_rows_equal

CONFIG_MAPPING: Any = pytest.importorskip("transformers").CONFIG_MAPPING
modeling_auto: Any = pytest.importorskip("transformers.models.auto.modeling_auto")

TEXTS = ["which", "which of the two pictures shows a circle?", "a b c d e f g " * 20, "colour " * 90]
PROMPT = list(range(203, 3, -1))
"""Two chunks. Logits of all of its tokens are compared."""
MOST_PARAMETERS = 20_000_000
# What transformers' classes raise where a config's own defaults do not fit the sizes above.
UNMADE = (AssertionError, AttributeError, ImportError, IndexError, KeyError, StrictDataclassError, TypeError,
          ValueError)


def leave_out(model_type: str, why: str, served: set[str] = SERVED) -> NoReturn:
    """Skip, but for a family that the docs name as equal."""
    if model_type in served:
        pytest.fail(f"docs/generic.md says that {model_type} is equal, but {why}")
    pytest.skip(why)


def leave_out_unmade(folder: Path, model_type: str, why: str) -> NoReturn:
    """Skip a family of which there is no tiny checkpoint, if its own default config is refused by name."""
    if model_type not in SERVED:
        try:
            CONFIG_MAPPING[model_type]().save_pretrained(folder)
        except UNMADE as error:
            pytest.skip(f"transformers makes no default config: {type(error).__name__}: {error}")
        if transformers_model.TransformersStrategy(folder).is_multimodal:
            pytest.skip("its checkpoints have images, which the next test compares or refuses")
        with pytest.raises(ModelError) as refused:
            transformers_model.TransformersStrategy(folder).read_config()
        why = f"refused: {refused.value}"
    leave_out(model_type, why)


def refuse_unmade_images(folder: Path, model_type: str, why: str) -> NoReturn:
    """As `leave_out_unmade`, with what can be had of the processor, which is read where the network is not refused."""
    if model_type in SERVED_IMAGES:
        leave_out(model_type, why, SERVED_IMAGES)
    config = CONFIG_MAPPING[model_type]()
    config.save_pretrained(folder)
    try:
        save_processor(make_processor(model_type, config), folder)
    except (NotMade, *UNMADE):
        write_names_of_processor(folder, model_type)
    strategy = transformers_model.TransformersStrategy(folder)
    with pytest.raises(ModelError) as refused:
        strategy.processor(RunnerConfig(model=str(folder)))
    pytest.skip(f"refused: {refused.value} ({why})")


def make_small(folder: Path, model_type: str) -> Path:
    """A tiny checkpoint; skips where transformers' own classes cannot make one from these sizes."""
    from transformers import AutoModelForCausalLM

    try:
        changes = small_config(model_type)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(foreign_config(model_type, **changes))
        size = sum(parameter.numel() for parameter in model.parameters())
    except UNMADE as error:
        leave_out_unmade(folder, model_type, f"transformers makes no tiny one: {type(error).__name__}: {error}")
    if size > MOST_PARAMETERS:
        leave_out_unmade(folder, model_type, f"{size} parameters: its sizes have names of their own")
    return make_foreign_checkpoint(folder, model_type, **changes)


@pytest.mark.slow
@pytest.mark.full("nearly 200 families, a second or two each; twenty of them and every refusal stay")
@pytest.mark.parametrize("model_type", sorted(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_every_family_is_equal_or_refused(model_type: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(strategies, "find_strategy", lambda model_type: None)
    path = make_small(tmp_path, model_type)
    reference.load_model.cache_clear()
    try:
        llm = LLM(path, platform="cpu", max_num_batched_tokens=128, **SMALL)
    except ModelError as reason:
        leave_out(model_type, f"refused: {reason}")
    with llm:
        assert model_type not in SERVED or kinds(llm) == IN_DOCS[model_type]
        assert_prompt_rows_equal(path, llm, PROMPT)
        assert_equals_reference(path, llm, [llm.engine.processor.from_text(text) for text in TEXTS])


@pytest.mark.slow
@pytest.mark.full("nearly a hundred families of images; one of each mechanism and every refusal stay")
@pytest.mark.parametrize("model_type", sorted(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES))
def test_every_image_family_is_equal_or_refused(model_type: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(strategies, "find_strategy", lambda model_type: None)
    try:
        checkpoint = make_image_checkpoint(tmp_path, model_type)
    except (NotMade, *UNMADE, RuntimeError) as error:
        refuse_unmade_images(tmp_path / "unmade", model_type, f"there is no tiny one: {type(error).__name__}: {error}")
    try:
        llm = LLM(tmp_path, platform="cpu", max_num_batched_tokens=1024, max_num_seqs=8, dtype="float32")
    except ModelError as reason:
        leave_out(model_type, f"refused: {reason}", SERVED_IMAGES)
    with llm:
        first, second = picture(230, 140, 1), picture(150, 420, 2)
        several = ["which of ", first, " and ", second, " is it?"]
        try:
            asked = ask(checkpoint, llm, several)
        except RequestError:
            with pytest.raises(RequestError, match="this model's processor takes one"):
                ask(checkpoint, llm, several)
            asked = ask(checkpoint, llm, ["which of them is ", second, " ?"])
        assert_all_rows_equal(tmp_path, llm, asked)
        assert_equals_transformers(tmp_path, llm, [ask(checkpoint, llm, ["what is ", first, " ?"]), asked])


@pytest.mark.slow
@pytest.mark.full("each family that is served, started twice; what starts in the fast set is within the bounds, too")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", sorted(SERVED))
def test_a_family_without_fault_stays_far_below_the_bounds(model_type: str, dtype: str, tmp_path: Path,
                                                          monkeypatch: Any) -> None:
    found: list[Distances] = []
    compare = transformers_model.compare_at_start
    monkeypatch.setattr(transformers_model, "compare_at_start",
                        lambda *args: (found.append(compare(*args)), found[-1])[1])
    monkeypatch.setattr(strategies, "find_strategy", lambda model_type: None)
    LLM(make_small(tmp_path, model_type), platform="cpu", **{**SMALL, "dtype": dtype}).close()
    print(f"{model_type} {dtype}: attention {found[0].attention:.1e}, others {found[0].others:.1e}")
    bounds = FLOAT32_BOUNDS if dtype == "float32" else HALF_BOUNDS
    assert found[0].attention < bounds.attention / 5
    assert found[0].others < bounds.others / 5
