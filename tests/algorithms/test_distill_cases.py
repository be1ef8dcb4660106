"""Faults that users of other systems reported, case by case: ``reported/distill.jsonl``.

The folder of cases is ``../shared/cases`` or that of STROP_CASES; without it each case is skipped by name.
Whole runs are in ``tests/e2e/test_distillation.py``: d09, d17 and d18 are also there.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from strop.algorithms.aggregation import aggregate
from strop.algorithms.distillation import chosen_log_probs, compare, cut, divergence, top_words
from strop.algorithms.logprobs import token_log_probs
from strop.algorithms.output_layer import OutputLayer
from strop.config.checks.check import check as check_config
from strop.config.load import load_config
from strop.errors import ConfigError
from strop.protocol import DataProto
from strop.trainer.build import build_trainer
from strop.trainer.ppo import PPO, Groups
from strop.workers.losses import actor_objective

import runs
import tiny_model
from builders import one_row

FOLDER = Path(os.environ.get("STROP_CASES", Path(__file__).parents[2] / "../shared/cases")) / "reported"
NAMES = [f"d{number:02}" for number in range(1, 19) if number != 12]  # d12: a teacher with another prompt
CASES: dict[str, dict[str, Any]] = {}
if FOLDER.is_dir():
    CASES = {case["case"]: case for case in map(json.loads, (FOLDER / "distill.jsonl").open())}
else:
    warnings.warn(f"the reported cases are skipped: there is no {FOLDER} (STROP_CASES)", stacklevel=1)
CHECKS: dict[str, Callable[[Any, Any, Path], None]] = {}
ALONE = (
    "reward_model.reward_manager=none",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.actor.entropy_coeff=0",
    "algorithm.kl_ctrl.kl_coef=0",
    "trainer.test_freq=-1",
    "trainer.val_before_train=False",
)


def check(name: str) -> Callable[[Callable[[Any, Any, Path], None]], Callable[[Any, Any, Path], None]]:
    """Register the check (given, right, folder) of a case."""

    def registered(function: Callable[[Any, Any, Path], None]) -> Callable[[Any, Any, Path], None]:
        CHECKS[name] = function
        return function

    return registered


@pytest.mark.parametrize("name", NAMES)
def test_reported_case(name, tmp_path):
    if not CASES:
        pytest.skip(f"no folder of cases: {FOLDER}")
    CHECKS[name](CASES[name]["given"], CASES[name]["right"], tmp_path)


def by_blocks(
    teacher: list[float], student: list[float], kind: str, b: float = 0.5, **options: Any
) -> tuple[float, list[float]]:
    """Return the divergence of logits (or log-probs) of all words, and its gradient by the student's."""
    p, q = torch.tensor([teacher]), torch.tensor([student], requires_grad=True)
    layers = [OutputLayer(torch.eye(x.shape[1])) for x in (q, p)]
    if (words := options.pop("words", None)) is not None:
        layers = [cut(layer, words) for layer in layers]
    options = {"kind": kind, "js_weight": b, "temperature": 1.0, **options}
    found = compare(q, layers[0], p, layers[1], **options).divergence_N.sum()
    return float(found.detach()), torch.autograd.grad(found, q)[0][0].tolist()


def logs(probabilities: list[float]) -> list[float]:
    return torch.tensor(probabilities, dtype=torch.float64).log().tolist()


def exact(given: Any, kind: str, b: float = 0.5) -> float:
    p, q = (torch.tensor([logs(given[name])], dtype=torch.float64) for name in ("teacher", "student"))
    return float(divergence(p, q, kind, b))


@check("d01")
def _(given, right, _folder):
    for kind in ("forward", "reverse"):
        assert exact(given, kind) == pytest.approx(right[kind], abs=1e-12)
        value, gradient = by_blocks(logs(given["teacher"]), logs(given["student"]), kind)
        assert value == pytest.approx(right[kind], abs=1e-6)
        assert gradient == pytest.approx(right[f"gradient_{kind}"], abs=1e-6)


