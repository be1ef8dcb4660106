"""The commands that a run ends with."""

from __future__ import annotations

import shlex
from types import SimpleNamespace

from strop.config.load import load_config
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
