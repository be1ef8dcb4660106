"""Rules about files: what the configuration points to is there. URLs are left to the download."""

from __future__ import annotations

import ast
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from strop.config.checks.finding import Finding, error, warning
from strop.config.forecast import read_model_facts
from strop.config.paths import expand, is_url, may_be_a_hub_name
from strop.config.roles import model_paths
from strop.config.schema import Config, RootConfig
from strop.config.schema.data import RowsConfig


def data_files(config: RootConfig) -> Iterator[Finding]:
    """Parquet files exist."""
    val_only = config.trainer.val_only
    for key, files in (("train_files", config.data.train_files), ("val_files", config.data.val_files)):
        if key == "train_files" and val_only:
            continue
        if not files and (key == "train_files" or val_only or isinstance(config, Config)):
            yield error(f"data.{key}: found an empty list, expected at least one parquet file")
        for file in files:
            if not is_url(file) and not Path(expand(file)).exists():
                yield error(f"data.{key}: no file {file} (strop prepare makes one from a data set)")


def models(config: Config) -> Iterator[Finding]:
    """Model folders exist and hold a model; a name without a folder is left to the hub."""
    for key, path in model_paths(config).items():
        yield from model_folder(key, path)


def model_folder(key: str, path: str) -> Iterator[Finding]:
    """The model that the key `key` names."""
    folder = Path(expand(path))
    if is_url(path) or folder.is_file():
        return
    if folder.is_dir():
        if not (folder / "config.json").is_file() and not any(folder.glob("*.gguf")):
            yield error(f"{key}={path}: the folder has no config.json, so it is not a Hugging Face model")
    elif not may_be_a_hub_name(path):
        yield error(f"{key}={path}: no such folder")


def tokenizer(config: RootConfig) -> Iterator[Finding]:
    """A tokenizer of its own exists."""
    path = config.data.tokenizer
    if path and not is_url(path) and not Path(expand(path)).exists() and not may_be_a_hub_name(path):
        yield error(f"data.tokenizer={path}: no such folder")


def context_window(config: Config) -> Iterator[Finding]:
    """The policy was made for sequences as long as these."""
    return context_of_model(config.actor_rollout_ref.model.path, config.data)


def context_of_model(path: str, data: RowsConfig) -> Iterator[Finding]:
    """The model at `path` was made for sequences as long as the rows of `data` may be."""
    facts = read_model_facts(path)
    longest = data.max_prompt_length + data.max_response_length
    if facts is not None and facts.context is not None and facts.context < longest:
        yield warning(
            f"data.max_prompt_length={data.max_prompt_length} + "
            f"data.max_response_length={data.max_response_length} = "
            f"{longest} tokens, more than the {facts.context} that {path} was made for"
        )


def custom_reward(config: Config) -> Iterator[Finding]:
    """The reward file exists and defines the function; it is read, not run."""
    path, name = config.custom_reward_function.path, config.custom_reward_function.name
    if path is None or is_url(path):
        return
    file = Path(expand(path))
    if not file.is_file():
        yield error(f"custom_reward_function.path={path}: no such file")
        return
    try:
        tree = ast.parse(file.read_bytes(), filename=str(file))
    except (SyntaxError, ValueError) as problem:
        yield error(f"custom_reward_function.path={path}: not Python ({problem})")
        return
    defined = _defined_names(tree)
    if name not in defined and "*" not in defined:
        has = ", ".join(sorted(defined)) or "nothing"
        yield error(f"custom_reward_function.name={name}: {path} does not define it; it defines {has}")


def resume(config: RootConfig) -> Iterator[Finding]:
    """A checkpoint that is named exists; of a remote one this is seen when it is fetched."""
    mode = config.trainer.resume_mode
    if mode not in ("auto", "disable") and not is_url(mode) and not Path(expand(mode)).is_dir():
        yield error(
            f"trainer.resume_mode={mode}: expected auto, disable, or a global_step_N folder; there is no "
            f"such folder"
        )