@check("d02")
def _(given, right, folder):
    for b, expected in zip(given["beta"], right["jsd"], strict=True):
        assert exact(given, "js", b) == pytest.approx(expected, abs=1e-12)
        value, _ = by_blocks(logs(given["teacher"]), logs(given["student"]), "js", b)
        assert value == pytest.approx(expected, abs=1e-6)
    for b in (0, 1):
        with pytest.raises(ConfigError, match="js_weight"):
            load_config(["teacher.kl=js", f"teacher.js_weight={b}"])


@check("d03")
def _(given, right, _folder):
    value, _ = by_blocks(logs(given["teacher"]), logs(given["student"]), "js", given["beta"])
    assert exact(given, "js", given["beta"]) == pytest.approx(right["jsd"], abs=1e-12)
    assert value == pytest.approx(right["jsd"], abs=1e-6)
    assert value < torch.tensor(2.0).log() + 1e-7


def with_others(teacher: list[float], student: list[float], k: int, kind: str) -> float:
    p, q = (torch.tensor([logs(x)]) for x in (teacher, student))
    words = OutputLayer(torch.eye(p.shape[1]))
    ids, top = top_words(p, words, k, temperature=1.0)
    return float(divergence(top, chosen_log_probs(q, words, ids, temperature=1.0)[0], kind))


@check("d04")
def _(given, right, _folder):
    p, q = given["teacher"], given["student"]
    found = with_others(p, q, given["k"], "forward")
    assert found == pytest.approx(right["with_tail"], abs=1e-6)
    assert 0 <= found <= right["full"]
    assert with_others(p, q, 4, "forward") == pytest.approx(right["k=4"], abs=1e-6)


@check("d05")
def _(given, right, _folder):
    p, q = given["teacher"], given["student"]
    found = with_others(p, q, given["k"], "reverse")
    assert found == pytest.approx(right["with_tail"], abs=1e-6)
    assert by_blocks(logs(p), logs(q), "reverse")[0] == pytest.approx(right["full"], abs=1e-6)
    assert with_others(p, [0.01, 0.495, 0.495], given["k"], "reverse") > found


def learner(*keys: str) -> PPO:
    """An algorithm without models, whose teacher is a part of the advantages."""
    config = load_config([*ALONE, "teacher.model.path=teacher", "teacher.kl=sampled", *keys])
    weights: Any = None
    return PPO(config, Groups(None, None, teacher=object()), None, weights, total_iterations=1)  # ty: ignore


def advantages(mask: Any, teacher: Any, student: Any) -> Tensor:
    columns = {
        "response_mask": torch.tensor(mask).float(),
        "teacher_log_prob": torch.tensor([[float(x) for x in row] for row in teacher]),
        "old_log_probs": torch.tensor(student),
    }
    columns["token_level_scores"] = torch.zeros_like(columns["old_log_probs"])
    uids = [str(number) for number in range(len(mask))]
    batch = DataProto.from_dict(columns, {"uid": uids})
    return learner().estimate_advantages(batch, 0.0).batch["advantages"]


@check("d06")
def _(given, right, _folder):
    found = advantages(given["response_mask"], given["teacher_log_prob"], given["student_log_prob"])
    mask = torch.tensor(given["response_mask"])
    assert float(found.sum() / mask.sum()) == pytest.approx(right["mean_advantage_over_tokens"], abs=1e-6)
    assert found.isfinite().all()
    assert not found[mask == 0].any()


@check("d07")
def _(given, right, _folder):
    width = max(map(len, given["token_losses"]))
    losses = torch.tensor([[*row, *[0.0] * (width - len(row))] for row in given["token_losses"]])
    mask = torch.tensor([[1.0] * len(row) + [0.0] * (width - len(row)) for row in given["token_losses"]])
    actor = load_config([]).actor_rollout_ref.actor
    for cuts in given["cuts"]:
        parts = []
        for rows in cuts:
            objective = actor_objective(
                actor.model_copy(update={"entropy_coeff": 0}),
                **{"n_tokens": 4.0, "n_seqs": 2.0, "max_response_length": width},
                **{"teacher_coef": 1.0, "has_reward": False},
            )
            zeros = torch.zeros(len(rows), width)
            outputs = {"log_prob": zeros, "teacher_kl": losses[rows], "teacher_agrees": zeros}
            loss, metrics = objective(outputs, {"response_mask": mask[rows], "advantages": zeros})
            assert float(loss) == pytest.approx(float(metrics["teacher/kl"]))
            parts.append(float(loss))
        assert sum(parts) == pytest.approx(right["loss"], abs=1e-6)
    assert aggregate(
        losses, mask, mode="token-mean", n_tokens=4, n_seqs=2, max_response_length=width
    ) == pytest.approx(right["loss"])


