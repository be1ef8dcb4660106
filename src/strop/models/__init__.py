"""Hugging Face models as the trainer needs them: loading, and the policy, value and reward forward passes."""
