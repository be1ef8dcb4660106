"""Write docs/config.md from the schema, the defaults and the table of keys that this version does not honour.

python docs/generate_config_reference.py           write it
python docs/generate_config_reference.py --check   exit 1 if it is stale
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from strop.config.keys import Key, all_keys
from strop.config.support import status_in_words
from strop.config.trees import PPO

PAGE = Path(__file__).with_name("config.md")

INTRODUCTION = """\
<!-- Written by docs/generate_config_reference.py from src/strop/config/schema/: edit that, not this page. -->

# Configuration

Every key, section by section. The defaults are those of `src/strop/config/ppo_trainer.yaml`.

```
strop train data.train_batch_size=64 trainer.logger=[console]    # overrides, in Hydra's grammar
strop train --config-path conf --config-name mine    # conf/mine.yaml over the defaults, then overrides
strop check --config-path conf --config-name mine    # what it comes to, and every error; loads no model
```

- A file of your own needs only the keys that differ. A `defaults:` list and config groups in its folder work
  as Hydra users know them; the shipped defaults are always underneath.
- `key=value`, `+key=value` and `++key=value` all set a key; `~key` removes one, which is of use in mappings
  such as `override_config`. A list is written `key=[a,b]`, a mapping `key={a: 1}`. A key that does not exist
  is an error that names the nearest one.
- A default such as `${data.max_prompt_length}` follows the key that it names until you set it.
- Paths may begin with `~`, and model and data paths may be `hdfs://` or any other fsspec URL.
- `data.train_batch_size` and `ppo_mini_batch_size` count prompts over all processes; each prompt has
  `actor_rollout_ref.rollout.n` samples. Micro-batch sizes count samples in one process and never change a
  number.
- Deprecated keys work and say so: `*_micro_batch_size` (samples over all processes; setting one sets its
  `*_micro_batch_size_per_gpu` aside) and `actor_rollout_ref.model.external_libs`.

The last column says what this version does with a key: *honoured*; *no effect*, and when, with a warning that
names the key; or *error*, and when.
"""


def page() -> str:
    """The whole page."""
    defaults = OmegaConf.to_container(OmegaConf.load(PPO.defaults_file), resolve=False)
    keys = all_keys()
    lines = [INTRODUCTION]
    for section in (key for key in keys.values() if key.is_section):
        lines += [f"{'###' if '.' in section.path else '##'} `{section.path}`", "", section.doc, ""]
        rows = [_row(key, defaults) for key in keys.values() if _is_directly_in(key, section)]
        if rows:
            lines += [
                "| key | type | default | meaning | in this version |",
                "| --- | --- | --- | --- | --- |",
            ]
            lines += [*rows, ""]
    return "\n".join(lines)


def _is_directly_in(key: Key, section: Key) -> bool:
    return not key.is_section and key.path.rpartition(".")[0] == section.path


def _row(key: Key, defaults: dict[str, Any]) -> str:
    """A line of a table; the default stands as in the YAML file, with its interpolations."""
    value: Any = defaults
    for word in key.path.split("."):
        value = value[word]
    default = "null" if value is None else str(value)
    cells = (f"`{key.path}`", key.expected, f"`{default}`", key.doc, status_in_words(key.path))
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def main(arguments: list[str]) -> int:
    """Write or check; the exit status."""
    text = page()
    if arguments == ["--check"]:
        if not PAGE.exists() or PAGE.read_text() != text:
            sys.stderr.write(f"{PAGE} is stale: run python docs/generate_config_reference.py\n")
            return 1
        return 0
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
