"""Worker groups, in this process or on Ray: the trainer sees workers only through them."""
