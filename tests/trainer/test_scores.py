"""Scores that are computed while models evaluate the samples, or the next ones are generated."""

from __future__ import annotations

import functools
import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pyarrow.parquet as pq
import pytest
import torch

from strop.algorithms.advantages import remax
from strop.columns import ENDED_BY
from strop.config.load import load_config
from strop.controller.group import GroupMethod, LocalWorkerGroup
from strop.errors import ModelError, RewardError
from strop.models.loader import load_scorer
from strop.protocol import DataProto
from strop.rewards.base import Reward
from strop.rewards.loading import load_reward_manager
from strop.rewards.manager import RewardManager
from strop.rewards.reward_output import RewardOutput, ScoreCheck
from strop.rollout.hf import decoding
from strop.trainer.build import build_trainer
from strop.trainer.metrics import PhaseTimer
from strop.trainer.scores import PendingScores, Samples

import tiny_model
from messages import mentions, naming
from runs import fit, make_inputs, metrics, overrides

# A scorer that waits until the program has done something else: without that, its deadline passes.
WAITS = """
import pathlib, time
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    deadline = time.monotonic() + 60
    while not pathlib.Path({go!r}).exists():
        if time.monotonic() > deadline:
            raise TimeoutError("nothing else was done meanwhile")
        time.sleep(0.005)
    return float(len(solution_str))
"""
QUIET = ("trainer.test_freq=-1", "trainer.val_before_train=false", "trainer.total_training_steps=1")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture
def make(inputs, tmp_path):
    """Return a function that builds trainers; close their reward managers."""
    made = []

    def build(*options: str):
        made.append(build_trainer(load_config(overrides(inputs, tmp_path / "run", *QUIET, *options))))
        made[-1].init_workers()
        return made[-1]

    yield build
    for trainer in made:
        for manager in (trainer.reward_fn, trainer.val_reward_fn):
            if isinstance(manager, RewardManager):
                manager.close()


def waiting_scorer(folder: Path) -> tuple[str, Path]:
    """Return the option for a scorer that waits for a file, and that file."""
    go = folder / "go"
    (folder / "reward.py").write_text(WAITS.format(go=str(go)))
    return f"custom_reward_function.path={folder / 'reward.py'}", go


@pytest.mark.parametrize(
    ("role", "method", "call", "options", "metric"),
    [
        # of the passes before the update, the last
        ("critic", "compute_values", 1, (), "critic/score/max"),
        # the second batch of validation
        (
            "rollout",
            "generate_sequences",
            2,
            ("data.val_batch_size=2", "trainer.val_only=true"),
            "val/test_score/strop/arithmetic",
        ),
    ],
)
def test_samples_are_scored_during_the_next_calls_of_workers(
    make, tmp_path, monkeypatch, role, method, call, options, metric
):
    option, go = waiting_scorer(tmp_path)
    trainer = make(option, "reward_model.timeout_s=120", *options)
    worker, calls = getattr(trainer, role).worker, []
    plain = getattr(worker, method)

    def counted(*arguments, **options):
        calls.append(method)
        if len(calls) == call:
            go.touch()
        return plain(*arguments, **options)

    monkeypatch.setattr(worker, method, counted)
    fit(trainer)
    (line,) = metrics(tmp_path / "run")
    assert line.get("reward/errors", 0) == 0
    assert line[metric] > 0


def test_samples_are_scored_while_others_are_generated(make, tmp_path, monkeypatch):
    """The scorer notes each response that it gets; generation goes on only when the first is noted."""
    notes = tmp_path / "notes"
    notes.mkdir()
    (tmp_path / "reward.py").write_text(
        "import pathlib, uuid\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        f"    pathlib.Path({str(notes)!r}, uuid.uuid4().hex).touch()\n"
        "    return float(len(solution_str))\n"
    )
    trainer = make(f"custom_reward_function.path={tmp_path / 'reward.py'}", "data.max_response_length=40")
    early, plain = [], decoding._report

    def report(*arguments):
        plain(*arguments)
        deadline = time.monotonic() + 60
        while not early and not any(notes.iterdir()) and time.monotonic() < deadline:
            time.sleep(0.005)
        early.append(len(list(notes.iterdir())))

    monkeypatch.setattr(decoding, "_report", report)
    fit(trainer)
    assert 0 < early[0] < 16
    assert len(list(notes.iterdir())) == 16  # each once
    (line,) = metrics(tmp_path / "run")
    (rows,) = [pq.read_table(path).to_pylist() for path in (tmp_path / "run" / "rollouts").iterdir()]
    assert line["reward/errors"] == 0
    assert [row["score"] for row in rows] == [float(len(row["response"])) for row in rows]


