"""The YAML and the main of the reference documents, taken from the documents themselves, train."""

from __future__ import annotations

import ast
import os
import re
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import reference_forms
import torch
from omegaconf import OmegaConf

import strop
from strop import (
    DataProto,
    LocalWorkerGroup,
    NVMegatronRayWorkerGroup,
    RayPPOTrainer,
    RayWorkerGroup,
    RewardManager,
    verl,
)
from strop.config.load import load_config
from strop.errors import ConfigError
from strop.models.loader import load_scorer, load_tokenizer
from strop.rewards.router import default_compute_score
from strop.rewards.score import gsm8k, math

import forked
import tiny_model
from runs import fit, hashes, make_inputs, metrics, overrides, train

DOCUMENTS = Path(__file__).resolve().parents[2] / ".." / "shared" / "reference"
FROM_VERL = Path(__file__).parents[2] / "docs" / "from_verl.md"
PARTS = ("role_worker_mapping = {", "reward_fn = RewardManager", "trainer = RayPPOTrainer(")


def document(name: str) -> str:
    """The text of a document; the test is skipped where the documents are not."""
    if not (DOCUMENTS / name).is_file():
        pytest.skip(f"the reference document is not there: {DOCUMENTS / name}")
    return (DOCUMENTS / name).read_text()


def code_blocks(name: str, language: str) -> list[str]:
    blocks = re.findall(rf"\.\. code:: {language}\n\n((?: {{3}}.*\n|\s*\n)+)", document(name))
    return [textwrap.dedent(block) for block in blocks]


def of_architecture() -> dict[str, str]:
    """The programs in the first document, by their name in ``reference_forms``."""
    blocks = code_blocks("ppo_example_architecture.rst", "python")
    main = "\n".join(next(block for block in blocks if part in block) for part in PARTS)
    return {"MAIN": main, "SCORERS": next(block for block in blocks if "_select_rm_score_fn" in block)}


def of_notes() -> dict[str, str]:
    """The programs in the second document, whose blocks mix statements with prose."""
    text = document("ppo_code_reading_notes.md")
    lines = [line.strip() for line in text.splitlines()]
    whole = "\n".join(line.partition(" -> self.")[0].removeprefix("-> ") for line in lines)
    block = next(block for block in text.split("```") if "apply_kl_penalty(" in block)
    iteration = [line for line in block.splitlines() if line[:1].isalpha() and is_python(line)]
    for row in reversed(range(len(iteration))):
        name = iteration[row].partition(" = ")[0]
        if name in ("gen_batch_output", "ref_log_prob", "values"):  # the notes say once that they are joined
            iteration.insert(row + 1, f"batch = batch.union({name})")

    def of(*starts: str) -> str:
        return "\n".join(next(line for line in whole.splitlines() if line.startswith(s)) for s in starts)

    mapping = re.search(r"role_worker_mapping = \{.*?\}", text, re.DOTALL)
    assert mapping is not None
    managers = "reward_fn = load", "val_reward_fn = load", "reward_manager_name ="
    return {
        "WORKERS": mapping.group(),
        "INPUTS": of(*managers, "train_dataset = ", "val_dataset = "),
        "LOADERS": of("self._create_dataloader"),
        "ITERATION": "\n".join(iteration),
        "LOSS": of("log_probs = logprobs_from", "pg_loss, "),
    }


def is_python(line: str) -> bool:
    try:
        ast.parse(line)
    except SyntaxError:
        return False
    return True


def program(name: str) -> Any:
    """Return a program of the documents, or of ``reference_forms`` on a machine without them.

    Nothing is changed but where names are imported from.
    """
    found = vars(reference_forms)
    if DOCUMENTS.is_dir():
        found = of_architecture() | of_notes()
    return compile(re.sub(r"from verl\.[\w.]+ import", "from strop import", found[name]), name, "exec")


def calls(text: str) -> set[tuple[str, ...]]:
    """The functions that a program calls, with the names of their arguments."""
    found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    return {(ast.unparse(call.func), *sorted(str(arg.arg) for arg in call.keywords)) for call in found}


def test_the_programs_for_machines_without_the_documents_have_their_calls():
    for name, text in {**of_architecture(), **of_notes()}.items():
        assert calls(text) <= calls(getattr(reference_forms, name)), name


@pytest.mark.slow
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
    exec(program("MAIN"), names)
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


class ByTheNotes(RayPPOTrainer):
    """An iteration is the one of the notes; everything around it is the run's."""

    def step(self, prompts):
        batch = DataProto.from_single_dict(prompts)
        batch.non_tensor_batch["uid"] = np.array([str(row) for row in range(len(batch))], dtype=object)
        gen_batch = batch.pop(batch_keys=["input_ids", "attention_mask", "position_ids"])
        names: dict[str, Any] = {
            "self": self,
            "gen_batch": gen_batch,
            "batch": batch.repeat(repeat_times=self.config.actor_rollout_ref.rollout.n, interleave=True),
            "apply_kl_penalty": verl.apply_kl_penalty,
            "compute_advantage": verl.compute_advantage,
        }
        exec(program("ITERATION"), names)
        outputs = [names["critic_output"].meta_info, names["actor_output"].meta_info]
        return names["batch"], {**names["kl_metrics"], **outputs[0]["metrics"], **outputs[1]["metrics"]}