@check("d08")
def _(given, right, _folder):
    value, gradient = by_blocks(
        given["teacher_logits"], given["student_logits"], "forward", words=given["words"]
    )
    assert value == pytest.approx(right["forward"], abs=1e-6)
    assert gradient[given["words"] :] == [0.0] * (len(gradient) - given["words"])


@check("d09")
def _(given, right, folder):
    pytest.importorskip("peft")
    inputs = runs.make_inputs(folder)
    keys = [
        "actor_rollout_ref.model.lora_rank=4",
        "actor_rollout_ref.model.override_config={attention_dropout: 0.5}",
    ]
    trainer = runs.train(
        runs.overrides(inputs, folder / "run", *ALONE, *keys, "teacher.model.path=reference")
    )
    worker = trainer.actor.worker
    module, seen = worker.engine.module, []
    inference = worker.engine.infer
    worker.engine.infer = lambda *args, **options: seen.append(inference(*args, **options)) or seen[-1]
    batch = one_row(advantages=torch.zeros(1, 2))
    batch.meta_info |= {"n_tokens": 2.0, "n_seqs": 1.0, "iteration": 0}
    batch.meta_info |= {"total_iterations": 1, "first_update": 0}
    first, second = worker.compute_teacher(batch), worker.compute_teacher(batch)
    assert torch.equal(first.batch["teacher_log_prob"], second.batch["teacher_log_prob"])
    assert not any(column.requires_grad for column in first.batch.values())
    worker.update_actor(batch.union(first))
    assert module.training
    assert not any(layer.disable_adapters for layer in module.adapters._layers.values())


@check("d10")
def _(given, right, _folder):
    options = {"temperature": given["temperature"]}
    assert by_blocks(given["teacher_logits"], given["student_logits"], "forward", **options)[
        0
    ] == pytest.approx(right["forward"], abs=1e-6)
    for who in ("teacher", "student"):
        hidden = torch.tensor([given[f"{who}_logits"]])
        found = token_log_probs(hidden, OutputLayer(torch.eye(3)), torch.tensor([given["token"]]), **options)
        assert float(found.log_probs_N) == pytest.approx(right[f"{who}_log_prob"], abs=1e-6)
    served = ["teacher.servers=[http://127.0.0.1:1]", "teacher.kl=sampled"]
    temperature = f"actor_rollout_ref.rollout.temperature={given['temperature']}"
    errors = check_config(load_config([*ALONE, *served, temperature])).errors
    assert any("rollout.temperature" in line for line in errors)


@check("d11")
def _(given, right, folder):
    """The log-prob at response place t is of token t after the t tokens before it: a model's own."""
    from strop.models.loader import load_causal_lm
    from strop.models.policy import PolicyModel

    tiny_model.save(folder / "model", hidden=32)
    language_model = load_causal_lm(folder / "model")
    module = PolicyModel(language_model).eval()
    prompt, responses = [5], [[6, 0, 0], [6, 6, 5]]
    mask = torch.tensor([[1.0, 0, 0], [1, 1, 1]])
    ids = torch.tensor([[*prompt, *row] for row in responses])
    attention = torch.cat([torch.ones(2, 1), mask], dim=1).long()
    columns = {
        "input_ids": ids,
        "attention_mask": attention,
        "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
        "responses": ids[:, 1:],
        "response_mask": mask,
    }
    with torch.no_grad():
        found = module(columns, words=ids.max().item() + 10)["log_prob"]
        logits = language_model(input_ids=ids).logits[..., : ids.max().item() + 10]
    expected = logits.log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None])[..., 0] * mask
    torch.testing.assert_close(found, expected)
    assert [int((row != 0).sum()) for row in found] == [len(row) for row in right["teacher_log_prob"]]