def test_a_failure_elsewhere_does_not_wait_for_scores(make, tmp_path, monkeypatch):
    option, _ = waiting_scorer(tmp_path)  # the file never comes
    trainer = make(option, "reward_model.timeout_s=600")

    def compute_values(batch):
        raise ModelError("no values today")

    monkeypatch.setattr(trainer.critic.worker, "compute_values", compute_values)
    started = time.monotonic()
    with pytest.raises(ModelError, match="no values today"):
        fit(trainer)
    trainer.reward_fn.close()  # waits for the thread that feeds the scorer
    assert time.monotonic() - started < 300  # and not as long as the scorer has


def test_a_failure_elsewhere_cancels_greedy_scores_too():
    cancelled = []
    scores, greedy = (
        SimpleNamespace(cancel=functools.partial(cancelled.append, name)) for name in ("scores", "greedy")
    )
    samples = Samples(DataProto(), scores, PhaseTimer(), greedy)
    with pytest.raises(ModelError), samples.cancelled_on_error():
        raise ModelError("no values today")
    assert sorted(cancelled) == ["greedy", "scores"]


def test_a_failure_of_the_scorer_stops_the_step(make, tmp_path):
    (tmp_path / "reward.py").write_text("def compute_score(**sample):\n    raise ValueError('no verdict')\n")
    trainer = make(f"custom_reward_function.path={tmp_path / 'reward.py'}")
    with pytest.raises(RewardError, match=naming("no verdict", "ValueError")):
        fit(trainer)


class Deferred(LocalWorkerGroup):
    """Group that records when a call is started and when its result is read."""

    notes: ClassVar[list[str]] = []

    def __getattr__(self, name):
        plain = super().__getattr__(name)

        class Call:
            def __init__(self, *args, **kwargs):
                Deferred.notes.append(f"start {name}")
                self.args, self.kwargs = args, kwargs

            def get(self):
                Deferred.notes.append(f"get {name}")
                return plain(*self.args, **self.kwargs)

        return GroupMethod(Call)


def test_reward_model_reference_actor_and_critic_work_at_the_same_time(inputs, tmp_path):
    load_scorer(inputs / "model", fresh_head_seed=5).save_pretrained(tmp_path / "reward_model")
    tiny_model.build_tokenizer().save_pretrained(tmp_path / "reward_model")
    model = ("reward_model.enable=true", f"reward_model.model.path={tmp_path / 'reward_model'}")
    options = (*QUIET, *model, "reward_model.model.input_tokenizer=null", "algorithm.kl_ctrl.kl_coef=0.1")
    trainer = build_trainer(load_config(overrides(inputs, tmp_path / "run", *options)))
    trainer.worker_group_cls = Deferred
    trainer.init_workers()
    Deferred.notes.clear()
    fit(trainer)
    names = ("compute_rm_score", "compute_ref_log_prob", "compute_log_prob", "compute_values")
    found = [note for note in Deferred.notes if note.split()[1] in names]
    assert found[:4] == [f"start {name}" for name in names]
    assert sorted(found[4:]) == sorted(f"get {name}" for name in names)
    trainer.reward_fn.close()


class OwnManager(RewardManager):
    """Overrides how a batch is scored."""

    def __init__(self, score) -> None:
        super().__init__(tokenizer=None, num_examine=0)
        self.score = score

    def __call__(self, batch):
        return self.score(batch)


