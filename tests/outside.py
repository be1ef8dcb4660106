"""What tests need from the machine, beyond packages of Python."""

from __future__ import annotations

import functools
import subprocess

import pytest

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
