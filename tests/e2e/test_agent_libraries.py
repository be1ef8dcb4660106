"""Programs of other libraries, as in docs/agents.md: one hash, whatever their delays, and after kill -9.

The libraries are no part of the tests' packages: pip install openai-agents 'smolagents[openai]'.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest

from strop.tracking.jsonl import read_metrics

import tiny_model
from byte_tokenizer import byte_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
PAGE = Path(__file__).parents[2] / "docs" / "agents.md"
CALLS = '''
def calls(text):
    """A call in half of the answers."""
    return [("look_up", {"word": text[:6]})] if sum(map(ord, text)) % 2 else []

def right(response):
    return float(len(response) % 3)
'''
LATE = "    import random, time\n    time.sleep(random.SystemRandom().random() * 0.5)\n    return {"
STOPS = [*range(32 + 0xC0, 32 + 0x100)]  # bytes that no text of the template has


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    tokenizer = byte_tokenizer()
    model = tiny_model.build_model(tokenizer, seed=3)
    model.config.max_position_embeddings = 16384
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "calls.py").write_text(CALLS)
    rows = [{"prompt": f"Which number belongs to word {number}?"} for number in range(12)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for name, text in re.findall(r"^```python\n# (\w+)\.py\n(.*?)^```$", PAGE.read_text(), re.S | re.M):
        (folder / f"{name}.py").write_text(text)
        (folder / f"{name}_late.py").write_text(text.replace("    return {", LATE))
    return folder


def _started(inputs, run, program):
    options = {
        "custom_reward_function.path": inputs / "calls.py",
        "custom_reward_function.name": "right",
        "agent.path": f"{inputs / program}.py:run",
        "agent.parser": f"{inputs / 'calls.py'}:calls",
        "agent.max_calls": 4,
        "data.train_batch_size": 4,
        "data.max_prompt_length": 14000,
        "data.max_response_length": 8000,
        "actor_rollout_ref.rollout.name": "hf",
        "actor_rollout_ref.rollout.stop_token_ids": STOPS,
        "trainer.device": "cpu",
        "trainer.save_freq": 1,
    }
    command = [sys.executable, "-m", "strop", "train", inputs / "model", inputs / "rows.jsonl"]
    command += ["--steps", "3", "--n", "2", "--out", run, *(f"{name}={one}" for name, one in options.items())]
    with (run.parent / f"{run.name}.log").open("ab") as log:
        return subprocess.Popen([*map(str, command)], stdout=log, stderr=log)


@pytest.mark.parametrize(
    ("program", "package"), [("openai_agents", "openai-agents"), ("small", "smolagents")]
)
def test_a_program_of_a_library_trains_one_hash(inputs, tmp_path, program, package):
    if not any(metadata.distributions(name=package)):  # benchmarks have a module agents, too
        pytest.skip(f"needs {package}")
    hashes = []
    for name, own in (("at_once", program), ("late", f"{program}_late"), ("killed", f"{program}_late")):
        run = tmp_path / name
        if name == "killed":
            process = _started(inputs, run, own)
            metrics = run / "metrics.jsonl"
            while process.poll() is None and not (metrics.exists() and metrics.read_bytes()):
                time.sleep(0.1)
            time.sleep(2)
            process.kill()
            process.wait()
        process = _started(inputs, run, own)
        assert process.wait() == 0, (tmp_path / f"{name}.log").read_text()[-3000:]
        lines = [line for line in read_metrics(run / "metrics.jsonl") if line["step"]]
        assert len(lines) == 3
        assert max(line["turns/mean"] for line in lines) > 1
        hashes.append(hashlib.sha256((run / "final_model" / "model.safetensors").read_bytes()).hexdigest())
    assert hashes[0] == hashes[1] == hashes[2]
