"""Keys that are not honoured: which they are, when, and what is said of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import strop
from strop.config.batch_plan import MICRO_BATCHES
from strop.config.checks.check import check
from strop.config.checks.keys import status_in_words
from strop.config.keys import all_keys
from strop.config.load import load_config

from messages import mentions

ROLLOUT = "actor_rollout_ref.rollout"
ULYSSES = "actor_rollout_ref.actor.ulysses_sequence_parallel_size"


def status(path):
    return status_in_words(all_keys()[path])


def test_every_honoured_key_is_read_in_the_source():
    package = Path(strop.__file__).parent
    files = [path for path in package.rglob("*.py") if path.relative_to(package).parts[0] != "config"]
    files += [package / "config" / name for name in ("placement.py", "roles.py")]
    text = "\n".join(path.read_text() for path in files)
    in_batch_plan = {keys.per_gpu for keys in MICRO_BATCHES.values()}
    for keys in MICRO_BATCHES.values():
        in_batch_plan |= {keys.overall, keys.dynamic, keys.max_tokens, keys.sequence_parallel}
    unread = [
        path
        for path, key in all_keys().items()
        if not key.is_section
        and status(path) == "honoured"
        and path not in {*in_batch_plan, "actor_rollout_ref.model.external_libs"}
        and not re.search(rf"\.{path.rpartition('.')[2]}\b", text)
    ]
    assert unread == []


NOT_HONOURED = {
    "actor_rollout_ref.rollout.min_p": "0.5",
    "actor_rollout_ref.rollout.stop": "[x]",
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size": "2",
    "critic.megatron.override_transformer_config": "{recompute_granularity: full}",
    "reward_model.num_workers": "4",
    "reward_model.forward_max_token_len_per_gpu": "4096",
    "actor_rollout_ref.rollout.response_length": "7",
    "actor_rollout_ref.rollout.prompt_length": "7",
    "actor_rollout_ref.rollout.enforce_eager": "False",
    "actor_rollout_ref.rollout.free_cache_engine": "False",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": "2",
    "critic.ulysses_sequence_parallel_size": "2",
    "actor_rollout_ref.actor.fsdp_config.fsdp_size": "4",
    "actor_rollout_ref.actor.fsdp_config.wrap_policy.min_num_params": "10",
    "actor_rollout_ref.ref.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap": "[Layer]",
    "reward_model.model.fsdp_config.min_num_params": "10",
    "actor_rollout_ref.ref.fsdp_config.param_offload": "True",
    "critic.model.fsdp_config.grad_offload": "True",
    "critic.model.fsdp_config.optimizer_offload": "True",
    "critic.optim.total_training_steps": "100",
}


@pytest.mark.parametrize(("path", "value"), NOT_HONOURED.items())
def test_a_key_that_is_not_honoured_is_named(report, path, value):
    before, after = report(), report(f"{path}={value}")
    lines = [line for line in after.errors + after.warnings if f"{path}=" in line]
    assert len(lines) == 1
    assert not any(f"{path}=" in line for line in before.errors + before.warnings)
    assert status(path) != "honoured"
    assert ("error" in status(path)) == bool(after.errors)


def test_a_default_and_a_key_without_consequence_are_not_named(report):
    assert report().warnings == []
    quiet = report(
        f"{ROLLOUT}.tensor_model_parallel_size=1", f"{ROLLOUT}.dtype=float32",
        "actor_rollout_ref.model.compute_dtype=float32", "trainer.n_gpus_per_node=1",
        "trainer.default_hdfs_dir=null",
        "actor_rollout_ref.actor.fsdp_config.fsdp_size=1",
    )  # fmt: skip
    assert quiet.warnings == []
    # The same value as the default, but written by the user: then somebody counts on it.
    (line,) = report(f"{ROLLOUT}.gpu_memory_utilization=0.5").warnings
    assert line.endswith(f"{ROLLOUT}.gpu_memory_utilization=0.5")


ABSENT = {
    "critic.optim.lr": ("3e-5", ["algorithm.adv_estimator=grpo"]),
    "critic.model.override_config.attention_dropout": ("0.1", ["algorithm.adv_estimator=remax"]),
    "critic.use_dynamic_bsz": ("True", ["algorithm.adv_estimator=rloo"]),
    "algorithm.gamma": ("0.9", ["algorithm.adv_estimator=grpo"]),
    "algorithm.lam": ("0.9", ["algorithm.adv_estimator=reinforce_plus_plus"]),
    "algorithm.whiten_advantages": ("True", ["algorithm.adv_estimator=remax"]),
    "algorithm.norm_adv_by_std_in_grpo": ("True", []),
    "algorithm.kl_penalty": ("mse", ["algorithm.kl_ctrl.kl_coef=0"]),
    "algorithm.kl_ctrl.kl_coef": ("0.1", ["actor_rollout_ref.actor.use_kl_loss=True"]),
    "algorithm.kl_ctrl.type": ("adaptive", ["algorithm.kl_ctrl.kl_coef=0"]),
    "algorithm.kl_ctrl.target_kl": ("0.2", []),
    "algorithm.kl_ctrl.horizon": (
        "20000",
        ["algorithm.kl_ctrl.type=adaptive", "actor_rollout_ref.actor.use_kl_loss=True"],
    ),
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": ("4", ["algorithm.kl_ctrl.kl_coef=0"]),
    "actor_rollout_ref.actor.kl_loss_coef": ("0.001", []),
    "actor_rollout_ref.actor.kl_loss_type": ("kl", []),
    "actor_rollout_ref.actor.rollout_is_threshold": ("3", []),
    "actor_rollout_ref.actor.rollout_is_threshold_low": ("0.3", []),
    "actor_rollout_ref.actor.rollout_is_mode": ("mask", []),
    "actor_rollout_ref.actor.old_log_prob_from_update": (
        "False",
        ["actor_rollout_ref.actor.use_rollout_log_probs=True"],
    ),
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": (
        "4096",
        ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8"],
    ),
    "actor_rollout_ref.actor.fsdp_config.reshard_after_forward": ("False", []),
    "critic.model.fsdp_config.use_no_sync_for_gradient_accumulation": ("True", []),
    "critic.optim.min_lr_ratio": ("0.1", []),
    "critic.optim.lr_warmup_steps_ratio": ("0.1", ["critic.optim.lr_warmup_steps=0"]),
    "trainer.critic_warmup": ("2", ["algorithm.adv_estimator=grpo"]),
    "reward_model.penalty_reward_value": ("-1", []),
    "reward_model.max_length": (
        "64",
        [
            "reward_model.enable=True",
            "reward_model.model.path=hub/name",
            "reward_model.model.input_tokenizer=null",
        ],
    ),
    "reward_model.model.path": ("somebody/scorer", []),
    "reward_model.micro_batch_size_per_gpu": ("2", []),
    "custom_reward_function.name": ("mine", []),
}


@pytest.mark.parametrize("path", ABSENT)
def test_a_key_of_what_the_run_does_not_have_is_named_if_it_was_written(report, path):
    value, without = ABSENT[path]
    key = path.removesuffix(".attention_dropout")
    before, after = report(*without), report(*without, f"{path}={value}")
    assert not any(f"{key}=" in line for line in before.warnings if line.startswith("no effect "))
    named = [line for line in after.warnings if line.startswith("no effect ") and f" {key}=" in line]
    assert len(named) == 1
    assert "no effect" in status(key)
    assert after.errors == before.errors


OF_THE_REFERENCE = (
    "actor_rollout_ref.ref.fsdp_config.param_offload=True",
    "actor_rollout_ref.ref.fsdp_config.reshard_after_forward=False",
    "actor_rollout_ref.ref.fsdp_config.wrap_policy.min_num_params=10",
    "actor_rollout_ref.ref.ulysses_sequence_parallel_size=2",
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=4096",
)


@pytest.mark.parametrize(
    ("options", "idle"),
    [
        (["actor_rollout_ref.model.lora_rank=8"], 4),
        (["actor_rollout_ref.model.lora_rank=8", "teacher.model.path=reference"], 4),
        (["actor_rollout_ref.model.lora_rank=8", "teacher.model.path=hub/name"], 3),  # it is one more model
        (["algorithm.kl_ctrl.kl_coef=0", "teacher.model.path=hub/name"], 3),
        (["actor_rollout_ref.model.lora_rank=8", "+trainer.placement.RefPolicy=global_pool"], 0),
        ([], 0),
    ],
)
def test_keys_of_a_references_model_are_named_where_it_is_the_actor(report, options, idle):
    """Sizes of its passes have an effect: the actor makes them, or a teacher's model."""
    several = ("trainer.n_gpus_per_node=2", "trainer.device=cuda")
    lines = report(*several, *options, *OF_THE_REFERENCE).warnings
    named = [key for key in OF_THE_REFERENCE if any("no effect" in line and key in line for line in lines)]
    assert named == [*OF_THE_REFERENCE[:idle]]


