"""Agents: programs that own their loop, and sample from the policy through an endpoint.

``chat.py`` reads requests, compares messages and makes token ids of them; ``session.py`` holds the
requests of a program and their answers, as one row of tokens; ``server.py`` serves requests, ``program.py``
runs the programs in processes (``child.py``).
"""
