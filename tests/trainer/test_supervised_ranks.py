"""strop sft, train-rm and dpo on several ranks, after kill -9, and on real preferences."""

from __future__ import annotations

import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from strop.cli.main import main
from strop.prepare import prepare

import forked
import runs
import tiny_model
from supervised_runs import final_weights, make_inputs, metrics, overrides, require_equal_weights, train

HH = Path(__file__).resolve().parents[2] / ".." / "shared" / "data" / "hh_rlhf"
"""Raw Helpful and Harmless dialogues. Their text is offensive: nothing here shows it."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = make_inputs(tmp_path_factory.mktemp("ranks"))
    tiny_model.save(folder / "teacher", hidden=48, seed=5)
    return folder


KINDS = pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("sft", ()),
        ("train-rm", ()),
        ("dpo", ()),
        ("sft", ("teacher.model.path={}/teacher", "update.nll_coef=0.5")),
        ("sft", ("teacher.model.path={}/teacher", "teacher.kl=reverse", "teacher.top_k=4")),
    ],
    ids=["sft", "train-rm", "dpo", "teacher", "likeliest words of a teacher"],
)


@pytest.mark.slow
@KINDS
def test_two_ranks_train_what_one_trains(ray_session, inputs, tmp_path, kind, keys):
    """7 rows a batch: one rank has a row more, the other one that is padding."""
    own = (key.format(inputs) for key in keys)
    options = ("data.train_batch_size=7", "update.micro_batch_size_per_gpu=3", *own)
    train(kind, overrides(inputs, tmp_path / "one", *options))
    two = train(kind, overrides(inputs, tmp_path / "two", *options, "trainer.n_gpus_per_node=2"))
    assert two.group.world_size == 2
    two.shutdown()
    require_equal_weights(tmp_path / "two", final_weights(tmp_path / "one"))
    for one, other in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
        if kind == "dpo" and one["step"] == 1:  # the policy is the reference: margins are rounding errors
            assert one["train/rewards/margin"] == pytest.approx(0, abs=1e-6)
            assert 0 <= one.pop("train/rewards/accuracy") <= 1 >= other.pop("train/rewards/accuracy") >= 0
        assert other == pytest.approx(one, abs=1e-4)


@pytest.mark.slow
@KINDS
def test_a_killed_run_resumes_exactly(inputs, tmp_path, kind, keys):
    own = (key.format(inputs) for key in keys)
    options = ("trainer.save_freq=1", "trainer.total_training_steps=40", "trainer.test_freq=20", *own)
    straight = train(kind, overrides(inputs, tmp_path / "straight", *options))
    again = overrides(inputs, tmp_path / "killed", *options)
    with forked.start(["-m", "strop", kind, *again]) as process:
        deadline = time.monotonic() + 300
        while not (tmp_path / "killed" / "global_step_3").exists():
            assert process.poll() is None, "the run ended before it was killed"
            assert time.monotonic() < deadline, "no third checkpoint after 300 s"
            time.sleep(0.01)
        process.kill()
    assert not (tmp_path / "killed" / "global_step_40").exists()
    resumed = train(kind, again)
    assert resumed.group.weights_hash() == straight.group.weights_hash()
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "straight")


@pytest.mark.slow
@pytest.mark.skipif(not HH.is_dir(), reason=f"the real data is not here: {HH}")
def test_real_preferences_go_from_raw_files_to_a_reward_model(inputs, tmp_path):
    for kind in ("sft", "rm"):
        prepare("full_hh_rlhf", str(HH), tmp_path / kind, split_kind=kind)
    for command, kind in (("sft", "sft"), ("train-rm", "rm")):
        file = next((tmp_path / kind).glob("*.parquet"))
        run = tmp_path / f"{kind}-run"
        options = overrides(
            inputs,
            run,
            f"data.train_files={file}",
            "data.val_files=[]",
            "data.max_prompt_length=256",
            "data.max_response_length=128",
            "data.filter_overlong=True",
            "trainer.total_training_steps=2",
            "model.use_remove_padding=True",
        )
        assert main([command, *options]) == 0
        lines = metrics(run)
        assert [line["step"] for line in lines] == [1, 2]
        assert all(line["skipped_steps"] == 0 for line in lines)


@pytest.mark.slow
def test_a_reward_model_serves_reinforcement_learning_as_it_is_exported(inputs, tmp_path):
    """The model serves as reward model, whose scores are then centred, and as the start of the critic."""
    reward_model = tmp_path / "rm" / "final_model"
    train("train-rm", overrides(inputs, tmp_path / "rm"))
    options = runs.overrides(
        inputs,
        tmp_path / "ppo",
        f"critic.model.path={reward_model}",
        "reward_model.enable=True",
        f"reward_model.model.path={reward_model}",
        "reward_model.model.input_tokenizer=null",
        "data.max_prompt_length=10",
        "data.max_response_length=6",
        "trainer.total_training_steps=1",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
    )
    assert main(["train", *options]) == 0
    samples = pq.read_table(tmp_path / "ppo" / "rollouts" / "step_000001.parquet").to_pylist()
    model = AutoModelForSequenceClassification.from_pretrained(reward_model)
    for sample in samples:
        ids = torch.tensor([[*sample["prompt_ids"], *sample["response_ids"]]])
        with torch.no_grad():
            hidden = model.model(ids).last_hidden_state
            raw = model.score(hidden[0, -1]).item()  # by place: the policy may sample the pad token
        assert sample["score"] == pytest.approx(raw - model.config.strop_reward_mean, abs=1e-4)