def run_folder(config: RootConfig) -> Iterator[Finding]:
    """The run folder, or the nearest folder above it that is there, can be written to: by trying."""
    path = config.trainer.default_local_dir
    if is_url(path):
        yield error(
            f"trainer.default_local_dir={path}: expected a folder on a disk, which every node sees; "
            "trainer.default_hdfs_dir takes copies of the checkpoints"
        )
        return
    there = os.path.abspath(expand(path))
    while not os.path.lexists(there):
        there = os.path.dirname(there)
    if not os.path.isdir(there):
        yield error(
            f"trainer.default_local_dir={path}: {there} is not a folder; name another, or move it away"
        )
        return
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".strop-probe-", dir=there))
    except OSError as problem:
        yield error(
            f"trainer.default_local_dir={path}: nothing can be written to {there} ({problem.strerror}); "
            "name a folder that you may write to"
        )


def _defined_names(tree: ast.Module) -> set[str]:
    """What a module defines at its top level, also inside `if` and `try`; "*" for a star import."""
    names: set[str] = set()
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names |= {alias.asname or alias.name for alias in aliases}
            case ast.Assign(targets=targets):
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
            case ast.If() | ast.Try() | ast.With():
                pending += [
                    child
                    for child in ast.iter_child_nodes(node)
                    if isinstance(child, ast.stmt | ast.ExceptHandler)
                ]
            case ast.ExceptHandler(body=body):
                pending += body
    return names


# Rules about the reward model: it reads what the policy writes.


def input_tokenizer(config: Config) -> Iterator[Finding]:
    """The tokenizer that samples are decoded with exists."""
    path = config.reward_model.model.input_tokenizer
    if not config.reward_model.enable or path is None or is_url(path) or may_be_a_hub_name(path):
        return
    if not Path(expand(path)).exists():
        yield error(f"reward_model.model.input_tokenizer={path}: no such folder")


def shared_vocabulary(config: Config) -> Iterator[Finding]:
    """A reward model that scores the policy's token ids has as many; the tokens are compared later."""
    rewards = config.reward_model
    if not rewards.enable or rewards.model.input_tokenizer is not None:
        return
    paths = config.actor_rollout_ref.model.path, rewards.model.path
    policy, reward_model = (read_model_facts(path) for path in paths)
    if policy is not None and reward_model is not None and policy.vocabulary != reward_model.vocabulary:
        yield error(
            f"reward_model.model.input_tokenizer=null has the policy's token ids scored as they are, but the "
            f"vocabularies differ: {policy.vocabulary} tokens of {paths[0]}, {reward_model.vocabulary} of "
            f"{paths[1]}; set it to the policy's tokenizer, so that samples are written anew"
        )


def reward_model_context_window(config: Config) -> Iterator[Finding]:
    """The reward model was made for sequences as long as these."""
    rewards, data = config.reward_model, config.data
    facts = read_model_facts(rewards.model.path) if rewards.enable else None
    if facts is None or facts.context is None:
        return
    if rewards.model.input_tokenizer is not None and rewards.max_length is not None:
        longest, keys = rewards.max_length, f"reward_model.max_length={rewards.max_length}"
    else:  # samples written anew have about as many tokens as they had
        longest = data.max_prompt_length + data.max_response_length
        keys = (
            f"data.max_prompt_length={data.max_prompt_length} + "
            f"data.max_response_length={data.max_response_length} = {longest} tokens"
        )
    if longest > facts.context:
        yield warning(f"{keys}, more than the {facts.context} that {rewards.model.path} was made for")


def longest_sequence(config: Config) -> Iterator[Finding]:
    """What is written anew has a limit where micro-batches have one."""
    rewards = config.reward_model
    written_anew = rewards.enable and rewards.model.input_tokenizer is not None
    if written_anew and rewards.use_dynamic_bsz and rewards.max_length is None:
        cap = rewards.forward_max_token_len_per_gpu
        yield warning(
            f"reward_model.max_length=null: a sample of more than reward_model.forward_max_token_len_per_gpu="
            f"{cap} tokens of the reward model's would stop the run; with max_length={cap} its end is scored"
        )
