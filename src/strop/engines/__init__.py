"""Training engines: the protocol in ``base``, one module or package per back-end."""
