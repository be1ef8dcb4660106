"""Where workers run: in this process, or elsewhere. The trainer sees only a worker group."""
