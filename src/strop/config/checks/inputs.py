"""Rules about files, folders and models on this machine. URLs and hub names are left to the download."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub.constants import HF_HUB_CACHE, HF_HUB_OFFLINE

from strop.config.batch_plan import longest_scored_row
from strop.config.checks.finding import Finding, error, warning
from strop.config.checks.learning import trained_models
from strop.config.keys import all_keys, longest_row, value_at
from strop.config.machine import machine_memory
from strop.config.memory.facts import quantization_of, read_config_file, read_model_facts
from strop.config.memory.forecast import hidden_columns
from strop.config.memory.shapes import gib
from strop.config.names import missing_module
from strop.config.paths import (
    expand,
    hub_split,
    is_rows,
    is_template_file,
    is_url,
    may_be_a_hub_name,
    reason_no_model,
    similar_path,
    with_split,
)
from strop.config.roles import model_paths, tokenizer_paths
from strop.config.schema import Config, RootConfig
from strop.config.schema.trainer import KEPT_BY_TIME
from strop.passed import is_function

SEVERAL_FILES = "[a.csv,b.csv]"
_MOST_MISSING = 3  # a list of more may be prompts in the place of rows


def data_files(config: RootConfig) -> Iterator[Finding]:
    """Require the files, and the package that reads data sets on the hub."""
    for key, files in (("train_files", config.data.train_files), ("val_files", config.data.val_files)):
        if key == "train_files" and config.trainer.val_only:
            continue
        missing = 0
        for file in files:
            base = (with_split(file) or (file,))[0]  # a folder with a data set of several splits
            if is_url(file) or is_rows(file) or any(Path(expand(name)).exists() for name in (file, base)):
                continue
            missing += 1
            if missing > _MOST_MISSING:
                yield error(
                    f"data.{key}: expected names of files, found {len(files)} texts; a row of a prompt is a "
                    f"dict, as {{'prompt': {file[:30]!r}}}"
                )
                break
            if hub_split(file) is None:
                on_hub = f"; on the hub: {file}:train" if hub_split(f"{file}:train") else ""
                several = f"; write several files as {SEVERAL_FILES}" if set("*?,") & set(file) else ""
                hint = several or similar_path(file) or f" (strop prepare makes one from a data set){on_hub}"
                yield error(f"data.{key}: no file {file}{hint}")
            elif missing_module("datasets"):
                yield error(
                    f"data.{key}: no file {file}, and reading it from the Hugging Face hub needs the "
                    "package 'datasets': pip install 'strop[hub]'"
                )
    data = config.data
    if not config.trainer.val_only and (
        both := [file for file in data.val_files if file in data.train_files]
    ):
        yield warning(
            f"data.val_files: {both[0]} is in data.train_files, too: validation measures no new prompts"
        )


_OWN_TEMPLATE_ARGUMENTS = ("add_generation_prompt", "continue_final_message", "return_dict", "tokenize")


def chat_template(config: RootConfig) -> Iterator[Finding]:
    """Require the template's file, and variables that are not set by strop."""
    template = config.data.chat_template
    if is_template_file(template) and not is_url(template) and not Path(expand(template)).is_file():
        yield error(
            f"data.chat_template={template}: no such file (a template given as text has Jinja's {{ and }})"
            + similar_path(template)
        )
    for name in config.data.apply_chat_template_kwargs:
        if name in (*_OWN_TEMPLATE_ARGUMENTS, "chat_template", "conversation"):
            instead = (
                "use data.chat_template" if name == "chat_template" else "its value follows from the prompts"
            )
            yield error(f"data.apply_chat_template_kwargs.{name}: it is set by strop; {instead}")


def models(config: Config) -> Iterator[Finding]:
    """Require models where the configuration names folders."""
    for key, path in model_paths(config).items():
        yield from model_folder(key, path)


def model_folder(key: str, path: str) -> Iterator[Finding]:
    """Require a model in the folder that the key `key` names, if it names one."""
    folder = Path(expand(path))
    if path.startswith(("http://", "https://")) and not path.endswith(".gguf"):
        expected = "expected a folder or a name on the hub (OWNER/NAME)"
        server = "; a server is called by a reward function (strop docs rewards)" * ("reward" in key)
        yield error(f"{key}={path}: {expected}{server}")
    if not path or is_url(path):
        return
    if folder.exists() or not may_be_a_hub_name(path):
        if reason := reason_no_model(key, path):
            yield error(reason)
    elif not (Path(HF_HUB_CACHE) / f"models--{path.replace('/', '--')}").is_dir():
        offline = ", but HF_HUB_OFFLINE is set" if HF_HUB_OFFLINE else ""
        found = f"no such folder here{similar_path(path)}"
        yield warning(f"{key}={path}: {found}; it will be downloaded from the Hugging Face hub{offline}")