@check("d13")
def _(given, right, folder):
    del right
    enable = given["algorithm.filter_groups.enable"]
    keys = [f"algorithm.filter_groups.enable={enable}", "actor_rollout_ref.rollout.n=2"]
    config = load_config([*ALONE, "teacher.model.path=teacher", *keys])
    assert any("filter_groups" in line for line in check_config(config).errors)


@check("d14")
def _(given, right, folder):
    inputs = runs.make_inputs(folder)
    (inputs / "model" / "model.safetensors").unlink()
    table = pq.read_table(inputs / "train.parquet")
    sources = pa.array([given["rows"][row % 2] for row in range(len(table))])
    place = table.schema.names.index("data_source")
    pq.write_table(table.set_column(place, "data_source", sources), inputs / "train.parquet")
    entries = ", ".join(f"{name}: {{model: {{path: {inputs / 'model'}}}}}" for name in given["teachers"])
    keys = runs.overrides(inputs, folder / "run", *ALONE, f"teacher.by_source={{{entries}}}")
    with pytest.raises(ConfigError, match="data_source") as raised:
        build_trainer(load_config(keys))
    missing, *have = right["error_before_a_model_loads"]
    assert f"data_source {missing}; it has {', '.join(have)}" in str(raised.value)


@check("d15")
def _(given, right, _folder):
    found = advantages(*([given[name]] for name in ("response_mask", "teacher_log_prob", "student_log_prob")))
    assert found[0].tolist() == pytest.approx(right["advantage"], abs=1e-6)
    mask = torch.tensor([given["response_mask"]])
    assert int(mask.sum()) == right["tokens_in_the_denominator"]


@check("d16")
def _(given, right, _folder):
    logits = torch.tensor([given["student_logits"]], requires_grad=True)
    found = token_log_probs(
        logits, OutputLayer(torch.eye(3)), torch.tensor([given["token"]]), temperature=1.0
    )
    log_prob_BT = found.log_probs_N[None]
    found_BT = advantages([[1]], [[given["teacher_log_prob"]]], log_prob_BT.detach().tolist())
    assert float(found_BT) == pytest.approx(right["advantage"], abs=1e-6)
    actor = load_config(["actor_rollout_ref.actor.entropy_coeff=0"]).actor_rollout_ref.actor
    objective = actor_objective(actor, n_tokens=1.0, n_seqs=1.0, max_response_length=1)
    columns = {"response_mask": torch.ones(1, 1), "advantages": found_BT}
    columns["old_log_probs"] = log_prob_BT.detach()
    (gradient,) = torch.autograd.grad(objective({"log_prob": log_prob_BT}, columns)[0], logits)
    assert gradient[0].tolist() == pytest.approx(right["gradient_by_logits"], abs=1e-6)


@check("d17")
def _(given, right, folder):
    del given
    inputs = runs.make_inputs(folder)
    shutil.copytree(inputs / "model", inputs / "teacher")
    file = inputs / "teacher" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    words = tokenizer["model"]["vocab"]
    words["1"], words["2"] = words["2"], words["1"]
    file.write_text(json.dumps(tokenizer))
    for model in ("teacher", "model"):
        (inputs / model / "model.safetensors").unlink()
    keys = runs.overrides(inputs, folder / "run", *ALONE, f"teacher.model.path={inputs / 'teacher'}")
    with pytest.raises(Exception, match=r"teacher\.model\.path") as raised:
        build_trainer(load_config(keys))
    assert all(text in str(raised.value) for text in ("first, 5, is '1'", "'2' to the model"))
    assert len(right["error_before_a_model_loads"]) == 3


@check("d18")
def _(given, right, _folder):
    del right
    gradients, student = [], [0.3, 0.2, 0.5]
    for number, _ in enumerate(given["teachers"]):
        value, gradient = by_blocks([[0.5, 0.1, 0.4], [0.1, 0.6, 0.3]][number], student, "reverse")
        gradients.append(gradient)
        assert value > 0
    assert gradients[0] != gradients[1]
