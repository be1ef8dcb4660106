"""``python -m strop.trainer.main_ppo key=value ...``: verl's name for ``strop train``."""

from __future__ import annotations

import sys

from strop.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
