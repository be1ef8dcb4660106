"""Worker groups on Ray: the only package that imports ray."""
