"""Memory that a run needs, and the sizes that are chosen from the memory that there is."""
