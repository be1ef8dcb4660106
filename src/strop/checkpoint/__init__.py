"""Checkpoints of a run: write, seal, find, resume, upload and export them."""
