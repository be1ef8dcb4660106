"""The roles: each holds an engine (and the actor a rollout), and offers what the trainer asks of it."""
