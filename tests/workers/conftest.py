from __future__ import annotations

import sys
from pathlib import Path

# The jobs of sharded engines are shared: the ranks import them by name.
sys.path.insert(0, str(Path(__file__).parent.parent / "engines"))
