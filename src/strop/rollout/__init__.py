"""How responses are generated: `base` is the seam, `hf` the engine that runs on the trainer's own weights."""
