"""Keys and values as verl's scripts and files write them; what they mean there is verl's documentation."""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from strop.config.checks.check import check
from strop.config.checks.keys import changed_from_verl, sizes_in_verl
from strop.config.keys import all_keys, value_at
from strop.config.load import load_config
from strop.config.trees import PPO
from strop.config.verl import _table, other_defaults, versions
from strop.errors import ConfigError

from messages import mentions

SHARED = "ulysses_sequence_parallel_size"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
KL = "algorithm.kl_ctrl.kl_coef"


def problems_of(*overrides: str, **options) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides, **options)
    return caught.value.problems


@pytest.mark.parametrize(
    ("written", "key", "value"),
    [
        (["algorithm.use_kl_in_reward=False"], KL, 0),
        (["algorithm.use_kl_in_reward=False", f"{KL}=0.01"], KL, 0),
        (["algorithm.use_kl_in_reward=True", f"{KL}=0.01"], KL, 0.01),
        (["algorithm.use_kl_in_reward=True"], KL, 0.001),  # verl's own default of the weight
        (["algorithm.rollout_correction.rollout_is=token"], f"{ACTOR}.rollout_is", "token"),
        (["algorithm.rollout_correction.bypass_mode=True"], f"{ACTOR}.use_rollout_log_probs", True),
        ([f"{ACTOR}.strategy=fsdp2"], f"{ACTOR}.strategy", "fsdp"),
        (["model_engine=megatron"], f"{ACTOR}.strategy", "megatron"),
        ([f"{ACTOR}.strategy=megatron", "actor_rollout_ref.ref.strategy=megatron"],
         f"{ACTOR}.strategy", "megatron"),
        ([f"+{ACTOR}.megatron.dtype=float32"], "actor_rollout_ref.model.compute_dtype", "float32"),
        (["+actor_rollout_ref.model.torch_dtype=bfloat16"],
         "actor_rollout_ref.model.compute_dtype", "bfloat16"),
        ([f"{ACTOR}.policy_loss.loss_mode=gspo"], f"{ACTOR}.policy_loss", "gspo"),
        ([f"+{ACTOR}.policy_loss={{loss_mode: vanilla, dro_beta: null}}"], f"{ACTOR}.policy_loss", "ppo"),
        ([f"{ACTOR}.fsdp_config.{SHARED}=2"], f"{ACTOR}.{SHARED}", 2),
        (["critic.fsdp.param_offload=True"], "critic.model.fsdp_config.param_offload", True),
        ([f"critic.fsdp.{SHARED}=2"], f"critic.{SHARED}", 2),
        ([f"{ROLLOUT}.load_format=dummy"], f"{ROLLOUT}.load_format", "dummy_dtensor"),
        (["reward.reward_manager.name=prime"], "reward_model.reward_manager", "prime"),
        (["reward.reward_model.model_path=judge"], "reward_model.model.path", "judge"),
        (["+reward.reward_kwargs.a.b=3"], "reward_model.reward_kwargs", {"a": {"b": 3}}),
        (["reward.custom_reward_function.path=mine.py"], "custom_reward_function.path", "mine.py"),
        (["trainer.resume_mode=resume_path", "trainer.resume_from_path=a/global_step_3"],
         "trainer.resume_mode", "a/global_step_3"),
        (["trainer.max_actor_ckpt_to_keep=2", "trainer.max_critic_ckpt_to_keep=2"],
         "trainer.max_ckpt_to_keep", 2),
        (["trainer.val_generations_to_log_to_wandb=7"], "trainer.log_val_generations", 7),
    ],
)  # fmt: skip
def test_a_key_of_verl_sets_its_counterpart_and_is_named_once(written, key, value):
    config = load_config(written)
    assert value_at(config, key) == value
    assert key in config.written or value == "ppo"
    assert len(config.notes) <= 1
    assert check(config).warnings[: len(config.notes)] == list(config.notes)
    if value not in ("ppo", 0.01):  # those change nothing
        assert mentions(config.notes[0], key.partition(".reward_kwargs")[0], "->")


