"""Tiny random checkpoints of image types that only transformers knows, with the type's own image processor.

transformers writes them, under published names. Sizes come from each type's default config, made small: widths of two
heads, a layer of each kind, experts few. image_sizes.py has what a type needs beside that.
"""

from __future__ import annotations

import collections
import importlib.util
import inspect
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.oracle.image_sizes import SIZES_OF

VOCAB_SIZE = 1024
MOST_PARAMETERS = 120e6
CONTROL_TOKENS = {f"{name}_token": f"<|{name}|>" for name in (
    "image", "image_boundary", "end_of_utterance", "video", "audio", "boi", "eoi", "boa", "eoa", "start_image",
    "end_image", "context_image", "image_start", "image_end", "vision_start", "vision_end", "video_start", "video_end",
    "image_break", "fake_image", "global_image", "image_begin", "tile", "image_newline", "vision_bos", "vision_eos",
    "audio_bos", "audio_eos", "image_tag", "begin_image", "slice_start", "slice_end", "image_id_start", "image_id_end",
    "row_start", "col", "img_line_break", "image_wrapper", "eof", "eol")}
TEMPLATE = (
    "{% for m in messages %}{{ '<s>' + m.role + '\n' }}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}PLACEHOLDER{% else %}{{ p.text }}{% endif %}{% endfor %}"
    "{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)

_WIDTHS = ("hidden_size", "d_model", "n_embd", "embed_dim", "width", "dim")
_HEADS = ("num_attention_heads", "num_heads", "n_head", "attention_heads", "encoder_attention_heads",
          "decoder_attention_heads")
_LAYERS = ("num_hidden_layers", "depth", "n_layer", "num_layers", "encoder_layers", "decoder_layers", "n_layers",
           "layers")
_MOST = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
         "num_experts_per_tok": 2, "moe_topk": 2, "moe_k": 2, "top_k_experts": 2, "n_group": 1, "topk_group": 1,
         "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "intermediate_size": 96, "mlp_dim": 96,
         "ffn_dim": 96, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "intermediate_size_mlp": 96,
         "first_k_dense_replace": 1, "kv_lora_rank": 32, "q_lora_rank": 32, "moe_num_shared_experts": 1,
         "n_shared_experts": 1, "num_codebooks": 2, "hidden_size_per_layer_input": 16,
         "vocab_size_per_layer_input": VOCAB_SIZE, "dense_intermediate_size": 96, "laurel_rank": 8}
_BY_LAYER = ("deepstack_visual_indexes", "fullatt_block_indexes", "out_indices", "mlp_only_layers",
             "vision_feature_layers", "cross_attention_layers", "feature_layers")
_FIXED = ("patch_size", "image_size", "temporal_patch_size", "spatial_merge_size", "vocab_size",
          "max_position_embeddings")
IMAGE_PROCESSORS = {
    "glm_ocr": "Glm46VImageProcessorPil", "glm4v_moe": "Glm4vImageProcessorPil",
    "qwen3_vl_moe": "Qwen2VLImageProcessorPil", "glmga": "GlmgaImageProcessorPil",
    "qwen2_5_omni_thinker": "Qwen2VLImageProcessorPil", "qwen3_omni_moe_thinker": "Qwen2VLImageProcessorPil"}
PROCESSORS = {
    "glm_ocr": "Glm46VProcessor", "glmga": "Glm46VProcessor", "qwen2_5_omni_thinker": "Qwen2_5OmniProcessor",
    "qwen3_omni_moe_thinker": "Qwen3OmniMoeProcessor", "kosmos-2": "Kosmos2Processor",
    "kosmos-2.5": "Kosmos2_5Processor", "cosmos3_omni": "Qwen3VLProcessor"}


class NotMade(Exception):
    """There is no tiny checkpoint of the type, for the reason given."""


