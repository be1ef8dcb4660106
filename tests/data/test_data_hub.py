"""Names on the Hugging Face hub: what is fetched, how often, and what is said when it cannot be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hub import COMMIT, Hub, cache_by_hand, serving
from huggingface_hub import constants
from safetensors.numpy import save

from strop.data import hub
from strop.data.hub import is_hub_name, local_model, local_tokenizer
from strop.errors import ModelError

from builders import write_prompts
from messages import mentions, naming

NAME = "org/tiny"
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
INDEX = {"weight_map": {"a": SHARDS[0], "b": SHARDS[1], "c": SHARDS[0]}}
SMALL = ["config.json", "generation_config.json", "model.safetensors.index.json", "own_code.py",
         "templates/chat.jinja", "tokenizer.json"]  # fmt: skip
FILES = {
    **{file: file.encode() for file in (*SMALL, *SHARDS)},
    "model.safetensors.index.json": json.dumps(INDEX).encode(),
    **dict.fromkeys(
        ["pytorch_model.bin", "consolidated.safetensors", "tiny-q8.gguf", "original/consolidated.00.pth",
         "original/params.json", "onnx/model.onnx", "tf_model.h5", "README.md", "picture.png"],
        b"not needed",
    ),
}  # fmt: skip
FIND = """
import sys
from strop.data import hub
from strop.errors import ModelError
try:
    print(getattr(hub, sys.argv[1])(sys.argv[2], sys.argv[3]))
except ModelError as error:
    print(error)
