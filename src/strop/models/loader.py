"""Load models from Hugging Face folders and GGUF files, with float32 weights and no dropout."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from strop.config.memory.facts import quantization_of
from strop.errors import ModelError, StropError
from strop.models.folder import attention_for, generation_config_of, load_model_config, locate, read_config
from strop.models.folder import load_tokenizer as load_tokenizer  # for programs
from strop.models.heads import policy_class, reason_unsupported, scorer_config
from strop.models.source import Source


@contextlib.contextmanager
def no_progress_bars() -> Generator[None]:
    """Disable transformers' progress bars in the body."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def dtype_named(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype called ``name``; ``auto`` is bfloat16 on a GPU and float32 on a CPU."""
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    return getattr(torch, name)


def model_arguments(
    path: str | Path,
    *,
    num_labels: int | None = None,
    override_config: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
) -> dict[str, Any]:
    """Return the arguments with which transformers builds or loads the model of a folder."""
    config = load_model_config(path, override_config=override_config, trust_remote_code=trust_remote_code)
    if reason := reason_unsupported(config):
        raise ModelError(f"model {path}: {reason}")
    if method := quantization_of(vars(config)):  # of a name on the hub, before its weights are read
        raise ModelError(
            f"model {path}: its weights are quantized ({method}), and quantized weights cannot be trained"
        )
    if num_labels is not None:
        config = scorer_config(config)
        config.num_labels = num_labels
    implementation = attention_for(config, attn_implementation)
    attention = {} if implementation is None else {"attn_implementation": implementation}
    return {"config": config, "dtype": torch.float32, "trust_remote_code": trust_remote_code, **attention}


def completed(
    model: PreTrainedModel,
    path: str | Path,
    *,
    override_config: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    **others: Any,
) -> PreTrainedModel:
    """Give a model its source, for exports, and its generation configuration; see ``without_jitter``."""
    del others
    held: Any = model
    held.strop_source = Source.read(Path(path), read_config(path, trust_remote_code))
    # from_pretrained makes it without override_config, and from_config with defaults of the family
    if model.can_generate() and (generation := generation_config_of(Path(path), override_config)) is not None:
        model.generation_config = generation
    return without_jitter(model, override_config)


def without_jitter(model: PreTrainedModel, override_config: Mapping[str, Any] | None) -> PreTrainedModel:
    """Keep routers that draw random numbers in training (``jitter``) in eval mode for good; return the model.

    The configuration is left alone: Phi-3.5-MoE's ``router_jitter_noise`` also has a meaning in evaluation
    (experts within that distance of the best share the token), and in training it samples experts. A jitter
    in ``override_config`` is deliberate and stays.
    """
    if not any("jitter" in key and value for key, value in (override_config or {}).items()):
        for module in model.modules():
            if any(
                "jitter" in name and isinstance(x, int | float) and x > 0 for name, x in vars(module).items()
            ):
                module.train = MethodType(_stay_in_eval, module)
                module.train()
    return model


def _stay_in_eval(module: nn.Module, mode: bool = True) -> nn.Module:
    del mode
    return nn.Module.train(module, False)


def model_class(config: PretrainedConfig, *, scores: bool) -> Any:
    """Return transformers' class of a policy, or of a critic or reward model."""
    return AutoModelForSequenceClassification if scores else policy_class(config)


def _load(path: str | Path, **options: Any) -> tuple[Any, set[str]]:
    """Load a model; return it with the names of weights that the files lack."""
    # keep logs clean; a program's own stream may have no isatty
    on_terminal = getattr(sys.stderr, "isatty", lambda: False)()
    bars = contextlib.nullcontext() if on_terminal else no_progress_bars()
    try:
        arguments = model_arguments(path, **options)
        auto_class = model_class(arguments["config"], scores="num_labels" in options)
        if auto_class is AutoModelForSequenceClassification:
            # a class that heads._scorer_class made has the names of its weights in files
            scorer = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(arguments["config"]), None)
            arguments["key_mapping"] = getattr(scorer, "key_mapping", {})
        with bars:
            model, loading = auto_class.from_pretrained(**locate(path), **arguments, output_loading_info=True)
    except (StropError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # the family's code may raise anything, for example for a missing key
        raise ModelError(f"cannot load a model from {path}: {load_failure(error)}") from error
    if quantizer := getattr(model, "hf_quantizer", None):
        if not all(weight.is_floating_point() for weight in model.parameters()):
            raise ModelError(
                f"model {path}: its weights are quantized, and quantized weights cannot be trained"
            )
        quantizer.remove_quantization_config(model)  # an unpacked GGUF file is an ordinary model
    return completed(model, path, **options), set(loading["missing_keys"])


def load_failure(error: Exception) -> str:
    """Return an error's name and message, without transformers' list of all of its classes."""
    return f"{type(error).__name__}: {error}".partition("\nModel type should be one of")[0]


def load_causal_lm(path: str | Path, **options: Any) -> PreTrainedModel:
    """Load a causal language model with float32 weights, no dropout and no router jitter.

    ``options``: override_config, trust_remote_code, attn_implementation.
    """
    model, missing = _load(path, **options)
    if missing:
        raise ModelError(f"model {path}: no weights for {sorted(missing)[:5]}")
    return model


def load_scorer(path: str | Path, *, fresh_head_seed: int | None, **options: Any) -> PreTrainedModel:
    """Load a sequence-classification model with one output, for a reward model or a critic.

    A folder without a ``score`` layer (a language model) gets a new one by ``fresh_head``; with
    ``fresh_head_seed=None`` (a reward model) that is a ``ModelError``. ``options`` as in ``load_causal_lm``.
    """
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # a missing score layer is handled below
    try:
        model, missing = _load(path, num_labels=1, **options)
    finally:
        logging.set_verbosity(verbosity)
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise ModelError(f"model {path}: {type(model).__name__} has no bias-free linear `score` layer")
    if "score.weight" in missing:
        if fresh_head_seed is None:
            raise ModelError(f"reward model {path}: no weights for its score layer; is it a language model?")
        with torch.no_grad():
            head.weight.copy_(fresh_head(head.in_features, fresh_head_seed))
    if others := missing - {"score.weight"}:
        raise ModelError(f"model {path}: no weights for {sorted(others)[:5]}")
    return model


def fresh_head(hidden: int, seed: int) -> Tensor:
    """Draw weights [1, H] of a scalar head from N(0, 1/(H + 1)) (Stiennon et al. 2020, appendix)."""
    # not torch's global generator: every rank draws the same head, whatever it drew before
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((1, hidden), generator=generator) * (hidden + 1) ** -0.5


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Return the buffers that are saved with a model; every rank holds them whole."""
    saved = module.state_dict().keys()
    return ((name, buffer) for name, buffer in module.named_buffers(remove_duplicate=False) if name in saved)


def hidden_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return every id that decoding without special tokens leaves out.

    These are the special tokens, and the ids that the model can sample and the tokenizer has no token for.
    """
    special = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    nameless = {*range(model.config.get_text_config().vocab_size)} - {*tokenizer.get_vocab().values()}
    return sorted({*tokenizer.all_special_ids, *special, *nameless})
