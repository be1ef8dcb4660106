"""HTTP rollouts on fake servers, and one of vLLM's."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import torch

from strop.config.load import load_config
from strop.environments.loading import load_environments
from strop.environments.pool import EnvironmentPool
from strop.passed import passing
from strop.rollout.episodes import Episodes
from strop.rollout.http import start
from strop.rollout.http.engine import HTTPRollout, require_held
from strop.rollout.http.pool import Pool
from strop.rollout.http.wire import ARGUMENTS, facts_of
from strop.rollout.turn_format import TurnFormat
from strop.rollout.vllm.arguments import FIXED, model_facts
from strop.rollout.vllm.checkpoint import CheckpointWeights

import tiny_model
from fake_vllm import FACTS, GENERATE
from tiny_lms import EOS, PAD, tiny_lm

COMPARED = ("dtype", "quantization", "logprobs_mode", "generation_config", "max_model_len", "unsupported")
EXPECTED = {name: FACTS[name] for name in COMPARED}
SETTINGS = {
    "min_servers": 1,
    "max_restarts": 3,
    "retries": 2,
    "deadline_s": None,
    "patience_s": 20.0,
    "proxy": None,
    "token_env": None,
    "open_network": False,
}


def rollout_on(
    *servers: Any,
    urls: Any = None,
    sampling: Any = None,
    folder: Any = None,
    token: Any = None,
    slots: int = 8,
    fixed_slots: bool = False,
    own: Any = (),
    broadcasts: bool = False,
    **given: Any,
) -> Any:
    """A rollout with the weights of ``tiny_lm("qwen2")`` on these servers."""
    model = tiny_lm("qwen2")
    weights = CheckpointWeights(model)
    settings = {**SETTINGS, "urls": urls or [server.url for server in servers], **given}
    expected, verify = EXPECTED | model_facts(model.config), partial(require_held, weights, torch.float32)
    rollout = HTTPRollout(
        weights,
        Pool(
            SimpleNamespace(**settings),
            expected,
            model.config.vocab_size,
            token,
            own,
            verify,
            weights=weights.names,
            broadcasts=broadcasts,
        ),
        dtype=torch.float32,
        slots=slots,
        fixed_slots=fixed_slots,
        pad_token_id=PAD,
        eos_token_ids=[EOS],
        hidden_token_ids=[EOS],
        sampling=sampling,
        folder=folder,
    )
    rollout.update_weights(model.named_parameters())
    return rollout


def episodes_of(kind: type, **settings: Any) -> Episodes:
    """Episodes of the environment ``kind`` in texts of the tiny tokenizer."""
    cloudpickle.register_pickle_by_value(sys.modules[kind.__module__])  # else its process imports torch
    name = f"function:{kind.__name__}-0"
    config = load_config(["actor_rollout_ref.model.path=m", "data.train_files=f"])
    section = config.environment.model_copy(update={"path": {"": name}, **settings})
    with passing({name: kind}):
        environments = load_environments(section)
    assert environments is not None
    whole = config.model_copy(update={"environment": section})
    form = TurnFormat(whole, environments, tiny_model.build_tokenizer(), [EOS])
    return Episodes(environments, section, form, EnvironmentPool(environments, section))


def kill_amid(server: Any) -> None:
    """Kill the server while it answers its next request: by the request, as a busy machine has no clock."""
    server.seen.clear()

    def watch() -> None:
        while GENERATE not in server.paths():
            time.sleep(0.005)
        server.kill()

    threading.Thread(target=watch, daemon=True).start()


def counts(rollout: Any) -> dict[str, float]:
    """Return the counts since they were last taken."""
    return rollout._pool.take_counts()


@contextlib.contextmanager
def real_server(folder, *more):
    """The URL of vLLM's server of the model in ``folder``, whose token is "secret", once it answers."""
    free = socket.socket()  # bound while vLLM starts, which sets the same option: no other test gets the port
    free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    free.bind(("127.0.0.1", 0))
    port = str(free.getsockname()[1])
    arguments = {
        "model": str(folder / "model"),
        "dtype": "float32",
        "max_model_len": 64,
        **FIXED,
        **ARGUMENTS,
    }
    arguments |= {"enforce_eager": True, "kv_cache_memory_bytes": 60_000_000, "max_num_seqs": 8}
    line = start.command(arguments, ["--host", "127.0.0.1", "--port", port, *more])
    own = tempfile.mkdtemp()  # vLLM's sockets are in it, whose paths have 107 characters at most
    guard = [sys.executable, "-P", "-m", "strop.rollout.http.start", own, *line]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            guard, stdin=subprocess.PIPE, stdout=log, stderr=log,
            env=start.environment("secret", Path(own), "a test's"),
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        while isinstance(facts_of([url], "secret", None)[url], Exception):
            assert process.poll() is None, (folder / "log").read_text()[-3000:]
            time.sleep(1)
        yield url
    finally:
        free.close()
        process.communicate()
        shutil.rmtree(own, ignore_errors=True)
