"""Rollout ``http``: samples of servers elsewhere, or of servers that the run starts."""
