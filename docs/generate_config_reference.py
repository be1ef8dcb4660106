"""Write docs/config.md and docs/supervised_config.md from the schemas and the defaults.

python docs/generate_config_reference.py           write them
python docs/generate_config_reference.py --check   exit 1 if one is stale
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from strop.config.checks.keys import status_in_words
from strop.config.keys import Key, all_keys
from strop.config.trees import DPO, PPO, REWARD_MODELLING, SFT, Tree

PAGE = Path(__file__).with_name("config.md")
SUPERVISED_PAGE = Path(__file__).with_name("supervised_config.md")

INTRODUCTION = """\
<!-- Written by docs/generate_config_reference.py from src/strop/config/schema/: edit that, not this page. -->

# Configuration

Every key, section by section. The defaults are those of `src/strop/config/ppo_trainer.yaml`, and for
keys of an engine or a rollout that it does not have, of that back-end's module `keys`.

```
strop train data.train_batch_size=64 trainer.logger=[console]    # overrides, in Hydra's grammar
strop train --config-path conf --config-name mine    # conf/mine.yaml over the defaults, then overrides
strop check --config-path conf --config-name mine    # sizes and every error; loads no model
```

- Your own file needs only the keys that differ. A `defaults:` list and config groups in its folder work
  as Hydra users know them; the shipped defaults are always underneath.
- `key=value`, `+key=value` and `++key=value` all set a key; `~key` removes one, which is of use in mappings
  such as `override_config`. A list is written `key=[a,b]`, a mapping `key={a: 1}`. A key that does not exist
  is an error that names the nearest one of its section.
- Numbers whose type shows no upper bound are ints of 32 bits, floats of float32's range, and at most 1,024
  processes.
- A default such as `${data.max_prompt_length}` follows the key that it names until you set it.
- A required key without a value is an error that says what to write.
- Paths may begin with `~`, and model and data paths may be `hdfs://` or any other fsspec URL.
- `data.train_batch_size` and `ppo_mini_batch_size` count prompts over all processes; each prompt has
  `actor_rollout_ref.rollout.n` samples. Micro-batch sizes count samples in one process and never change a
  number.
- Deprecated keys work and say so: `*_micro_batch_size` (samples over all processes; setting one sets its
  `*_micro_batch_size_per_gpu` aside) and `actor_rollout_ref.model.external_libs`.

The last column says when a key counts: *honoured*: always; *no effect*: not under that condition, and a
warning names the key if you wrote it; *error*: that condition stops the run; *required*: it has no default.

## The 15 keys that people set
"""

COMMON_KEYS = (
    "actor_rollout_ref.model.path",
    "data.train_files",
    "data.val_files",
    "data.train_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    "algorithm.adv_estimator",
    "actor_rollout_ref.rollout.name",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    "actor_rollout_ref.actor.optim.lr",
    "trainer.n_gpus_per_node",
    "trainer.total_epochs",
    "trainer.default_local_dir",
)


SUPERVISED_INTRODUCTION = """\
<!-- Written by docs/generate_config_reference.py from src/strop/config/schema/: edit that, not this page. -->

# Configuration of the supervised trainers

Every key of `strop sft`, `strop train-rm` and `strop dpo`, with the defaults of `sft_trainer.yaml`,
`rm_trainer.yaml` and `dpo_trainer.yaml` in `src/strop/config/`. [supervised.md](supervised.md) and
[preference.md](preference.md) describe the commands; overrides and your own files work as in
[config.md](config.md).
"""


def page() -> str:
    """Return the page of reinforcement learning."""
    keys = all_keys(PPO.schema)
    common = [_row(PPO, keys[path], keys, with_status=False) for path in COMMON_KEYS]
    return "\n".join([INTRODUCTION, *_HEAD[False], *common, "", *_sections(PPO, "##", with_status=True)])


def supervised_page() -> str:
    """Return the page of the supervised trainers, with only the differences from the first."""
    lines = [SUPERVISED_INTRODUCTION, "## `strop sft`", "", *_sections(SFT, "###", with_status=False)]
    for command, tree in (("train-rm", REWARD_MODELLING), ("dpo", DPO)):
        lines += _differences(command, tree)
    return "\n".join(lines)


def _differences(command: str, tree: Tree) -> list[str]:
    """Return the section of a command whose keys are mostly those of `strop sft`."""
    same = [line for line in _sections(SFT, "###", with_status=False) if _is_row(line)]
    own = [line for line in _sections(tree, "###", with_status=False) if _is_row(line)]
    theirs = {line.split("|")[1] for line in own}
    missing = sorted(line.split("|")[1].strip() for line in same if line.split("|")[1] not in theirs)
    return [
        f"## `strop {command}`",
        "",
        "The keys of `strop sft`, with these differences:",
        "",
        *_HEAD[False],
        *(line for line in own if line not in same),
        "",
        f"It has no {', '.join(missing)}.",
        "",
    ]


_HEAD = {
    True: ["| key | type | default | meaning | in this version |", "| --- | --- | --- | --- | --- |"],
    False: ["| key | type | default | meaning |", "| --- | --- | --- | --- |"],
}


def _is_row(line: str) -> bool:
    return line.startswith("| `")


def _sections(tree: Tree, heading: str, *, with_status: bool) -> list[str]:
    """Return the sections of a tree as headings and tables."""
    keys, lines = all_keys(tree.schema), []
    for section in (key for key in keys.values() if key.is_section):
        lines += [f"{heading}{'#' * ('.' in section.path)} `{section.path}`", "", section.doc, ""]
        if with_status and section.limits:
            lines += [f"{status_in_words(section).capitalize()}.", ""]
        rows = [
            _row(tree, key, keys, with_status=with_status)
            for key in keys.values()
            if not key.is_section and key.path.rpartition(".")[0] == section.path
        ]
        if rows:
            lines += [*_HEAD[with_status], *rows, ""]
    return lines


def _row(tree: Tree, key: Key, keys: dict[str, Key], *, with_status: bool) -> str:
    """Return a line of a table; a default stands as in the YAML file, with its interpolations."""
    value: Any = tree.raw_default(key.path)
    default = "null" if value is None else str(value)
    default = "(required)" if key.required is not None and not value else f"`{default}`"
    cells = [f"`{key.path}`", key.expected, default, key.doc]
    if with_status:
        cells.append(status_in_words(key, inherited=len(keys[key.path.rpartition(".")[0]].limits)))
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def main(arguments: list[str]) -> int:
    """Write or check the pages; return the exit status."""
    for path, text in ((PAGE, page()), (SUPERVISED_PAGE, supervised_page())):
        if arguments != ["--check"]:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            sys.stderr.write(f"{path} is stale: run python docs/generate_config_reference.py\n")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
