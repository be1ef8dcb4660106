"""Every algorithm, KL and reward that can be configured runs whole, and does what its key says."""

from __future__ import annotations

import pyarrow.parquet as pq
import pytest
import torch

from strop import ActorRolloutRefWorker, CriticWorker, RayPPOTrainer, RewardManager
from strop.config.load import load_config
from strop.config.placement import pools_of
from strop.controller.group import LocalWorkerGroup
from strop.controller.pools import ResourcePoolManager, Role
from strop.errors import ConfigError, ModelError
from strop.models.loader import load_causal_lm, load_scorer, load_tokenizer
from strop.tracking.jsonl import read_metrics
from strop.trainer.weight_sync import WeightSync

import tiny_model
from messages import naming
from runs import fit, hashes, make_inputs, metrics, overrides, train


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = make_inputs(tmp_path_factory.mktemp("inputs"))
    load_scorer(folder / "model", fresh_head_seed=5).save_pretrained(folder / "reward_model")
    tiny_model.build_tokenizer().save_pretrained(folder / "reward_model")
    return folder


def _run(inputs, run, *options):
    """Train without validation: the trainer, and the lines of metrics.jsonl."""
    options = ("trainer.test_freq=-1", "trainer.val_before_train=false", *options)
    trainer = train(overrides(inputs, run, *options))
    return trainer, metrics(run)


@pytest.fixture(scope="module")
def plain(inputs):
    """The trainer and the folder of two epochs of two iterations."""
    run = inputs / "plain"
    epochs = ("data.train_batch_size=12", "trainer.total_training_steps=null", "trainer.total_epochs=2")
    return _run(inputs, run, *epochs, "trainer.log_rollouts=false")[0], run


@pytest.mark.parametrize("estimator", ["grpo", "remax"])
def test_an_estimator_without_values_trains_the_actor_without_a_critic(inputs, tmp_path, estimator):
    """Groups and greedy baselines; ``gae`` is the default of all other runs, and tests/algorithms has all."""
    trainer, lines = _run(
        inputs,
        tmp_path,
        f"algorithm.adv_estimator={estimator}",
        f"custom_reward_function.path={_noisy_reward(tmp_path)}",
        "algorithm.kl_ctrl.kl_coef=0",
    )
    assert list(trainer.groups) == ["actor"]
    assert all(line["actor/grad_norm"] > 0 for line in lines)
    start = load_causal_lm(inputs / "model").model.embed_tokens.weight
    trained = load_causal_lm(tmp_path / "final_model").model.embed_tokens.weight
    assert (trained - start).abs().max() > 1e-3


def _noisy_reward(folder):
    """Scores that differ between the samples of a prompt, so that every estimator has something to learn."""
    path = folder / "noisy_reward.py"
    path.write_text(
        "import zlib\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': zlib.crc32(solution_str.encode()) % 100 / 100, 'length': len(solution_str)}\n"
    )
    return path


def test_texts_of_a_reward_function_are_kept_with_the_samples(inputs, tmp_path):
    path = tmp_path / "reward.py"
    path.write_text(
        "def compute_score(solution_str, ground_truth, **_):\n"
        "    return {'score': 0.5, 'acc': len(solution_str) > 2, 'pred': solution_str, 'why': None}\n"
    )
    _, lines = _run(inputs, tmp_path / "run", f"custom_reward_function.path={path}", "trainer.test_freq=1")
    assert 0 <= lines[0]["reward/acc/mean"] <= 1
    assert not [name for line in lines for name in line if name.startswith(("reward/pred", "reward/why"))]
    for folder in ("rollouts", "validation"):
        rows = pq.read_table(tmp_path / "run" / folder / "step_000001.parquet").to_pylist()
        for row in rows:
            assert row["score"] == 0.5
            assert row["reward/acc"] == (len(row["response"]) > 2)
            assert row["reward_text/pred"] == row["response"]
            assert row["reward_text/why"] is None


