"""The mathematics of strop: pure functions of tensors and floats, with torch and the standard library only.

``logprobs``       log-probs, entropies and full KL of tokens, never holding [tokens, vocabulary] at once
``kl``             KL estimates per token, the penalty in the reward, fixed and adaptive coefficients
``output_layer``   the same for a head that is a matrix, in blocks of the vocabulary
``output_kernel``  its Triton kernels
``output_sums``    its sums over blocks, splits and ranks
``advantages``     gae, grpo, reinforce_plus_plus, reinforce_plus_plus_baseline, rloo, remax
``policy_loss``    ppo, gspo, cispo, and the clipped value loss
``aggregation``    masked sums and means, and the loss of a mini-batch with global denominators
``correction``     importance weights for the sampler's distribution, and its distance from the trainer's
``preference``     the Bradley-Terry model and its calibration
``registry``       lookup of an estimator or a loss, and calls bound by parameter name

Nothing here reads a configuration, and no normalization is hidden: every denominator is an argument or in the
first lines of a function. Slots with mask 0 may hold anything, NaN and infinity included, without effect on
results or gradients; results are 0 there. ``strop docs algorithms`` lists every formula with its source and
its configuration key.
"""
