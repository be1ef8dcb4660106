"""The columns of a batch: shape, dtype, unit, who writes each and who reads it.

A batch is a :class:`~strop.protocol.DataProto`: tensors and object columns, one entry per row. ``COLUMNS``
lists all that strop writes. ``SAMPLE_COLUMNS`` lists those of ``rollouts/*.parquet`` and
``validation/*.parquet``, one row per sample and without padding. A data file's further columns travel with
the rows as object columns, so that reward functions can read them. tests/data/test_columns.py holds both
tables against real batches.

Shapes: B samples (prompts x n, a prompt's samples adjacent), P prompt tokens (``data.max_prompt_length``), T
response tokens (``data.max_response_length``), L = P + T, H hidden size, n samples per prompt. Micro-batches
drop columns of tokens that are padding in all of their rows.

A worked example: one sample of two turns, P = 3, T = 8. The policy of version 7 writes a tool call ("c1 c2")
and its turn ends; the environment inserts the tool's answer ("a1 a2"); meanwhile the policy was updated, so
version 8 samples the final turn ("r1 r2" and the stop token "."). "_" is padding::

    position            0   1   2 | 3   4   5   6   7   8   9   10
    input_ids           _   p1  p2| c1  c2  a1  a2  r1  r2  .   _
    attention_mask      0   1   1 | 1   1   1   1   1   1   1   0
    position_ids        0   0   1 | 2   3   4   5   6   7   8   8
    prompts             _   p1  p2|
    responses                     | c1  c2  a1  a2  r1  r2  .   _
    response_mask                 | 1   1   0   0   1   1   1   0
    sampled by version            | 7   7           8   8   8
    rollout_log_probs             | x   x   0   0   x   x   x   0   by the version that sampled the token
    old_log_probs                 | x   x   0   0   x   x   x   0   by version 8, just before its update
    rollout_is_weights            | w   w   0   0   1   1   1   0   min(exp(old - rollout), threshold)
    token_level_scores            | 0   0   0   0   0   0   s   0   the score is on the last sampled token
    advantages, returns           | x   x   0   0   x   x   x   0

A tool's tokens are attended to (``attention_mask`` 1) but never trained on, scored or regularized
(``response_mask`` 0): every sum over a response goes over ``response_mask``. The versions themselves are not
a column: all rows of a batch come from the version in ``meta_info["weights_version"]``, and the log-probs of
tokens that an older version sampled are enough to correct for it.
"""

from __future__ import annotations

from typing import NamedTuple


class Column(NamedTuple):
    """One column of a batch or of a samples file."""

    shape: str
    dtype: str
    """``int64``, ``float32``, ``bool``, or ``object`` for a column of Python values."""
    unit: str
    meaning: str
    writer: str
    reader: str
    when: str = "always"


_DATA, _ROLLOUT, _ACTOR, _CRITIC = "data.loader", "rollout", "workers.policy", "workers.critic"
_DRIVER, _SCORES, _PASSES = "trainer.ppo", "trainer.scores", "every forward pass"