def train_by_the_notes(config: Any, trainer_cls: type, group_cls: type) -> Any:
    """Train with what the notes say; return the trainer."""
    names: dict[str, Any] = {"config": config, "ray": ray, "processor": None, "collate_fn": None}
    names |= {name: getattr(strop, name) for name in strop.BUILDING_BLOCKS}
    names |= {"train_sampler": None, "tokenizer": load_tokenizer(config.actor_rollout_ref.model.path)}
    exec(program("WORKERS"), names)
    exec(program("INPUTS"), names)
    roles = {**names["role_worker_mapping"], strop.Role.RewardModel: strop.RewardModelWorker}
    pools = strop.ResourcePoolManager({"all": [config.trainer.n_gpus_per_node]}, dict.fromkeys(roles, "all"))
    trainer = trainer_cls(
        config,
        names["tokenizer"],
        roles,
        pools,
        group_cls,
        names["reward_fn"],
        names["val_reward_fn"],
        names["train_dataset"],
        names["val_dataset"],
    )
    exec(program("LOADERS"), names | {"self": trainer})
    trainer.init_workers()
    fit(trainer)
    return trainer


def trained_as_ever(folder: Path, group_cls: type, *options: str, by: type = ByTheNotes) -> Any:
    """Train by the notes and as ever, require equal results, and return the first trainer."""
    inputs = make_inputs(folder)
    trainers, lines = [], []
    for kind in (by, RayPPOTrainer):
        run = folder / kind.__name__
        config = load_config(overrides(inputs, run, *options))
        trainers.append(train_by_the_notes(config, kind, group_cls))
        lines.append(metrics(run)[-1])
    assert hashes(trainers[0]) == hashes(trainers[1])
    for name in ("critic/kl", "critic/kl_coeff", "actor/pg_loss", "critic/vf_loss", "actor/lr"):
        assert lines[0][name] == lines[1][name], name
    trainers[1].shutdown()
    return trainers[0]


def test_the_iteration_of_the_notes_trains_as_the_run_does(tmp_path):
    trainer = trained_as_ever(tmp_path, LocalWorkerGroup, "trainer.worker_group=local")
    assert [len(trainer.train_dataloader), len(list(trainer.train_dataloader))] == [3, 1]  # 2 steps are done
    assert [test_data.batch["input_ids"].shape for test_data in trainer.val_dataloader] == [(6, 8)]
    assert trainer.kl_ctrl.value == 0.005
    with pytest.raises(ConfigError, match="reward_model"):
        trainer.rm_wg.compute_rm_score(None)


@pytest.mark.slow
def test_the_iteration_of_the_notes_with_a_full_kl(tmp_path):
    trained_as_ever(tmp_path, LocalWorkerGroup, "trainer.worker_group=local", "algorithm.kl_penalty=full")


@pytest.mark.slow
def test_the_programs_of_the_notes_take_a_configuration_of_hydra(tmp_path):
    inputs, group, found = make_inputs(tmp_path), "trainer.worker_group=local", []
    for kind in (OmegaConf.from_dotlist, load_config):
        options = overrides(inputs, tmp_path / kind.__name__, group, "reward_model.enable=False")
        config = kind(options)
        if OmegaConf.is_config(config):
            OmegaConf.set_struct(config, True)  # as in a program of Hydra: absent keys raise
        found.append(hashes(train_by_the_notes(config, RayPPOTrainer, LocalWorkerGroup)))
    assert found[0] == found[1]


def test_a_step_that_leaves_the_filter_of_groups_out_is_named(tmp_path, caplog):
    keys = "trainer.worker_group=local", "algorithm.filter_groups.enable=True"
    config = load_config(overrides(make_inputs(tmp_path), tmp_path / "run", *keys))
    train_by_the_notes(config, ByTheNotes, LocalWorkerGroup)
    found = [text for text in caplog.messages if "filter_groups.enable=True; ByTheNotes.step" in text]
    assert len(found) == 1


class ByALoop(RayPPOTrainer):
    """A loop of one's own, with what verl's loop reads of its trainer."""

    def fit(self):
        self.global_steps = 0
        assert self._validate()
        self.global_steps += 1
        while self.global_steps <= self.total_training_steps:
            for prompts in self.train_dataloader:
                self.iteration(prompts)
                self.global_steps += 1
                if self.global_steps > self.total_training_steps:
                    break

    def iteration(self, batch):
        settings, n = self.config.algorithm, self.config.actor_rollout_ref.rollout.n
        gen_batch = batch.pop(batch_keys=["input_ids", "attention_mask", "position_ids"])
        output = self.actor_rollout_wg.generate_sequences(gen_batch)
        batch.non_tensor_batch["uid"] = np.array([str(row) for row in range(len(batch))], dtype=object)
        batch = batch.repeat(repeat_times=n, interleave=True).union(output)
        batch = batch.union(self.actor_rollout_wg.compute_log_prob(batch))
        if self.use_reference_policy:
            batch = batch.union(self.ref_policy_wg.compute_ref_log_prob(batch))
        if self.use_critic:
            batch = batch.union(self.critic_wg.compute_values(batch))
        if self.use_rm:
            batch = batch.union(self.rm_wg.compute_rm_score(batch))
        batch.batch["token_level_scores"] = self.reward_fn(batch)
        batch, _ = verl.apply_kl_penalty(batch, kl_ctrl=self.kl_ctrl, kl_penalty=settings.kl_penalty)
        batch = verl.compute_advantage(batch, settings.adv_estimator, num_repeat=n)
        if self.use_critic:
            self.critic_wg.update_critic(batch)
        if self.config.trainer.critic_warmup < self.global_steps:
            self.actor_rollout_wg.update_actor(batch)


