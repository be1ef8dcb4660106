"""The mathematics of strop: pure functions of tensors and floats, with torch and the standard library only.

``masked``         sums, means, variances and whitening that padding cannot reach
``logprobs``       log-probs, entropies and full KL of tokens, never holding [tokens, vocabulary] at once
``kl``             KL estimates per token, the penalty in the reward, fixed and adaptive coefficients
``advantages``     gae, grpo, reinforce_plus_plus, reinforce_plus_plus_baseline, rloo, remax
``groups``         statistics over the samples of one prompt
``policy_loss``    ppo, gspo, cispo
``value_loss``     the clipped value loss
``aggregation``    from a loss per token to a number, with global denominators
``correction``     importance weights for the sampler's own distribution, and how far it is from the trainer's
``registry``       finding an estimator or a loss by name or by import path

Nothing here reads a configuration, and no normalisation is hidden: what a function divides by is an argument
or in its first lines. A slot whose mask is 0 may hold anything, NaN and infinity included, without reaching a
result or a gradient; results hold 0 there. ``docs/algorithms.md`` lists every formula with its source and its
configuration key.
"""
