"""Write docs/config*.md, docs/supervised_config.md and src/strop/keywords.py from schemas and defaults.

python docs/generate_config_reference.py           write them
python docs/generate_config_reference.py --check   exit 1 if one is stale
"""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path
from typing import Any

from strop.config.checks.keys import status_in_words
from strop.config.keys import Key, all_keys
from strop.config.trees import DPO, PPO, REWARD_MODELLING, SFT, Tree

from generate_keywords import KEYWORDS, keywords

MARK = "<!-- Written by docs/generate_config_reference.py from src/strop/config/schema/: edit that. -->\n"

HEAD = "[Configuration](config.md) explains the entries, and how to set a key."

INTRODUCTION = """\

# Configuration

Each key stands with its meaning, its default and its type. The defaults are those of
`src/strop/config/ppo_trainer.yaml`, and for keys of an engine or a rollout that it does not have, of that
back-end's module `keys`.

```
strop train data.train_batch_size=64 trainer.logger=[console]    # overrides, in Hydra's grammar
strop train --config-path conf --config-name mine    # conf/mine.yaml over the defaults, then overrides
strop check --config-path conf --config-name mine    # sizes and every error; loads no model
strop check --diff ...                               # also the keys that differ from the defaults
strop keys lr                                        # keys with a word in their name or meaning
```

- Your own file needs only the keys that differ. A `defaults:` list and config groups in its folder work
  as Hydra users know them; the shipped defaults are always underneath.
- `key=value`, `+key=value` and `++key=value` all set a key; `~key` removes one, which is of use in mappings
  such as `override_config`. A list is written `key=[a,b]`, a mapping `key={a: 1}`. A key that does not exist
  is an error that names the nearest one of its section.
- Numbers whose type shows no upper bound are ints of 32 bits, floats of float32's range, and at most 1,024
  processes.
- `actor_rollout_ref.model.external_lib` names packages to import first, which register models or tokenizers
  of your own with transformers.
- A default such as `${data.max_prompt_length}` follows the key that it names until you set it.
- A required key without a value is an error that says what to write.
- Paths may begin with `~`, and model and data paths may be `hdfs://` or any other fsspec URL.
- `data.train_batch_size` and `ppo_mini_batch_size` count prompts over all processes; each prompt has
  `actor_rollout_ref.rollout.n` samples. Micro-batch sizes count samples in one process and change
  results by rounding only.
- Deprecated keys work and say so: `*_micro_batch_size` (samples over all processes; setting one sets its
  `*_micro_batch_size_per_gpu` aside) and `actor_rollout_ref.model.external_libs`.

After that a key may have a condition: *No effect*: not under it, and a warning names the key if you wrote
it; *Error*: it stops the run; *Required*: the key has no default.

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

# Configuration of the supervised trainers

Every key of `strop sft`, `strop train-rm` and `strop dpo`, with the defaults of `sft_trainer.yaml`,
`rm_trainer.yaml` and `dpo_trainer.yaml` in `src/strop/config/`. [supervised.md](supervised.md) and
[preference.md](preference.md) describe the commands; overrides and your own files work as in
[config.md](config.md).
"""


PAGES = {
    "algorithm": ["algorithm"],
    "data": ["data"],
    "reward_model": ["reward_model", "custom_reward_function"],
    "teacher": ["teacher"],
    "environment": ["environment"],
    "agent": ["agent"],
    "trainer": ["trainer"],
    "model": ["actor_rollout_ref", "actor_rollout_ref.model"],
    "actor": ["actor_rollout_ref.actor"],
    "rollout": ["actor_rollout_ref.rollout"],
    "ref": ["actor_rollout_ref.ref"],
    "critic": ["critic"],
}
"""docs/config_NAME.md -> the sections that it has, each with the sections below it."""


def pages() -> dict[str, str]:
    """Return the pages by their names without .md."""
    keys = all_keys(PPO.schema)
    by_page: dict[str, list[Key]] = {name: [] for name in PAGES}
    for section in (key for key in keys.values() if key.is_section):
        by_page[_page_of(section.path)].append(section)
    common = [_item(PPO, keys[path], keys, with_status=False) for path in COMMON_KEYS]
    found = {"config": "\n".join([MARK, INTRODUCTION, *common, "", "## All keys", "", *_contents(keys)])}
    for name, sections in by_page.items():
        title = " and ".join(f"`{path}`" for path in PAGES[name])
        head = [MARK, f"# Configuration: {title}", "", HEAD, ""]
        found[f"config_{name}"] = "\n".join([*head, *_sections(PPO, sections, "##", with_status=True)])
    return found | {"supervised_config": supervised_page()}


