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
    assert [key.partition("=")[0] for key in named] == [
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