@dataclass(frozen=True)
class ImageCheckpoint:
    path: Path
    processor: Any
    """transformers' own, as it was saved: the oracle of prompts."""

    def inputs(self, text: str, images: list[Image.Image]) -> dict[str, Any]:
        """What transformers' model takes for a rendered text, whose placeholders are not expanded."""
        return call_processor(self.processor, text, images)


def make_image_checkpoint(path: Path, model_type: str, change: Callable[[dict[str, Any]], None] = lambda fields: None,
                          ) -> ImageCheckpoint:
    """`change` edits the fields of config.json. Raises NotMade."""
    from transformers import AutoModelForImageTextToText

    mapping: Any = AutoModelForImageTextToText._model_mapping
    processor = make_processor(model_type, _config(model_type, {}, change))
    tokenizer = processor.tokenizer
    ids = {f"{name}_{suffix}": tokenizer.convert_tokens_to_ids(token) for suffix in ("id", "index")
           for name in dir(processor) if name.endswith("_token") and isinstance(token := getattr(processor, name), str)}
    for side, name in (("start", "bos"), ("end", "eos")):
        token = getattr(processor, f"vision_{name}_token", f"<|vision_{side}|>")
        ids.setdefault(f"vision_{side}_token_id", tokenizer.convert_tokens_to_ids(token))
    expansion = call_processor(processor, placeholder(processor), [picture(230, 140)])["input_ids"][0].tolist()
    # The token that an expansion repeats is replaced by rows of the image.
    ids["image_token_id"] = ids["image_token_index"] = collections.Counter(expansion).most_common(1)[0][0]
    config = _config(model_type, ids, change)
    for name in ("vision_start_token_id", "vision_end_token_id"):
        if not hasattr(config, name):
            setattr(config, name, ids.get(name, 0))
    model_class = mapping[type(config)]
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in model_class(config).parameters())
    if size > MOST_PARAMETERS:
        raise NotMade(f"{size} parameters are not tiny")
    torch.manual_seed(0)
    model = model_class(config).float().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1 and name.endswith("weight"):
                parameter.copy_(1 + 0.1 * noise)
            else:
                parameter.copy_(noise * (0.1 if parameter.dim() <= 1 else max(1, parameter[0].numel()) ** -0.5))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(path)
    save_processor(processor, path)
    return ImageCheckpoint(path, processor)


def save_processor(processor: Any, path: Path) -> None:
    """Its files for images and text, and a template."""
    from transformers import ProcessorMixin

    type(processor).get_attributes = classmethod(lambda kind: ["image_processor", "tokenizer"])
    ProcessorMixin.save_pretrained(processor, path)  # that of one class copies a font of its videos
    (path / "chat_template.json").unlink(missing_ok=True)
    template = TEMPLATE.replace("PLACEHOLDER", placeholder(processor))
    (path / "chat_template.jinja").write_text(template)


def write_names_of_processor(path: Path, model_type: str) -> None:
    """The files of a processor that cannot be made here: the names of its classes, and a tokenizer."""
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    backends: dict[str, str] = IMAGE_PROCESSOR_MAPPING_NAMES.get(model_type) or {}  # type: ignore[assignment]
    names = {"image_processor_type": backends.get("torchvision"),
             "processor_class": PROCESSORS.get(model_type) or PROCESSOR_MAPPING_NAMES.get(model_type)}
    _byte_tokenizer([]).save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps({key: name for key, name in names.items() if name}))