@pytest.mark.parametrize("wrap", [lambda function: function, OwnManager], ids=["function", "manager"])
@pytest.mark.parametrize("with_model", [False, True])
def test_a_users_own_reward_runs_in_the_main_thread_and_sees_the_models_scores(with_model, wrap):
    seen = {}

    def own(batch):
        seen.update(thread=threading.current_thread(), columns=set(batch.batch))
        return torch.ones_like(batch.batch["response_mask"])

    call = SimpleNamespace(get=lambda: DataProto({"rm_scores": torch.zeros(2)}))
    group = SimpleNamespace(compute_rm_score=SimpleNamespace(start=lambda batch: call))
    scores = PendingScores(DataProto(), 1, wrap(own), group if with_model else None)
    assert scores.finished is None
    scores.complete(DataProto({"response_mask": torch.ones(2, 3)}))
    assert seen == {}
    assert scores.get().batch["token_level_scores"].sum() == 6
    assert seen["thread"] is threading.main_thread()
    assert ("rm_scores" in seen["columns"]) == with_model


MASK = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])
PER_TOKEN = torch.tensor([[0.0, 0.5, 0.0], [0.25, 0.0, -1.0]])  # sums: 0.5, -0.75


def scored_by_model(columns, manager):
    call = SimpleNamespace(get=lambda: DataProto(columns))
    group = SimpleNamespace(compute_rm_score=SimpleNamespace(start=lambda batch: call))
    scores = PendingScores(DataProto(), 1, manager, group)
    scores.complete(DataProto({"response_mask": MASK}))
    return scores.get().batch


@pytest.mark.parametrize("model", [PER_TOKEN, PER_TOKEN.sum(dim=1), PER_TOKEN.sum(dim=1).double()])
@pytest.mark.parametrize(
    "manager",
    [
        lambda data: data.batch["rm_scores"],  # as verl v0.1's
        lambda data, return_dict: {"reward_tensor": data.batch["rm_scores"], "reward_extra_info": {}},
    ],
)
def test_scores_of_samples_are_accepted_and_those_of_a_models_tokens_are_summed(model, manager):
    found = scored_by_model({"rm_scores": model}, manager)
    assert found["rm_scores"].tolist() == [0.5, -0.75]
    assert found["token_level_scores"].tolist() == [[0, 0.5, 0], [0, 0, -0.75]]


@pytest.mark.parametrize(
    ("columns", "found"),
    [
        ({"rm_scores": torch.zeros(2, 1)}, "[2, 1]"),
        ({"rm_scores": torch.zeros(2, 4)}, "[2, 4]"),
        ({"rm_scores": torch.zeros(3)}, "[3]"),
        ({"rm_scores": torch.zeros(2, 3, 1)}, "[2, 3, 1]"),
        ({"scores": torch.zeros(2)}, "no such column"),
    ],
)
def test_other_shapes_of_a_reward_model_are_errors_that_name_column_and_role(columns, found):
    with pytest.raises(RewardError, match=naming("rm_scores", "RewardModel", found, "[2]", "[2, 3]")):
        scored_by_model(columns, lambda data: data.batch["rm_scores"])


@pytest.mark.parametrize("shape", [(2, 1), (3,), (2, 4), ()])
def test_other_shapes_of_a_manager_are_errors_that_name_it(shape):
    with pytest.raises(RewardError, match=naming("reward_manager", list(shape), "[2]", "[2, 3]")):
        scored_by_model({"rm_scores": torch.zeros(2)}, lambda data: torch.zeros(shape))


def score_batch(function, *, check=None):
    """Return the scored batch of three rows of two tokens (one in the last)."""
    mask = torch.tensor([[1.0, 1.0], [1.0, 1.0], [1.0, 0.0]])
    columns = {"data_source": ["own"] * 3, "extra_info": [{"index": 7}, {"index": 8}, {"index": 9}]}
    scores = PendingScores(DataProto(), 1, function, None, check)
    scores.complete(DataProto.from_dict({"response_mask": mask}, columns))
    return scores.get()


NAN, INF = float("nan"), float("inf")


class Returns(Reward):
    """A reward of the user's own that returns a ``RewardOutput``."""

    def __init__(self, scores, parts):
        self.output = RewardOutput(scores, parts, {"own": 1.0}, ["a", "b", "c"], ["", "", ""])

    def expect(self, prompts, *, n=1, with_model=False):
        return SimpleNamespace(
            takes_samples=False, complete=lambda batch: None, get=lambda model: self.output
        )


