"""Rules about files, folders and models on this machine. URLs and hub names are left to the download."""

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
    """Require the parquet files."""
    for key, files in (("train_files", config.data.train_files), ("val_files", config.data.val_files)):
        if key == "train_files" and config.trainer.val_only:
            continue
        for file in files:
            if not is_url(file) and not Path(expand(file)).exists():
                yield error(f"data.{key}: no file {file} (strop prepare makes one from a data set)")


def models(config: Config) -> Iterator[Finding]:
    """Require models where the configuration names folders."""
    for key, path in model_paths(config).items():
        yield from model_folder(key, path)


def model_folder(key: str, path: str) -> Iterator[Finding]:
    """Require a model in the folder that the key `key` names, if it names one."""
    folder = Path(expand(path))
    if not path or is_url(path) or folder.is_file():
        return
    if folder.is_dir():
        if not (folder / "config.json").is_file() and not any(folder.glob("*.gguf")):
            yield error(f"{key}={path}: the folder has no config.json, so it is not a Hugging Face model")
    elif not may_be_a_hub_name(path):
        yield error(f"{key}={path}: no such folder")


def tokenizer(config: RootConfig) -> Iterator[Finding]:
    """Require the folder of a separate tokenizer."""
    path = config.data.tokenizer
    if path and not is_url(path) and not Path(expand(path)).exists() and not may_be_a_hub_name(path):
        yield error(f"data.tokenizer={path}: no such folder")


def context_window(config: Config) -> Iterator[Finding]:
    """See ``context_of_model``."""
    return context_of_model(config.actor_rollout_ref.model.path, config.data)


def context_of_model(path: str, data: RowsConfig) -> Iterator[Finding]:
    """Warn if rows of `data` may be longer than the context window of the model at `path`."""
    facts = read_model_facts(path)
    longest = data.max_prompt_length + data.max_response_length
    if facts is not None and facts.context is not None and facts.context < longest:
        yield warning(
            f"data.max_prompt_length={data.max_prompt_length} + "
            f"data.max_response_length={data.max_response_length} = "
            f"{longest} tokens, more than the context window of {path} ({facts.context})"
        )


def custom_reward(config: Config) -> Iterator[Finding]:
    """Require the file and the name of a custom reward function; the file is parsed, not run."""
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
    """Require the checkpoint that ``resume_mode`` names; a remote one is checked when it is fetched."""
    mode = config.trainer.resume_mode
    if mode not in ("auto", "disable") and not is_url(mode) and not Path(expand(mode)).is_dir():
        yield error(
            f"trainer.resume_mode={mode}: expected auto, disable, or a global_step_N folder; no such folder"
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
    while not os.path.lexists(parent):
        parent = os.path.dirname(parent)
    if not os.path.isdir(parent):
        yield error(
            f"trainer.default_local_dir={path}: {parent} is not a folder; name another, or move it away"
        )
        return
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".strop-probe-", dir=parent))
    except OSError as problem:
        yield error(
            f"trainer.default_local_dir={path}: nothing can be written to {parent} ({problem.strerror}); "
            "name a folder that you may write to"
        )


def _defined_names(tree: ast.Module) -> set[str]:
    """Return the names that a module defines at top level, also in `if` and `try`; "*" for a star import."""
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


def input_tokenizer(config: Config) -> Iterator[Finding]:
    """Require the tokenizer that decodes samples for the reward model."""
    path = config.reward_model.model.input_tokenizer
    if not config.reward_model.enable or path is None or is_url(path) or may_be_a_hub_name(path):
        return
    if not Path(expand(path)).exists():
        yield error(f"reward_model.model.input_tokenizer={path}: no such folder")


def shared_vocabulary(config: Config) -> Iterator[Finding]:
    """Require a vocabulary of the policy's size where token ids are scored; tokens are compared later."""
    rewards = config.reward_model
    if not rewards.enable or rewards.model.input_tokenizer is not None:
        return
    paths = config.actor_rollout_ref.model.path, rewards.model.path
    policy, reward_model = (read_model_facts(path) for path in paths)
    if policy is not None and reward_model is not None and policy.vocabulary != reward_model.vocabulary:
        yield error(
            f"reward_model.model.input_tokenizer=null: the reward model reads the policy's token ids, but "
            f"the vocabularies differ: {policy.vocabulary} tokens of {paths[0]}, {reward_model.vocabulary} "
            f"of {paths[1]}; set it to the policy's tokenizer, so that samples are tokenized again"
        )


def reward_model_context_window(config: Config) -> Iterator[Finding]:
    """Warn if sequences may be longer than the reward model's context window."""
    rewards, data = config.reward_model, config.data
    facts = read_model_facts(rewards.model.path) if rewards.enable else None
    if facts is None or facts.context is None:
        return
    if rewards.model.input_tokenizer is not None and rewards.max_length is not None:
        longest, keys = rewards.max_length, f"reward_model.max_length={rewards.max_length}"
    else:  # re-tokenized samples have about as many tokens
        longest = data.max_prompt_length + data.max_response_length
        keys = (
            f"data.max_prompt_length={data.max_prompt_length} + "
            f"data.max_response_length={data.max_response_length} = {longest} tokens"
        )
    if longest > facts.context:
        yield warning(f"{keys}, more than the context window of {rewards.model.path} ({facts.context})")


def longest_sequence(config: Config) -> Iterator[Finding]:
    """Warn if re-tokenized samples may exceed the token cap of a micro-batch."""
    rewards = config.reward_model
    retokenized = rewards.enable and rewards.model.input_tokenizer is not None
    if retokenized and rewards.use_dynamic_bsz and rewards.max_length is None:
        cap = rewards.forward_max_token_len_per_gpu
        yield warning(
            f"reward_model.max_length=null: a sample of more than reward_model.forward_max_token_len_per_gpu="
            f"{cap} of the reward model's tokens would stop the run; with max_length={cap} its end is scored"
        )
