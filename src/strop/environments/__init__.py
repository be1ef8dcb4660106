"""Environments: what answers the turns of a policy, in processes that may be killed.

``episode.py`` is one episode of a user's class and tools, ``child.py`` the process that runs episodes,
``pool.py`` the processes as a rollout uses them.
"""