def test_keys_that_are_not_needed_are_accepted_and_named_by_reason():
    config = load_config(
        [f"{ROLLOUT}.enable_chunked_prefill=False", "trainer.balance_batch=True", f"{ROLLOUT}.mode=async",
         "reward_model.model.use_remove_padding=True", "trainer.rollout_data_dir=out",
         f"{ACTOR}.use_torch_compile=False", "trainer.resume_from_path=old"]
    )  # fmt: skip
    named = [line for line in config.notes if line.startswith("keys of verl without effect")]
    assert len(named) == len(config.notes) == 5
    assert any(mentions(line, "trainer.rollout_data_dir=out", "rollouts/") for line in named)
    assert any(mentions(line, f"{ROLLOUT}.mode=async", "trainer.balance_batch=True") for line in named)
    assert any(mentions(line, "trainer.resume_from_path=old", "resume_mode=resume_path") for line in named)


def test_keys_of_the_server_of_verls_reward_model_are_not_those_of_the_rollout():
    config = load_config(["+reward.reward_model.rollout.engine_kwargs.vllm.swap_space=4"])
    assert any(mentions(line, "without effect", "engine_kwargs.vllm.swap_space=4") for line in config.notes)


def test_a_key_in_the_wrong_section_is_not_taken_for_one_of_verl():
    [problem] = problems_of("+trainer.use_dynamic_bsz=False")
    assert mentions(problem, "trainer.use_dynamic_bsz", "unknown key")


def test_keys_of_verls_megatron_that_a_run_does_not_need_are_accepted(tmp_path: Path):
    (tmp_path / "own.yaml").write_text("""
actor_rollout_ref:
  actor: &trained
    strategy: megatron
    load_weight: True
    optim:
      lr_warmup_init: 0.0
      lr_decay_steps: null
      lr_decay_style: constant
      weight_decay_incr_style: constant
      lr_wsd_decay_style: exponential
      use_checkpoint_opt_param_scheduler: False
      override_optimizer_config: {}
    megatron: &layout
      _target_: verl.workers.config.McoreEngineConfig
      tensor_model_parallel_size: 2
      dist_checkpointing_prefix: ''
      use_mbridge: True
      vanilla_mbridge: True
      use_remove_padding: True
      forward_only: False
      entropy_from_logits_with_chunking: False
      dtype: bfloat16
      override_mcore_model_config: {}
      override_transformer_config: {recompute_granularity: null, attention_backend: flash}
  ref: {strategy: megatron, load_weight: True, megatron: *layout}
critic: *trained
reward_model: {strategy: megatron, megatron: *layout}
""")
    config = load_config(config_path=tmp_path / "own.yaml")
    assert config.critic.strategy == "megatron"
    assert config.reward_model.megatron.tensor_model_parallel_size == 2
    names = ("vanilla_mbridge=False", "dist_checkpointing_prefix=module.", "use_remove_padding=False")
    config = load_config([f"+{ACTOR}.megatron.{name}" for name in names])
    assert all(any(mentions(line, "without effect", name) for line in config.notes) for name in names)


