"""Last import of the server of ``forked``: its forks collect no garbage among the modules before this one.

A collection there would also copy every page of them that a fork shares with the server.
"""

import gc

gc.collect()
gc.freeze()
