"""How a model is trained: one protocol, one folder per back-end."""
