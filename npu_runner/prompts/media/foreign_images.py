"""Images of families that only transformers knows, prepared by transformers' own processor. Imports it, and torch.

A picture goes through the processor by itself, with its placeholder for a text. What comes back is all that is needed:
the tokens that stand in the placeholder's place, and the arrays that `get_image_features` takes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from npu_runner.checkpoint.files import read_json
from npu_runner.errors import ModelError, RequestError
from npu_runner.request.prompt_inputs import ImageInput

_OF_TEXT = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}
_SIDES = (56, 112, 224, 448, 896, 1344, 2016)


class ForeignImages:
    # A stand-in until the prompts' side is merged.
    """`token`: id and text of the placeholder."""

    def __init__(self, folder: Path, config: Mapping[str, Any]):
        self._processor = _read_processor(folder, config["model_type"])
        text = self._processor.image_token
        self.token = self._processor.tokenizer.convert_tokens_to_ids(text), text

    def prepare(self, image: Image.Image) -> ImageInput:
        """Raises RequestError for what the processor refuses."""
        try:
            made = self._processor(images=[image], text=[self.token[1]], return_tensors="np", add_special_tokens=False)
        except (ValueError, TypeError) as error:
            raise RequestError(f"the image is refused by the model's processor: {error}", "image_refused") from error
        token_ids = tuple(int(token) for token in made["input_ids"][0])
        arrays = {name: np.asarray(value) for name, value in made.items() if name not in _OF_TEXT}
        digest = hashlib.blake2b(repr(token_ids).encode(), digest_size=16)
        for name, array in sorted(arrays.items()):
            digest.update(f"{name}{array.shape}{array.dtype}".encode())
            digest.update(np.ascontiguousarray(array).data)
        return ImageInput(digest.digest(), np.zeros((0, 0, 3), dtype=np.uint8), (1, 0, 0), len(token_ids),
                          tower_inputs=arrays, token_ids=np.array(token_ids, dtype=np.int32))

    def noise(self) -> ImageInput:
        noise = np.random.default_rng(0).integers(0, 256, (96, 64, 3), dtype=np.uint8)
        return self.prepare(Image.fromarray(noise))

    def sample(self) -> tuple[dict[str, Any], ImageInput]:
        """A prompt of some text and a picture, as transformers' model takes it, and the picture as we do."""
        noise = np.random.default_rng(0).integers(0, 256, (96, 64, 3), dtype=np.uint8)
        picture = Image.fromarray(noise)
        made = self._processor(images=[picture], text=[f"which {self.token[1]} is it?"], return_tensors="pt",
                               add_special_tokens=False, return_mm_token_type_ids=True)
        return dict(made), self.prepare(picture)

    def largest(self, max_tokens: int) -> ImageInput:
        """Of some sizes the one with the most tokens, up to `max_tokens`."""
        made = [self.prepare(Image.new("RGB", (width, height), (128, 128, 128)))
                for width in _SIDES for height in _SIDES if max(width, height) <= 8 * min(width, height)]
        fitting = [image for image in made if image.num_tokens <= max_tokens]
        return max(fitting or made, key=lambda image: image.num_tokens if fitting else -image.num_tokens)


def _read_processor(folder: Path, model_type: str) -> Any:
    """The family's processor with its images and its text, and without the parts for videos and sound, which need more
    packages."""
    import transformers
    from transformers import AutoImageProcessor, AutoTokenizer
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    values = read_json(folder, "processor_config.json") or {}
    name = values.get("processor_class") or PROCESSOR_MAPPING_NAMES.get(model_type)
    kind: Any = getattr(transformers, str(name), None)
    if kind is None:
        raise ModelError(f"{folder}: transformers has no processor for model_type {model_type!r}")
    parts = {"image_processor": AutoImageProcessor.from_pretrained(folder, backend="pil", local_files_only=True),
             "tokenizer": AutoTokenizer.from_pretrained(folder, local_files_only=True)}

    class Partial(kind):  # type: ignore[misc]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return type(argument)

    given = {name: parts.get(name) for name in kind.get_attributes()}
    known, _ = kind.get_processor_dict(folder)
    settings = {key: value for key, value in known.items() if key not in given and not isinstance(value, dict)
                and key != "processor_class"}
    return Partial.from_args_and_dict(list(given.values()), settings)