def _page_of(path: str) -> str:
    """Return the page of a section: the one with the longest name that the section's begins with."""
    names = {name: page for page, sections in PAGES.items() for name in sections}
    return names[max((name for name in names if f"{path}.".startswith(f"{name}.")), key=len)]


def _contents(keys: dict[str, Key]) -> list[str]:
    """Return an item for each page."""
    items = []
    for name, sections in PAGES.items():
        names = ", ".join(f"`{path}`" for path in sections)
        items.append(f"[{names}](config_{name}.md): {' '.join(_doc(keys[path]) for path in sections)}")
    return [*(_wrapped(f"- {item}") for item in items), ""]


def _doc(key: Key) -> str:
    """Return the meaning of a key, with links to the pages that it names."""
    return re.sub(r"strop docs (\w+)", r"[\1](\1.md)", key.doc)


def supervised_page() -> str:
    """Return the page of the supervised trainers, with only the differences from the first."""
    lines = [
        MARK,
        SUPERVISED_INTRODUCTION,
        "## `strop sft`",
        "",
        *_sections(SFT, None, "###", with_status=False),
    ]
    for command, tree in (("train-rm", REWARD_MODELLING), ("dpo", DPO)):
        lines += _differences(command, tree)
    return "\n".join(lines)


def _differences(command: str, tree: Tree) -> list[str]:
    """Return the section of a command whose keys are mostly those of `strop sft`."""
    same, own = _items(SFT), _items(tree)
    missing = sorted(f"`{path}`" for path in same if path not in own)
    return [
        f"## `strop {command}`",
        "",
        "The keys of `strop sft`, with these differences:",
        "",
        *(item for path, item in own.items() if item != same.get(path)),
        "",
        _wrapped(f"It has no {', '.join(missing)}."),
        "",
    ]


def _items(tree: Tree) -> dict[str, str]:
    """Return the lines of each key, by its path."""
    keys = all_keys(tree.schema)
    return {p: _item(tree, key, keys, with_status=False) for p, key in keys.items() if not key.is_section}


def _sections(tree: Tree, sections: list[Key] | None, heading: str, *, with_status: bool) -> list[str]:
    """Return sections, all of the tree by default, as headings and lists of keys."""
    keys, lines = all_keys(tree.schema), []
    for section in sections or [key for key in keys.values() if key.is_section]:
        lines += [f"{heading}{'#' * ('.' in section.path)} `{section.path}`", "", section.doc, ""]
        if with_status and section.limits:
            status = status_in_words(section)
            lines += [_wrapped(f"{status[0].upper()}{status[1:]}."), ""]
        items = [
            _item(tree, key, keys, with_status=with_status)
            for key in keys.values()
            if not key.is_section and key.path.rpartition(".")[0] == section.path
        ]
        if items:
            lines += [*items, ""]
    return lines


def _item(tree: Tree, key: Key, keys: dict[str, Key], *, with_status: bool) -> str:
    """Return an item of a list; a default stands as in the YAML file, with its interpolations."""
    value: Any = tree.raw_default(key.path)
    default = f"Default `{_in_yaml(value)}`"
    if key.required is not None and key.required.is_usual and not value:
        default = f"Required {key.required.when}".rstrip()
    status = status_in_words(key, inherited=len(keys[key.path.rpartition(".")[0]].limits))
    text = f"- `{key.path}`: {_doc(key)} {default} ({key.expected})."
    if with_status and status != "honoured":
        text += f" {status[0].upper()}{status[1:]}."
    return _wrapped(text)


def _in_yaml(value: Any) -> str:
    return "null" if value is None else str(value) or '""'


def _wrapped(text: str) -> str:
    """Return an item in lines of at most 110 characters, none of which begins as a quote or a list does."""
    bound = re.sub(r" (?=[-+>#*]|\d+\.)", "\0", text)
    lines = textwrap.wrap(bound, 110, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace("\0", " ")


def main(arguments: list[str]) -> int:
    """Write or check the files; return the exit status."""
    files = {Path(__file__).with_name(f"{name}.md"): text for name, text in pages().items()}
    for path, text in (files | {KEYWORDS: keywords()}).items():
        if arguments != ["--check"]:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            sys.stderr.write(f"{path} is stale: run python docs/generate_config_reference.py\n")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
