"""Records of a run: metrics, samples, curves. Imports neither torch nor an optional package."""

from __future__ import annotations

from strop.tracking.base import RunInfo, Tracker
from strop.tracking.trackers import Tracking

__all__ = ["RunInfo", "Tracker", "Tracking"]
