"""Trackers that need a package of their own; each is imported when a run uses it."""
