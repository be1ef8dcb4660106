from __future__ import annotations

import sys
from pathlib import Path

# The jobs of sharded engines and of workers are shared: the ranks import them by name.
sys.path[:0] = [str(Path(__file__).parent.parent / part) for part in ("engines", "workers")]