COLUMNS = {
    # The prompt, from the data loader. The rollout appends the response to the first three: [B, P] -> [B, L].
    "input_ids": Column(
        "BL", "int64", "token id", "prompt, padded left; response, padded right", _DATA, _PASSES
    ),
    "attention_mask": Column("BL", "int64", "0 or 1", "1 on tokens, 0 on padding", _DATA, _PASSES),
    "position_ids": Column("BL", "int64", "position", "clip(cumsum(attention_mask) - 1, 0)", _DATA, _PASSES),
    "data_source": Column("B", "object", "text", "selects the scorer", _DATA, "rewards, validation"),
    "reward_model": Column(
        "B", "object", "record", "{style, ground_truth}", _DATA, "rewards, samples", "the data file has it"
    ),
    "extra_info": Column(
        "B", "object", "record", "for reward functions", _DATA, "rewards", "the data file has it"
    ),
    "index": Column(
        "B", "object", "row", 'extra_info["index"], or the row\'s number', _DATA, "reward functions"
    ),
    "raw_prompt": Column(
        "B", "object", "messages", "the chat messages", _DATA, "data.rewriting", "data.return_raw_chat"
    ),
    "raw_prompt_ids": Column(
        "B",
        "object",
        "token ids",
        "text alone, without chat template",
        _DATA,
        "users",
        "data.return_raw_input_ids",
    ),
    "uid": Column(
        "B", "object", "text", "names the prompt; its n samples share it", _DRIVER, "advantages of groups"
    ),
    "seeds": Column("Bn", "int64", "seed", "one per sample to generate; B prompts here", _DRIVER, _ROLLOUT),
    # The response, from the rollout.
    "prompts": Column(
        "BP", "int64", "token id", "the prompt's part of input_ids", _ROLLOUT, "rewards, samples"
    ),
    "responses": Column("BT", "int64", "token id", "the response's part of input_ids", _ROLLOUT, _PASSES),
    "response_mask": Column(
        "BT", "float32", "0 or 1", "1 on tokens that the policy sampled", _ROLLOUT, "every loss"
    ),
    "rollout_log_probs": Column(
        "BT",
        "float32",
        "nats",
        "log-prob when the token was sampled",
        _ROLLOUT,
        "rollout correction, metrics",
    ),
    "truncated": Column(
        "B", "bool", "", "cut at the length limit, without stop token", _ROLLOUT, "rewards, metrics"
    ),
    # Scores.
    "rm_scores": Column(
        "B",
        "float32",
        "score",
        "the reward model's score",
        "workers.reward_model",
        "rewards",
        "reward_model.enable",
    ),
    "reward/<part>": Column(
        "B", "float32", "score", "a named part of the score; NaN: none", _SCORES, "samples"
    ),
    "reward_failed": Column(
        "B", "bool", "", "could not be scored", _SCORES, "samples", "not with a plain function"
    ),
    "token_level_scores": Column(
        "BT", "float32", "score", "the score, on the last token", _SCORES, "rewards"
    ),
    "baseline_scores": Column(
        "B", "float32", "score", "score of the greedy response", _SCORES, "ReMax", "adv_estimator=remax"
    ),
    # The models' view of the samples, before the update.
    "old_log_probs": Column("BT", "float32", "nats", "log-prob before the update", _ACTOR, "policy loss, KL"),
    "entropys": Column("BT", "float32", "nats", "entropy before the update", _ACTOR, "metrics"),
    "ref_log_prob": Column("BT", "float32", "nats", "the reference's log-prob", _ACTOR, "KL", "a KL is used"),
    "ref_hidden": Column(
        "BTH", "float32", "", "the reference's hidden states", _ACTOR, _ACTOR, "kl_penalty=full"
    ),
    "full_kl": Column("BT", "float32", "nats", "KL over the vocabulary", _ACTOR, _DRIVER, "kl_penalty=full"),
    "values": Column(
        "BT", "float32", "score", "the critic's values", _CRITIC, "GAE, value loss", "adv_estimator=gae"
    ),
    # What the driver makes of them.
    "kl": Column(
        "BT",
        "float32",
        "nats",
        "KL to the reference, as estimated",
        _DRIVER,
        "rewards, metrics",
        "a KL is used",
    ),
    "token_level_rewards": Column("BT", "float32", "score", "scores - beta kl", _DRIVER, "advantages"),
    "advantages": Column("BT", "float32", "score", "whitened where configured", _DRIVER, "policy loss"),
    "returns": Column("BT", "float32", "score", "target of the values", _DRIVER, "value loss"),
    "rollout_is_weights": Column(
        "BT", "float32", "ratio", "truncated importance weights", _DRIVER, "policy loss", "actor.rollout_is"
    ),
    # Fine-tuning and reward modelling: answers that are given.
    "rejected": Column(
        "BT", "int64", "token id", "the rejected answer", "data.answers", "reward modelling", "pairs"
    ),
    "rejected_mask": Column(
        "BT", "float32", "0 or 1", "1 on its tokens", "data.answers", "reward modelling", "pairs"
    ),
}
"""Name in ``DataProto.batch`` or ``DataProto.non_tensor_batch`` -> its description."""

_TOKENS = ("rollout_log_probs", "old_log_probs", "ref_log_prob", "entropys", "values", "token_level_rewards")
_SAMPLES = "tracking.samples"

SAMPLE_COLUMNS = {
    "uid": Column("B", "string", "text", "names the prompt; its n samples share it", _SAMPLES, "users"),
    "data_source": Column("B", "string", "text", "selects the scorer", _SAMPLES, "validation, view"),
    "ground_truth": Column(
        "B", "string", "text", "JSON if structured", _SAMPLES, "view", "the data file has it"
    ),
    "prompt": Column(
        "B", "string", "text", "with special tokens, as the model saw it", _SAMPLES, "validation, view"
    ),
    "response": Column("B", "string", "text", "without, as the reward saw it", _SAMPLES, "validation, view"),
    "truncated": Column("B", "bool", "", COLUMNS["truncated"].meaning, _SAMPLES, "validation, view"),
    "score": Column("B", "float32", "score", "sum of token_level_scores", _SAMPLES, "validation, view"),
    "reward/<part>": Column("B", "float32", "score", "null where a part does not apply", _SAMPLES, "view"),
    "reward_failed": COLUMNS["reward_failed"]._replace(writer=_SAMPLES, reader="validation"),
    "prompt_ids": Column("B*", "int64", "token id", "the prompt without padding", _SAMPLES, "users"),
    "response_ids": Column("B*", "int64", "token id", "the response without padding", _SAMPLES, "view"),
    "response_mask": Column("B*", "int8", "0 or 1", COLUMNS["response_mask"].meaning, _SAMPLES, "users"),
    **{
        name: COLUMNS[name]._replace(shape="B*", writer=_SAMPLES, reader="users")
        for name in (*_TOKENS, "advantages", "returns")
    },
}
"""Column of a samples file -> its description; ``B*``: a list of the sample's own length per row."""


def described(name: str, columns: dict[str, Column] = COLUMNS) -> Column | None:
    """Return the description of a column, None for a name that no table lists."""
    return columns.get("reward/<part>" if name.startswith("reward/") else name)
