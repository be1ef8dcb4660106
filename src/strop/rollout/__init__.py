"""Rollouts: the protocol in ``base``, one package per back-end."""
