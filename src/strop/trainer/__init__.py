"""The algorithm and its loop."""
