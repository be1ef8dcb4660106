"""Processes that score samples, with a deadline for each sample."""
