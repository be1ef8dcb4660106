"""Rewards: from a finished response to a number.

``manager``        scores a batch (``RewardManager``, ``load_reward_manager``)
``reward_output``  its result, as tensors
``router``         which scorer belongs to which data source; ``coverage``: whether anything scores it
``score``          the scorers themselves: pure functions of text; ``answers`` finds what they compare
``part_scorers``   scorers by name, several for a sample; ``composition`` makes a score of their parts
``sandbox``        runs programs that nobody trusts
``custom``         a user's own function, from ``custom_reward_function.path`` and ``.name``
``scoring``        a batch in a thread of its own, until too many samples have failed (``error_budget``)
``process``        runs a scorer in a process that can be killed at a deadline: samples come from a ``feed``
                   and are sent ahead. ``worker`` is that process; the two exchange ``records`` over a
                   ``wire``; ``output`` reads what it prints and ``process_tree`` ends it with all that it
                   started; ``pool`` has several of them share a feed
``examine``        samples with their scores, as text to read
``cli_score``      ``strop score``: a file of answers (``answer_file`` reads it)

Only ``manager``, ``pending``, ``composition`` and ``reward_output`` import torch: the scoring process starts
in a twentieth of a second.
"""
