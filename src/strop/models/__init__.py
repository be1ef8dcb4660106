"""Hugging Face models: loading, and the forward passes of policy, critic and reward model."""