def test_no_key_of_what_the_run_has_is_named(report):
    model = ["reward_model.enable=True", "reward_model.model.path=somebody/scorer"]
    for options in (
        ["critic.optim.lr=3e-5", "algorithm.gamma=0.9", "algorithm.lam=0.9", "algorithm.kl_penalty=mse"],
        ["algorithm.adv_estimator=strop.algorithms:mine", "critic.optim.lr=1", "algorithm.lam=0.9"],
        ["algorithm.adv_estimator=strop.algorithms:mine", "algorithm.norm_adv_by_std_in_grpo=True"],
        ["algorithm.adv_estimator=grpo", "algorithm.gamma=1", "algorithm.whiten_advantages=False"],
        ["algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.target_kl=0.2"],
        ["actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.kl_loss_coef=0.1"],
        ["actor_rollout_ref.actor.use_kl_loss=True", "algorithm.kl_penalty=mse"],
        ["reward_model.reward_manager=prime", "reward_model.timeout_s=3", "reward_model.parts={rule: 2}"],
        [*model, "reward_model.micro_batch_size_per_gpu=2", "reward_model.max_length=64"],
        # The reward model's key follows the critic's.
        [*model, "algorithm.adv_estimator=grpo", "critic.use_dynamic_bsz=True"],
    ):
        assert [line for line in report(*options).warnings if line.startswith("no effect ")] == []


