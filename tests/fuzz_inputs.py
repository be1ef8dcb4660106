"""Random configurations and broken files, each given to the commands that read it, in this process.

``PYTHONPATH=examples python tests/fuzz_inputs.py --seed 3 --configurations 1000 --files`` shows failures;
``--several`` draws configurations of several processes, ``--command sft`` those of another command.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import io
import random
import re
import shutil
import sys
import tempfile
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import ray

from strop.cli.main import main
from strop.config.keys import all_keys
from strop.config.load import load_tree
from strop.config.placement import process_count, runs_on_ray
from strop.config.trees import TREES
from strop.controller.ray import cluster
from strop.errors import ConfigError, StropError

import runs
import supervised_runs
from broken_files import broken_files

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
_SEVERAL = {
    "trainer.nnodes": "1 1 2 0",
    "trainer.worker_group": "auto auto ray local",
    "trainer.resource_pools": (
        "{a:[2]} {a:[2],b:[1]} {a:[1],b:[1],c:[1]} {a:[1,1],b:[2]} {a:[3],b:[2]} {global_pool:[2],b:[2]} {} "
        "{a:[]} {a:[0]} {a:2} {a:[-1],b:[2]} {'':[1]} {a:[1000],b:[1000]} {'[/red]':[2]} {a:[1.5]} "
        "{a:[true]} {1:[2]} [2]"
    ),
    "trainer.placement": (
        "{Critic:b} {Critic:b,RefPolicy:b} {Actor:a,Rollout:b} {Actor:a,Rollout:b,Critic:b} {Rollout:b} "
        "{ActorRollout:a,Critic:b} {RefPolicy:b} {RewardModel:a} {Nobody:a} {Critic:''} {Critic:null} [a] a"
    ),
    "actor_rollout_ref.hybrid_engine": "True False False",
    "actor_rollout_ref.rollout.name": "hf hf auto vllm",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "1 2 3 4 0 -1",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": "1 2 2 3 4 0",
    "actor_rollout_ref.ref.ulysses_sequence_parallel_size": "1 2 3",
    "critic.ulysses_sequence_parallel_size": "1 2 2 3 4",
    "actor_rollout_ref.model.use_remove_padding": "True True False",
    "critic.model.use_remove_padding": "True True False",
    "actor_rollout_ref.actor.fsdp_config.fsdp_size": "-1 1 2 2 3 4 0",
    "actor_rollout_ref.actor.fsdp_config.param_offload": "True",
    "critic.model.fsdp_config.fsdp_size": "-1 1 2 3 4",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "4 2 1 3 8",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "1 2 3 4 8 16",
    "actor_rollout_ref.actor.ppo_micro_batch_size": "1 2 4 8",
    "actor_rollout_ref.actor.use_dynamic_bsz": "True",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "6 12 24 48",
    "critic.ppo_mini_batch_size": "1 2 4 8",
    "data.train_batch_size": "8 4 6 1",
    "data.val_batch_size": "1 3 100",
    "actor_rollout_ref.rollout.n": "1 2 3",
    "algorithm.adv_estimator": "gae grpo grpo remax",
    "actor_rollout_ref.actor.use_kl_loss": "True",
    "algorithm.kl_penalty": "kl full",
    "trainer.async_save": "True",
    "trainer.max_restarts": "0 1",
    "trainer.val_only": "True",
    "trainer.device": "cpu cpu auto cuda",
}
"""Keys of runs with several processes, beside the number of these, with values for a model of two heads."""
_MOST_REAL = 4
"""Processes of the largest run with several that is really trained."""
_HANG_S = 300
_NAMED = re.compile(
    r"\bdata_source\b|"
    r"\b(actor_rollout_ref|algorithm|critic|custom_reward_function|data|model|reward_model|trainer)\.\w"
)
"""The names of columns and keys in errors."""


@dataclass(frozen=True)
class Result:
    """How a command ended: its status, or a traceback."""

    status: int | None
    text: str

    @property
    def ok(self) -> bool:
        return self.status in (0, 2)

    def names(self, text: str) -> bool:
        """Return True if an error names the path ``text``, or a key."""
        error = self.text[self.text.find("Error: ") :]
        return self.status == 0 or text in error or _NAMED.search(error) is not None


class ReachedModel(StropError):
    """Raised in place of loading a model: everything before has been accepted."""


def command(name: str, arguments: list[str], *, stop_at_model: bool = False) -> Result:
    """Run a command in this process; ``stop_at_model``: 0 as soon as a model would be loaded."""
    out = io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(out))
        stack.enter_context(runs.undrawn())
        for trainer in ("ray_trainer.RayPPOTrainer", "supervised.SupervisedTrainer") if stop_at_model else ():
            reached = mock.Mock(side_effect=ReachedModel("a model"))
            stack.enter_context(mock.patch(f"strop.trainer.{trainer}.init_workers", reached))
        faulthandler.dump_traceback_later(_HANG_S, exit=True, file=sys.__stderr__)
        stack.callback(faulthandler.cancel_dump_traceback_later)
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


def configurations(chance: random.Random, folder: Path, kind: str) -> Iterator[list[str]]:
    """Yield arguments, without end: one or two keys, in overrides, in YAML or misspelt."""
    keys = all_keys(TREES[kind].schema)
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


def several_processes(chance: random.Random, folder: Path, kind: str) -> Iterator[list[str]]:
    """Yield arguments, without end: a number of processes and up to six keys of ``_SEVERAL``."""
    one_key = configurations(chance, folder, kind)
    usable = [key for key in _SEVERAL if key in all_keys(TREES[kind].schema)]
    while True:
        keys = chance.sample(usable, min(chance.randint(0, 6), len(usable)))
        drawn = [f"{key}={chance.choice(_SEVERAL[key].split())}" for key in keys]
        further = next(one_key) if chance.random() < 0.2 else []
        yield [f"trainer.n_gpus_per_node={chance.randint(2, 4)}", *drawn, *further]


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


def make_inputs(folder: Path) -> Path:
    """Write a model, and data that every command reads, to ``folder``; return it."""
    runs.make_inputs(folder)
    for name in ("train", "val"):
        rows = pq.read_table(folder / f"{name}.parquet")
        right = [one["ground_truth"] for one in rows["reward_model"].to_pylist()]
        answers = {"response": right, "chosen": right, "rejected": ["0"] * len(rows)}
        for column, values in answers.items():
            rows = rows.append_column(column, pa.array(values))
        pq.write_table(rows, folder / f"{name}.parquet")
    return folder


def arguments_of(kind: str, inputs: Path, run: Path, *extra: str) -> list[str]:
    """Return the arguments of a command on ``inputs``."""
    if kind == "score":
        own = (one.replace("custom_reward_function.path=", "--custom=") for one in extra)
        return [str(inputs / "train.parquet"), *own]
    if kind == "eval":
        data = f"--data={inputs / 'train.parquet'}"
        short = ("--max-response-length=4", f"data.cache_dir={inputs / 'cache'}", "trainer.device=cpu")
        return [str(inputs / "model"), data, f"--out={run}", *short, *extra]
    build = runs.overrides if kind == "train" else supervised_runs.overrides
    return build(inputs, run, "trainer.total_training_steps=1", "trainer.test_freq=-1", *extra)


def try_configuration(
    arguments: list[str], inputs: Path, *, kind: str = "train", train_for_real: bool = False
) -> str | None:
    """Return what is wrong with the way in which the commands take it, or None."""
    run = inputs / "run"
    shutil.rmtree(run, ignore_errors=True)
    quick = ["trainer.resume_mode=disable", "trainer.save_freq=-1"]
    quick += ["trainer.val_before_train=False"] if kind == "train" else []
    named = {one.lstrip("+").partition("=")[0] for one in arguments}
    base = [one for one in arguments_of(kind, inputs, run, *quick) if one.partition("=")[0] not in named]
    given = [*base, *arguments]
    if any("num_workers=" in one and one.rpartition("=")[2] not in ("1", "2") for one in arguments):
        return _loads(kind, given)  # many processes
    checked = command("check", ["--command", kind, *given])
    if not checked.ok:
        return f"check --command {kind} {arguments}\n{checked.text[-2000:]}"
    if checked.status:
        return None if "Error" in checked.text or "error" in checked.text else f"no error: {arguments}"
    with contextlib.suppress(ConfigError):
        config = load_tree(TREES[kind], [one for one in given if not one.startswith("--")])
        if runs_on_ray(config) and (process_count(config) > _MOST_REAL or not ray.is_initialized()):
            train_for_real = False
    trained = command(kind, given, stop_at_model=not train_for_real)
    if not trained.ok or (trained.status and not train_for_real):
        return f"check accepts, {kind} ends: {arguments}\n{trained.text[-2000:]}"
    return None


def _loads(kind: str, given: list[str]) -> str | None:
    try:
        load_tree(TREES[kind], [one for one in given if not one.startswith("--")])
    except ConfigError:
        return None
    except Exception:  # noqa: BLE001
        return traceback.format_exc()
    return None


def try_broken(kind: str, name: str, inputs: Path, folder: Path) -> str | None:
    """Break a copy of ``inputs`` in ``folder``; return what is wrong with the commands' answers, or None."""
    copied = folder / "copy"
    shutil.rmtree(copied, ignore_errors=True)
    shutil.copytree(inputs, copied, ignore=shutil.ignore_patterns("run"))  # of a configuration that trained
    given = arguments_of(kind, copied, copied / "run", *broken_files()[kind][name](copied))
    checked = command("check", given) if kind == "train" else Result(0, "")
    if not checked.ok:
        return f"{name}: check\n{checked.text[-2000:]}"
    before = Result(0, "") if kind == "score" else command(kind, given, stop_at_model=True)
    if kind == "train" and checked.status == 0 and before.status != 0:
        return f"{name}: check accepts, train refuses\n{before.text[-2000:]}"
    trained = command(kind, given) if before.status == 0 else before
    unscored = kind == "score" and trained.status == 1  # some answers, the first of which it shows
    if not (trained.ok or unscored) or not trained.names(str(copied)):
        return f"{name}: {kind} ends with {trained.status}\n{trained.text[-2000:]}"
    return None


