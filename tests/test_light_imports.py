"""Commands and packages that start without heavy packages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from strop.cli.without_torch import needs_torch
from strop.config.load import load_config

import tiny_model

CHECK = (
    "strop.config.checks.check.check(strop.config.load.load_config(['actor_rollout_ref.rollout.name=hf']))"
)


@pytest.mark.parametrize(
    ("modules", "then", "heavy"),
    [
        (
            "strop.config.load strop.config.checks.check strop.cli.check",
            CHECK,
            "torch transformers pyarrow numpy ray",
        ),
        ("strop.cli.score", "", "torch transformers ray"),
        (
            "strop.api",
            "(strop.train, strop.Run, dir(strop))",
            "torch transformers pyarrow numpy pandas rich ray",
        ),
        (
            "strop.cli.prepare strop.data.prompt_table strop.prepare.arithmetic strop.prepare.maths",
            "",
            "torch transformers",
        ),
        (
            "strop.tracking.jsonl strop.tracking.console strop.tracking.curves strop.tracking.lengths "
            "strop.tracking.samples",
            "",
            "torch matplotlib wandb tensorboard",
        ),
    ],
)
def test_heavy_packages_are_not_imported(modules: str, then: str, heavy: str):
    code = f"import sys, {', '.join(modules.split())}\n{then}\nprint(set({heavy.split()}) & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout.strip(), done.stderr) == ("set()", "")


@pytest.mark.parametrize("module", ["strop.rollout.vllm.keys", "strop.engines.megatron.keys"])
def test_keys_of_a_back_end_can_be_imported_first(module: str):
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True)


@pytest.mark.parametrize(
    ("words", "verdict"),
    [
        ("{model} {data}/sums.csv --reward {data}/sums_reward.py data.answer_key=answer", "no errors"),
        ("--command train actor_rollout_ref.model.path={model} data.train_files={data}/sums.csv", "1 error"),
        ("--command sft {model} {data}/sums.csv data.response_key=answer", "no errors"),
        ("{model} {data}/none.csv --reward {data}/sums_reward.py", "1 error"),
    ],
)
def test_a_check_runs_without_torch(tmp_path, words: str, verdict: str):
    tiny_model.save(tmp_path)
    examples = Path(tiny_model.__file__).parent
    code = "import sys\nfrom strop.cli.main import main\nmain()\nprint({'torch._C'} & set(sys.modules))"
    command = words.format(model=tmp_path, data=examples).split()
    done = subprocess.run([sys.executable, "-c", code, "check", *command], capture_output=True, text=True)
    first, *_, last = done.stdout.splitlines()
    assert (first.startswith(verdict), last, "PyTorch" in done.stderr) == (True, "set()", False), done


@pytest.mark.parametrize(
    "key",
    [
        "custom_reward_function.path={folder}/{name}.py",
        "environment.path={folder}/{name}.py:Own",
        "environment.tools=[{folder}/{name}.py:f]",
        "environment.tools=['mcp:python {folder}/{name}.py']",
        "reward_model.reward_manager={name}:f",
    ],
)
def test_a_check_loads_torch_for_files_of_users_that_name_it(tmp_path, monkeypatch, key):
    (tmp_path / "heavy_file.py").write_text("import torch")
    (tmp_path / "light_file.py").write_text("import json")
    monkeypatch.syspath_prepend(tmp_path)
    keys = ["actor_rollout_ref.model.path=m", "data.train_files=f"]
    given = [key.format(folder=tmp_path, name=name) for name in ("heavy_file", "light_file")]
    assert [needs_torch(load_config([*keys, one])) for one in given] == [True, False]
    assert not needs_torch(load_config([*keys, 'environment.tools=["mcp:python \'x"]']))  # an open quote
