"""The chat template of a run; one that does not end is stopped before a run renders it."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from strop.config.paths import is_template_file
from strop.config.schema.data import RowsConfig
from strop.data.fetch import local_path
from strop.errors import DataError, raised_as

_LIMIT_S = 10
_GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")  # a tag of transformers
_RENDER = """
import json, math, resource, sys, time
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
template, variables, limit_s = json.load(sys.stdin)
# of the processor: a busy machine, or slow imports, are no fault of the template
resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time()) + limit_s,) * 2)
environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
environment.globals.update(strftime_now=lambda form: "", raise_exception=lambda message: sys.exit(1))
environment.from_string(template).render(**variables)
"""


def chat_template_of(data: RowsConfig) -> str | None:
    """Return the text of ``data.chat_template``, of a file its content; None: that of the tokenizer."""
    template = data.chat_template
    if not is_template_file(template):
        return template
    with raised_as(DataError, f"data.chat_template={template}: cannot be read", OSError, UnicodeDecodeError):
        return local_path(template, data.cache_dir).read_text(encoding="utf-8")


def require_end(tokenizer: Any, where: str, variables: Mapping[str, Any] | None = None) -> None:
    """Raise ``DataError`` if the chat template takes more than 10 s of the processor for one short message.

    A process of its own renders it: arithmetic in C, as in ``9 ** 999999999``, hears no signal. Other errors
    are left to the rendering of the data.
    """
    template = tokenizer.chat_template
    if isinstance(template, Mapping):
        template = template.get("default")
    if not template:
        return
    given = {
        "messages": [{"role": "user", "content": "1"}],
        "add_generation_prompt": True,
        **tokenizer.special_tokens_map,
        **(variables or {}),
    }
    if not _ends(json.dumps([_GENERATION.sub("", template), given, _LIMIT_S], default=str)):
        raise DataError(
            f"{where}: the chat template did not end within {_LIMIT_S} s for one message; expected one "
            "that renders at once. Correct it, or set data.chat_template to another"
        )


@functools.cache
def _ends(template_and_variables: str) -> bool:
    command = [sys.executable, "-c", _RENDER]
    done = subprocess.run(command, input=template_and_variables.encode(), capture_output=True, check=False)
    return done.returncode >= 0  # else a signal ended it
