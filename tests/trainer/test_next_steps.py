"""The commands that a run ends with."""

from __future__ import annotations

import shlex
from types import SimpleNamespace

from strop.config.load import load_config
from strop.passed import passing
from strop.trainer.loop import Run

REQUIRED = ["actor_rollout_ref.model.path=m", "data.train_files=a.jsonl"]


def keys_of_evaluation(*overrides: str) -> list[str]:
    run = SimpleNamespace(trainer=SimpleNamespace(config=load_config([*REQUIRED, *overrides])))
    return shlex.split(Run._evaluation_keys(run))


def test_an_evaluation_is_named_with_what_makes_its_prompts():
    prompt = 'Say "yes", (or {no}): a=b'
    written = [
        "data.chat_template=a b/tools.jinja",
        "data.answer_key=answer",
        "data.system_prompt='" + prompt + "'",
        "environment.path=game.py:Game",
        "data.train_batch_size=4",
    ]
    named = keys_of_evaluation(*written)
    assert sorted(key.partition("=")[0] for key in named) == [
        "data.answer_key",
        "data.chat_template",
        "data.system_prompt",
        "environment.path",
    ]
    config = load_config([*REQUIRED, *named])  # the parser of overrides reads them back
    assert (config.data.system_prompt, config.data.chat_template) == (prompt, "a b/tools.jinja")
    assert keys_of_evaluation() == []


def test_an_evaluation_is_named_with_the_reward_of_the_run():
    written = ["custom_reward_function.path=a b/reward.py", "data.data_source=mine"]
    assert keys_of_evaluation(*written) == ["--reward", "a b/reward.py", "data.data_source=mine"]
    written.append("custom_reward_function.name=other")
    assert keys_of_evaluation(*written)[:2] == ["--reward", "a b/reward.py:other"]
    judged = keys_of_evaluation("reward_model.enable=True", "reward_model.model.path=models/judge")
    assert judged == ["--reward-model", "models/judge"]
    with passing({"function:right-12ab": lambda response: 1.0}):
        of_program = keys_of_evaluation("custom_reward_function.path=function:right-12ab")
    assert of_program == ["--reward", "FILE.py:right"]


def test_an_evaluation_is_named_with_the_parts_of_a_score_and_with_values_of_any_form():
    parts = {"rule": 0, "num": {"scorer": "gsm8k", "kwargs": {"method": "flexible"}}}
    written = [
        "reward_model.parts.num={scorer: gsm8k, kwargs: {method: flexible}}",
        "reward_model.parts.rule=0",
        "reward_model.judge.url=http://127.0.0.1:8000",
        'reward_model.judge.rubric="Rate (it), from {response}: "',
        "data.image_key=photo",
        "data.max_pixels=4096",
        "data.data_source=null",
        "data.apply_chat_template_kwargs.enable_thinking=false",
        "environment.path={a: 'game (1).py:Game', b: 'other.py:make'}",
        "environment.tools=[tools.py:f, 'mcp:run (x, y)']",
    ]
    named = keys_of_evaluation(*written)
    found, expected = load_config([*REQUIRED, *named]), load_config([*REQUIRED, *written])
    assert (found.data, found.reward_model) == (expected.data, expected.reward_model)
    assert found.environment == expected.environment
    assert (found.reward_model.parts, found.data.data_source) == (parts, None)
    with passing({"function:one-12ab": len, "function:two-34cd": len}):
        functions = (
            "reward_model.parts={one: {scorer: 'function:one-12ab'}, two: {scorer: 'function:two-34cd'}}"
        )
        (of_program,) = keys_of_evaluation(functions)
    assert of_program == "reward_model.parts={one: {scorer: FILE.py:one}, two: {scorer: FILE.py:two}}"
