"""Small real things to test with: a Hugging Face folder with a tokenizer, and batches of random samples."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

# Files of workers that share two cores: one thread each, and results that do not depend on the machine's cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
