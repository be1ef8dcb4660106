"""Faults that users of other systems reported, case by case: ``reported/turns.jsonl`` and ``turns_env.py``.

The folder of cases is ``../shared/cases`` or that of STROP_CASES; without it each case is skipped by name.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

from strop.algorithms.advantages import gae, grpo, reinforce_plus_plus, turns_of
from strop.data.prompts import encode_prompts
from strop.data.rl_dataset import RLHFDataset
from strop.data.sources import Rows
from strop.data.tool_calls import find_parser
from strop.errors import DataError
from strop.protocol import DataProto
from strop.rewards.manager import RewardManager
from strop.rewards.score.exact import compute_length_score
from strop.rollout.base import SamplingParams
from strop.rollout.episodes import _scores
from strop.rollout.in_flight import InFlight
from strop.trainer.metrics import batch_metrics

from byte_tokenizer import STOP, byte_tokenizer
from scripted import Script, answers, call, conversation, ended_by, environments_of

FOLDER = Path(os.environ.get("STROP_CASES", Path(__file__).parents[2] / "../shared/cases")) / "reported"
CASES: dict[str, dict[str, Any]] = {}
if FOLDER.is_dir():
    lines = (FOLDER / "turns.jsonl").read_text().splitlines()
    CASES = {case["case"]: case for case in map(json.loads, lines)}
else:
    warnings.warn(f"the reported cases are skipped: there is no {FOLDER} (STROP_CASES)", stacklevel=1)
CHECKS: dict[str, Callable[[Any, Any], None]] = {}


def check(*names: str) -> Callable[[Callable[[Any, Any], None]], Callable[[Any, Any], None]]:
    """Register the check (given, right) of some cases; for classes of ``turns_env`` given is the class."""

    def registered(function: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        CHECKS.update(dict.fromkeys(names, function))
        return function

    return registered


class Answers:
    """Answers the first turn with a column of its row."""

    def reset(self, **row):
        pass

    def respond(self, response, turn, answer):
        return answer if turn == 0 else None


def f(a: int) -> str:
    """Count.

    Args:
        a: A number.
    """
    return str(a)


F = environments_of(f).schemas[""]


@check("t01", "t03")
def _(given, right):
    script = Script(
        environments_of(own=Answers),
        [[given["turn_1_ids"], given["turn_2_ids"]]],
        rows={"answer": [given["answer"]]},
        prompt=given["messages"],
    )
    assert script.prompt_ids == right["prompt_ids"]
    _require_tokens(script.play(), right)


def _require_tokens(result: DataProto, right: dict[str, Any]) -> None:
    ids, mask = right["response_ids"], right["response_mask"]
    assert result.batch["responses"][0, : len(ids)].tolist() == ids
    assert result.batch["response_mask"][0].tolist() == [*mask, *[0] * (2000 - len(mask))]


@check("t02")
def _(given, right):
    async def g() -> str:
        """Return y."""
        return "y"

    async def slow_f(a: int) -> str:
        """Return x, later.

        Args:
            a: A number.
        """
        await asyncio.sleep(0.2)
        return "x"

    slow_f.__name__ = "f"
    result = Script(environments_of(slow_f, g), [[given["turn_1_ids"], given["turn_2_ids"]]]).play()
    _require_tokens(result, right)
    assert encode_prompts([given["messages"]], byte_tokenizer())[0] == right["prompt_ids"]


@check("t04")
def _(given, right):
    result = Script(environments_of(f), [[given["turn_1_ids"]]], turn_length=given["turn_length"]).play()
    _require_tokens(result, right)
    assert ended_by(result) == [right["ended_by"]]
    assert [result.batch[f"n_{name}"].tolist() for name in ("calls", "malformed")] == [[0], [0]]


@check("t05a", "t05b", "t05c")
def _(given, right):
    parse = find_parser(given["parser"], byte_tokenizer(), {}, [], pytest.fail)
    turn = parse(given["turn"], given["prompt_end"], F)
    assert [[name, arguments] for name, arguments, _ in turn.calls] == right["calls"]
    assert not turn.malformed
    assert turn.content == right.get("content", turn.content)


@check("t06a", "t06b", "t06c", "t06d")
def _(given, right):
    result = Script(environments_of(f), [[given["turn"], "end"]], malformed=given["malformed"]).play()
    assert ended_by(result) == ["stop"]
    calls = [[one["name"], one["arguments"]] for one in conversation(result)[0]["calls"]]
    found = {"malformed": result.batch["n_malformed"].item(), "calls": calls}
    assert any(found | one == found for one in right.get("either", [{"malformed": right.get("malformed")}]))
    for name in right.get("answer_names", ()):
        assert name in answers(result)[0]


@check("t07")
def _(given, right):
    (ids,) = encode_prompts([given["prompt"]], byte_tokenizer())
    assert ids == right["prompt_ids"]
    text = byte_tokenizer().decode(ids)
    assert right["contains"] in text
    assert right["never"] not in text


def _scored(result: DataProto, function: Callable[..., float], truth: str = "x", **options: Any) -> Any:
    """Return the rewards of a function, which runs in another process."""
    n = len(result)
    columns = {"data_source": ["d"] * n, "ground_truth": [truth] * n, "uid": ["u"] * n}
    texts = {"conversation": result.non_tensor_batch["conversation"]}
    batch = DataProto.from_dict(result.batch, non_tensors={**texts, **columns})
    manager = RewardManager(byte_tokenizer(), 0, function, **options)
    try:
        return manager(batch)
    finally:
        manager.close()


@check("t08")
def _(given, right):
    rows = {"answer": ["go on"]}
    result = Script(environments_of(own=Answers), [given["turns"]], rows=rows).play()
    expected = [right["response"], right["last_turn"], right["turns"]]

    def score(response, last_turn, turns):
        return float([response, last_turn, [turn.text for turn in turns]] == expected)

    assert float(_scored(result, score).token_level_scores.sum()) == 1


@check("t09")
def _(given, right):
    def says(a: int) -> str:
        """Return the answer.

        Args:
            a: A number.
        """
        return "42"

    says.__name__ = "f"
    result = Script(environments_of(says), [[given["turn_1"], given["turn_2"]]]).play()
    assert answers(result) == [given["answer"]["content"]]

    def contains(response, ground_truth):
        return float(ground_truth in response) + 0.5

    scores = _scored(result, contains, given["ground_truth"]).token_level_scores[0]
    assert scores.nonzero()[:, 0].tolist() == [int(result.batch["response_mask"][0].nonzero().max())]
    assert float(scores.sum()) == 0.5 + right["score_of_contains"]


@check("t12")
def _(given, right):
    def fails() -> str:
        """Fail."""
        raise TimeoutError

    script = Script(environments_of(fails), [["1"], ["0"], ["1"], [call("fails")]], n=4, error="end")
    result = script.play()
    assert ended_by(result) == given["ended_by"]
    output = _scored(result, lambda response: float(response), max_error_rate=1.0)
    assert [bool(error) for error in output.errors] == right["reward_failed"]
    mask = result.batch["response_mask"]
    assert int(mask[3].sum()) == right["tokens_of_4_in_the_loss"]
    advantages, _ = grpo(output.token_level_scores, mask, ["a"] * 4, norm_by_std=False)
    torch.testing.assert_close(advantages[:, 0], torch.tensor(right["advantages"]))


@check("t13")
def _(given, right):
    cls = type("Reveals", (_module().Secret,), {"respond": _reveal})
    n = given["n"]
    groups = given["prompts"] * given["steps"]
    script = Script(environments_of(own=cls), [["a", "b"]] * n * groups, n=n)
    result = script.play()
    secrets = [answers(result, row)[0] for row in range(n * groups)]
    by_group = [set(secrets[first : first + n]) for first in range(0, n * groups, n)]
    assert [len(group) for group in by_group] == [right["secrets_in_a_group"]] * groups
    assert len(set().union(*by_group)) > 1


def _reveal(self, response, turn):
    return str(self.secret) if turn == 0 else None


@check("t14")
def _(given, right):
    mask = torch.tensor([given["response_mask"]]).float()
    for poison in (0.0, 7.0):
        rewards, values = (
            torch.tensor([given[name]], dtype=torch.float64) + poison * (1 - mask)
            for name in ("rewards", "values")
        )
        found, _ = gae(rewards, values, mask, gamma=given["gamma"], lam=given["lambda"], whiten=False)
        torch.testing.assert_close(found[0], torch.tensor(right["gae"], dtype=torch.float64))
        _, returns = reinforce_plus_plus(rewards, mask, gamma=given["gamma"], whiten=False)
        expected = torch.tensor(right["reinforce_plus_plus_returns"], dtype=torch.float64)
        torch.testing.assert_close(returns[0], expected)


@check("t15")
def _(given, right):
    mask = torch.tensor([given["response_mask"]])
    assert turns_of(mask).tolist() == [right["turn"]]
    assert int(turns_of(mask).max()) + 1 == right["n_turns"]
    ids = torch.ones(1, 1, dtype=torch.long)
    prompt = DataProto.from_dict(
        {"input_ids": ids, "attention_mask": ids, "position_ids": ids - 1, "seeds": ids}
    )
    batch = InFlight(prompt, SamplingParams(max_tokens=mask.shape[1]), turn_length=9)
    batch.versions[0] = mask[0] - 1
    assert _scores(batch, 0, given["turn_rewards"]).tolist() == right["environment_scores"]


@check("t16")
def _(given, right):
    script = [[*[100] * 3, STOP], [*[100] * 4, STOP]]
    result = Script(environments_of(own=Answers), [script], rows={"answer": [""]}).play()
    mask = result.batch["response_mask"]
    n_tokens = len(given["response_mask"])
    assert mask[0].tolist() == [*given["response_mask"], *[0] * (2000 - n_tokens)]

    def length(response, n_response_tokens):
        return compute_length_score(response, n_tokens=n_response_tokens, **given["scorer"])

    counted = _scored(result, lambda n_response_tokens: float(n_response_tokens))
    assert float(counted.token_level_scores.sum()) == right["n_tokens"]
    output = _scored(result, length)
    assert float(output.token_level_scores.sum()) == right["penalty"]
    zeros = torch.zeros_like(mask)
    names = ("token_level_scores", "token_level_rewards", "advantages", "returns")
    batch = DataProto({**result.batch, **dict.fromkeys(names, zeros)}).union(
        DataProto.from_dict(non_tensors={"uid": ["u"]})
    )
    assert (
        batch_metrics(batch, max_prompt_length=999)["response_length/mean"] == right["response_length_metric"]
    )


@check("t17")
def _(given, right):
    rows = [{**row, "data_source": "d"} for row in given["rows"]]
    tools_of = environments_of(**dict.fromkeys(given["environments"], Answers)).tools_of
    with pytest.raises(DataError) as error:
        RLHFDataset(Rows("rows", rows), byte_tokenizer(), max_prompt_length=999, tools_of=tools_of)
    for word in right["error_before_a_model_loads"]:
        assert word in str(error.value)


class Counter:
    """A server's connection: it counts, and ends with its process when that is killed."""

    def __init__(self):
        self.count = 0

    def inc(self) -> str:
        """Count."""
        self.count += 1
        return str(self.count)


