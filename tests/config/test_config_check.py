from __future__ import annotations

import importlib.util
import json
import os
import shutil
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from strop.algorithms.advantages import ESTIMATORS
from strop.algorithms.policy_loss import POLICY_LOSSES
from strop.config.checks.check import check
from strop.config.checks.supervised import OptimizerSteps
from strop.config.load import load_config, load_tree
from strop.config.names import estimators, needs_critic, policy_losses
from strop.config.roles import critic_tokenizer, tokenizer_paths
from strop.config.trees import DPO, PPO, REWARD_MODELLING, SFT
from strop.errors import ConfigError

from messages import Message, mentions, naming

ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"
CORRECTIONS = (f"{ACTOR}.rollout_is=token", f"{ACTOR}.use_rollout_log_probs=True")
GSPO = [f"{ACTOR}.policy_loss=gspo", f"{ACTOR}.clip_ratio_low=3e-4", f"{ACTOR}.clip_ratio_high=4e-4"]


def doubts(result):
    """Warnings other than those about keys without effect."""
    return [line for line in result.warnings if not line.startswith("no effect")]


def test_a_good_configuration_has_no_errors_and_a_plan(report):
    result = report(train_rows=2048)
    assert (result.errors, doubts(result)) == ([], [])
    assert result.plan.iterations == 60
    result.raise_errors()


def test_all_errors_come_together(report):
    result = report(
        "algorithm.adv_estimator=grop", "data.val_files=/no/such.parquet", "data.train_batch_size=7",
        f"{ACTOR}.ppo_mini_batch_size=256", "critic.strategy=megatron", "trainer.logger=[consol]",
    )  # fmt: skip
    assert len(result.errors) == 5
    assert result.plan is None
    with pytest.raises(ConfigError) as caught:
        result.raise_errors()
    assert caught.value.problems == result.errors


def ahead(steps: int) -> list[str]:
    """Overrides with which generation may run ahead."""
    return [
        f"trainer.async_steps={steps}",
        "actor_rollout_ref.hybrid_engine=False",
        "trainer.resource_pools={learner: [8], rollout: [8]}",
        "trainer.placement={Rollout: rollout}",
    ]


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        ([], ["data.train_files", "actor_rollout_ref.model.path"]),
        (["trainer.val_only=True"], ["data.val_files", "actor_rollout_ref.model.path"]),
        (
            ["actor_rollout_ref.model.path=x/y", "reward_model.enable=True"],
            ["data.train_files", "reward_model.model.path"],
        ),
    ],
)
def test_keys_without_a_default_are_required_with_an_example(options, missing):
    errors = [line for line in check(load_config(options)).errors if "not set" in line]
    assert [line.partition(":")[0] for line in errors] == missing
    assert all(f"{key}=" in line for key, line in zip(missing, errors, strict=True))


# ------------------------------------------------------------------------------------------------- models