@pytest.mark.parametrize(
    ("function", "failed", "found"),
    [
        (lambda batch: torch.tensor([[0.0, 1.0], [NAN, 2.0], [3.0, 0.0]]), 1, "NaN or infinity as score"),
        (lambda batch: torch.tensor([[0.0, 1.0], [0, 2.0], [-INF, 0.0]]), 2, "NaN or infinity as score"),
        (lambda batch: torch.tensor([[0, 1], [0, 1e300], [3, 0]], dtype=torch.float64), 1, "as score"),
        (Returns(torch.tensor([[0.0, 1.0], [NAN, 2.0], [3.0, 0.0]]), {}), 1, "NaN or infinity as score"),
        (
            Returns(torch.tensor([[0.0, 1.0], [0.0, 2.0], [3.0, 0.0]]), {"a": torch.tensor([NAN, INF, 1.0])}),
            1,
            "infinity as a",
        ),
        (
            lambda batch, return_dict=False: {
                "reward_tensor": torch.tensor([[0.0, 1.0], [0.0, 2.0], [3.0, 0.0]]),
                "reward_extra_info": {"a": [1.0, NAN, None]},
            },
            1,
            "NaN or infinity as a",
        ),
    ],
)  # fmt: skip
def test_a_reward_of_the_batch_that_is_not_finite_is_an_error_of_its_sample(function, failed, found, caplog):
    check = ScoreCheck(error_score=-0.5, max_error_rate=0.5)
    batch = score_batch(function, check=check)
    scores = batch.batch["token_level_scores"]
    place = 0 if failed == 2 else 1  # the last token
    assert scores[failed, place] == -0.5
    assert scores[failed, 1 - place] == 0.0
    assert scores.isfinite().all()
    assert batch.batch["reward_failed"].tolist() == [row == failed for row in range(3)]
    assert batch.meta_info["reward_metrics"]["reward/errors"] == 1.0
    assert batch.meta_info["reward_metrics"]["reward/error_rate"] == pytest.approx(1 / 3)
    assert all(batch.batch[name][failed].isnan() for name in batch.batch if name.startswith("reward/"))
    assert mentions(caplog.text, f"sample {failed} (data_source='own', extra_info.index={7 + failed})", found)
    with pytest.raises(RewardError, match=naming("reward_model.max_error_rate=0.1")):
        score_batch(lambda batch: torch.full((3, 2), NAN))


def test_one_error_of_a_small_batch_is_within_the_default_rate_and_the_next_is_not():
    check, function = ScoreCheck(), lambda batch: torch.tensor([[0.0, 1.0], [NAN, 2.0], [3.0, 0.0]])
    score_batch(function, check=check)
    with pytest.raises(RewardError, match=naming("max_error_rate=0.1", "sample 1")):
        score_batch(function, check=check)


def test_verls_dict_of_rewards_becomes_scores_and_parts(caplog):
    def manager(data, return_dict=False):
        assert return_dict
        data.batch["acc"] = torch.ones(3)
        extra = {
            "acc": [True, False, torch.tensor(1.0)],
            "some": [0.5, None, "n/a"],
            "pred": ["4", None, "6"],
            "short": [1.0],
        }
        return {"reward_tensor": torch.ones(3, 2), "reward_extra_info": extra}

    batch = score_batch(manager)
    assert batch.batch.keys() == {
        "response_mask", "reward_failed", "token_level_scores", "reward/acc", "reward/some"
    }  # fmt: skip
    assert batch.batch["reward/acc"].tolist() == [1.0, 0.0, 1.0]
    assert batch.batch["reward/some"][0] == 0.5
    assert batch.batch["reward/some"][1:].isnan().all()
    assert batch.meta_info["reward_metrics"]["reward/acc/mean"] == pytest.approx(2 / 3)
    texts = {name: column.tolist() for name, column in batch.non_tensor_batch.items() if "text" in name}
    assert texts == {"reward_text/pred": ["4", None, "6"], "reward_text/some": [None, None, "n/a"]}
    assert mentions(caplog.text, "'short'")