@check("t18")
def _(given, right):
    said = [call("inc")] * given["each_calls_inc"]
    for processes in (1, 2):
        script = Script(environments_of(Counter), [[*said, "end"]] * given["samples"], processes=processes)
        script.decode()
        script.episodes.answer([(script.batch, row) for row in range(given["samples"])])
        for process in script.pool._processes:  # killed between the calls
            if process._child is not None:
                process._child.process.kill()
                os.waitid(os.P_PID, process._child.process.pid, os.WEXITED | os.WNOWAIT)
        result = script.play()
        assert [answers(result, row) for row in range(given["samples"])] == [
            right["answers_of_each_sample"]
        ] * 2


@check("t19")
def _(given, right):
    def says() -> str:
        """Say."""
        return text

    text, tokenizer = given["answer"]["content"], byte_tokenizer()
    result = Script(
        environments_of(says), [[call("says"), "end"]], answer_length=given["answer_length"]
    ).play()
    (cut,) = answers(result)
    assert (
        len(tokenizer(cut, add_special_tokens=False)["input_ids"]) <= right["tokens_of_cut_message_at_most"]
    )
    said = tokenizer.decode(result.batch["responses"][0])
    assert cut + right["bridge_ends_with"] + "end" in said
    assert "\ufffd" not in said
    assert cut.startswith(right["begins_with"])
    assert cut.endswith(right["ends_with"])
    assert "left out" in cut