@pytest.mark.parametrize(
    ("written", "parts"),
    [
        (["actor_rollout_ref.model.lora.rank=8"], ["lora.rank=8", "lora_rank", "fsdp", "leave it out"]),
        ([f"+{ACTOR}.megatron.use_megatron_fsdp=True"], ["use_megatron_fsdp=True", "strategy=fsdp"]),
        (["+critic.optim.min_lr_factor=1.0"], ["min_lr_factor=1.0", "leave it out"]),
        (["model_engine=veomni"], ["model_engine", "veomni", "fsdp, megatron"]),
        ([f"+{ACTOR}.veomni.fsdp_size=4"], ["veomni.fsdp_size=4", "fsdp and megatron"]),
        ([f"{ACTOR}.strategy=fsdp", "reward_model.strategy=megatron"],
         ["reward_model.strategy=megatron", f"{ACTOR}.strategy=fsdp", "keep one"]),
        ([f"+{ACTOR}.megatron.override_mcore_model_config.a=1"], ["config.a=1", "override_transformer"]),
        ([f"{ROLLOUT}.name=sglang"], [f"{ROLLOUT}.name=sglang", "vllm"]),
        ([f"{ROLLOUT}.multi_turn.enable=True"], ["multi_turn.enable=True", "environment.tools"]),
        ([f"{ROLLOUT}.multi_turn.tool_config_path=t.yaml"], ["tool_config_path", "environment.tools=["]),
        ([f"{ROLLOUT}.multi_turn.interaction_config_path=i.yaml"], ["respond", "environment.path="]),
        ([f"{ROLLOUT}.multi_turn.max_tool_response_length=512"], ["environment.answer_length, in tokens"]),
        ([f"+{ROLLOUT}.skip_special_tokens=False"], ["skip_special_tokens=False", "rewards"]),
        (["reward_model.reward_manager=dapo"], ["reward_manager=dapo", "parts.overlong", "module:DAPO"]),
        (["algorithm.rollout_correction.rollout_rs=token"], ["rollout_rs=token", "rollout_is_mode=mask"]),
        (["algorithm.use_kl_in_reward=True", f"{ACTOR}.use_kl_loss=True"], ["use_kl_in_reward=True", "loss"]),
        (["trainer.max_actor_ckpt_to_keep=2", "trainer.max_critic_ckpt_to_keep=3"],
         ["trainer.max_ckpt_to_keep", "=2", "=3", "keep one"]),
        (["trainer.max_actor_ckpt_to_keep=2", "trainer.max_ckpt_to_keep=3"], ["=2", "=3", "keep one"]),
        (["critic.fsdp.param_offload=7"], ["critic.model.fsdp_config.param_offload", "critic.fsdp.param"]),
    ],
)  # fmt: skip
def test_what_has_no_counterpart_is_refused_with_what_to_do(written, parts):
    [problem] = problems_of(*written)
    assert mentions(problem, *parts)


def test_many_refused_keys_with_one_reason_are_one_line():
    keys = [f"+{ACTOR}.veomni.{name}=2" for name in ("fsdp_size", "expert_parallel_size")]
    [problem] = problems_of(*keys, "+critic.torchtitan.tensor_parallel_size=2")
    assert mentions(problem, "veomni.fsdp_size=2", "expert_parallel_size=2", "critic.torchtitan")


def test_a_file_of_verls_defaults_needs_no_word(tmp_path: Path):
    (tmp_path / "own.yaml").write_text(
        """
data: {image_key: images, val_batch_size: null, val_max_samples: -1, custom_cls: {path: null, name: null},
  apply_chat_template_kwargs: {}, tool_config_path: "${oc.select:actor_rollout_ref.rollout.x,null}"}
actor_rollout_ref:
  nccl_timeout: 600
  actor:
    _target_: verl.workers.config.FSDPActorConfig
    policy_loss: {_target_: a.B, loss_mode: vanilla, clip_cov_lb: 1.0}
    optim: {warmup_style: null, lr_scheduler_type: constant, lr_warmup_steps: null, clip_grad: 1.0}
    fsdp_config: {model_dtype: fp32, dtype: bfloat16, qat: {enable: false, mode: w4a16}}
    checkpoint: {save_contents: [model, optimizer, extra], load_contents: "${.save_contents}"}
  ref: {strategy: "${actor_rollout_ref.actor.strategy}"}
  rollout: {load_format: dummy, multi_turn: {enable: false, format: hermes}, engine_kwargs: {vllm: {}}}
critic: {fsdp: {param_offload: false, strategy: fsdp}, model: {tokenizer_path: null}, enable: null}
reward: {num_workers: 8, reward_manager: {source: register, name: naive}, sandbox_fusion: {url: null},
  reward_model: {enable: false, rollout: {name: "???", top_k: -1}}}
reward_model: {enable: null, reward_manager: null, rollout: null}
distillation: {enabled: false, teacher_models: {a: {b: 1}}}
trainer: {balance_batch: true, resume_from_path: null, use_v1: true}
"""
    )
    config = load_config(config_path=tmp_path / "own.yaml")
    assert config.notes == ()
    assert config == load_config()


