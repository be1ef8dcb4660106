"""Random configurations and broken files, each given to ``strop check`` and ``strop train`` in this process.

``PYTHONPATH=examples python tests/fuzz_inputs.py --seed 3 --configurations 1000 --files`` shows failures.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq

from strop.cli.main import main
from strop.config.keys import all_keys
from strop.config.load import load_config
from strop.config.placement import runs_on_ray
from strop.errors import ConfigError, StropError

from runs import make_inputs, overrides, undrawn

_WORDS = (
    "0 1 -1 2 3 7 0.5 1.5 -0.5 1e30 -1e30 1e-300 1e300 2147483647 2147483648 1000000000000000000000000000000 "
    "nan inf -inf true True FALSE null None '' ' abc Auto AUTO auto [] [1] [''] [a,b] [[1]] [null] {} {a:1} "
    "{a:{b:c}} {'':1} x.y:z json:loads json. :loads .json NO_SUCH/folder '${trainer.seed}' '${nothing}' "
    "'${oc.env:HOME}' '[/red]' é a/b ../x 0x10 1_000 3.0 '3' 1:2 2020-01-01 ??? s3://no/such nosuch://x "
    "file:///no/such ~ *"
)
VALUES = [*_WORDS.split(" "), "' '", "'a b'"]
YAML_VALUES = [
    *("0", "1.0e+30", "[]", "{}", "null", "~", "''", '"a\\0b"', '"\\x1b[31m"', "2020-01-01", "!!set {a}"),
    *("!!binary aGk=", ".nan", ".inf", "0o17", "on", "1e3", "&a [*a]", "!!python/object:os.system {}"),
    *("[1, {a: 1}]", "{1: 2}", "'${data}'", '"\\ud800"', "9" * 400, "- x", "1.e-400"),
]
_HEAVY = ("num_workers", "nnodes", "n_gpus_per_node", "resource_pools")
"""Keys whose large values are tried without starting processes."""


@dataclass(frozen=True)
class Result:
    """How a command ended: its status, or a traceback."""

    status: int | None
    text: str

    @property
    def ok(self) -> bool:
        return self.status in (0, 2)


class ReachedModel(StropError):
    """Raised in place of loading a model: everything before has been accepted."""


def command(name: str, arguments: list[str], *, stop_at_model: bool = False) -> Result:
    """Run a command in this process; ``stop_at_model``: 0 as soon as a model would be loaded."""
    out = io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(out))
        stack.enter_context(undrawn())
        if stop_at_model:
            reached = mock.Mock(side_effect=ReachedModel("a model"))
            stack.enter_context(mock.patch("strop.trainer.ray_trainer.RayPPOTrainer.init_workers", reached))
        try:
            status: int | None = main([name, *arguments])
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        except KeyboardInterrupt:
            raise
        except BaseException:  # noqa: BLE001 - this is what is looked for
            return Result(None, traceback.format_exc())
    if status in (130, 143):
        raise KeyboardInterrupt  # meant for this program
    text = out.getvalue()
    return Result(0 if "ReachedModel" in text else status, text)


def configurations(chance: random.Random, folder: Path) -> Iterator[list[str]]:
    """Yield arguments, without end: one or two keys, in overrides, in YAML or misspelt."""
    keys = all_keys()
    plain = [path for path, key in keys.items() if not key.is_section]
    order = chance.sample(plain, len(plain))  # every key comes before one comes twice
    for number in range(10**9):
        if not order:
            order = chance.sample(plain, len(plain))
        path = order.pop()
        how = chance.choice(["key", "key", "key", "pair", "yaml", "misspelt", "form"])
        if how == "yaml":
            file = folder / f"fuzz_{number}.yaml"
            file.write_text(_yaml(path, chance.choice([*YAML_VALUES, *VALUES])))
            yield [f"--config-path={file}"]
        elif how == "misspelt":
            yield [f"{_misspelt(path, chance)}={chance.choice(VALUES)}"]
        elif how == "form":
            form = chance.choice(
                ["+{}={}", "++{}={}", "~{}", "~{}={}", "{}", "{}=", "{}={},1", "={}{}", "{}.a={}"]
            )
            yield [form.format(path, _value(keys[path].expected, chance))]
        else:
            paths = [path, *([chance.choice(plain)] if how == "pair" else [])]
            yield [f"{one}={_value(keys[one].expected, chance)}" for one in paths]


def _value(expected: str, chance: random.Random) -> str:
    if expected.startswith("one of ") and chance.random() < 0.5:
        word = chance.choice(expected.removeprefix("one of ").replace(" or null", "").split(", "))
        return chance.choice([word, word, word.upper(), word.title(), word[:-1], f" {word}"])
    return chance.choice(VALUES)


def _misspelt(path: str, chance: random.Random) -> str:
    words = path.split(".")
    at = chance.randrange(len(words))
    word = words[at]
    cut = chance.randrange(len(word))
    words[at] = chance.choice(
        [word[:cut] + word[cut + 1 :], word.upper(), word + "s", word.replace("_", "-"), "x"]
    )
    return ".".join(words)


def _yaml(path: str, value: str) -> str:
    *sections, key = path.split(".")
    lines = [f"{'  ' * depth}{section}:" for depth, section in enumerate(sections)]
    return "\n".join([*lines, f"{'  ' * len(sections)}{key}: {value}", ""])


def try_configuration(arguments: list[str], inputs: Path, *, train_for_real: bool = False) -> str | None:
    """Return what is wrong with the way in which the commands take it, or None."""
    run = inputs / "run"
    shutil.rmtree(run, ignore_errors=True)
    quick = ("resume_mode=disable", "val_before_train=False", "test_freq=-1", "save_freq=-1")
    base = overrides(inputs, run, "trainer.total_training_steps=1", *(f"trainer.{one}" for one in quick))
    named = {one.lstrip("+").partition("=")[0] for one in arguments}
    base = [one for one in base if one.partition("=")[0] not in named]
    given = [*base, *arguments]
    if any(
        f"{key}=" in one and one.rpartition("=")[2] not in ("1", "2") for key in _HEAVY for one in arguments
    ):
        try:
            load_config([one for one in given if not one.startswith("--")])
        except ConfigError:
            return None
        except Exception:  # noqa: BLE001
            return traceback.format_exc()
        return None
    checked = command("check", given)
    if not checked.ok:
        return f"check {arguments}\n{checked.text[-2000:]}"
    if checked.status:
        return None
    with contextlib.suppress(ConfigError):
        if runs_on_ray(load_config([one for one in given if not one.startswith("--")])):
            return None
    trained = command("train", given, stop_at_model=not train_for_real)
    if not trained.ok or (trained.status and not train_for_real):
        return f"check accepts, train ends: {arguments}\n{trained.text[-2000:]}"
    return None


Breaker = Callable[[Path], list[str]]
"""Breaks a file in a copy of the inputs; returns the overrides that name it."""


def broken_files() -> dict[str, Breaker]:
    """Return the ways to break an input by name."""
    return {**_data_files(), **_model_folders(), **_other_files()}


def _data_files() -> dict[str, Breaker]:
    def parquet(edit: Callable[[bytes], bytes]) -> Breaker:
        def make(folder: Path) -> list[str]:
            file = folder / "train.parquet"
            file.write_bytes(edit(file.read_bytes()))
            return []

        return make

    def table(edit: Callable[[pa.Table], pa.Table]) -> Breaker:
        def make(folder: Path) -> list[str]:
            pq.write_table(edit(pq.read_table(folder / "train.parquet")), folder / "train.parquet")
            return []

        return make

    def column(name: str, values: Callable[[int], pa.Array]) -> Breaker:
        def edit(rows: pa.Table) -> pa.Table:
            at = rows.column_names.index(name) if name in rows.column_names else rows.num_columns
            rows = rows.drop_columns(name) if name in rows.column_names else rows
            return rows.add_column(at, name, values(len(rows)))

        return table(edit)

    def replaced(by: Callable[[Path], None]) -> Breaker:
        def make(folder: Path) -> list[str]:
            (folder / "train.parquet").unlink()
            by(folder / "train.parquet")
            return []

        return make

    def not_utf8(rows: int) -> pa.Array:
        offsets = pa.array(range(rows + 1), pa.int32()).buffers()[1]
        return pa.Array.from_buffers(pa.string(), rows, [None, offsets, pa.py_buffer(b"\xff" * rows)])

    def messages(*contents: object) -> Callable[[int], pa.Array]:
        return lambda rows: pa.array(
            [[{"role": "user", "content": contents[row % len(contents)]}] for row in range(rows)]
        )

    return {
        "data cut in half": parquet(lambda content: content[: len(content) // 2]),
        "data empty": parquet(lambda content: b""),
        "data wrong magic": parquet(lambda content: b"XXXX" + content[4:-4] + b"XXXX"),
        "data footer of zeros": parquet(lambda content: content[:-200] + bytes(192) + content[-8:]),
        "data footer length": parquet(lambda content: content[:-8] + b"\xff\xff\xff\x7f" + content[-4:]),
        "data pages of zeros": parquet(lambda content: content[:4] + bytes(400) + content[404:]),
        "data is text": parquet(lambda content: b"a,b\n1,2\n"),
        "data is JSON": parquet(lambda content: b'{"prompt": "1"}\n'),
        "data without rows": table(lambda rows: rows.slice(0, 0)),
        "data without prompt": table(lambda rows: rows.drop_columns("prompt")),
        "data without source": table(lambda rows: rows.drop_columns("data_source")),
        "data without ground truth": table(lambda rows: rows.drop_columns("reward_model")),
        "data without columns": table(lambda rows: rows.select([])),
        "prompt of numbers": column("prompt", lambda rows: pa.array(range(rows))),
        "prompt null": column("prompt", lambda rows: pa.nulls(rows)),
        "prompt binary": column("prompt", lambda rows: pa.array([b"\xff"] * rows)),
        "prompt not UTF-8": column("prompt", not_utf8),
        "prompt of lists of numbers": column("prompt", lambda rows: pa.array([[1]] * rows)),
        "prompt of empty lists": column("prompt", lambda rows: pa.array([[]] * rows, pa.list_(pa.string()))),
        "prompt with null messages": column(
            "prompt", lambda rows: pa.array([[None, {"role": "user"}]] * rows)
        ),
        "prompt with null contents": column("prompt", messages("1", None)),
        "prompt huge": column("prompt", messages("1" * 200_000, "1")),
        "prompt with control characters": column("prompt", messages("\x1b[31m\x00", "\ufdd0", "1")),
        "prompt with control tokens": column("prompt", messages("<end>", "1<assistant>2")),
        "source not UTF-8": column("data_source", not_utf8),
        "source null": column("data_source", lambda rows: pa.nulls(rows, pa.string())),
        "source of numbers": column("data_source", lambda rows: pa.array([1.5] * rows)),
        "source is markup": column("data_source", lambda rows: pa.array(["[/red]"] * rows)),
        "reward_model is text": column("reward_model", lambda rows: pa.array(["1"] * rows)),
        "ground truth null": column("reward_model", lambda rows: pa.array([{"ground_truth": None}] * rows)),
        "ground truth NaN": column(
            "reward_model", lambda rows: pa.array([{"ground_truth": float("nan")}] * rows)
        ),
        "extra_info is a list": column("extra_info", lambda rows: pa.array([[1]] * rows)),
        "column with a reserved name": column("input_ids", lambda rows: pa.array(range(rows))),
        "column of times": column("at", lambda rows: pa.array([2**60] * rows, pa.timestamp("ms"))),
        "data is a folder": replaced(lambda path: path.mkdir()),
        "data is a loop": replaced(lambda path: path.symlink_to(path)),
        "data is a pipe": replaced(lambda path: os.mkfifo(path)),
        "data is missing": replaced(lambda path: None),
        "data has a long name": lambda folder: [f"data.train_files={folder}/{'x' * 300}.parquet"],
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
        "tokenizer missing": model(lambda path: [file.unlink() for file in path.glob("tokenizer*")]),
        "tokenizer is broken JSON": model(lambda path: (path / "tokenizer.json").write_text("{")),
        "tokenizer is another JSON": model(lambda path: (path / "tokenizer.json").write_text("{}")),
        "template with a mistake": model(_break_template),
    }


def _break_template(path: Path) -> None:
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "chat_template.jinja").write_text("{% for message in %}")


def _other_files() -> dict[str, Breaker]:
    def reward(text: str | bytes) -> Breaker:
        def make(folder: Path) -> list[str]:
            (folder / "reward.py").write_bytes(text if isinstance(text, bytes) else text.encode())
            return [f"custom_reward_function.path={folder}/reward.py"]

        return make

    def checkpoint(*entries: str, latest: str | None = None, resume: str = "auto") -> Breaker:
        def make(folder: Path) -> list[str]:
            (folder / "run").mkdir()
            for entry in entries:
                (folder / "run" / entry).mkdir(parents=True)
            if latest is not None:
                (folder / "run" / "latest_checkpointed_iteration.txt").write_bytes(latest.encode("latin-1"))
            return [f"trainer.resume_mode={resume.format(folder / 'run')}", "trainer.save_freq=1"]

        return make

    def file(text: str) -> Breaker:
        def make(folder: Path) -> list[str]:
            (folder / "own.yaml").write_text(text)
            return [f"--config-path={folder}/own.yaml"]

        return make

    return {
        "reward with a syntax error": reward("def compute_score(:\n"),
        "reward without the function": reward("x = 1\n"),
        "reward that raises": reward("raise RuntimeError('no')\n"),
        "reward that exits": reward("import sys; sys.exit(3)\n"),
        "reward of null bytes": reward(b"\0\0"),
        "reward that is not UTF-8": reward(b"x = '\xff'\n"),
        "reward is a number": reward("compute_score = 3\n"),
        "reward with other parameters": reward("def compute_score(a, b): return 0\n"),
        "checkpoint named by a superscript": checkpoint("global_step_²"),
        "checkpoint named by nothing": checkpoint("global_step_", "global_step_x.tmp"),
        "checkpoint that is missing": checkpoint(latest="5\n"),
        "checkpoint that is empty": checkpoint("global_step_5", latest="5\n"),
        "latest is text": checkpoint(latest="five"),
        "latest is a superscript": checkpoint(latest="²"),
        "latest is not UTF-8": checkpoint(latest="\xff\xfe"),
        "resume from a folder without a checkpoint": checkpoint("global_step_5", resume="{}/global_step_5"),
        "YAML with tabs": file("data:\n\tseed: 1\n"),
        "YAML that is a list": file("- a\n- b\n"),
        "YAML that is a text": file("just text"),
        "YAML with a broken quote": file("data: {prompt_key: 'x}\n"),
        "YAML with a loop of defaults": file("defaults: [own]\n"),
        "YAML with an object": file("data: !!python/object/apply:os.system ['true']\n"),
    }


def try_broken(name: str, inputs: Path, folder: Path) -> str | None:
    """Break a copy of ``inputs`` in ``folder``; return what is wrong with the commands' answers, or None."""
    copied = folder / "copy"
    shutil.rmtree(copied, ignore_errors=True)
    shutil.copytree(inputs, copied)
    extra = broken_files()[name](copied)
    given = [
        *overrides(copied, copied / "run", "trainer.total_training_steps=1", "trainer.test_freq=-1"),
        *extra,
    ]
    checked = command("check", given)
    if not checked.ok:
        return f"{name}: check\n{checked.text[-2000:]}"
    before = command("train", given, stop_at_model=True)
    if checked.status == 0 and before.status != 0:
        return f"{name}: check accepts, train refuses\n{before.text[-2000:]}"
    trained = command("train", given)
    if not trained.ok:
        return f"{name}: train\n{trained.text[-2000:]}"
    return None


def run_all(seed: int, n_configurations: int, names: list[str], inputs: Path, folder: Path) -> list[str]:
    """Try configurations and broken files; return a text for each failure."""
    chance, found = random.Random(seed), []

    def note(problem: str | None) -> None:
        if problem is not None:
            print(problem, flush=True)
            found.append(problem)

    with contextlib.chdir(folder):  # some values are relative paths
        for number, arguments in zip(range(n_configurations), configurations(chance, folder), strict=False):
            note(try_configuration(arguments, inputs, train_for_real=number % 20 == 0))
        for name in names:
            note(try_broken(name, inputs, folder))
    return found


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--configurations", type=int, default=0)
    parser.add_argument("--files", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        inputs = make_inputs(folder / "inputs")
        names = list(broken_files()) if arguments.files else []
        failures = run_all(arguments.seed, arguments.configurations, names, inputs, folder)
    print(f"{arguments.configurations} configurations, {len(names)} broken files: {len(failures)} failures")


if __name__ == "__main__":
    _main()
