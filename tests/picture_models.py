"""Tiny random models of seven image-text families with tokenizer and processor, from configurations alone.

``make(kind, folder)`` writes one. Their tokenizers have a token for each character and for some words.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "smolvlm", "idefics3", "gemma3", "internvl", "llava")
COLOURS = ("red", "green", "blue", "yellow", "white", "black")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}PLACEHOLDER"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
SIDE = 56
"""Pixels of a side of a picture, or of a tile, where the family has squares of one size."""


def tokenizer_of(tokens: list[str], placeholder: str, **named: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with special ``tokens`` and ``named`` ones, in whose chats a picture is text."""
    words = [*COLOURS, "user", "assistant", "colour"]
    special = ["<pad>", "<|im_start|>", "<|im_end|>", *tokens, *named.values()]
    letters = [*map(chr, range(32, 127)), "\n"]
    vocabulary: dict[str, int] = {}
    for token in [*special, *letters, *words, "\n\n", "\n\n\n", "\n\n\n\n"]:
        vocabulary.setdefault(token, len(vocabulary))
    merges = []
    for word in words:
        for end in range(1, len(word)):
            if (pair := (word[:end], word[end])) not in merges:
                merges.append(pair)
            vocabulary.setdefault(word[: end + 1], len(vocabulary))
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"[a-z]+|\d|\n+|[^a-z\d\n]"), "isolated")
    raw.decoder = decoders.Fuse()
    raw.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        chat_template=TEMPLATE.replace("PLACEHOLDER", placeholder),
        extra_special_tokens=named or ["<|im_start|>", *tokens],
    )


def text_part(tokenizer: Any, wide: bool, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 128 if wide else 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}
    tokens = {"vocab_size": len(tokenizer), "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}
    return {**sizes, **heads, **tokens, "tie_word_embeddings": True, **more}


def image_processor(module: str, name: str, **settings: Any) -> Any:
    found = importlib.import_module(f"transformers.models.{module}.image_processing_pil_{module}")
    return getattr(found, name)(**settings)


def qwen(kind: str, wide: bool) -> tuple[Any, ...]:
    names = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer = tokenizer_of(names, "<|vision_start|><|image_pad|><|vision_end|>")
    keys = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    ids = dict(zip(keys, tokenizer.convert_tokens_to_ids(names), strict=True))
    vision = {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64}
    vision |= {"spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 128 if wide else 64}
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    if kind == "qwen2_5_vl":
        patch, more = 14, {}
        vision |= {"patch_size": patch, "window_size": 112, "fullatt_block_indexes": [1]}
        rope["mrope_section"] = [4, 6, 6] if wide else [2, 3, 3]
    else:
        patch, more = 16, {"head_dim": 32 if wide else 16}
        vision |= {"patch_size": patch, "deepstack_visual_indexes": [0], "num_position_embeddings": 64}
        rope |= {"mrope_section": [8, 4, 4] if wide else [4, 2, 2], "mrope_interleaved": True}
    text = text_part(tokenizer, wide, rope_parameters=rope, **more)
    images = image_processor(
        "qwen2_vl",
        "Qwen2VLImageProcessorPil",
        min_pixels=(2 * patch) ** 2,
        max_pixels=(8 * patch) ** 2,
        patch_size=patch,
        merge_size=2,
        temporal_patch_size=2,
    )
    return tokenizer, images, {"text_config": text, "vision_config": vision, **ids}, {}


def idefics(kind: str, wide: bool, split: bool) -> tuple[Any, ...]:
    tags = [f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)]
    names = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *tags]
    tokenizer = tokenizer_of(names, "<image>")
    images = image_processor(
        kind,
        {"smolvlm": "SmolVLMImageProcessorPil", "idefics3": "Idefics3ImageProcessorPil"}[kind],
        size={"longest_edge": SIDE * 2},
        max_image_size={"longest_edge": SIDE},
        do_image_splitting=split,
    )
    config = {
        "text_config": {"model_type": "llama", **text_part(tokenizer, wide)},
        "vision_config": {**VISION, "image_size": SIDE, "patch_size": 14},
        "scale_factor": 2,
        "image_token_id": tokenizer.convert_tokens_to_ids("<image>"),
        "pad_token_id": 0,
    }
    return tokenizer, images, config, {"image_seq_len": 4}


