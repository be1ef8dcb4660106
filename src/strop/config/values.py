"""Reading a value of the tree by its full path."""

from __future__ import annotations

import operator
from typing import Any

from strop.config.schema import Config


def value_at(config: Config, path: str) -> Any:
    """The value of the key `path`, for example "trainer.total_epochs"."""
    return operator.attrgetter(path)(config)
