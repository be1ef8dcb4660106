"""Expected numbers are worked out by hand from the units of the keys: prompts, prompts, samples per rank."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.config.batch_plan import BatchPlan, MicroBatchSize, resolve_micro_batch
from strop.config.load import load_config, load_tree
from strop.config.trees import PPO
from strop.errors import ConfigError
from strop.trainer.commands import fitted

from builders import write_prompts
from messages import Message, naming

MINI = "actor_rollout_ref.actor.ppo_mini_batch_size"
CRITIC = "critic.ppo_mini_batch_size"
MICRO = "actor_rollout_ref.actor.ppo_micro_batch_size"


def plan(*overrides, ranks=1, **sizes):
    return BatchPlan.from_config(load_config([f"trainer.n_gpus_per_node={ranks}", *overrides]), **sizes)


def problems(*overrides, **sizes):
    with pytest.raises(ConfigError) as caught:
        plan(*overrides, **sizes)
    return caught.value.problems


BY_ROWS = "actor_rollout_ref.actor.use_dynamic_bsz=False"


def test_the_defaults_by_rows_on_gsm8k():
    found = plan(BY_ROWS, train_rows=7473)
    assert (found.prompts, found.n, found.samples) == (1024, 1, 1024)
    assert (found.actor.mini_batches, found.actor.samples_per_mini_batch) == (4, 256)
    assert (found.actor.micro_batch, found.actor.micro_batches) == (MicroBatchSize(rows=8), 32)
    assert found.actor.optimizer_steps == found.critic.optimizer_steps == 4
    assert {name: forward.micro_batches for name, forward in found.forwards.items()} == {
        "log_prob": 64,
        "ref": 64,
        "values": 128,
    }
    assert (found.iterations_per_epoch, found.iterations) == (7, 210)


def test_n_samples_multiply_samples_and_not_steps():
    found = plan(
        "data.train_batch_size=12", f"{MINI}=4", "actor_rollout_ref.rollout.n=5",
        "critic.ppo_mini_batch_size=6",
        "critic.ppo_epochs=3", "algorithm.adv_estimator=gae", BY_ROWS,
    )  # fmt: skip
    assert found.samples == 60
    assert (found.actor.samples_per_mini_batch, found.actor.optimizer_steps) == (20, 3)
    assert (found.critic.samples_per_mini_batch, found.critic.optimizer_steps) == (30, 6)
    assert found.actor.micro_batches == 3  # 8 + 8 + 4: the last one is smaller
    assert found.critic.micro_batches == 4
    assert (found.train_rows, found.iterations) == (None, None)


def test_ranks_share_a_mini_batch():
    found = plan(
        "data.train_batch_size=8", f"{MINI}=4", "actor_rollout_ref.rollout.n=4", f"{MICRO}_per_gpu=3", ranks=2
    )
    assert (found.actor.samples_per_mini_batch, found.actor.samples_per_rank) == (16, 8)
    assert found.actor.micro_batches == 3
    assert found.forwards["log_prob"].samples_per_rank == 16


def test_critic_reference_and_reward_model_are_planned_only_when_the_run_has_them():
    bare = plan("algorithm.adv_estimator=grpo", "algorithm.kl_ctrl.kl_coef=0")
    assert bare.critic is None
    assert list(bare.forwards) == ["log_prob"]
    rich = plan(
        "algorithm.adv_estimator=rloo", "actor_rollout_ref.actor.use_kl_loss=True", "reward_model.enable=True"
    )
    assert list(rich.forwards) == ["log_prob", "ref", "reward_model"]
    assert plan("algorithm.adv_estimator=mine.py:fn").critic is not None  # it may need one


def test_the_number_of_iterations():
    assert plan("trainer.total_epochs=2", train_rows=2047).iterations == 2  # full batches only
    assert plan("trainer.total_training_steps=5", train_rows=7473).iterations == 5
    assert plan("trainer.total_training_steps=5").iterations == 5
    warm = plan("trainer.total_training_steps=5", "trainer.critic_warmup=2")
    assert (warm.iterations, warm.actor_iterations) == (5, 3)


@pytest.mark.parametrize(
    ("overrides", "ranks", "rows", "parts"),
    [
        (["data.train_batch_size=256", f"{MINI}=100"], 1, None, [f"{MINI}=100", "=256", "nearest: 64, 128"]),
        (["data.train_batch_size=800", f"{MINI}=256"], 8, None, [f"{MINI}=256", "=800", "nearest: 200, 400"]),
        (
            ["data.train_batch_size=800", f"{CRITIC}=300"],
            1,
            None,
            [f"{CRITIC}=300", "=800", "nearest: 200, 400"],
        ),
        (["data.train_batch_size=256", f"{MINI}=300"], 1, None, [f"{MINI}=300", "=256", "nearest: 256"]),
        (["data.train_batch_size=256", f"{CRITIC}=300"], 1, None, [f"{CRITIC}=300", "=256", "nearest: 256"]),
        (
            ["data.train_batch_size=64", f"{MINI}=2", "actor_rollout_ref.rollout.n=2"],
            8,
            None,
            [f"{MINI}=2", "actor_rollout_ref.rollout.n=2", "8", "4"],
        ),
        (
            ["data.train_batch_size=9", f"{MINI}=3"],
            2,
            None,
            ["data.train_batch_size=9", "actor_rollout_ref.rollout.n=1", "2", "nearest: 8, 10"],
        ),
        ([], 1, 100, ["data.train_batch_size=1024", "100"]),
    ],
)
def test_sizes_that_do_not_divide_show_the_numbers_and_the_nearest_that_work(overrides, ranks, rows, parts):
    assert problems(*overrides, ranks=ranks, train_rows=rows) == [Message(*parts)]


def test_all_wrong_sizes_are_reported_at_once():
    found = problems(
        f"{MINI}=2000", f"{MICRO}=3", f"{MICRO}_per_gpu=3", f"{CRITIC}=3000",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=null",
        "actor_rollout_ref.ref.log_prob_use_dynamic_bsz=False", train_rows=1,
    )  # fmt: skip
    assert len(found) == 5


@pytest.mark.parametrize(
    ("prompts", "mini", "ranks"), [(800, 160, 32), (1000, 200, 8), (300, 300, 4), (257, 257, 1), (40, 40, 8)]
)
def test_a_default_mini_batch_becomes_one_near_it_that_divides(prompts, mini, ranks):
    actor = plan(f"data.train_batch_size={prompts}", ranks=ranks).actor
    assert actor.samples_per_mini_batch == mini
    assert actor.mini_batches * mini == prompts


@pytest.mark.parametrize(
    ("rows", "written", "batch"),
    [
        (100, [], 32),
        (20, [], 20),
        (100, [f"{MINI}=64"], 64),
        (100, [f"{MINI}=12"], 24),
        (100, [f"{MINI}=8", f"{CRITIC}=12"], 24),
        (30, [f"{MINI}=12"], 24),
        (10, [f"{MINI}=12"], 10),  # an error: no batch of these rows is one of 12
    ],
)
def test_a_default_batch_of_few_rows_is_one_that_written_mini_batches_divide(tmp_path, rows, written, batch):
    values = [f"data.train_files={write_prompts(tmp_path / 'train.parquet', rows)}", *written]
    config = fitted(lambda defaults: load_tree(PPO, values, defaults=defaults)).config
    assert config.data.train_batch_size == batch


def test_a_deprecated_size_is_divided_by_the_ranks():
    config = load_config([f"{MICRO}=32"])
    assert resolve_micro_batch(config, "actor", ranks=4) == MicroBatchSize(rows=8)
    with pytest.raises(ConfigError, match=naming("ppo_micro_batch_size=32", "3", "30", "33")):
        resolve_micro_batch(config, "actor", ranks=3)


def test_both_keys_or_neither_is_an_error_that_names_them():
    both = load_config([f"{MICRO}=3", f"{MICRO}_per_gpu=4"])
    with pytest.raises(ConfigError, match=naming(f"{MICRO}_per_gpu=4", f"{MICRO}=3")):
        resolve_micro_batch(both, "actor")
    neither = load_config([f"{MICRO}_per_gpu=null", BY_ROWS])
    with pytest.raises(ConfigError, match=naming(f"{MICRO}_per_gpu", "use_dynamic_bsz=True")):
        resolve_micro_batch(neither, "actor")


def test_a_token_cap_holds_one_whole_sequence():
    overrides = [
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1023",
    ]
    with pytest.raises(ConfigError, match=naming("=1023", "=512", "1024")):
        resolve_micro_batch(load_config(overrides), "actor")
    assert plan(*overrides[:1]).actor.micro_batches is None
    rewards = ["reward_model.use_dynamic_bsz=True", "reward_model.forward_max_token_len_per_gpu=2000"]
    assert resolve_micro_batch(load_config(rewards), "reward_model").max_tokens == 2000
    with pytest.raises(ConfigError, match=naming("=2000", "reward_model.max_length=2001")):
        resolve_micro_batch(load_config([*rewards, "reward_model.max_length=2001"]), "reward_model")


SHARED = "actor_rollout_ref.actor.ulysses_sequence_parallel_size"


def test_ranks_that_share_sequences_take_samples_together():
    sizes = ["data.train_batch_size=12", f"{MINI}=6", f"{MICRO}_per_gpu=4", f"{SHARED}=2"]
    critic = "critic.ppo_mini_batch_size=12"
    shared = plan(*sizes, critic, ranks=4)
    assert (shared.ranks, shared.actor.sharing, shared.critic.sharing) == (4, 2, 1)
    assert (shared.actor.samples_per_rank, shared.actor.micro_batches) == (3, 1)
    assert shared.forwards["log_prob"].samples_per_rank == shared.forwards["ref"].samples_per_rank == 6
    assert shared.forwards["values"].samples_per_rank == 3
    assert plan(*sizes).actor.sharing == 1  # one process has nobody to share with
    on_four = "x actor_rollout_ref.rollout.n=1 does not divide over 4 ranks (nearest: 4)"
    assert problems(*sizes[:1], f"{MINI}=1", f"{SHARED}=2", ranks=4) == [
        Message(f"{MINI}=1", "actor_rollout_ref.rollout.n=1", "2"),
        f"critic.ppo_mini_batch_size=1 {on_four}",
    ]
    assert problems("data.train_batch_size=12", f"{MINI}=2", f"{SHARED}=2", ranks=4) == [
        f"critic.ppo_mini_batch_size=2 {on_four}"
    ]
    assert problems(*sizes[:3], critic, f"{SHARED}=3", ranks=4) == [
        Message(f"{SHARED}=3", "4", "2"),
        SHARED.replace("actor.u", "ref.u") + "=3 does not divide the 4 ranks (nearest: 2, 4)",
    ]


def test_ranks_that_share_sequences_have_the_tokens_of_all_of_them():
    cap = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
    dynamic = ["actor_rollout_ref.actor.use_dynamic_bsz=True", f"{SHARED}=2"]
    config = load_config([*dynamic, f"{cap}=512"])
    assert resolve_micro_batch(config, "actor", ranks=4) == MicroBatchSize(max_tokens=1024)
    assert resolve_micro_batch(config, "ref", ranks=4) == MicroBatchSize(max_tokens=1024)
    with pytest.raises(ConfigError, match=naming("=511", "2 ranks", "512")):
        resolve_micro_batch(load_config([*dynamic, f"{cap}=511"]), "actor", ranks=4)
    deprecated = load_config([f"{MICRO}=32", f"{SHARED}=2"])
    assert resolve_micro_batch(deprecated, "actor", ranks=4) == MicroBatchSize(rows=16)


@settings(max_examples=30)
@given(
    mini_batches=st.integers(1, 6), mini=st.integers(1, 6), n=st.integers(1, 4), micro=st.integers(1, 9),
    ranks=st.integers(1, 4),
)  # fmt: skip
def test_a_valid_plan_accounts_for_every_sample(mini_batches, mini, n, micro, ranks):
    overrides = [
        f"data.train_batch_size={mini_batches * mini * ranks}", f"{MINI}={mini * ranks}",
        f"actor_rollout_ref.rollout.n={n}", f"{MICRO}_per_gpu={micro}",
    ]  # fmt: skip
    actor = plan(*overrides, ranks=ranks).actor
    assert actor.mini_batches * actor.samples_per_mini_batch == mini_batches * mini * ranks * n
    assert actor.samples_per_rank * ranks == actor.samples_per_mini_batch
    assert (actor.micro_batches - 1) * micro < actor.samples_per_rank <= actor.micro_batches * micro


def test_the_default_mini_batch_is_at_most_the_batch():
    sizes = ("data.train_batch_size=40", "actor_rollout_ref.rollout.name=hf")
    config = load_config(sizes)
    assert (config.actor_rollout_ref.actor.ppo_mini_batch_size, config.critic.ppo_mini_batch_size) == (40, 40)
    assert load_config(["data.train_batch_size=512"]).actor_rollout_ref.actor.ppo_mini_batch_size == 256
    given = load_config([*sizes, "actor_rollout_ref.actor.ppo_mini_batch_size=41"])
    assert given.actor_rollout_ref.actor.ppo_mini_batch_size == 41