def libraries(config: RootConfig) -> Iterator[Finding]:
    """Require the packages that are imported before models are loaded."""
    for path in all_keys(type(config)):
        if not path.endswith("model.external_lib"):
            continue
        named = value_at(config, path)
        for package in [named] if isinstance(named, str) else named or []:
            used = {key.split(".")[0] for key in model_paths(config)}
            if (missing := missing_module(package)) and path.split(".")[0] in used:
                yield error(f"{path}={package}: there is no module {missing}; is its folder on PYTHONPATH?")


def reward_file(config: Config) -> Iterator[Finding]:
    """Require the file of a user's reward function, with Python in it; it is not run."""
    path = config.custom_reward_function.path
    if path is None or is_function(path):
        return
    if is_url(path):
        yield error(f"custom_reward_function.path={path}: expected a Python file on this machine")
        return
    file = Path(expand(path))
    try:
        if file.exists() and not file.is_file():  # the first read of a pipe never returns
            yield error(f"custom_reward_function.path={path}: expected a file, found a folder or a pipe")
            return
        compile(file.read_bytes(), path, "exec")
    except OSError as problem:
        yield error(f"custom_reward_function.path={path}: {problem.strerror}{similar_path(path)}")
    except (SyntaxError, ValueError) as problem:  # the latter: null bytes
        line = getattr(problem, "lineno", None)
        place = f", line {line}" if line else ""
        yield error(f"custom_reward_function.path={path}{place}: not Python: {problem.args[0]}")


def tokenizers(config: RootConfig) -> Iterator[Finding]:
    """Require the folders of separate tokenizers."""
    paths, known = {"data.tokenizer": config.data.tokenizer or ""}, {""}
    if isinstance(config, Config):
        paths, known = tokenizer_paths(config), {*model_paths(config).values()}
    for key, path in paths.items():
        if not (path in known or is_url(path) or Path(expand(path)).exists() or may_be_a_hub_name(path)):
            yield error(f"{key}={path}: no such folder{similar_path(path)}")
        known.add(path)  # the critic's may be that of the policy


def quantized_models(config: RootConfig) -> Iterator[Finding]:
    """Require models whose weights are numbers: transformers computes with others in its own ways."""
    for key, path in model_paths(config).items():
        if method := quantization_of(read_config_file(path) if path else {}):
            yield error(
                f"{key}={path}: its weights are quantized ({method}), and they are not supported, "
                "nor adapters on them (QLoRA); name the unquantized model"
            )


def context_windows(config: Config) -> Iterator[Finding]:
    """Warn if sequences may be longer than the context window of the policy or of the reward model."""
    model, scorer, trains = config.actor_rollout_ref.model, config.reward_model, not config.trainer.val_only
    yield from context_of_model(model, *longest_row(config.data), trains=trains)
    if scorer.enable:
        yield from context_of_model(scorer.model, *longest_scored_row(config), trains=trains)


def context_of_model(model: Any, longest: int, keys: str, *, trains: bool = True) -> Iterator[Finding]:
    """Warn if `longest` tokens, which `keys` give, exceed the context window of a section's `model`.

    Beyond some length a RoPE may turn all rows of a pass otherwise, also the short ones: their log-probs
    would depend on the rows of a pass, and differ from vLLM's, which goes by the longest that is possible.
    """
    path = model.path
    bound, kind = _same_rope(read_config_file(path) if path else {}, model)
    if trains and bound is not None and longest > bound:
        yield error(
            f"{keys}: {longest} tokens, and {path} (rope_type={kind}) encodes positions otherwise in passes "
            f"with more than {bound}, so that log-probs depend on the other rows of a pass; lower them to "
            f"{bound}"
        )
    facts = read_model_facts(path)
    context = getattr(model, "override_config", {}).get("max_position_embeddings", facts and facts.context)
    if isinstance(context, int) and context < longest:
        yield warning(f"{keys}: {longest} tokens exceed the context window of {path} ({context})")


def _same_rope(config: Mapping[str, Any], model: Any) -> tuple[int | None, str]:
    """Return the tokens up to which each pass turns positions alike, None without a bound; and the kind."""
    text = {**(config.get("text_config") or config), **getattr(model, "override_config", {})}
    rope = text.get("rope_parameters") or text.get("rope_scaling")
    rope = rope if isinstance(rope, Mapping) else {}
    kind, bound = rope.get("rope_type") or rope.get("type"), None
    if kind in ("longrope", "su") and rope.get("short_factor") != rope.get("long_factor", ()):
        name = "original_max_position_embeddings"
        bound = rope.get(name) or text.get(name)
    elif kind == "dynamic":
        bound = text.get("max_position_embeddings")
    return bound if isinstance(bound, int) else None, str(kind)


