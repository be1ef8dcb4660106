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


def test_checks_run_without_torch(tmp_path):
    tiny_model.save(tmp_path)
    model, data = tmp_path, Path(tiny_model.__file__).parent
    reward = f"--reward {data}/sums_reward.py"
    verdicts = {
        f"{model} {data}/sums.csv {reward} data.answer_key=answer": "no errors",
        f"--command train actor_rollout_ref.model.path={model} data.train_files={data}/sums.csv": "1 error",
        f"--command sft {model} {data}/sums.csv data.response_key=answer": "no errors",
        f"{model} {data}/none.csv {reward}": "1 error",
    }
    code = (
        "import sys\nfrom strop.cli.main import main\nfor words in sys.argv[1:]:\n"
        " print('---')\n sys.argv = ['strop', 'check', *words.split()]\n main()\n"
        "print({'torch._C'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code, *verdicts], capture_output=True, text=True)
    _, *checks = done.stdout.split("---\n")
    for check, verdict in zip(checks, verdicts.values(), strict=True):
        assert check.startswith(verdict), done
    assert (done.stdout.splitlines()[-1], "PyTorch" in done.stderr) == ("set()", False), done


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
    (tmp_path / "light_file.py").write_text("import json\nimport also_light")
    (tmp_path / "also_light.py").write_text("import re")
    monkeypatch.syspath_prepend(tmp_path)
    keys = ["actor_rollout_ref.model.path=m", "data.train_files=f"]
    given = [key.format(folder=tmp_path, name=name) for name in ("heavy_file", "light_file")]
    assert [needs_torch(load_config([*keys, one])) for one in given] == [True, False]
    (tmp_path / "also_light.py").write_text("from transformers import AutoModel")
    assert needs_torch(load_config([*keys, given[1]]))
    assert not needs_torch(load_config([*keys, 'environment.tools=["mcp:python \'x"]']))  # an open quote