def picture(width: int, height: int, seed: int = 1) -> Image.Image:
    """Smooth noise: every patch differs, and resizing has something to smooth."""
    coarse = np.random.default_rng(seed).integers(0, 256, (7, 9, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def call_processor(processor: Any, text: str, images: list[Image.Image]) -> dict[str, Any]:
    """Ids and what the network takes. Some processors ask for a list of pictures for each text."""
    import transformers

    given: dict[str, Any] = {"text": [text], "return_tensors": "pt", "add_special_tokens": False}
    if not images:
        return dict(processor(**given))
    types: list[dict[str, Any]] = [{"return_mm_token_type_ids": True}, {}]
    for more in types:
        for shown in ([images], images):  # nested, as apply_chat_template does
            try:
                made = dict(processor(images=shown, **given, **more))
            except (TypeError, ValueError, AttributeError, IndexError, KeyError) as error:
                failed = error
                continue
            assert isinstance(made["input_ids"], torch.Tensor), transformers.__version__
            return made
    raise failed


def placeholder(processor: Any) -> str:
    """What a chat template writes for an image."""
    name = type(processor).__name__
    if name in ("Gemma3Processor", "ShieldGemma2Processor", "Gemma3nProcessor"):
        return str(processor.boi_token)
    if name == "QianfanOCRProcessor":
        return "<image>"
    if name == "Qwen2_5OmniProcessor":
        return f"{processor.vision_bos_token}{processor.image_token}{processor.vision_eos_token}"
    if name == "HunYuanVLProcessor":
        return f"{processor.image_start_token}{processor.image_token}{processor.image_end_token}"
    if not isinstance(getattr(processor, "image_token", None), str):
        raise NotMade("its processor names no image token")
    return str(processor.image_token)


# -- configs ----------------------------------------------------------------------------------------------------------


def _first(fields: dict[str, Any], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if type(fields.get(name)) is int), None)


def _kept_layers(fields: dict[str, Any]) -> list[int]:
    """Indices of layers of which there is one of each kind."""
    for name in ("layer_types", "layers_block_type", "mlp_layer_types"):
        kinds = fields.get(name)
        if isinstance(kinds, list) and kinds:
            return sorted({*[kinds.index(kind) for kind in dict.fromkeys(kinds)][:4], *range(min(2, len(kinds)))})
    return [0, 1]


def _shrunk(fields: dict[str, Any], is_text: bool, widths: dict[int, int]) -> dict[str, Any]:
    """One level of a config. `widths` learns the new value of each hidden size."""
    fields = dict(fields)
    hidden, heads, layers = (_first(fields, names) for names in (_WIDTHS, _HEADS, _LAYERS))
    if heads and hidden:
        num_kv_heads = fields.get("num_key_value_heads")
        head_dim = fields["head_dim"] if type(fields.get("head_dim")) is int else fields[hidden] // fields[heads]
        head_dim += -head_dim % 8  # grouped GEMMs need it
        is_grouped = bool(num_kv_heads) and fields[heads] > num_kv_heads
        widths[fields[hidden]] = fields[hidden] = head_dim * 2
        fields[heads] = 2
        if num_kv_heads is not None:
            fields["num_key_value_heads"] = 1 if is_grouped else 2
        for name in ("num_global_key_value_heads", "v_num_heads", "num_linear_heads"):
            if type(fields.get(name)) is int:
                fields[name] = 1
    if layers:
        count = fields[layers]
        kept = [index for index in _kept_layers(fields) if index < count] or [0]
        for name, value in list(fields.items()):
            if isinstance(value, list) and len(value) == count and count > 4:
                fields[name] = [value[index] for index in kept]
        fields[layers] = len(kept)
        for name in _BY_LAYER:
            if isinstance(fields.get(name), list) and fields[name]:
                fields[name] = [0]
        if isinstance(fields.get("depths"), list):
            fields["depths"] = [1] * len(fields["depths"])
    for name, most in _MOST.items():
        if type(fields.get(name)) in (int, float) and fields[name]:
            fields[name] = min(most, fields[name])
    if is_text and type(fields.get("vocab_size")) is int:
        fields["vocab_size"] = VOCAB_SIZE
    if is_text and type(fields.get("max_position_embeddings")) is int:
        fields["max_position_embeddings"] = 8192
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if type(fields.get(name)) is int and fields[name] >= VOCAB_SIZE:
            fields[name] = 0
    return fields


def _config(model_type: str, ids: dict[str, int], change: Callable[[dict[str, Any]], None]) -> Any:
    from transformers import CONFIG_MAPPING

    default = CONFIG_MAPPING[model_type]()
    widths: dict[int, int] = {}

    def walk(fields: dict[str, Any], config: Any) -> dict[str, Any]:
        parts = {name: walk(fields[name], getattr(config, name)) for name in getattr(config, "sub_configs", {})
                 if isinstance(fields.get(name), dict)}
        is_text = not any(word in type(config).__name__.lower() for word in ("vision", "audio", "vq"))
        return {**_shrunk(fields, is_text, widths), **parts}

    def rewidth(fields: dict[str, Any]) -> dict[str, Any]:
        for name, value in list(fields.items()):
            if isinstance(value, dict):
                rewidth(value)
            elif (type(value) is int and value in widths and name not in _FIXED + _WIDTHS and "head" not in name
                    and re.search(r"(hidden|embed|dim|width|channels|proj|output)", name)):
                fields[name] = widths[value]
        return fields

    fields = rewidth(walk(default.to_dict(), default))
    text = next((fields[name] for name in ("text_config", "llm_config") if isinstance(fields.get(name), dict)), fields)
    for part in fields.values():
        if isinstance(part, dict) and type(part.get("out_hidden_size")) is int:
            part["out_hidden_size"] = text.get("hidden_size", part["out_hidden_size"])
    SIZES_OF.get(model_type, lambda fields: None)(fields)
    change(fields)
    for name in fields:
        if name.endswith(("_token_id", "_token_index")) and name in ids:
            fields[name] = ids[name]
    fields.pop("architectures", None)
    for part in (fields, *(value for value in fields.values() if isinstance(value, dict))):
        part.pop("per_layer_config", None)
    return type(default).from_dict(fields)


# -- processors -------------------------------------------------------------------------------------------------------


def make_processor(model_type: str, config: Any) -> Any:
    """The type's own processor with images of the sizes of `config`, and a tokenizer of bytes."""
    import transformers
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    backends: dict[str, str] = IMAGE_PROCESSOR_MAPPING_NAMES.get(model_type) or {}  # type: ignore[assignment]
    images = IMAGE_PROCESSORS.get(model_type) or backends.get("pil")
    if images is None and importlib.util.find_spec("torchvision") is not None:
        images = backends.get("torchvision")
    name = PROCESSORS.get(model_type) or PROCESSOR_MAPPING_NAMES.get(model_type)
    if images is None or name is None:
        raise NotMade(f"transformers has no image processor for Pillow ({images}), or no processor ({name})")
    try:
        kind: Any = getattr(transformers, name)
        source = inspect.getsource(importlib.import_module(kind.__module__))
    except (ImportError, AttributeError) as error:
        raise NotMade(f"{name}: {error}") from error
    forms = (r"<[^\"'\s<>]{1,40}>", r"\[[A-Z_]+\]", r"<\|[^\"'\s]{1,40}\|>", r"<｜[^\"'\s]{1,40}｜>")
    written = re.findall(rf"[\"']({'|'.join(forms)})[\"']", source)

    class Partial(kind):  # type: ignore[misc]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return type(argument)

    Partial.__name__ = Partial.__qualname__ = name
    parameters = inspect.signature(kind.__init__).parameters
    given: dict[str, Any] = {part: None for part in ("video_processor", "feature_extractor")
                             if part in parameters or part in kind.get_attributes()}
    given |= {count: 9 for count in ("image_seq_length", "image_seq_len", "num_image_tokens")
              if count in parameters and parameters[count].default is inspect.Parameter.empty}
    written += [str(getattr(kind, name)) for name in dir(kind) if name.endswith("_TOKEN")]
    processor = Partial(image_processor=_image_processor(getattr(transformers, images), config),
                        tokenizer=_byte_tokenizer(sorted(set(written))), **given)
    _fit(processor, config)
    return processor


def _byte_tokenizer(written: list[str]) -> Any:
    from transformers import PreTrainedTokenizerFast

    letters = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(list(dict.fromkeys(["<pad>", "<s>", "</s>", *written, *CONTROL_TOKENS.values()])))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>", bos_token="<s>",
                                   unk_token="<pad>", extra_special_tokens=CONTROL_TOKENS)