def run_all(
    seed: int,
    n_configurations: int,
    names: Iterable[tuple[str, str]],
    inputs: Path,
    folder: Path,
    *,
    kind: str = "train",
    several: bool = False,
) -> list[str]:
    """Try configurations of a command, and broken files (command, name); return a text for each failure."""
    chance, found = random.Random(seed), []
    draw = (several_processes if several else configurations)(chance, folder, kind)

    def note(problem: str | None) -> None:
        if problem is not None:
            print(problem, flush=True)
            found.append(problem)

    with contextlib.chdir(folder):  # some values are relative paths
        for number, arguments in zip(range(n_configurations), draw, strict=False):
            note(
                try_configuration(
                    arguments, inputs, kind=kind, train_for_real=number % (4 if several else 20) == 0
                )
            )
        for command_name, name in names:
            note(try_broken(command_name, name, inputs, folder))
    return found


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--configurations", type=int, default=0)
    parser.add_argument("--several", action="store_true", help="processes: train some of them on Ray")
    parser.add_argument("--files", action="store_true")
    parser.add_argument("--command", choices=[*broken_files()], help="only this one (configurations: train)")
    arguments = parser.parse_args()
    kinds = [arguments.command] if arguments.command else [*broken_files()]
    names = [(kind, name) for kind in kinds for name in broken_files()[kind]] if arguments.files else []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        inputs = make_inputs(folder / "inputs")
        if arguments.several:
            cluster.connect(_MOST_REAL)
        failures = run_all(
            arguments.seed,
            arguments.configurations,
            names,
            inputs,
            folder,
            kind=arguments.command or "train",
            several=arguments.several,
        )
    print(f"{arguments.configurations} configurations, {len(names)} broken files: {len(failures)} failures")


if __name__ == "__main__":
    _main()
