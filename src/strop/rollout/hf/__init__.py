"""The rollout ``hf``: a transformers model and strop's decoding loop."""
