"""What makes the passes of Hugging Face models faster without a change of their formulas."""