"""


class Machine:
    """Processes with a home of their own, which reach a hub."""

    def __init__(self, home: Path, url: str, **environment: str) -> None:
        self.home = home
        self._environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_ENDPOINT": url,
            "HF_HOME": str(home / "hf"),
            "no_proxy": "127.0.0.1",
            **environment,
        }
        self._environment.pop("HF_HUB_CACHE", None)

    def start(self, *arguments: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, *arguments],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def leave_network(self) -> Machine:
        """Ask an address from now on at which no server of another test can be: port 1 is never assigned."""
        self._environment["HF_ENDPOINT"] = "http://127.0.0.1:1"
        return self

    def find(self, function: str, name: str = NAME) -> subprocess.Popen:
        return self.start("-c", FIND, function, name, str(self.home / "strop"))


def answer(process: subprocess.Popen) -> str:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    return out.strip()


def test_a_machine_fetches_what_it_needs_and_once(tmp_path):
    with serving(Hub(NAME, FILES)) as server:
        machine = Machine(tmp_path, server.url)
        folder = Path(answer(machine.find("local_tokenizer")))
        assert folder == tmp_path / "hf/hub/models--org--tiny/snapshots" / COMMIT
        assert server.files == SMALL
        both = [machine.find("local_model"), machine.find("local_model")]
        assert [Path(answer(process)) for process in both] == [folder, folder]
        assert server.files == sorted([*SMALL, *SHARDS])
        assert (folder / SHARDS[1]).read_bytes() == SHARDS[1].encode()
        asked = len(server.requests)
        assert Path(answer(machine.find("local_model"))) == folder
        assert len(server.requests) == asked  # what is whole is taken as it is
    machine.leave_network()
    assert Path(answer(machine.find("local_model"))) == folder
    (folder / "own_code.py").unlink()
    process = machine.find("local_model")
    assert "1 file(s) are missing (own_code.py)" in process.communicate()[1]
    (folder / "generation_config.json").unlink()
    text = answer(machine.find("local_model"))
    assert mentions(text, NAME, folder, "generation_config.json")


@pytest.mark.slow
def test_the_rate_of_a_recipe_needs_no_weights_of_a_model_on_the_hub(tmp_path):
    shape = {"hidden_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1, "vocab_size": 10}
    weights = save({"weight": np.zeros(133_000, dtype=np.int8)})
    files = {"config.json": json.dumps(shape).encode(), "model.safetensors": weights}
    data = write_prompts(tmp_path / "train.parquet", 20)
    command = ["-m", "strop", "check", "--config-only", "--full", "--recipe", "grpo"]
    command += [f"actor_rollout_ref.model.path={NAME}", f"data.train_files={data}"]
    command += ["actor_rollout_ref.rollout.name=hf"]
    with serving(Hub(NAME, files)) as server:
        machine = Machine(tmp_path, server.url)
        assert "lr: 0.0005  # derived" in answer(machine.start(*command))  # 1e-5 x (1e8 / 133,000)^0.6
    assert not list((tmp_path / "hf").rglob("model.safetensors"))
    other = Machine(tmp_path / "other", server.url).leave_network()
    assert "lr: 1.0e-06  # derived" in answer(other.start(*command))


def test_what_another_program_has_put_into_the_cache_is_not_fetched_again(tmp_path):
    (tmp_path / "model").mkdir()
    for file in ("config.json", *SHARDS, "model.safetensors.index.json"):
        (tmp_path / "model" / file).write_bytes(FILES[file])
    snapshot = cache_by_hand(tmp_path / "hf/hub", NAME, tmp_path / "model")
    with serving(Hub(NAME, FILES)) as server:
        assert Path(answer(Machine(tmp_path, server.url).find("local_model"))) == snapshot
        missing = sorted(set(SMALL) - {"config.json", "model.safetensors.index.json"})
        assert server.files == missing


def test_a_gguf_file_is_its_own_tokenizer(tmp_path):
    with serving(Hub(NAME, {"README.md": b"", "tiny-q8.gguf": b"weights"})) as server:
        folder = Path(answer(Machine(tmp_path, server.url).find("local_tokenizer")))
    assert [path.name for path in folder.iterdir()] == ["tiny-q8.gguf"]


def test_an_unknown_name_and_a_hub_without_an_answer_are_errors(tmp_path):
    with serving(Hub(NAME, FILES)) as server:
        machine = Machine(tmp_path, server.url)
        text = answer(machine.find("local_model", "org/tinny"))
        assert mentions(text, "org/tinny", "RepositoryNotFoundError")
    text = answer(machine.leave_network().find("local_model"))
    assert mentions(text, "org/tiny", "Hugging Face")
    assert mentions(text, f"{tmp_path}/hf/hub", "`hf download org/tiny`")


def test_a_check_of_the_configuration_fetches_nothing(tmp_path):
    write_prompts(tmp_path / "train.parquet", 8)
    with serving(Hub(NAME, FILES)) as server:
        machine = Machine(tmp_path, server.url)
        run = machine.start(
            "-m", "strop", "check", "--config-only", f"actor_rollout_ref.model.path={NAME}",
            f"data.train_files={tmp_path}/train.parquet", f"data.val_files={tmp_path}/train.parquet",
            "data.train_batch_size=8",
            "actor_rollout_ref.actor.ppo_mini_batch_size=8", "actor_rollout_ref.rollout.name=hf",
            "trainer.device=cpu", f"data.cache_dir={tmp_path}/strop",
        )  # fmt: skip
        assert NAME in answer(run)
        assert server.requests == []
    assert not (tmp_path / "hf").exists()


# ------------------------------------------------------------------------------------------ without a network


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache in which a test puts files; returns what puts them there, for ``NAME``."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))

    def put(*files: str) -> Path:
        for file in files:
            (tmp_path / "model" / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "model" / file).write_bytes(FILES.get(file, b""))
        return cache_by_hand(tmp_path / "hub", NAME, tmp_path / "model")

    return put


@pytest.mark.parametrize(
    ("files", "parts"),
    [
        (["config.json", "model.safetensors"], None),
        (["config.json", "model.safetensors.index.json", *SHARDS], None),
        (["config.json", "pytorch_model.bin"], None),
        (["config.json", "tiny-q8.gguf"], None),
        (["config.json", "tokenizer.json"], ["config.json", "tokenizer.json", "model.safetensors"]),
        (["config.json", "model.safetensors.index.json", SHARDS[0]], [SHARDS[1], "HF_HUB_OFFLINE"]),
    ],
)
def test_a_cached_model_has_its_weights_in_one_format_and_a_tokenizer_needs_none(
    cache, tmp_path, files, parts
):
    snapshot = cache(*files)
    assert local_tokenizer(NAME, tmp_path / "strop") == snapshot
    if parts is None:
        assert local_model(NAME, tmp_path / "strop") == snapshot
    else:
        with pytest.raises(ModelError, match=naming(*parts)):
            local_model(NAME, tmp_path / "strop")


@pytest.mark.parametrize("index", [{}, {"weight_map": None}, {"weight_map": {}}])
def test_a_cached_index_that_names_no_file_is_none(cache, tmp_path, monkeypatch, index):
    monkeypatch.setitem(FILES, "model.safetensors.index.json", json.dumps(index).encode())
    cache("config.json", "model.safetensors.index.json", *SHARDS)
    with pytest.raises(ModelError, match=naming(NAME, "found config.json", SHARDS[0], "expected")):
        local_model(NAME, tmp_path / "strop")


def test_a_hub_that_does_not_answer_is_named_with_the_folder_that_may_be_meant(tmp_path, monkeypatch):
    (tmp_path / NAME).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    released = threading.Event()
    monkeypatch.setattr(hub, "get_session", lambda: SimpleNamespace(head=lambda url: released.wait(60)))
    monkeypatch.setattr(hub, "_ANSWER_S", 0.1)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    try:
        with pytest.raises(ModelError, match=naming("org/tinny", "no answer", f"did you mean {NAME}?")):
            local_model("org/tinny", tmp_path / "strop")
    finally:
        released.set()


def test_a_local_path_is_not_a_hub_name(cache, tmp_path, monkeypatch):
    cache("config.json", "model.safetensors")
    monkeypatch.chdir(tmp_path)
    assert is_hub_name(NAME)
    (tmp_path / NAME).mkdir(parents=True)
    assert not is_hub_name(NAME)
    assert local_model(NAME, tmp_path / "strop") == Path(NAME)
    for path in (
        "/no/folder",
        "./folder",
        "folder",
        "a/b/c",
        "tiny.gguf",
        "s3://bucket/tiny",
        "org/",
        "two words",
    ):
        assert not is_hub_name(path)
