"""``python -m strop``: the command ``strop`` where its script is not on the PATH."""

from __future__ import annotations

import sys

from strop.cli.main import main

sys.exit(main())