@pytest.mark.fast("options1")
@pytest.mark.parametrize(
    "options",
    [
        [
            "trainer.critic_warmup=1",
            "actor_rollout_ref.actor.optim.warmup_style=linear",
            "algorithm.whiten_advantages=False",
        ],
        [
            "algorithm.adv_estimator=grpo",
            "algorithm.norm_adv_by_std_in_grpo=False",
            "actor_rollout_ref.actor.use_kl_loss=True",
        ],
        ["algorithm.adv_estimator=grpo", "algorithm.kl_ctrl.kl_coef=0"],
        [  # the KL is of the sampler's log-probs, and no pass before the update reads the reference's states
            "actor_rollout_ref.actor.use_rollout_log_probs=True",
            "actor_rollout_ref.actor.use_kl_loss=True",
            "actor_rollout_ref.actor.kl_loss_type=full",
        ],
    ],
)
def test_a_loop_with_the_names_of_verls_trainer_trains_as_ever(tmp_path, options):
    inputs, with_model = inputs_with_reward_model(tmp_path)
    options = [*options, "trainer.worker_group=local", "trainer.total_training_steps=4"]
    found = []
    for kind in (ByALoop, RayPPOTrainer):
        run = tmp_path / kind.__name__
        config = load_config(overrides(inputs, run, *options, *with_model))
        found.append(hashes(train_by_the_notes(config, kind, LocalWorkerGroup)))
    assert found[0] == found[1]


@pytest.mark.slow
def test_the_iteration_of_the_notes_on_ray(ray_session, tmp_path):
    trainer = trained_as_ever(
        tmp_path, RayWorkerGroup, "trainer.worker_group=ray", "trainer.n_gpus_per_node=2"
    )
    assert trainer.actor.worker_cls is strop.ActorRolloutRefWorker
    trainer.shutdown()


@pytest.mark.slow
def test_the_loop_of_from_verl(tmp_path):
    names: dict[str, Any] = {"__name__": "example"}
    exec(FROM_VERL.read_text().split("```python\n")[1].split("```")[0], names)
    trained_as_ever(tmp_path, LocalWorkerGroup, "trainer.worker_group=local", by=names["Mine"])


def test_the_scorers_of_the_document():
    names: dict[str, Any] = {"gsm8k": gsm8k, "math": math}
    exec(program("SCORERS"), names)
    select = names["_select_rm_score_fn"]
    assert select("openai/gsm8k")("It is\n#### 1,234.", "1234") == 1
    assert select("lighteval/MATH")("so \\boxed{\\frac12}", "\\frac{1}{2}") == 1
    with pytest.raises(NotImplementedError):
        select("mine")
    with pytest.raises(NotImplementedError):
        default_compute_score("mine", "1", "1")
    manager = RewardManager(tiny_model.build_tokenizer(), 0)
    with pytest.raises(NotImplementedError):
        manager.validate_sources(["mine"])
    assert manager.compute_score(data_source="openai/gsm8k", solution_str="#### 3", ground_truth="3") == 1


def test_the_loss_of_the_notes():
    names: dict[str, Any] = {
        "logits": torch.tensor([[[0.0, 0.0], [0.0, 3.0]]]),
        "micro_batch": {"responses": torch.tensor([[1, 0]])},
        "logprobs_from_logits": verl.logprobs_from_logits,
        "core_algos": verl,
        "old_log_prob": torch.tensor([[-1.0, -2.0]]),
        "log_prob": torch.tensor([[-1.0, -1.0]], requires_grad=True),
        "advantages": torch.tensor([[1.0, 2.0]]),
    }
    exec(program("LOSS"), names)
    # log(1/2), and log(1 / (1 + e^3))
    torch.testing.assert_close(names["log_probs"], torch.tensor([[-0.693147, -3.048587]]))
    # ratios 1 and e, the second clipped at 1.2: -(1 * 1 + 2 * 1.2) / 2
    assert names["pg_loss"].item() == pytest.approx(-1.7)
    assert names["pg_clipfrac"].item() == 0.5
    assert names["ppo_kl"].item() == pytest.approx(-0.5)
    names["pg_loss"].backward()
    assert names["log_prob"].grad.tolist() == [[-0.5, 0.0]]
