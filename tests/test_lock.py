"""Versions that ``requirements.lock`` pins: the commands of the Makefile install them on every Python."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent


def test_every_pinned_version_that_is_here_is_for_the_oldest_python():
    """As on Debian 12, whose Python is 3.11.2: pip would find no such version of a package there."""
    own = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    oldest = next(part.version for part in SpecifierSet(own) if part.operator == ">=")
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    pinned = {canonicalize_name(name): version for name, version in pins.items()}
    needs = {
        f"{found.name}=={found.version}": found.metadata["Requires-Python"]
        for found in importlib.metadata.distributions()
        if pinned.get(canonicalize_name(found.name)) == found.version
    }
    assert len(needs) > 50
    assert {name: need for name, need in needs.items() if need and oldest not in SpecifierSet(need)} == {}