def test_a_file_may_hold_defaults_without_effect_and_an_override_may_not(valid, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(
        "algorithm: {adv_estimator: grpo, lam: 0.5}\ncritic: {optim: {lr: 1e-5}, grad_clip: 2.0}\n"
    )
    named = "no effect without a critic (algorithm.adv_estimator needs no values): critic."
    warnings = check(load_config(valid, config_path=file)).warnings
    assert [line for line in warnings if line.startswith(named)] == [f"{named}grad_clip=2.0"]
    assert any(line.endswith(": algorithm.lam=0.5") for line in warnings)
    typed = check(load_config([*valid, "critic.optim.lr=1e-5"], config_path=file)).warnings
    assert f"{named}optim.lr=1e-05, critic.grad_clip=2.0" in typed


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (  # no effect for two reasons
            ["algorithm.adv_estimator=grpo", "critic.forward_max_token_len_per_gpu=99"],
            ["algorithm.adv_estimator", "critic.forward_max_token_len_per_gpu=99"],
        ),
        (["algorithm.adv_estimator=grpo", "critic.strategy=megatron"], ["critic.strategy"]),
        (  # two keys with one reason
            [f"{ROLLOUT}.name=hf", "critic.ulysses_sequence_parallel_size=4", f"{ULYSSES}=2"],
            [f"{ULYSSES}=2, critic.ulysses_sequence_parallel_size=4"],
        ),
        (
            ["critic.use_dynamic_bsz=True", "critic.ppo_micro_batch_size_per_gpu=4"],
            ["cut by tokens", "critic.ppo_micro_batch_size_per_gpu=4"],
        ),
    ],
)
def test_keys_are_named_once_and_share_a_line_if_they_share_the_reason(report, overrides, parts):
    result = report(*overrides)
    key = parts[-1].partition("=")[0]
    (line,) = [line for line in result.errors + result.warnings if key in line]
    assert mentions(line, *parts)
