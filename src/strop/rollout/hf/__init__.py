"""Generation with a Hugging Face model and strop's own decoding loop."""
