"""Rules about LoRA adapters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from strop.config.checks.finding import Finding, error, warning
from strop.config.checks.learning import trained_models
from strop.config.memory.facts import read_model_facts, trained_whole
from strop.config.names import is_installed, needs_reference
from strop.config.paths import ADAPTER_CONFIG, ADAPTER_WEIGHTS, ATTENTION, expand, is_url, similar_path
from strop.config.roles import uses_reference
from strop.config.schema import Config, RootConfig
from strop.config.schema.supervised import PreferenceConfig, RewardModellingConfig


def adapters(config: RootConfig) -> Iterator[Finding]:
    """Require weights and an adapter that LoRA can use."""
    for key, model, _, _ in trained_models(config):
        if not model.has_adapters:
            continue
        given = f"{key}.lora_rank={model.lora_rank}"
        if model.lora_adapter_path is not None:
            given = f"{key}.lora_adapter_path={model.lora_adapter_path}"
        if not is_installed("peft"):
            yield error(f"{given}: the package peft is not installed: pip install 'strop[peft]'")
        yield from _folder(key, model.lora_adapter_path)
        if model.lora_adapter_path is not None and _has_reference(config, key):
            yield warning(
                f"{given}: the reference is {key}.path={model.path} without that adapter. For one with it, "
                f"merge it (strop export {model.lora_adapter_path} --merge --out FOLDER), and set "
                f"{key}.path=FOLDER with {key}.lora_rank in place of lora_adapter_path"
            )
        has_head = key == "critic.model" or isinstance(config, RewardModellingConfig)
        for end in model.modules_to_save if model.lora_adapter_path is None else ():
            if trained_whole(model.path, end) == {} and not (has_head and "score".endswith(end)):
                yield error(
                    f"{key}.modules_to_save={model.modules_to_save}: {key}.path={model.path} has no module "
                    f"whose name ends in {end}; expected ends of names such as embed_tokens or norm"
                )
        facts = read_model_facts(model.path) if model.lora_adapter_path is None else None
        if facts and facts.experts and model.target_modules == "all-linear" and not model.exclude_modules:
            yield error(
                f"{given} with {key}.target_modules=all-linear: {key}.path={model.path} has routed experts, "
                f"which cannot have adapters; name other layers, for example {key}.target_modules={ATTENTION}"
            )


def _has_reference(config: RootConfig, key: str) -> bool:
    """Return True if the model at ``key`` is compared with a reference."""
    if isinstance(config, Config):
        return key == "actor_rollout_ref.model" and uses_reference(config)
    return isinstance(config, PreferenceConfig) and needs_reference(config.update.loss)


def _folder(key: str, path: str | None) -> Iterator[Finding]:
    if path is None or is_url(path):
        return
    folder = Path(expand(path))
    if not (folder / ADAPTER_CONFIG).is_file():
        found = f"no {ADAPTER_CONFIG} there" if folder.is_dir() else f"no such folder{similar_path(path)}"
        yield error(
            f"{key}.lora_adapter_path={path}: {found}; expected a folder of peft's, with {ADAPTER_CONFIG} "
            f"and {ADAPTER_WEIGHTS}"
        )
