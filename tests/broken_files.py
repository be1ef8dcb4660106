"""Broken data files, model folders, reward functions, checkpoints and configuration files, by name."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file, save_file

Breaker = Callable[[Path], list[str]]
"""Breaks a file in a copy of the inputs; returns the overrides that name it."""


def _parquet(edit: Callable[[bytes], bytes]) -> Breaker:
    def make(folder: Path) -> list[str]:
        file = folder / "train.parquet"
        file.write_bytes(edit(file.read_bytes()))
        return []

    return make


def _table(edit: Callable[[pa.Table], pa.Table]) -> Breaker:
    def make(folder: Path) -> list[str]:
        pq.write_table(edit(pq.read_table(folder / "train.parquet")), folder / "train.parquet")
        return []

    return make


def _column(name: str, values: Callable[[int], pa.Array]) -> Breaker:
    def edit(rows: pa.Table) -> pa.Table:
        at = rows.column_names.index(name) if name in rows.column_names else rows.num_columns
        rows = rows.drop_columns(name) if name in rows.column_names else rows
        return rows.add_column(at, name, values(len(rows)))

    return _table(edit)


def _replaced(by: Callable[[Path], None]) -> Breaker:
    def make(folder: Path) -> list[str]:
        (folder / "train.parquet").unlink()
        by(folder / "train.parquet")
        return []

    return make


def _not_utf8(rows: int) -> pa.Array:
    offsets = pa.array(range(rows + 1), pa.int32()).buffers()[1]
    return pa.Array.from_buffers(pa.string(), rows, [None, offsets, pa.py_buffer(b"\xff" * rows)])


def _messages(*contents: object) -> Callable[[int], pa.Array]:
    return lambda rows: pa.array(
        [[{"role": "user", "content": contents[row % len(contents)]}] for row in range(rows)]
    )


def broken_files() -> dict[str, dict[str, Breaker]]:
    """Return the ways to break an input by name, for each command that reads it."""
    data, answers, models, rewards = _data_files(), _answers(), _model_folders(), _reward_files()
    run = {**_checkpoints(), **_yaml_files(), "data has a long name": _long_name}
    return {
        "train": {**data, **models, **rewards, **run},
        "sft": {**data, **answers, **models, **run},
        "train-rm": {**data, **answers, **models, **run},
        "dpo": {**data, **answers, **models, **run},
        "eval": {**data, **models, **rewards},
        "score": {**data, **answers, **rewards},
    }


def _long_name(folder: Path) -> list[str]:
    return [f"data.train_files={folder}/{'x' * 300}.parquet"]


def _data_files() -> dict[str, Breaker]:
    return {
        "data cut in half": _parquet(lambda content: content[: len(content) // 2]),
        "data empty": _parquet(lambda content: b""),
        "data wrong magic": _parquet(lambda content: b"XXXX" + content[4:-4] + b"XXXX"),
        "data footer of zeros": _parquet(lambda content: content[:-200] + bytes(192) + content[-8:]),
        "data footer length": _parquet(lambda content: content[:-8] + b"\xff\xff\xff\x7f" + content[-4:]),
        "data pages of zeros": _parquet(lambda content: content[:4] + bytes(400) + content[404:]),
        "data is text": _parquet(lambda content: b"a,b\n1,2\n"),
        "data is JSON": _parquet(lambda content: b'{"prompt": "1"}\n'),
        "data without rows": _table(lambda rows: rows.slice(0, 0)),
        "data without prompt": _table(lambda rows: rows.drop_columns("prompt")),
        "data without source": _table(lambda rows: rows.drop_columns("data_source")),
        "data without ground truth": _table(lambda rows: rows.drop_columns("reward_model")),
        "data without columns": _table(lambda rows: rows.select([])),
        "prompt of numbers": _column("prompt", lambda rows: pa.array(range(rows))),
        "prompt null": _column("prompt", lambda rows: pa.nulls(rows)),
        "prompt binary": _column("prompt", lambda rows: pa.array([b"\xff"] * rows)),
        "prompt not UTF-8": _column("prompt", _not_utf8),
        "prompt of lists of numbers": _column("prompt", lambda rows: pa.array([[1]] * rows)),
        "prompt of empty lists": _column("prompt", lambda rows: pa.array([[]] * rows, pa.list_(pa.string()))),
        "prompt with null messages": _column(
            "prompt", lambda rows: pa.array([[None, {"role": "user"}]] * rows)
        ),
        "prompt with null contents": _column("prompt", _messages("1", None)),
        "prompt huge": _column("prompt", _messages("1" * 200_000, "1")),
        "prompt with control characters": _column("prompt", _messages("\x1b[31m\x00", "\ufdd0", "1")),
        "prompt with control tokens": _column("prompt", _messages("<end>", "1<assistant>2")),
        "source not UTF-8": _column("data_source", _not_utf8),
        "source null": _column("data_source", lambda rows: pa.nulls(rows, pa.string())),
        "source of numbers": _column("data_source", lambda rows: pa.array([1.5] * rows)),
        "source is markup": _column("data_source", lambda rows: pa.array(["[/red]"] * rows)),
        "reward_model is text": _column("reward_model", lambda rows: pa.array(["1"] * rows)),
        "ground truth null": _column("reward_model", lambda rows: pa.array([{"ground_truth": None}] * rows)),
        "ground truth NaN": _column(
            "reward_model", lambda rows: pa.array([{"ground_truth": float("nan")}] * rows)
        ),
        "extra_info is a list": _column("extra_info", lambda rows: pa.array([[1]] * rows)),
        "column with a reserved name": _column("input_ids", lambda rows: pa.array(range(rows))),
        "column of times": _column("at", lambda rows: pa.array([2**60] * rows, pa.timestamp("ms"))),
        "data is a folder": _replaced(lambda path: path.mkdir()),
        "data is a loop": _replaced(lambda path: path.symlink_to(path)),
        "data is a pipe": _replaced(lambda path: os.mkfifo(path)),
        "data is missing": _replaced(lambda path: None),
    }


def _answers() -> dict[str, Breaker]:
    """Break the columns ``response``, ``chosen`` and ``rejected``."""

    def texts(text: str | None) -> Callable[[int], pa.Array]:
        return lambda rows: pa.array([text] * rows, pa.string())

    broken: dict[str, Callable[[int], pa.Array]] = {
        "null": texts(None),
        "null in one row": lambda rows: pa.array([None, *["1"] * (rows - 1)]),
        "empty": texts(""),
        "of spaces": texts("   "),
        "of unknown characters": texts("\U0001f600\u202e"),
        "of control tokens": texts("<end>1<assistant>"),
        "of control characters": texts("\x1b[31m\0"),
        "huge": texts("1" * 200_000),
        "not UTF-8": _not_utf8,
        "of numbers": lambda rows: pa.array(range(rows)),
        "binary": lambda rows: pa.array([b"1"] * rows),
        "of lists": lambda rows: pa.array([["1"]] * rows),
        "of messages": _messages("1"),
    }

    def make(values: Callable[[int], pa.Array]) -> Breaker:
        def edit(folder: Path) -> list[str]:
            for name in ("response", "chosen"):
                _column(name, values)(folder)
            return []

        return edit

    return {
        **{f"answers {name}": make(values) for name, values in broken.items()},
        "answers missing": _table(lambda rows: rows.drop_columns(["response", "chosen"])),
        "rejected missing": _table(lambda rows: rows.drop_columns("rejected")),
        "rejected null": _column("rejected", texts(None)),
        "rejected huge": _column("rejected", texts("1" * 200_000)),
        "answers alike": _table(
            lambda rows: rows.drop_columns("rejected").append_column("rejected", rows["chosen"])
        ),
    }


def _model_folders() -> dict[str, Breaker]:
    def model(edit: Callable[[Path], object]) -> Breaker:
        def make(folder: Path) -> list[str]:
            edit(folder / "model")
            return []

        return make

    def setting(file: str, **values: object) -> Breaker:
        def edit(path: Path) -> None:
            settings = json.loads((path / file).read_text()) | values
            (path / file).write_text(json.dumps(settings))

        return model(edit)

    weights = "model.safetensors"
    index = json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}})
    return {
        "model without config": model(lambda path: (path / "config.json").unlink()),
        "config is broken JSON": model(lambda path: (path / "config.json").write_text("{")),
        "config is a list": model(lambda path: (path / "config.json").write_text("[]")),
        "config is not UTF-8": model(lambda path: (path / "config.json").write_bytes(b"\xff\xfe{}")),
        "config without a type": setting("config.json", model_type=None),
        "config of an unknown type": setting("config.json", model_type="nosuch"),
        "config with a wrong shape": setting("config.json", hidden_size=48),
        "config with a text for a number": setting("config.json", hidden_size="x"),
        "config with no layers": setting("config.json", num_hidden_layers=0),
        "config with heads that do not divide": setting("config.json", num_attention_heads=7),
        "weights cut": model(lambda path: (path / weights).write_bytes((path / weights).read_bytes()[:1000])),
        "weights empty": model(lambda path: (path / weights).write_bytes(b"")),
        "weights missing": model(lambda path: (path / weights).unlink()),
        "weights with a wrong header": model(lambda path: (path / weights).write_bytes(b"\xff" * 5000)),
        "shard missing": model(
            lambda path: ((path / weights).unlink(), (path / f"{weights}.index.json").write_text(index))
        ),
        "weights of NaN": model(lambda path: _edit_weights(path, lambda name, weight: weight * math.nan)),
        "weights without a tensor": model(
            lambda path: _edit_weights(path, lambda name, weight: None if "mlp" in name else weight)
        ),
        "generation config is broken JSON": model(
            lambda path: (path / "generation_config.json").write_text("{")
        ),
        "tokenizer missing": model(lambda path: [file.unlink() for file in path.glob("tokenizer*")]),
        "tokenizer is broken JSON": model(lambda path: (path / "tokenizer.json").write_text("{")),
        "tokenizer is another JSON": model(lambda path: (path / "tokenizer.json").write_text("{}")),
        "template with a mistake": model(_break_template),
    }


def _edit_weights(path: Path, edit: Callable[[str, torch.Tensor], torch.Tensor | None]) -> None:
    file = path / "model.safetensors"
    edited = {name: edit(name, weight) for name, weight in load_file(file).items()}
    save_file({name: weight for name, weight in edited.items() if weight is not None}, file)


def _break_template(path: Path) -> None:
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "chat_template.jinja").write_text("{% for message in %}")


def _reward_files() -> dict[str, Breaker]:
    def reward(text: str | bytes) -> Breaker:
        def make(folder: Path) -> list[str]:
            (folder / "reward.py").write_bytes(text if isinstance(text, bytes) else text.encode())
            return [f"custom_reward_function.path={folder}/reward.py"]

        return make

    def reward_place(make_place: Callable[[Path], None]) -> Breaker:
        def make(folder: Path) -> list[str]:
            make_place(folder / "reward.py")
            return [f"custom_reward_function.path={folder}/reward.py"]

        return make

    return {
        "reward with a syntax error": reward("def compute_score(:\n"),
        "reward without the function": reward("x = 1\n"),
        "reward that raises": reward("raise RuntimeError('no')\n"),
        "reward that exits": reward("import sys; sys.exit(3)\n"),
        "reward of null bytes": reward(b"\0\0"),
        "reward that is not UTF-8": reward(b"x = '\xff'\n"),
        "reward is a number": reward("compute_score = 3\n"),
        "reward is a folder": reward_place(Path.mkdir),
        "reward is a pipe": reward_place(os.mkfifo),
        "reward with other parameters": reward("def compute_score(a, b): return 0\n"),
    }


def _checkpoints() -> dict[str, Breaker]:
    def checkpoint(*entries: str, latest: str | None = None, resume: str = "auto") -> Breaker:
        def make(folder: Path) -> list[str]:
            (folder / "run").mkdir()
            for entry in entries:
                (folder / "run" / entry).mkdir(parents=True)
            if latest is not None:
                (folder / "run" / "latest_checkpointed_iteration.txt").write_bytes(latest.encode("latin-1"))
            return [f"trainer.resume_mode={resume.format(folder / 'run')}", "trainer.save_freq=1"]

        return make

    return {
        "checkpoint named by a superscript": checkpoint("global_step_²"),
        "checkpoint named by nothing": checkpoint("global_step_", "global_step_x.tmp"),
        "checkpoint that is missing": checkpoint(latest="5\n"),
        "checkpoint that is empty": checkpoint("global_step_5", latest="5\n"),
        "latest is text": checkpoint(latest="five"),
        "latest is a superscript": checkpoint(latest="²"),
        "latest is not UTF-8": checkpoint(latest="\xff\xfe"),
        "resume from a folder without a checkpoint": checkpoint("global_step_5", resume="{}/global_step_5"),
    }


def _yaml_files() -> dict[str, Breaker]:
    def file(text: str) -> Breaker:
        def make(folder: Path) -> list[str]:
            (folder / "own.yaml").write_text(text)
            return [f"--config-path={folder}/own.yaml"]

        return make

    return {
        "YAML with tabs": file("data:\n\tseed: 1\n"),
        "YAML that is a list": file("- a\n- b\n"),
        "YAML that is a text": file("just text"),
        "YAML with a broken quote": file("data: {prompt_key: 'x}\n"),
        "YAML with a loop of defaults": file("defaults: [own]\n"),
        "YAML with an object": file("data: !!python/object/apply:os.system ['true']\n"),
    }