SIZES = {
    **{"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9},
    "max_position_embeddings": 131072,
}


EQUAL = {"short_factor": [1.0, 2.0], "long_factor": [1.0, 2.0]}


@pytest.mark.parametrize(
    ("rope", "bound"),
    [
        ({"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 1023}}, 1023),
        ({"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 1023}, 1023),
        ({"rope_scaling": {"rope_type": "dynamic"}, "max_position_embeddings": 1000}, 1000),
        ({"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 1024}}, None),
        ({"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 9} | EQUAL}, None),
        ({"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 512}}, None),
    ],
)
def test_lengths_at_which_a_rope_changes_for_all_rows_are_refused(report, tmp_path, rope, bound):
    (tmp_path / "model" / "config.json").write_text(json.dumps(SIZES | rope))
    found = [line for line in report().errors if "encodes positions otherwise" in line]
    assert len(found) == (bound is not None)
    assert all(mentions(line, "1024 tokens", f"more than {bound}", "max_prompt_length") for line in found)
    assert not any("positions otherwise" in line for line in report("trainer.val_only=True").errors)
    yarn = "actor_rollout_ref.model.override_config={rope_scaling: {rope_type: yarn, factor: 2.0}}"
    if "rope_scaling" in rope:
        assert not any("positions otherwise" in line for line in report(yarn).errors)


def test_a_balance_that_would_outweigh_the_task_is_named(report, tmp_path):
    """The coefficient of gpt-oss as published."""
    (tmp_path / "model" / "config.json").write_text(json.dumps(SIZES | {"router_aux_loss_coef": 0.9}))
    key = "actor_rollout_ref.model.override_config.router_aux_loss_coef"
    found = [line for line in report().warnings if "router_aux_loss_coef=0.9" in line]
    assert len(found) == 2  # of the actor and of the critic
    assert mentions(found[0], f"set {key}=0.001")
    assert not any(f"set {key}" in line for line in report(f"{key}=0.001").warnings)


def test_quantized_weights_are_refused(report, tmp_path):
    quantized = {"quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "model" / "config.json").write_text(json.dumps(SIZES | quantized))
    found = [line for line in report().errors if "quantized" in line]
    assert len(found) == 1
    assert mentions(found[0], f"actor_rollout_ref.model.path={tmp_path}/model", "mxfp4", "unquantized")


# ------------------------------------------------------------------------------------------------------ names


def test_names_and_parameters_are_those_that_are_registered():
    for read, registered in ((estimators(), ESTIMATORS), (policy_losses(), POLICY_LOSSES)):
        parameters = {name: frozenset(signature(f).parameters) for name, f in registered.items()}
        assert read == parameters
    assert [name for name in ESTIMATORS if needs_critic(name)] == ["gae"]


OWN = """\
import no_such_package

def centred(rewards, response_mask, scale=2.0, values=None): ...
def by_group(rewards, response_mask, *, uid, lam): ...
def with_critic(rewards, values, response_mask): ...
@no_such_package.cached
def decorated(rewards, response_mask): ...
"""


def test_the_inputs_of_an_own_estimator_are_read_from_its_file(report, tmp_path, monkeypatch):
    (tmp_path / "my_estimators.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    found = {}
    for name in ("centred", "by_group", "with_critic", "decorated", "missing"):
        own = f"my_estimators:{name}"
        result = report(f"algorithm.adv_estimator={own}", "critic.optim.lr=1e-4")
        idle = any(
            "no effect without a critic" in line and "critic.optim.lr" in line for line in result.warnings
        )
        found[name] = needs_critic(own), idle, [line for line in result.warnings if "n >= 2" in line]
        assert not any("n >= 2" in line for line in result.errors)
    assert found.pop("by_group") == (False, True, [Message(f"{ROLLOUT}.n=1", "my_estimators:by_group")])
    assert found == {
        "centred": (False, True, []),
        "with_critic": (True, False, []),
        "decorated": (True, False, []),  # a decorator may change the parameters
        "missing": (True, False, []),
    }
    (tmp_path / "my_estimators.py").write_text(OWN.replace("values=None", "values"))
    assert needs_critic("my_estimators.centred")  # the file has changed


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("algorithm.adv_estimator=grop", ("algorithm.adv_estimator=grop", "grpo?", "gae, grpo, ")),
        ("algorithm.adv_estimator=xyz", ("algorithm.adv_estimator=xyz", "gae")),
        ("actor_rollout_ref.actor.policy_loss=pg", ("actor_rollout_ref.actor.policy_loss=pg",)),
        ("reward_model.reward_manager=naiv", ("naive?", "naive, prime")),
        ("algorithm.adv_estimator=no_such_package.mine:fn", ("no_such_package", "PYTHONPATH")),
        (
            "trainer.logger=[console,wandbb]",
            ("trainer.logger=wandbb", "wandb?", "console, jsonl, file, tensorboard"),
        ),
        ("data.train_files=[]", ("data.train_files",)),
        ("data.train_files=[/no/a.parquet,hdfs://host/b.parquet]", ("data.train_files", "/no/a.parquet")),
        ("data.train_files=['/no/*.csv']", ("data.train_files", "[a.csv,b.csv]")),
        ("actor_rollout_ref.model.path=/no/model", ("actor_rollout_ref.model.path=/no/model",)),
        ("actor_rollout_ref.model.path=gpt2", ("actor_rollout_ref.model.path=gpt2", "OWNER/NAME")),
        ("critic.model.path=./no", ("critic.model.path=./no",)),
        ("data.tokenizer=/no/tokenizer", ("data.tokenizer=/no/tokenizer",)),
        ("critic.model.tokenizer_path=/no/one", ("critic.model.tokenizer_path=/no/one",)),
        ("trainer.resume_mode=autom", ("trainer.resume_mode=autom",)),
        ("trainer.default_local_dir=s3://bucket/run", ("default_hdfs_dir",)),
        (f"{ROLLOUT}.temperature=0", (f"{ROLLOUT}.temperature=0", "0")),
        ("algorithm.adv_estimator=rloo", ("n >= 2",)),
        ("algorithm.adv_estimator=grpo", (f"{ROLLOUT}.n=1", "algorithm.adv_estimator=grpo", "n >= 2")),
        ("algorithm.adv_estimator=reinforce_plus_plus_baseline", (f"{ROLLOUT}.n=1", "n >= 2")),
    ],
)
def test_unknown_names_missing_inputs_and_impossible_values_are_one_error_each(report, override, parts):
    assert report(override).errors == [Message(*parts)]


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("data.train_files={}/trian.parquet", "train.parquet"),
        ("data.val_files={}/modl/train.parquet", "model/train.parquet"),
        ("actor_rollout_ref.model.path={}/modle", "model"),
        ("data.tokenizer={}/modle", "model"),
        ("critic.model.tokenizer_path={}/modle", "model"),
        ("data.chat_template={}/tran.parquet", "train.parquet"),
        ("custom_reward_function.path={}/tran.parquet", "train.parquet"),
        ("trainer.resume_mode={}/modle", "model"),
    ],
)
def test_a_misspelt_path_is_answered_by_the_one_that_is_there(report, tmp_path, override, meant):
    (tmp_path / "model" / "train.parquet").touch()
    (line,) = report(override.replace("{}", str(tmp_path))).errors
    assert mentions(line, override.partition("=")[0], f"did you mean {tmp_path}/{meant}?")


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.adv_estimator=json:loads", "reward_model.reward_manager=__main__:Manager"],
        ["actor_rollout_ref.actor.policy_loss=os.path.join", "trainer.logger=[console,json:JSONDecoder]"],
        ["actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B", "data.tokenizer=hdfs://host/tokenizer"],
        ["data.train_files=s3://bucket/train.parquet"],
        # a model that the run does not load
        ["critic.model.path=/no/model", "algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=2"],
        ["reward_model.model.path=/no/model"],
        ["trainer.resume_mode=/tmp"],
        ["trainer.project_name='a/b'"],
        [f"{ROLLOUT}.temperature=0", "trainer.val_only=True"],
        ["algorithm.adv_estimator=rloo", f"{ROLLOUT}.n=2"],
        ["algorithm.adv_estimator=grpo", "trainer.val_only=True"],
        ["algorithm.kl_penalty=abs"],
        [f"{ACTOR}.kl_loss_type=abs"],  # without use_kl_loss
    ],
)
def test_import_paths_urls_hub_names_and_unused_values_are_accepted(report, overrides):
    assert report(*overrides).errors == []


def test_trackers_need_their_package_and_a_name_that_they_take(report, monkeypatch):
    (line,) = report("trainer.project_name='a/b'", "trainer.logger=[wandb]").errors
    assert mentions(line, "trainer.project_name", "wandb")
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else found(name))
    (line,) = report("trainer.logger=[console,wandb]").errors
    assert mentions(line, "trainer.logger=wandb", "'strop[wandb]'")


# --------------------------------------------------------------------------------------------------- learning


def test_a_learning_rate_that_is_low_for_the_size_of_the_model_is_named(report, tmp_path):
    shape = {"hidden_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1, "vocab_size": 10}
    (tmp_path / "model/config.json").write_text(json.dumps(shape))
    save_file({"weight": np.zeros(10_000, dtype=np.int8)}, tmp_path / "model/model.safetensors")
    (line,) = doubts(report())
    assert mentions(line, f"{ACTOR}.optim.lr=1e-06 is low", "0.01 million", f"{ACTOR}.optim.lr=3e-03")
    assert f"{ACTOR}.optim.lr_warmup_steps=20" in line
    for warmed_up in ("lr_warmup_steps=5", "lr_warmup_steps_ratio=0.1"):
        assert "lr_warmup_steps=20" not in doubts(report(f"{ACTOR}.optim.{warmed_up}"))[0]
    for quiet in (f"{ACTOR}.optim.lr=1e-3", f"{ACTOR}.optim.lr=0", "trainer.val_only=True"):
        assert doubts(report(quiet)) == []


@pytest.mark.parametrize(
    ("parameters", "alpha", "usual"),
    [
        # 1e-5 x (1e8 / 133,000)^0.6 = 5.32e-4 of full training, x 3.3
        (133_000, 16, 1.755e-3),
        (133_000, 64, 4.39e-4),
        (5_000_000, 16, 1.99e-4),
        (5_000_000, 8, 3.98e-4),
        (135_000_000, 16, 1e-4),  # above 16 million 1e-4
        (135_000_000, 32, 5e-5),
    ],
)
def test_rates_of_adapters_have_bounds_that_follow_size_and_alpha(report, tmp_path, parameters, alpha, usual):
    shape = {"hidden_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1, "vocab_size": 10}
    (tmp_path / "model/config.json").write_text(json.dumps(shape))
    save_file({"weight": np.zeros(parameters, dtype=np.int8)}, tmp_path / "model/model.safetensors")
    lora = [f"actor_rollout_ref.model.lora_{key}" for key in ("rank=16", f"alpha={alpha}")]
    for factor, word in ((0.1, "is low"), (0.2, ""), (1, ""), (4.8, ""), (5.2, "is high")):
        lines = doubts(report(f"{ACTOR}.optim.lr={factor * usual}", *lora))
        assert len(lines) == bool(word)
        for line in lines:
            assert mentions(line, word, "LoRA", f"{ACTOR}.optim.lr={usual:.0e}")
            assert (f"lora_alpha={alpha}" in line) == (alpha != 16)


def test_low_rates_of_adapters_are_those_of_weights_times_a_factor(report, tmp_path):
    shape = {"hidden_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1, "vocab_size": 10}
    (tmp_path / "model/config.json").write_text(json.dumps(shape))
    save_file({"weight": np.zeros(133_000, dtype=np.int8)}, tmp_path / "model/model.safetensors")
    weights, adapters = f"{ACTOR}.optim.lr", "actor_rollout_ref.model.lora_rank=16"
    assert doubts(report(f"{weights}=1e-4")) == []
    (line,) = doubts(report(f"{weights}=1e-4", adapters))
    assert mentions(line, f"{weights}=0.0001 is low", "LoRA", "0.133 million", f"{weights}=2e-03")
    assert doubts(report(f"{weights}=2e-3", adapters)) == []


def test_a_reference_that_lacks_the_adapter_that_is_trained_further_is_named(tmp_path, monkeypatch):
    (tmp_path / "my_losses.py").write_text(
        "def alone(chosen_log_prob, rejected_log_prob, ref_chosen_log_prob=None): ...\n"
        "def beside(chosen_log_prob, ref_chosen_log_prob, ref_rejected_log_prob): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    policy = "actor_rollout_ref.model"
    for tree, key, warns, *options in (
        (DPO, "model", True),
        (DPO, "model", False, "update.loss=simpo"),
        (DPO, "model", False, "update.loss=my_losses:alone"),
        (DPO, "model", True, "update.loss=my_losses:beside"),
        (SFT, "model", False),
        (PPO, policy, True),
        (PPO, policy, True, "algorithm.kl_ctrl.kl_coef=0", f"{ACTOR}.use_kl_loss=True"),
        (PPO, policy, False, "algorithm.kl_ctrl.kl_coef=0"),
        (PPO, policy, False, "trainer.val_only=True"),
    ):
        given = [f"{key}.path=the/base", f"{key}.lora_adapter_path={tmp_path}/sft", *options]
        lines = [line for line in check(load_tree(tree, given)).warnings if "the reference is" in line]
        assert len(lines) == warns, (tree.name, options)
        assert not warns or mentions(lines[0], f"{key}.path=the/base", f"export {tmp_path}/sft --merge")
        lora = [f"{key}.path=the/base", f"{key}.lora_rank=8", *options]  # starts as the base model
        assert not any("the reference is" in line for line in check(load_tree(tree, lora)).warnings)


@pytest.mark.parametrize("tree", [SFT, REWARD_MODELLING, DPO])
def test_steps_and_rate_of_a_supervised_run_on_few_rows_are_named(tree, tmp_path):
    shape = {"hidden_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1, "vocab_size": 10}
    (tmp_path / "model").mkdir(exist_ok=True)
    (tmp_path / "model/config.json").write_text(json.dumps(shape))
    save_file({"weight": np.zeros(133_000, dtype=np.int8)}, tmp_path / "model/model.safetensors")
    options = [f"model.path={tmp_path / 'model'}", "data.train_files=rows.jsonl", "data.train_batch_size=32"]

    def found(*more):
        config = load_tree(tree, [*options, "update.optim.lr=1e-6", *more])
        about = ("optim.lr", "optimizer step")
        return [line for line in check(config, train_rows=50).warnings if any(map(line.__contains__, about))]

    rate, steps = found()
    assert mentions(rate, "update.optim.lr=1e-06 is low", "update.optim.lr=5e-04")
    assert mentions(steps, "2 optimizer steps", "trainer.total_epochs=15", "data.train_batch_size")
    assert found("update.optim.lr=5e-4", "trainer.total_epochs=15") == []
    assert found("update.optim.lr=5e-4", "trainer.total_training_steps=2") == []


def test_the_steps_of_a_supervised_run_count_the_last_smaller_batch():
    options = ["model.path=m", "data.train_files=rows.jsonl", "data.train_batch_size=32"]
    said = [
        str(OptimizerSteps.of(load_tree(DPO, [*options, *more]), rows))
        for more, rows in [
            ([], 50),
            (["trainer.total_epochs=3"], 64),
            (["trainer.total_training_steps=3"], 50),
        ]
    ]
    assert said == [
        "2 optimizer steps: 1 epoch of 50 rows in batches of 32, the last of an epoch 18",
        "6 optimizer steps: 3 epochs of 64 rows in batches of 32",
        "3 optimizer steps: 1.5 epochs of 50 rows in batches of 32, the last of an epoch 18",
    ]


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ([f"{ROLLOUT}.do_sample=False"], [f"{ROLLOUT}.do_sample=False"]),
        (
            [f"{ROLLOUT}.do_sample=False", f"{ROLLOUT}.temperature=1", f"{ACTOR}.rollout_is=token"],
            [f"{ROLLOUT}.do_sample=False"],
        ),
        ([f"{ROLLOUT}.top_p=0.9"], [f"{ROLLOUT}.top_p"]),
        ([f"{ROLLOUT}.top_p=0.9", f"{ROLLOUT}.top_k=5"], [f"{ROLLOUT}.top_p and {ROLLOUT}.top_k"]),
        ([f"{ROLLOUT}.val_kwargs.n=2"], [f"{ROLLOUT}.val_kwargs.n=2"]),
        (
            ["algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=4"],
            ["algorithm.kl_ctrl.kl_coef=0.005", "algorithm.adv_estimator=grpo", f"{ACTOR}.use_kl_loss=True"],
        ),
        ([f"{ROLLOUT}.top_k=5", *ahead(1), f"{ACTOR}.rollout_is=token"], [f"{ROLLOUT}.top_k"]),
        ([f"{ROLLOUT}.top_k=5", "trainer.async_steps=1", "trainer.val_only=True"], [f"{ROLLOUT}.top_k"]),
        (
            [*ahead(1)],
            ["trainer.async_steps=1", "1 iteration old", *CORRECTIONS],
        ),
        (
            [*ahead(3), f"{ACTOR}.ppo_mini_batch_size=1024"],
            ["trainer.async_steps=3", "3 iterations old", *CORRECTIONS],
        ),
        (
            [f"{ACTOR}.policy_loss=gspo"],
            [
                f"{ACTOR}.policy_loss=gspo",
                "clip_ratio_low=0.2 and clip_ratio_high=0.2",
                "3e-4",
                "4e-4",
                "seq-mean-token-mean",
            ],
        ),
        (
            [
                f"{ACTOR}.policy_loss=gspo",
                f"{ACTOR}.clip_ratio_low=3e-4",
                f"{ACTOR}.clip_ratio_high=0.28",
                f"{ACTOR}.loss_agg_mode=seq-mean-token-mean",
            ],
            [f"{ACTOR}.policy_loss=gspo", "clip_ratio_high=0.28", "4e-4"],
        ),
        (GSPO, [f"{ACTOR}.policy_loss=gspo", "loss_agg_mode=token-mean", "seq-mean-token-mean", "verl"]),
    ],
)
def test_doubtful_settings_are_one_warning_each(report, overrides, parts):
    result = report(*overrides)
    assert (result.errors, doubts(result)) == ([], [Message(*parts)])


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.kl_ctrl.type=adaptive", f"{ROLLOUT}.top_k=0", "trainer.critic_warmup=2"],
        [
            f"{ROLLOUT}.val_kwargs.n=2",
            f"{ROLLOUT}.val_kwargs.do_sample=True",
            f"{ROLLOUT}.val_kwargs.temperature=0.7",
        ],
        [
            "actor_rollout_ref.actor.optim.min_lr_ratio=0.1",
            "actor_rollout_ref.actor.optim.warmup_style=cosine",
        ],
        ["critic.optim.min_lr_ratio=0.1", "algorithm.adv_estimator=reinforce_plus_plus"],
        ["algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=4", "algorithm.kl_ctrl.kl_coef=0"],
        ["algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=4", f"{ACTOR}.use_kl_loss=True"],
        ["algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=4", "algorithm.norm_adv_by_std_in_grpo=False"],
        ["algorithm.adv_estimator=reinforce_plus_plus_baseline", f"{ROLLOUT}.n=4"],
        ["algorithm.adv_estimator=gae"],
        ["algorithm.adv_estimator=remax"],
        ["algorithm.adv_estimator=reinforce_plus_plus"],
        [*ahead(1), f"{ACTOR}.rollout_is=token"],
        [*ahead(4), f"{ACTOR}.use_rollout_log_probs=True"],
        ["trainer.async_steps=1", "trainer.val_only=True"],
        [*GSPO, f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"],
        [
            f"{ACTOR}.rollout_is=token",
            f"{ACTOR}.rollout_is_mode=mask",
            f"{ACTOR}.rollout_is_threshold_low=0.5",
        ],
        [f"{ACTOR}.use_rollout_log_probs=True", f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_type=full"],
    ],
)
def test_sound_settings_have_no_warning(report, overrides):
    result = report(*overrides)
    assert (result.errors, doubts(result)) == ([], [])


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (
            [f"{ACTOR}.use_rollout_log_probs=True", f"{ACTOR}.rollout_is=token"],
            [f"{ACTOR}.use_rollout_log_probs=True", f"{ACTOR}.rollout_is"],
        ),
        (
            [f"{ACTOR}.use_rollout_log_probs=True", "algorithm.kl_penalty=full"],
            [f"{ACTOR}.use_rollout_log_probs=True", "algorithm.kl_penalty=full"],
        ),
        (
            [f"{ACTOR}.use_rollout_log_probs=True", f"{ROLLOUT}.top_p=0.9"],
            [f"{ROLLOUT}.top_p", f"{ACTOR}.use_rollout_log_probs=True", f"{ACTOR}.rollout_is=token"],
        ),
        (
            [*ahead(1), f"{ROLLOUT}.top_k=50"],
            [f"{ROLLOUT}.top_k", "trainer.async_steps=1", f"{ACTOR}.rollout_is=token"],
        ),
        (
            [f"{ACTOR}.rollout_is=token", f"{ACTOR}.rollout_is_threshold_low=0.5"],
            [f"{ACTOR}.rollout_is_threshold_low=0.5", f"{ACTOR}.rollout_is_mode=mask"],
        ),
        (
            [
                f"{ACTOR}.rollout_is=token",
                f"{ACTOR}.rollout_is_mode=mask",
                f"{ACTOR}.rollout_is_threshold_low=2",
            ],
            [f"{ACTOR}.rollout_is_threshold_low=2", f"{ACTOR}.rollout_is_threshold,"],
        ),
    ],
)
def test_corrections_of_the_sampler_that_cannot_work_are_one_error_each(report, overrides, parts):
    assert report(*overrides).errors == [Message(*parts)]


def test_a_critic_warmup_ends_before_the_run(report):
    (line,) = report("trainer.critic_warmup=3", "trainer.total_training_steps=3").errors
    assert mentions(line, "3 iterations")


# ----------------------------------------------------------------------------------------------------- inputs


def test_a_model_folder_has_a_configuration_or_a_gguf_file(report, tmp_path):
    assert len(report("reward_model.model.path=/no/model", "reward_model.enable=True").errors) == 1
    (tmp_path / "empty").mkdir()
    (line,) = report(f"actor_rollout_ref.model.path={tmp_path}/empty").errors
    assert mentions(line, "config.json")
    (tmp_path / "empty" / "weights.gguf").touch()
    assert report(f"actor_rollout_ref.model.path={tmp_path}/empty").errors == []
    for place in ("final_model", "global_step_3/actor/huggingface"):
        run = tmp_path / place.partition("/")[0] / "run"
        (run / place).mkdir(parents=True)
        (run / place / "config.json").touch()
        (line,) = report(f"actor_rollout_ref.model.path={run}").errors
        assert mentions(line, f"did you mean {run / place}?")
    (tmp_path / "model" / "model.safetensors").touch()
    (line,) = report(f"actor_rollout_ref.model.path={tmp_path}/model/model.safetensors").errors
    assert mentions(line, "a file", f"did you mean {tmp_path}/model?")


def test_a_model_made_for_shorter_sequences_is_doubtful(report, tmp_path):
    (tmp_path / "model" / "config.json").write_text(
        '{"num_attention_heads": 2, "hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 10,'
        ' "intermediate_size": 16, "max_position_embeddings": 1000}'
    )
    (line,) = doubts(report())
    assert mentions(line, "data.max_prompt_length=512", "data.max_response_length=512", "1024", "1000")
    assert doubts(report("data.max_prompt_length=488")) == []
    longer = "+actor_rollout_ref.model.override_config.max_position_embeddings=1024"
    assert doubts(report(longer)) == []


def test_deprecated_keys_are_named_and_contradictions_are_errors(report):
    result = report("critic.ppo_micro_batch_size=8", "critic.forward_micro_batch_size_per_gpu=4")
    assert result.errors == []
    (line,) = doubts(result)
    assert mentions(line, "critic.ppo_micro_batch_size=8")
    model = "actor_rollout_ref.model"
    (line,) = report(f"{model}.external_lib=json", f"{model}.external_libs=os").errors
    assert mentions(line, f"{model}.external_lib=json", f"{model}.external_libs=os")


@pytest.mark.parametrize(
    ("path", "obstacle"),
    [
        ("{0}/file", "{0}/file"),
        ("{0}/file/run", "{0}/file"),
        ("{0}/file/a/b/c", "{0}/file"),
        ("/proc/run", "/proc"),  # where the superuser has every right, and makes no folder either
        ("/proc/a/b", "/proc"),
    ],
)
def test_a_run_folder_that_cannot_be_made_is_an_error(report, tmp_path, path, obstacle):
    (tmp_path / "file").touch()
    override = f"trainer.default_local_dir={path.format(tmp_path)}"
    (line,) = report(override).errors
    assert mentions(line, override, obstacle.format(tmp_path))
    with pytest.raises(ConfigError, match=naming(override, obstacle.format(tmp_path))):
        check(load_tree(SFT, [override])).raise_errors()


def test_a_run_is_not_written_into_the_folder_of_its_model(report, tmp_path):
    (line,) = report(f"trainer.default_local_dir={tmp_path}/x/../model").errors
    assert mentions(line, "trainer.default_local_dir", "actor_rollout_ref.model.path", "another one")
    assert report(f"trainer.default_local_dir={tmp_path}/model/run").errors == []


@pytest.mark.parametrize("below", ["", "/a/b"])
def test_checking_a_run_folder_leaves_no_trace(report, tmp_path, below):
    before = sorted(tmp_path.iterdir())
    assert report(f"trainer.default_local_dir={tmp_path}{below}").errors == []
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], "policy"),
        (["data.tokenizer=apart"], "apart"),
        (["data.tokenizer=apart", "critic.model.path=values"], "apart"),
        (["data.tokenizer=apart", "critic.model.tokenizer_path=own"], "own"),
    ],
)
def test_the_critic_has_the_policys_tokenizer_unless_it_names_one(overrides, expected):
    config = load_config(["actor_rollout_ref.model.path=policy", *overrides])
    assert critic_tokenizer(config) == expected
    assert tokenizer_paths(config)["critic.model.tokenizer_path"] == expected


@pytest.mark.parametrize(
    "override",
    [
        f"{ROLLOUT}.n=1000000000000000000000000000000",
        f"{ROLLOUT}.temperature=1e-30",
        "actor_rollout_ref.actor.optim.eps=1e30",
        "actor_rollout_ref.actor.optim.eps=1e-300",
        "actor_rollout_ref.actor.optim.lr=1e30",
        "actor_rollout_ref.model.external_lib=''",
        "actor_rollout_ref.model.external_lib=[a,.b]",
        "algorithm.kl_ctrl.kl_coef=1e300",
        "data.prompt_key=''",
        "data.train_files=[a,'']",
        "reward_model.timeout_s=1e300",
        "trainer.default_local_dir=''",
        "trainer.nnodes=2000000000",
        "trainer.resume_mode=''",
        "trainer.seed=18446744073709551616",
    ],
)
def test_values_that_no_run_can_take_are_out_of_bounds(override):
    with pytest.raises(ConfigError) as caught:
        load_config([override])
    assert mentions(caught.value.problems[0], override.partition("=")[0], "expected")


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("data.max_response_length=1000000000", ("data.max_response_length=1000000000", "GiB")),
        (f"{ROLLOUT}.val_kwargs.n=2000000000", ("val_kwargs.n=2000000000", "GiB")),
        ("data.train_files=''", ("data.train_files", "parquet")),
        ("actor_rollout_ref.model.external_lib=json.nothing", ("external_lib", "json.nothing")),
        ("reward_model.reward_manager=json.nothing:Manager", ("reward_manager", "json.nothing")),
        ("custom_reward_function.path=/no/reward.py", ("custom_reward_function.path", "/no/reward.py")),
        ("custom_reward_function.path=https://a.b/r.py", ("path=https://a.b/r.py", "file on this machine")),
        ("actor_rollout_ref.model.path=https://huggingface.co/a/b", ("model.path=https://", "OWNER/NAME")),
    ],
)
def test_what_a_run_would_stop_at_is_found_without_running_it(report, override, parts):
    assert Message(*parts) in report(override).errors


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_a_reward_file_that_is_no_file_is_named_without_waiting_for_a_writer(report, tmp_path, make):
    make(tmp_path / "reward.py")
    (line,) = report(f"custom_reward_function.path={tmp_path}/reward.py").errors
    assert mentions(line, "custom_reward_function.path", "reward.py", "expected a file")


def test_a_server_as_reward_model_is_called_by_a_function(report):
    (line,) = report("reward_model.enable=True", "reward_model.model.path=http://localhost:8000/score").errors
    assert mentions(line, "reward_model.model.path=http://localhost:8000/score", "strop docs rewards")


def test_a_validation_file_that_is_a_training_file_is_named_with_both_keys(report, tmp_path):
    files = f"data.val_files=[{tmp_path}/test.parquet,{tmp_path}/train.parquet]"
    (line,) = doubts(report(files))
    assert mentions(line, "data.val_files", "train.parquet", "data.train_files")
    assert doubts(report(files, "trainer.val_only=True")) == []


def test_a_reward_file_with_a_mistake_is_named_with_its_line(report, tmp_path):
    (tmp_path / "reward.py").write_text("def compute_score(:\n    pass\n")
    (line,) = report(f"custom_reward_function.path={tmp_path}/reward.py").errors
    assert mentions(line, "reward.py, line 1", "not Python")


def test_checkpoints_that_the_disk_has_no_room_for_are_named(report, tmp_path, monkeypatch):
    shape = {"hidden_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1, "vocab_size": 10}
    (tmp_path / "model/config.json").write_text(json.dumps(shape))
    save_file({"weight": np.zeros(1 << 20, dtype=np.int8)}, tmp_path / "model/model.safetensors")
    quiet, saves = (f"{ACTOR}.optim.lr=1e-3", "algorithm.adv_estimator=grpo"), "trainer.save_freq=1"

    def found(free: int, *more: str) -> list[str]:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
        return [line for line in report(*quiet, *more).warnings if "checkpoint takes" in line]

    (line,) = found((12 << 20) - 1, saves)
    assert mentions(line, "trainer.default_local_dir", "GiB free")
    assert found(12 << 20, saves) == []
    (line,) = found((36 << 20) - 1, saves, "trainer.max_ckpt_to_keep=2")
    assert mentions(line, "3 exist", "trainer.max_ckpt_to_keep")
    (line,) = found((36 << 20) - 1)  # the last two by time, while a third one is written
    assert mentions(line, "3 exist", "trainer.save_minutes")
    assert found(36 << 20) == []
    for no_save in ("trainer.save_minutes=null", "actor_rollout_ref.model.lora_rank=8"):
        assert found(1, no_save) == []
    assert found((24 << 20) - 1, saves, "algorithm.adv_estimator=gae")