def resume(config: RootConfig) -> Iterator[Finding]:
    """Require the checkpoint that ``resume_mode`` names; a remote one is checked when it is fetched."""
    mode = config.trainer.resume_mode
    if mode not in ("auto", "disable") and not is_url(mode) and not Path(expand(mode)).is_dir():
        yield error(
            f"trainer.resume_mode={mode}: expected auto, disable, or a global_step_N folder; no such folder"
            + similar_path(mode)
        )


def run_folder(config: RootConfig) -> Iterator[Finding]:
    """Require a run folder that can be written, by writing to it or to its nearest existing parent."""
    path = config.trainer.default_local_dir
    if is_url(path):
        yield error(
            f"trainer.default_local_dir={path}: expected a folder on a disk, which every node sees; "
            "trainer.default_hdfs_dir takes copies of the checkpoints"
        )
        return
    parent = os.path.abspath(expand(path))
    for key, model in model_paths(config).items():
        if os.path.abspath(expand(model)) == parent:
            yield error(
                f"trainer.default_local_dir={path}: the folder of {key}; name another one, for commands that "
                "take a run's folder would take the trained model in place of that model"
            )
    while not os.path.lexists(parent):
        parent = os.path.dirname(parent)
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".strop-probe-", dir=parent))
    except OSError as problem:
        yield error(
            f"trainer.default_local_dir={path}: nothing can be written to {parent} ({problem.strerror}); "
            "name a folder that you may write to"
        )
        return
    yield from _room(config, parent)


_SAVED_BYTES = 12
"""Of a trained parameter: the weight and AdamW's two moments, in float32."""


def _room(config: RootConfig, folder: str) -> Iterator[Finding]:
    """Warn if the checkpoints that exist at once do not fit onto the disk of ``folder``."""
    settings = config.trainer
    by_number, by_time = settings.save_freq > 0, settings.save_minutes is not None
    if settings.val_only or not (by_number or by_time):
        return
    models = [one.model for one in trained_models(config) if not one.model.has_adapters]
    facts = [read_model_facts(model.path) for model in models]
    size = _SAVED_BYTES * sum(found.parameters or 0 for found in facts if found is not None)
    free, count, why = shutil.disk_usage(folder).free, KEPT_BY_TIME + 1, "trainer.save_minutes"
    if by_number:
        count, why = (settings.max_ckpt_to_keep or 0) + 1, "trainer.max_ckpt_to_keep + 1"
    if size * count > free:
        yield warning(
            f"trainer.default_local_dir={settings.default_local_dir}: a checkpoint takes at least "
            f"{gib(size)}, "
            + (f"{count} exist while one is saved ({why}), " if count > 1 else "")
            + f"and {folder} has {gib(free)} free"
        )


_BYTES_OF_A_TOKEN = 32
"""Ids, mask and positions in 64 bits, mask of the response and log-probs in 32."""


def memory(config: Config) -> Iterator[Finding]:
    """Require that the columns of one iteration's samples fit into this machine's memory."""
    rollout = config.actor_rollout_ref.rollout
    rows = 0 if config.trainer.val_only else config.data.train_batch_size * rollout.n
    keys = f"data.train_batch_size={config.data.train_batch_size} x actor_rollout_ref.rollout.n={rollout.n}"
    if rollout.val_kwargs.n > rows:
        rows, keys = rollout.val_kwargs.n, f"actor_rollout_ref.rollout.val_kwargs.n={rollout.val_kwargs.n}"
    of_states = (
        0 if config.trainer.val_only else hidden_columns(config, config.data.train_batch_size * rollout.n)
    )
    yield from columns_in_memory(config, rows, keys, of_states)


def columns_in_memory(config: RootConfig, rows: int, keys: str, of_states: int = 0) -> Iterator[Finding]:
    """Require that padded columns of ``rows`` sequences fit into this machine's memory.

    ``of_states``: bytes of the hidden states among them.
    """
    length, words = longest_row(config.data)
    size, installed = rows * length * _BYTES_OF_A_TOKEN + of_states, machine_memory()
    if size > installed:
        yield error(
            f"{keys} sequences of {words} tokens: their columns alone take {size / 2**30:,.0f} GiB, and this "
            f"machine has {installed / 2**30:,.0f} GiB"
        )
