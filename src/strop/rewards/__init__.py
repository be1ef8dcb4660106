"""Rewards: from a finished response to a number.

``base``           the protocol of a reward, and the adapter for plain callables
``manager``        ``RewardManager``, the built-in reward; ``load_reward_manager`` makes the configured one
``batch``          the rewards of one batch: a scoring thread and a budget of failures
``parts``          weights: from the parts of a score to the score
``arguments``      the values that a function takes by name
``scorer``         all functions of a sample, called for one sample or a batch
``router``         the scorer of each data source
``custom``         a user's function, from ``custom_reward_function.path`` and ``.name``
``reward_output``  the result as tensors, metrics and text
``verl``           names that reward managers written for verl import
``score``          the built-in scorers: pure functions of text
``sandbox``        runs untrusted programs
``worker``         scoring processes, killed at a deadline: a ``pool`` starts each ``process``, which runs
                   ``child``, and decides which sample is at fault if one is lost
``process_tree``   kills a process with everything that it started

Only ``base``, ``manager``, ``batch``, ``parts``, ``reward_output`` and ``verl`` import torch: a scoring
process starts in a twentieth of a second.
"""
