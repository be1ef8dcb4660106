"""Ways of the actor's weights to a rollout in another pool: one module each.

A rollout in the actor's processes needs none: its engine runs there, and copies from the actor's tensors.
"""