def gemma(wide: bool) -> tuple[Any, ...]:
    names = {"boi": "<start_of_image>", "eoi": "<end_of_image>", "image": "<image_soft_token>"}
    named = {f"{name}_token": token for name, token in names.items()}
    tokenizer = tokenizer_of([], "<start_of_image>", **named)
    text = text_part(
        tokenizer,
        wide,
        head_dim=32 if wide else 16,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        query_pre_attn_scalar=16,
    )
    config = {
        "text_config": text,
        "vision_config": {**VISION, "image_size": SIDE, "patch_size": 14},
        "mm_tokens_per_image": 4,
        **{f"{name}_token_index": tokenizer.convert_tokens_to_ids(token) for name, token in names.items()},
    }
    images = image_processor("gemma3", "Gemma3ImageProcessorPil", size={"height": SIDE, "width": SIDE})
    return tokenizer, images, config, {"image_seq_length": 4}


def internvl(wide: bool) -> tuple[Any, ...]:
    named = {"context_image_token": "<IMG_CONTEXT>", "start_image_token": "<img>"}
    named |= {"end_image_token": "</img>", "video_token": "<video>"}
    tokenizer = tokenizer_of([], "<IMG_CONTEXT>", **named)
    config = {
        "text_config": {"model_type": "qwen2", **text_part(tokenizer, wide)},
        "vision_config": {**VISION, "image_size": [SIDE, SIDE], "patch_size": [14, 14]},
        "image_token_id": tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        "downsample_ratio": 0.5,
    }
    images = image_processor(
        "got_ocr2",
        "GotOcr2ImageProcessorPil",
        size={"height": SIDE, "width": SIDE},
        crop_to_patches=False,  # as published; InternVLProcessor's own default is True, and holds
        min_patches=1,
        max_patches=4,
    )
    return tokenizer, images, config, {"image_seq_length": 4}


def llava(wide: bool) -> tuple[Any, ...]:
    tokenizer = tokenizer_of(["<image>"], "<image>")
    vision = {**VISION, "model_type": "clip_vision_model", "image_size": SIDE, "patch_size": 14}
    config = {
        "text_config": {"model_type": "llama", **text_part(tokenizer, wide)},
        "vision_config": {**vision, "projection_dim": 32},
        "image_token_id": tokenizer.convert_tokens_to_ids("<image>"),
        "image_seq_length": 16,
        "vision_feature_layer": -1,
    }
    crop = {"height": SIDE, "width": SIDE}
    images = image_processor("clip", "CLIPImageProcessorPil", size={"shortest_edge": SIDE}, crop_size=crop)
    options = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return tokenizer, images, config, {"patch_size": 14, **options}


PROCESSORS = {
    "qwen2_5_vl": "Qwen2_5_VLProcessor",
    "qwen3_vl": "Qwen3VLProcessor",
    "smolvlm": "SmolVLMProcessor",
    "idefics3": "Idefics3Processor",
    "gemma3": "Gemma3Processor",
    "internvl": "InternVLProcessor",
    "llava": "LlavaProcessor",
}


def make(kind: str, folder: str | Path, *, seed: int = 0, wide: bool = False, split: bool = False) -> Path:
    """Write model, tokenizer and processor of a family; return the folder.

    ``wide``: heads of 32, the least that vLLM takes on a CPU. ``split``: SmolVLM's and Idefics' pictures in
    crops.
    """
    match kind:
        case "qwen2_5_vl" | "qwen3_vl":
            tokenizer, images, settings, options = qwen(kind, wide)
        case "smolvlm" | "idefics3":
            tokenizer, images, settings, options = idefics(kind, wide, split)
        case "gemma3":
            tokenizer, images, settings, options = gemma(wide)
        case "internvl":
            tokenizer, images, settings, options = internvl(wide)
        case _:
            tokenizer, images, settings, options = llava(wide)
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, tie_word_embeddings=True, **settings)
    model = AutoModelForImageTextToText.from_config(config)
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    file = {"processor_class": PROCESSORS[kind], "image_processor": images.to_dict(), **options}
    Path(folder, "processor_config.json").write_text(json.dumps(file, default=str, indent=1))
    return Path(folder)


def louder(folder: Path, factor: float = 3) -> Path:
    """Make the weights of a model larger, so that its pictures matter."""
    model = AutoModelForImageTextToText.from_pretrained(folder)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(factor)
    model.save_pretrained(folder)
    return folder