@check("Submit", "LastTurn")
def _(cls, right):
    limit = getattr(cls, "max_turns", 8)
    result = Script(environments_of(own=cls), [cls.script], max_turns=limit).play()
    assert ended_by(result) == [right["ended_by"]]
    assert result.batch["n_turns"].tolist() == [right["n_turns"]]
    assert float(result.batch["environment_scores"].sum()) == right["reward"]
    said = conversation(result)
    assert [turn["text"] for turn in said] == cls.script[: right["n_turns"]]
    assert not said[-1]["answers"]


@check("Types")
def _(cls, right):
    result = Script(environments_of(own=cls), [cls.script]).play()
    *found, error = answers(result)
    assert found == right["answers"][:-1]
    assert error == "error: ValueError: no such thing"
    assert result.batch["n_errors"].tolist() == [right["errors"]]


@check("Secret")
def _(cls, right):
    CHECKS["t13"](CASES["t13"]["given"], CASES["t13"]["right"] | right)


@check("Shared")
def _(cls, right):
    scripts = [[call("size_of"), "end"]] * 4
    result = Script(environments_of(own=cls), scripts, n=2, rows={"items": [[], []]}).play()
    assert [answers(result, row) for row in range(4)] == [["1"]] * 4


@check("Flaky")
def _(cls, right):
    result = Script(environments_of(own=cls), [["a"]] * 4, rows={"number": [0, 1, 2, 3]}).play()
    assert ended_by(result) == ["environment", "error"] * 2
    output = _scored(result, lambda response: 1.0, max_error_rate=1.0)
    assert [bool(error) for error in output.errors] == [False, True] * 2
    with pytest.raises(Exception, match="service away"):
        _scored(result, lambda response: 1.0)


def _module() -> Any:
    spec = importlib.util.spec_from_file_location("turns_env", FOLDER / "turns_env.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["turns_env"] = module
    spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)
    return module


@pytest.mark.parametrize("name", CHECKS)
def test_reported(name):
    if not CASES:
        pytest.skip(f"there is no {FOLDER} (STROP_CASES)")
    if name in CASES:
        CHECKS[name](CASES[name]["given"], CASES[name]["right"])
    else:
        cls = getattr(_module(), name)
        CHECKS[name](cls, cls.right)


def test_each_reported_case_is_checked():
    if not CASES:
        pytest.skip(f"there is no {FOLDER} (STROP_CASES)")
    classes = {name for name, value in vars(_module()).items() if isinstance(value, type)}
    assert CASES.keys() | classes == CHECKS.keys()
