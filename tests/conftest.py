"""Small real things to test with: a Hugging Face folder with a tokenizer, and batches of random samples."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

# One thread each: tests run in parallel, and numbers must not depend on the machine's cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach for the network, or wait for it
torch.set_num_threads(1)

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
