"""The YAML of the reference document, taken from the document itself, trains."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from runs import make_inputs, metrics

DOCUMENT = Path(__file__).resolve().parents[2] / ".." / "shared" / "reference" / "config_explanation.rst"


def test_the_reference_documents_yaml_trains_one_step(tmp_path):
    if not DOCUMENT.is_file():
        pytest.skip(f"the reference document is not there: {DOCUMENT}")
    blocks = re.findall(r"\.\. code:: yaml\n\n((?: {3}.*\n|\n)+)", DOCUMENT.read_text())
    (tmp_path / "reference.yaml").write_text("".join(textwrap.dedent(block) for block in blocks))
    inputs = make_inputs(tmp_path)
    command = [
        *(sys.executable, "-m", "strop.trainer.main_ppo"),
        f"--config-path={tmp_path / 'reference.yaml'}",
        f"data.train_files={inputs / 'train.parquet'}",
        f"data.val_files={inputs / 'val.parquet'}",
        f"actor_rollout_ref.model.path={inputs / 'model'}",
        "actor_rollout_ref.rollout.name=hf",
        "trainer.n_gpus_per_node=1",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "data.max_prompt_length=8",
        "data.max_response_length=4",
        "+trainer.total_training_steps=1",
        "+trainer.device=cpu",
        f"+data.cache_dir={inputs / 'cache'}",
    ]
    # The document logs to console and wandb; what wandb left behind in this process must not reach it.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    environment |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    run = tmp_path / "checkpoints" / "verl_examples" / "gsm8k"
    assert [line["step"] for line in metrics(run)] == [0, 1]
    assert "critic/kl" in metrics(run)[-1]  # kl_coef 0.005 brings the reference model
    assert list(run.rglob("*.wandb"))
