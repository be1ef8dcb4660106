"""Faster passes of Hugging Face models, with their formulas unchanged."""
