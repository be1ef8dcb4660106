"""Rollout vllm on prompts with pictures.

vLLM needs torchvision for these models: ``make test-all`` runs this file in an environment of its own.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from pathlib import Path

import picture_rows
import pytest
import torch
from safetensors.torch import save_file

from strop.config.load import load_config
from strop.errors import ModelError
from strop.models.checkpoint_layout import CheckpointLayout
from strop.models.loader import load_causal_lm
from strop.rollout.vllm.arguments import why_unsupported

import forked
import picture_models
import runs
from outside import require_vllm

require_vllm()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("torchvision") is None,
        reason="needs torchvision, with which vLLM reads pictures (make .venv-pictures/ready)",
    ),
]
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "smolvlm", "idefics3", "llava")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return picture_rows.inputs(tmp_path_factory.mktemp("pictures"))


def published(kind: str, folder: Path) -> Path:
    """Write a model under the names of published files, which vLLM reads."""
    made = picture_models.make(kind, folder.with_name(f"{folder.name}-made"), wide=True)
    shutil.copytree(made, folder)
    model = load_causal_lm(made)
    weights = CheckpointLayout(model).convert((n, w.detach()) for n, w in model.named_parameters())
    content = {name: weight.contiguous().clone() for name, weight in weights}
    save_file(content, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "video_preprocessor_config.json").write_text("{}")
    return folder


def keys(inputs: Path, model: Path, run: Path, *extra: str) -> list[str]:
    return picture_rows.options(
        inputs,
        run,
        f"actor_rollout_ref.model.path={model}",
        f"critic.model.path={model}",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.verify_weights_every=1",
        "trainer.total_training_steps=6",
        "data.max_prompt_length=64",
        *extra,
    )


def differences(run: Path) -> list[float]:
    return [
        line["training/rollout_probs_diff_max"] for line in map(json.loads, (run / "metrics.jsonl").open())
    ]


@pytest.mark.parametrize("kind", FAMILIES)
def test_probabilities_are_the_trainers_in_every_iteration(inputs, tmp_path, kind):
    """Ids are compared in the engine, for each request; weights after each transfer, the encoder's too."""
    model = published(kind, tmp_path / "model")
    done = forked.run(runs.train, keys(inputs, model, tmp_path / "run"))
    assert done.returncode == 0, done.stderr[-3000:]
    if kind == "llava":  # vLLM leaves out a norm behind the layer whose features are read
        assert re.search(r"\b2 of \d+ weights", done.stderr)
        assert "post_layernorm" in done.stderr
    else:
        assert "not verified" not in done.stderr
    found = differences(tmp_path / "run")
    assert len(found) == 6
    assert max(found) < 1e-6


@pytest.mark.parametrize("steps", [0, 4])
@pytest.mark.parametrize("name", ["Sees", "Pictures", "pictures"])
def test_turns_with_pictures_are_those_of_the_trainer(inputs, tmp_path, name, steps):
    model = published("qwen2_5_vl", tmp_path / "model")
    own = picture_rows.turns(tmp_path) if name == "Sees" else picture_rows.answers(tmp_path, name)
    ahead = picture_rows.APART if steps else ()
    options = keys(inputs, model, tmp_path / "run", *own, *ahead, f"trainer.async_steps={steps}")
    done = forked.run(runs.train, options)
    assert done.returncode == 0, done.stderr[-3000:]
    assert max(differences(tmp_path / "run")) < (1e-6 if not steps else 0.1)


def _train_with_a_stale_cache(options: list[str]) -> None:
    from vllm.v1.engine.llm_engine import LLMEngine

    LLMEngine.reset_encoder_cache = lambda self: None
    runs.train(options)


def test_a_stale_encoder_cache_would_show(inputs, tmp_path):
    model = published("qwen2_5_vl", tmp_path / "model")
    done = forked.run(_train_with_a_stale_cache, keys(inputs, model, tmp_path / "run"))
    assert done.returncode == 0, done.stderr[-3000:]
    first, *later = differences(tmp_path / "run")
    assert first < 1e-6
    assert min(later[2:]) > 1e-5  # pictures come again in the second epoch


def _checksums_of_a_changed_encoder(options: list[str]) -> None:
    from strop.trainer.build import build_trainer

    trainer = build_trainer(load_config(options))
    trainer.init_workers()
    rollout = trainer.actor.worker.rollout
    rollout.update_weights(trainer.actor.worker.engine.named_weights())
    before = rollout.checksums()
    module = rollout._worker.model_runner.get_model()
    weight = next(w for n, w in module.named_parameters() if "patch_embed" in n)
    with torch.no_grad():
        weight.view(-1)[0] += 1
    changed = {name for name, value in rollout.checksums().items() if value != before[name]}
    assert len(changed) == 1, changed
    assert "patch_embed" in changed.pop()
    rollout.update_weights(trainer.actor.worker.engine.named_weights())
    verify = trainer.actor.worker.verify_rollout
    verify(1)
    # normalizes pixels, and is in no checkpoint
    next(b for n, b in module.named_buffers() if n == "visual.input_norm.weight")[2] += 1e-3
    with pytest.raises(ModelError, match=r"of version 2: 1 of .* visual\.input_norm\.weight\."):
        verify(2)


def test_checksums_name_a_changed_weight_of_the_encoder_and_a_changed_constant(inputs, tmp_path):
    model = published("qwen2_5_vl", tmp_path / "model")
    done = forked.run(_checksums_of_a_changed_encoder, keys(inputs, model, tmp_path / "run"))
    assert done.returncode == 0, done.stderr[-3000:]


def test_weights_are_never_dummies(inputs, tmp_path):
    """They would overwrite the constants that normalize pixels, which are in no checkpoint."""
    model = published("qwen2_5_vl", tmp_path / "model")
    dummy = keys(inputs, model, tmp_path / "run", "actor_rollout_ref.rollout.load_format=dummy")
    done = forked.run(runs.train, [*dummy, "trainer.total_training_steps=1"])
    assert done.returncode == 0, done.stderr[-3000:]
    assert max(differences(tmp_path / "run")) < 1e-6


def test_a_family_that_vllm_reads_causally_is_refused(tmp_path):
    config = load_causal_lm(picture_models.make("gemma3", tmp_path, wide=True)).config
    assert why_unsupported(config, "cpu") is None
    assert "name=hf" in str(why_unsupported(config, "cpu", pictures=True))
    assert why_unsupported(config, "cuda", pictures=True) is None
