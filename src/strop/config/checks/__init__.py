"""Checks of a whole configuration, before any model loads."""
