"""Rules about a whole configuration, before any model loads."""