@pytest.mark.fast("kl-reward")
@pytest.mark.parametrize(("kind", "place"), [("kl", "reward"), ("full", "reward"), ("full", "loss")])
def test_the_kl_starts_at_zero_and_grows_with_the_policys_distance(inputs, tmp_path, kind, place):
    """From sampled tokens or whole distributions: tests/workers/test_losses.py has every estimate."""
    options = [f"algorithm.kl_penalty={kind}", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=3"]
    if place == "loss":
        options += [
            "actor_rollout_ref.actor.use_kl_loss=true",
            f"actor_rollout_ref.actor.kl_loss_type={kind}",
        ]
    reward = f"custom_reward_function.path={_noisy_reward(tmp_path)}"
    trainer, (first, second) = _run(inputs, tmp_path / "run", *options, reward)
    assert first["objective/kl"] == pytest.approx(0, abs=1e-5)
    assert abs(second["objective/kl"]) > 1e-3
    if place == "reward":
        assert second["objective/non_score_reward"] == pytest.approx(
            -0.005 * second["objective/kl"], rel=1e-3
        )
        assert "actor/kl_loss" not in second
    else:
        assert second["objective/non_score_reward"] == 0
        assert abs(second["actor/kl_loss"]) > 1e-4
    assert "ref" in trainer.groups


def test_the_first_ratio_of_an_on_policy_update_is_one(inputs, tmp_path):
    _, lines = _run(
        inputs,
        tmp_path,
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.rollout_is=token",
        "trainer.total_training_steps=1",
    )
    assert lines[0]["actor/grad_norm"] > 0
    assert lines[0]["actor/ppo_kl"] == pytest.approx(0, abs=1e-6)
    assert lines[0]["actor/pg_clipfrac"] == 0
    assert lines[0]["training/rollout_probs_diff_max"] < 1e-5
    samples = pq.read_table(tmp_path / "rollouts" / "step_000001.parquet").to_pylist()
    for row in samples:
        assert row["old_log_probs"] == pytest.approx(row["rollout_log_probs"], rel=2**-15)


def test_critic_warm_up_leaves_the_actor_as_it_was(inputs, tmp_path):
    _, lines = _run(
        inputs, tmp_path, "trainer.critic_warmup=1", "trainer.save_freq=1", "algorithm.kl_ctrl.kl_coef=0"
    )
    assert ["actor/lr" in line for line in lines] == [False, True]
    start = load_causal_lm(inputs / "model").state_dict()
    after_one = load_causal_lm(tmp_path / "global_step_1" / "actor" / "huggingface").state_dict()
    after_two = load_causal_lm(tmp_path / "global_step_2" / "actor" / "huggingface").state_dict()
    assert all(torch.equal(start[name], after_one[name]) for name in start)
    assert not all(torch.equal(start[name], after_two[name]) for name in start)


def test_the_warm_up_of_the_actor_begins_after_the_critics(inputs, tmp_path):
    rates = [f"{key}={value}" for key, value in {
        "actor_rollout_ref.actor.optim.lr": 1e-3, "actor_rollout_ref.actor.optim.lr_warmup_steps": 2,
        "critic.optim.lr": 2e-3, "critic.optim.lr_warmup_steps": 2, "critic.optim.warmup_style": "linear",
    }.items()]  # fmt: skip
    run = ("trainer.critic_warmup=1", "trainer.total_training_steps=4", "algorithm.kl_ctrl.kl_coef=0")
    _, lines = _run(inputs, tmp_path, *run, *rates)
    assert [line.get("actor/lr") for line in lines] == pytest.approx([None, 5e-4, 1e-3, 1e-3])
    assert [line["critic/lr"] for line in lines] == pytest.approx([1e-3, 2e-3, 2e-3, 1e-3])


def test_the_score_of_a_reward_model_is_added_to_the_rules(inputs, tmp_path):
    model = ("reward_model.enable=true", f"reward_model.model.path={inputs / 'reward_model'}")
    _run(
        inputs,
        tmp_path,
        *model,
        f"reward_model.model.input_tokenizer={inputs / 'model'}",
        "trainer.total_training_steps=1",
    )
    rows = pq.read_table(tmp_path / "rollouts" / "step_000001.parquet").to_pylist()
    assert len({row["reward/reward_model"] for row in rows}) > 1
    for row in rows:
        assert row["score"] == pytest.approx(row["reward/rule"] + row["reward/reward_model"], abs=1e-5)


def test_a_custom_reward_needs_prompts_alone_and_draws_the_same_numbers_in_every_run(inputs, tmp_path):
    rows = pq.read_table(inputs / "train.parquet").select(["prompt"])
    pq.write_table(rows, tmp_path / "prompts.parquet")
    (tmp_path / "dice.py").write_text(
        "import random\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return random.random()\n"
    )
    one, two = tmp_path / "one", tmp_path / "two"
    for run in (one, two):
        train(
            overrides(
                inputs,
                run,
                f"data.train_files={tmp_path / 'prompts.parquet'}",
                f"data.val_files={tmp_path / 'prompts.parquet'}",
                f"custom_reward_function.path={tmp_path / 'dice.py'}",
                "trainer.total_training_steps=1",
            )
        )
    assert 0 < metrics(one)[0]["val/test_score/prompts"] < 1
    assert metrics(one) == metrics(two)


def test_exactly_the_planned_iterations_run(plain):
    trainer, run = plain
    lines = metrics(run)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[-1]["epoch"] == 2.0
    assert lines[-1]["episode"] == 48
    assert trainer.actor.world_size == 1
    assert not (run / "rollouts").exists()


def test_an_update_without_a_transfer_fails_at_the_next_generation(inputs, tmp_path, monkeypatch):
    to_rollout = WeightSync.to_rollout

    def forget_the_second(weights, *arguments):
        return to_rollout(weights, *arguments) if weights.version != 1 else []

    monkeypatch.setattr(WeightSync, "to_rollout", forget_the_second)
    with pytest.raises(ModelError, match=naming("version 0", "version 1")):
        _run(inputs, tmp_path)


def test_samples_of_the_first_and_last_validation_are_logged(inputs, tmp_path, caplog):
    options = ["trainer.total_training_steps=3", "trainer.test_freq=1", "trainer.val_before_train=True"]
    with caplog.at_level("INFO"):
        train(overrides(inputs, tmp_path, *options))
    assert len(list(tmp_path.glob("validation/*.parquet"))) == 4
    assert caplog.text.count("[ground truth]") == 2


def test_every_metric_of_the_reference_documents_is_there(inputs, tmp_path):
    train(overrides(inputs, tmp_path, "trainer.test_freq=1"))
    assert len(pq.read_table(tmp_path / "validation" / "step_000002.parquet")) == 6
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all("val/test_score/strop/arithmetic" in line for line in lines)
    line = lines[-1]
    figures = ("score", "rewards", "advantages", "returns", "values")
    spread = [*(f"critic/{name}" for name in figures), "response_length", "prompt_length"]
    expected = {f"{name}/{statistic}" for name in spread for statistic in ("mean", "max", "min")}
    for family, names in {
        "actor": ("pg_loss", "pg_clipfrac", "ppo_kl", "entropy_loss", "grad_norm", "lr"),
        "critic": ("vf_loss", "vf_clipfrac", "vpred_mean", "grad_norm", "lr", "kl", "kl_coeff"),
        "objective": ("kl", "scores", "rlhf_reward", "non_score_reward", "entropy", "loss"),
        "policy": ("approxkl_avg", "clipfrac_avg", "entropy_avg"),
        "perf": ("total_num_tokens", "time_per_step", "throughput"),
        "training": ("rollout_probs_diff_mean", "rollout_probs_diff_max"),
        "time": ("from_scratch", "training"),
        "timing_s": ("gen", "step"),
        "timing_per_token_ms": ("gen", "update_actor"),
        "val": ("sequence_lengths", "num_stop_token_ids", "test_score/strop/arithmetic"),
        "response_length": ("clip_ratio",),
        "prompt_length": ("clip_ratio",),
        "loss": ("policy_avg",),
    }.items():
        expected |= {f"{family}/{name}" for name in names}
    expected |= {"critic/vf_explained_var", "objective/verifiable_correct_rate", "episode", "epoch", "lr"}
    assert expected <= line.keys(), sorted(expected - line.keys())


def test_an_exported_model_generates_like_the_trained_one(plain):
    trainer, run = plain
    trained = trainer.actor.worker.engine.module.hugging_face_model
    exported, tokenizer = load_causal_lm(run / "final_model"), load_tokenizer(run / "final_model")
    ids = torch.tensor([tokenizer.apply_chat_template(
        [{"role": "user", "content": "1+2="}], add_generation_prompt=True, return_dict=False)])  # fmt: skip
    with torch.no_grad():
        assert torch.equal(exported(ids).logits, trained.eval()(ids).logits)


@pytest.mark.parametrize(
    ("workers", "placed", "missing"),
    [
        ((Role.ActorRollout, Role.Critic), None, ["role_worker_mapping", "Role.RefPolicy", "KL"]),
        (
            (Role.ActorRollout, Role.RefPolicy),
            None,
            ["role_worker_mapping", "Role.Critic", "adv_estimator=gae"],
        ),
        (
            (Role.ActorRolloutRef, Role.Critic),
            (Role.ActorRolloutRef,),
            ["resource_pool_manager.mapping", "Role.Critic", "ActorRolloutRef"],
        ),
        ((Role.Actor, Role.RefPolicy, Role.Critic), None, ["Role.Rollout"]),
        ((), None, ["Role.ActorRollout", "no role"]),
    ],
)
def test_a_missing_role_is_a_configuration_error_before_any_worker(
    inputs, tmp_path, workers, placed, missing
):
    tokenizer = load_tokenizer(inputs / "model")
    placed = placed or workers
    with pytest.raises(ConfigError, match=naming(*missing)):
        RayPPOTrainer(
            config=load_config(overrides(inputs, tmp_path)),
            tokenizer=tokenizer,
            role_worker_mapping=dict.fromkeys(workers, ActorRolloutRefWorker),
            resource_pool_manager=ResourcePoolManager({"all": [1]}, dict.fromkeys(placed, "all")),
            ray_worker_group_cls=LocalWorkerGroup,
            reward_fn=RewardManager(tokenizer=tokenizer, num_examine=0),
        )


@pytest.mark.parametrize("policy", [Role.ActorRollout, Role.ActorRolloutRef])
def test_checks_are_of_the_processes_in_the_pools_of_a_program(inputs, tmp_path, policy):
    """A program may read the default of ``trainer.n_gpus_per_node``, 8, on a machine without GPUs."""
    tokenizer, roles = load_tokenizer(inputs / "model"), (policy, Role.RefPolicy, Role.Critic)

    def trainer(*processes):
        return RayPPOTrainer(
            config=load_config(overrides(inputs, tmp_path)),
            tokenizer=tokenizer,
            role_worker_mapping=dict.fromkeys(roles, ActorRolloutRefWorker),
            resource_pool_manager=ResourcePoolManager({"all": processes}, dict.fromkeys(roles, "all")),
            ray_worker_group_cls=LocalWorkerGroup,
            reward_fn=RewardManager(tokenizer=tokenizer, num_examine=0),
        )

    assert trainer(1).config.trainer.resource_pools == {}
    assert pools_of(trainer(2, 2).config) == {"all": [2, 2]}
    with pytest.raises(ConfigError, match=naming("data.train_batch_size=8", "3 ranks")):  # 8 x 2 samples
        trainer(3)


def test_actor_rollout_and_reference_can_be_one_role(inputs, plain, tmp_path):
    apart, run = plain
    config = load_config([f"trainer.default_local_dir={tmp_path}"], config_path=run / "config.yaml")
    workers = {Role.ActorRolloutRef: ActorRolloutRefWorker, Role.Critic: CriticWorker}
    trainer = RayPPOTrainer(
        config=config,
        tokenizer=load_tokenizer(inputs / "model"),
        role_worker_mapping=workers,
        resource_pool_manager=ResourcePoolManager({"all": [1]}, dict.fromkeys(workers, "all")),
        ray_worker_group_cls=LocalWorkerGroup,
        reward_fn=RewardManager(tokenizer=load_tokenizer(inputs / "model"), num_examine=0),
    )
    trainer.init_workers()
    fit(trainer)
    assert set(apart.groups) == {"actor", "ref", "critic"}
    assert set(trainer.groups) == {"actor", "critic"}
    assert hashes(trainer) == hashes(apart)
