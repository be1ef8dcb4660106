"""The YAML and the main of the reference documents, taken from the documents themselves, train."""

from __future__ import annotations

import os
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

from strop import NVMegatronRayWorkerGroup, RayPPOTrainer, RayWorkerGroup, RewardManager
from strop.config.load import load_config
from strop.models.loader import load_scorer, load_tokenizer

import forked
import tiny_model
from runs import hashes, make_inputs, metrics, overrides, train

DOCUMENTS = Path(__file__).resolve().parents[2] / ".." / "shared" / "reference"
PARTS = ("role_worker_mapping = {", "reward_fn = RewardManager", "trainer = RayPPOTrainer(")


def code_blocks(name: str, language: str) -> list[str]:
    document = DOCUMENTS / name
    if not document.is_file():
        pytest.skip(f"the reference document is not there: {document}")
    blocks = re.findall(rf"\.\. code:: {language}\n\n((?: {{3}}.*\n|\s*\n)+)", document.read_text())
    return [textwrap.dedent(block) for block in blocks]


def test_the_reference_documents_yaml_trains_one_step(tmp_path, monkeypatch):
    (tmp_path / "reference.yaml").write_text("".join(code_blocks("config_explanation.rst", "yaml")))
    inputs = make_inputs(tmp_path)
    command = [
        *("-m", "strop.trainer.main_ppo"),
        f"--config-path={tmp_path / 'reference.yaml'}",
        f"data.train_files={inputs / 'train.parquet'}",
        f"data.val_files={inputs / 'val.parquet'}",
        f"actor_rollout_ref.model.path={inputs / 'model'}",
        "actor_rollout_ref.rollout.name=hf",
        "trainer.n_gpus_per_node=1",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "data.max_prompt_length=8",
        "data.max_response_length=4",
        "+trainer.total_training_steps=1",
        "+trainer.device=cpu",
        f"+data.cache_dir={inputs / 'cache'}",
    ]
    # The document logs to console and wandb; what wandb left behind in this process must not reach the child.
    for name in [name for name in os.environ if name.startswith("WANDB")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    done = forked.run(command, env={"WANDB_MODE": "offline", "WANDB_SILENT": "true"})
    assert done.returncode == 0, done.stderr[-3000:]
    run = tmp_path / "checkpoints" / "verl_examples" / "gsm8k"
    assert [line["step"] for line in metrics(run)] == [0, 1]
    assert "critic/kl" in metrics(run)[-1]  # kl_coef 0.005 brings the reference model
    assert list(run.rglob("*.wandb"))


def reference_main() -> str:
    """The blocks that make up the main, with nothing changed but where names are imported from."""
    blocks = code_blocks("ppo_example_architecture.rst", "python")
    code = "\n".join(next(block for block in blocks if part in block) for part in PARTS)
    return re.sub(r"from verl\.[\w.]+ import", "from strop import", code)


def inputs_with_reward_model(folder: Path) -> tuple[Path, list[str]]:
    """Inputs of a run, and the options for a reward model."""
    inputs = make_inputs(folder)
    load_scorer(inputs / "model", fresh_head_seed=5).save_pretrained(inputs / "reward_model")
    tiny_model.build_tokenizer().save_pretrained(inputs / "reward_model")
    return inputs, [
        "reward_model.enable=true",
        f"reward_model.model.path={inputs / 'reward_model'}",
        "reward_model.model.input_tokenizer=null",
    ]


def run_reference_main(inputs: Path, options: list[str]) -> Any:
    """Execute the document's main; return its trainer."""
    names: dict[str, Any] = {
        "config": load_config(options),
        "tokenizer": load_tokenizer(inputs / "model"),
        "RayPPOTrainer": RayPPOTrainer,
        "RewardManager": RewardManager,
    }
    exec(compile(reference_main(), "ppo_example_architecture.rst", "exec"), names)
    return names["trainer"]


def test_the_reference_documents_main_trains_on_ray_as_in_one_process(ray_session, tmp_path):
    inputs, options = inputs_with_reward_model(tmp_path)
    expected = train(overrides(inputs, tmp_path / "local", "trainer.worker_group=local", *options))
    trainer = run_reference_main(inputs, overrides(inputs, tmp_path / "ray", *options))
    assert isinstance(trainer.actor, RayWorkerGroup)
    assert "reward_model" in trainer.groups
    assert hashes(trainer) == hashes(expected)
    assert metrics(tmp_path / "ray") == metrics(tmp_path / "local")
    trainer.shutdown()


@pytest.mark.slow
def test_the_megatron_branch_of_the_main_trains_as_fsdp_in_one_process(ray_session, tmp_path):
    pytest.importorskip("megatron.core", reason="needs megatron-core: pip install 'strop[megatron]'")
    inputs, options = inputs_with_reward_model(tmp_path)
    options += [f"{role}.optim.eps=1e-5" for role in ("actor_rollout_ref.actor", "critic")]
    train(overrides(inputs, tmp_path / "local", "trainer.worker_group=local", *options))
    megatron = [
        "actor_rollout_ref.actor.strategy=megatron",
        "actor_rollout_ref.model.external_lib=engines.megatron_shim",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
        "trainer.n_gpus_per_node=2",
    ]
    trainer = run_reference_main(inputs, overrides(inputs, tmp_path / "ray", *options, *megatron))
    assert isinstance(trainer.actor, NVMegatronRayWorkerGroup)
    assert "reward_model" in trainer.groups
    for line, other in zip(metrics(tmp_path / "ray"), metrics(tmp_path / "local"), strict=True):
        assert line == pytest.approx(other, rel=1e-4, abs=1e-4)
    trainer.shutdown()
