"""Workers of the roles: each holds an engine (the actor also a rollout) and has the trainer's operations."""