def test_keys_of_pictures_are_read_by_their_names_here():
    given = ["data.mm_processor_kwargs.min_pixels=784", "data.mm_processor_kwargs.max_pixels=3136"]
    config = load_config([*given, f"{ROLLOUT}.limit_images=4", "data.image_key=photo"])
    data = config.data
    assert (data.image_key, data.min_pixels, data.max_pixels, data.max_images) == ("photo", 784, 3136, 4)
    config = load_config([*given, "actor_rollout_ref.actor.freeze_vision_tower=True"])
    assert config.actor_rollout_ref.model.freeze == ["encoder", "projector"]
    with pytest.raises(ConfigError, match=r"data\.min_pixels"):
        load_config(["data.mm_processor_kwargs.nframes=4"])


def test_every_key_of_0_3_0_post1_is_accepted_at_its_default_there():
    unlike_here = {
        f"{ACTOR}.checkpoint.contents": "[model,hf_model,optimizer,extra]",
        f"{ACTOR}.optim.lr_warmup_steps": "-1",
        f"{ACTOR}.use_torch_compile": "True",
        f"{ROLLOUT}.disable_log_stats": "True",
        f"{ROLLOUT}.enable_chunked_prefill": "True",
        f"{ROLLOUT}.max_model_len": "null",
        f"{ROLLOUT}.use_fire_sampling": "False",
        "critic.checkpoint.contents": "[model,hf_model,optimizer,extra]",
        "data.image_key": "images",
        "data.val_batch_size": "null",
        "reward_model.model.fsdp_config.fsdp_size": "-1",
        "reward_model.model.fsdp_config.wrap_policy.min_num_params": "0",
        "reward_model.model.use_remove_padding": "False",
        "reward_model.strategy": "fsdp",
        "trainer.balance_batch": "True",
        "trainer.del_local_ckpt_after_load": "False",
        "trainer.max_actor_ckpt_to_keep": "null",
        "trainer.max_critic_ckpt_to_keep": "null",
        "trainer.resume_from_path": "null",
        "trainer.val_generations_to_log_to_wandb": "0",
    }
    assert load_config([f"{key}={value}" for key, value in unlike_here.items()]) == load_config()


def test_overrides_win_over_verls_keys_of_a_file(tmp_path: Path):
    (tmp_path / "own.yaml").write_text(
        "trainer: {max_actor_ckpt_to_keep: 5}\nactor_rollout_ref: {model: {lora: {rank: 8}}}\n"
    )
    config = load_config(
        ["trainer.max_ckpt_to_keep=2", "actor_rollout_ref.model.lora.rank=0"],
        config_path=tmp_path / "own.yaml",
    )
    assert config.trainer.max_ckpt_to_keep == 2