NO_REWARD = load_reward_manager(load_config(["reward_model.reward_manager=none"]), None)


def turns_batch(*ended_by: str) -> DataProto:
    """Return samples of three tokens, the second of an answer; those that end by an error are lost."""
    is_lost = [reason == "error" for reason in ended_by]
    mask = torch.tensor([[0.0, 0.0, 0.0] if lost else [1.0, 0.0, 1.0] for lost in is_lost])
    columns = {"response_mask": mask, "ended_by": torch.tensor([*map(ENDED_BY.index, ended_by)])}
    error = {"turns": [], "error": "environment.path=Flaky: away"}
    texts = [json.dumps(error if lost else {"turns": []}) for lost in is_lost]
    return DataProto.from_dict(columns, {"conversation": texts})


@pytest.mark.parametrize(
    ("function", "scores"),
    [
        (NO_REWARD, [0.0, 0.0]),
        (lambda batch: torch.tensor([1.0, 9.0]), [1.0, 0.0]),
        (
            lambda batch, return_dict: {
                "reward_tensor": torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.0, 9.0]]),
                "reward_extra_info": {"acc": [0.25, 9.0]},
            },
            [3.0, 0.0],
        ),
    ],
    ids=["none", "a score for each", "verl's dict"],
)
def test_a_lost_sample_is_an_error_whatever_the_manager_is(function, scores):
    check = ScoreCheck(error_score=-0.5, max_error_rate=0.5)
    pending = PendingScores(DataProto(), 1, function, None, check)
    pending.complete(turns_batch("stop", "error"))
    batch = pending.get()
    found, metrics = batch.batch["token_level_scores"], batch.meta_info["reward_metrics"]
    assert found[0].sum() == scores[0]
    assert found[1].tolist() == [-0.5, 0.0, 0.0]  # as a validation reads it
    assert batch.batch["reward_failed"].tolist() == [False, True]
    assert (metrics["reward/errors"], metrics["reward/error_rate"]) == (1.0, 0.5)
    assert metrics.get("reward/acc/mean", 0.25) == 0.25
    pending = PendingScores(DataProto(), 1, function, None)
    pending.complete(turns_batch("error", "error"))
    with pytest.raises(RewardError) as error:
        pending.get()
    assert mentions(error.value, "max_error_rate=0.1", "the environment lost the sample", "Flaky: away")


def test_a_score_between_two_turns_is_an_error():
    scores = torch.zeros(2, 3)
    scores[1, 1] = 0.5
    pending = PendingScores(DataProto(), 1, lambda batch: scores, None)
    pending.complete(turns_batch("stop", "stop"))
    with pytest.raises(RewardError) as error:
        pending.get()
    assert mentions(error.value, "0.5", "sample 1", "token 1", "response_mask")


@pytest.mark.parametrize(
    ("result", "found"),
    [
        (None, "None"),
        ([1.0, 2.0, 3.0], "[1.0, 2.0, 3.0]"),
        ({"score": 1.0}, "reward_tensor"),
        (torch.zeros(4), "[4]"),
        (torch.zeros(2, 2), "[2, 2]"),
    ],
)
def test_another_result_of_a_batch_function_is_named(result, found):
    with pytest.raises(RewardError, match=naming(found, "expected")):
        score_batch(lambda batch: result)


def test_a_greedy_response_that_its_environment_lost_is_no_baseline():
    columns = {"token_level_scores": torch.tensor([[1.0, 0.0], [0.5, 0.0]])}
    columns["response_mask"] = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    greedy, batch = DataProto(columns, {}, {"reward_metrics": {}}), DataProto({"row": torch.arange(4)})
    scores, greedy_scores = (SimpleNamespace(get=lambda found=found: found) for found in (batch, greedy))
    baseline = Samples(batch, scores, PhaseTimer(), greedy_scores).scored().batch["baseline_scores"]
    assert baseline[:2].tolist() == [1, 1]
    assert baseline[2:].isnan().all()
    advantages, _ = remax(torch.ones(4, 1), torch.ones(4, 1), baseline)
    assert advantages.tolist() == [[0], [0], [0], [0]]