def _image_processor(kind: Any, config: Any) -> Any:
    """With the sizes of `config`, as a checkpoint's file has them."""
    default, given = kind(), {}
    vision = getattr(config, "vision_config", None) or config
    side, patch = (value[0] if isinstance(value, (list, tuple)) else value
                   for value in (getattr(vision, "image_size", None), getattr(vision, "patch_size", None)))
    size = {name: value for name, value in dict(default.size or {}).items() if value is not None} if getattr(
        default, "size", None) is not None else {}
    if side and set(size) == {"height", "width"}:
        given["size"] = {"height": side, "width": side}
    if side and set(size) == {"longest_edge"}:
        given["size"] = {"longest_edge": min(size["longest_edge"], 2 * side)}
    if side and set(size) == {"shortest_edge"}:
        given["size"] = {"shortest_edge": side}
        if getattr(default, "crop_size", None):
            given["crop_size"] = {"height": side, "width": side}
    if patch and isinstance(getattr(default, "patch_size", None), int):
        given["patch_size"] = patch
    merge = getattr(vision, "spatial_merge_size", None)
    if merge and isinstance(getattr(default, "merge_size", None), int):
        given["merge_size"] = merge
    return kind(**given)


def _fit(processor: Any, config: Any) -> None:
    """Set what a checkpoint's processor file says, and a default does not."""
    vision, name = getattr(config, "vision_config", None), type(processor).__name__
    for setting in ("patch_size", "spatial_merge_size", "vision_feature_select_strategy", "image_seq_length",
                    "num_image_tokens", "image_seq_len", "downsample_factor"):
        if hasattr(processor, setting) and getattr(processor, setting) is None:
            values = [getattr(part, setting, None) for part in (config, vision) if part is not None]
            value = next((value for value in values if value is not None), None)
            setattr(processor, setting, value[0] if isinstance(value, (list, tuple)) else value)
    if name == "PixtralProcessor":
        processor.spatial_merge_size, side = config.spatial_merge_size, vision.patch_size
        processor.patch_size, processor.image_processor.patch_size = side, {"height": side, "width": side}
    if hasattr(processor, "num_additional_image_tokens"):
        is_clip = getattr(vision, "model_type", "").startswith("clip")
        processor.num_additional_image_tokens = 1 if is_clip else 0
    if getattr(config, "image_seq_length", None) and hasattr(processor, "image_seq_length"):
        processor.image_seq_length = config.image_seq_length
    if type(config).__name__ == "VipLlavaConfig":
        processor.vision_feature_select_strategy = "default"
    if type(config).__name__ == "PaliGemmaConfig":
        count = (vision.image_size // vision.patch_size) ** 2
        processor.image_seq_length = processor.image_processor.image_seq_length = count
    if hasattr(processor, "full_image_sequence"):  # a text that is made once
        count = getattr(config, "mm_tokens_per_image", processor.image_seq_length)
        processor.image_seq_length = count
        row = processor.tokenizer.image_token * count
        processor.full_image_sequence = f"\n\n{processor.boi_token}{row}{processor.tokenizer.eoi_token}\n\n"
    if "Deepseek" in name and hasattr(processor, "num_image_tokens"):
        processor.num_image_tokens = None
    if hasattr(processor, "img_size"):
        processor.img_size = vision.image_size
        processor.patch_size = vision.patch_size * getattr(config, "downsample_factor", 1)
    if hasattr(processor, "num_image_tokens") and processor.num_image_tokens is None and vision is not None:
        processor.num_image_tokens = (vision.image_size // vision.patch_size) ** 2


def read_fields(path: Path) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads((path / "config.json").read_text())
    return fields