def test_the_folder_that_verls_scripts_name_is_not_needed(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_config(["trainer.seed=5"], config_path="./config", config_name="ppo_trainer.yaml")
    assert config.trainer.seed == 5
    assert mentions(config.notes[0], "--config-path ./config")
    config = load_config(config_path="config", config_name="ppo_megatron_trainer.yaml")
    assert config.actor_rollout_ref.actor.strategy == config.critic.strategy == "megatron"
    [problem] = problems_of(config_path="config", config_name="mine")
    assert mentions(problem, "--config-path config", "no such file or folder")


def test_every_key_that_the_table_points_to_exists():
    table, keys = _table(), all_keys()
    targets = [rule if isinstance(rule, str) else rule["to"] for rule in table["renamed"].values()]
    known = [key for key in targets if not key.endswith("*")]
    known += [*table["values"], *table["advice"], *table["other_meaning"]]
    assert [key for key in known if key not in keys] == []
    theirs = {key for kind in ("refused", "unused") for group in table[kind] for key in group["keys"]}
    assert sorted((theirs | {*table["renamed"]}) & keys.keys()) == []


def test_defaults_that_are_said_to_differ_do_differ():
    for version in versions():
        for key, there, _, _ in other_defaults(version):
            assert PPO.raw_default(key) != there, (version, key)


def test_unwritten_keys_that_mean_something_else_than_in_verl_are_listed():
    group = ["algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=8", f"{ROLLOUT}.name=hf", "data.val_files=a"]
    found = list(changed_from_verl(load_config(group), "0.9.1"))
    assert mentions(found[0], KL, "0 in verl 0.9.1", "use_kl_in_reward is False", "0.005")
    assert [line.split()[0] for line in found[:-1]] == [
        KL, f"{ACTOR}.entropy_coeff", f"{ACTOR}.clip_ratio_c",
    ]  # fmt: skip
    assert mentions(found[-1], "trainer.test_freq=-1", "trainer.logger=[console,wandb]")
    assert "critic" not in found[-1]  # grpo has none
    assert "max_num_seqs" not in found[-1]  # hf has no such thing
    written = [
        "algorithm.use_kl_in_reward=False",
        f"{ACTOR}.entropy_coeff=0",
    ]
    found = list(changed_from_verl(load_config([*group, *written]), "0.9.1"))
    assert [line.split()[0] for line in found[:-1]] == [f"{ACTOR}.clip_ratio_c"]
    in_loss = load_config([*group, f"{ACTOR}.use_kl_loss=True"])
    found = list(changed_from_verl(in_loss, "0.9.1"))
    assert not any(line.startswith(KL) for line in found)
    assert mentions(found[0], f"{ACTOR}.kl_loss_type=low_var_kl ", f"{ACTOR}.kl_loss_type=low_var_kl_clamped")
    as_there = [f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_type=low_var_kl_clamped"]
    found = list(changed_from_verl(load_config([*group, *as_there]), "0.9.1"))
    assert not any("kl_loss_type" in line for line in found)
    megatron = load_config([*group, f"{ACTOR}.strategy=megatron"])
    old = list(changed_from_verl(megatron, "0.3.0.post1"))
    assert mentions(old[-1], f"{ACTOR}.megatron.tensor_model_parallel_size=4")
    assert "critic" not in old[-1]
    old = list(changed_from_verl(load_config(group), "0.3.0.post1"))
    assert "megatron" not in old[-1]
    assert mentions(old[0], KL, "0.001 in verl 0.3.0.post1", "0.005")
    assert not any("entropy_coeff" in line for line in old)


def test_unwritten_sizes_are_those_of_the_version_of_verl(monkeypatch, valid):
    """A script of 0.3.0.post1 writes the size of its reward model, and leaves 4 to the others."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: ModuleSpec(name, None, origin=name))
    size, version = "megatron.tensor_model_parallel_size", "0.3.0.post1"
    script = [*valid, "reward_model.enable=True", "reward_model.model.path=o/m", f"reward_model.{size}=4"]
    script += ["trainer.n_gpus_per_node=8", "trainer.device=cuda", f"{ACTOR}.ppo_mini_batch_size=8"]
    config = load_config([*script, "data.train_batch_size=8"], config_name="ppo_megatron_trainer")
    assert any(mentions(line, "reward_model.megatron", "(4, 1") for line in check(config).errors)
    sizes = sizes_in_verl(config, version)
    assert sizes == [f"{place}.{size}=4" for place in (ACTOR, "actor_rollout_ref.ref", "critic")]
    config = load_config([*sizes, *script, "data.train_batch_size=8"], config_name="ppo_megatron_trainer")
    assert check(config).errors == []
    assert sizes_in_verl(config, version) == []
    followed = load_config([*script, f"{ACTOR}.{size}=2"], config_name="ppo_megatron_trainer")
    assert sizes_in_verl(followed, version) == []  # the others follow what is written
    assert sizes_in_verl(load_config(script), version) == []  # fsdp
