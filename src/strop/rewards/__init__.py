"""Rewards: from a finished response to a number.

``manager``        ``RewardManager``, the built-in reward: which functions score a sample, with which weights
``arguments``      the values that a function takes by name
``batch``          when the samples of a batch are scored: a thread, while others are generated
``worker``         scoring processes, killed at a deadline: a ``pool`` starts each ``process``, which runs
                   ``child``, and decides which sample is at fault if one is lost

``base``           the protocol of a reward, and the adapter for plain callables
``scorer``         all functions of a sample, called for one sample or a batch
``router``         the scorer of each data source
``custom``         a user's function, from ``custom_reward_function.path`` and ``.name``
``loading``        the configured reward manager
``reward_output``  the result as tensors, metrics and text, and how many samples may fail
``example``        one row, scored before a run starts
``identity``       what identifies a function that a program passes
``verl``           names that reward managers written for verl import
``score``          the built-in scorers: pure functions of text
``sandbox``        runs untrusted programs

Of these, ``arguments``, ``scorer``, ``router``, ``custom`` and ``worker`` import no torch: a scoring process
starts in a twentieth of a second.
"""
