"""The columns of a batch: shape, dtype, unit, writer and readers.

A batch is a :class:`~strop.protocol.DataProto`: tensors and object columns, one entry per row. ``COLUMNS``
lists all that strop writes. ``SAMPLE_COLUMNS`` lists those of ``rollouts/*.parquet`` and
``validation/*.parquet``, one row per sample and without padding. A data file's further columns travel with
the rows as object columns, so that reward functions can read them. tests/data/test_columns.py holds both
tables against real batches.

Shapes: B samples (prompts x n, a prompt's samples adjacent), P prompt tokens (``data.max_prompt_length``), T
response tokens (``data.max_response_length``), L = P + T, I pictures of a row, H hidden size, n samples per
prompt. Micro-batches drop token positions that are padding in all of their rows.

A worked example of the general layout: P = 3, T = 8.
The policy of version 7 writes a tool call ("c1 c2") and its turn ends; the environment inserts the tool's
answer ("a1 a2"); meanwhile the policy was updated, so version 8 samples the final turn ("r1 r2" and the stop
token "."). "_" is padding::

    position            0   1   2 | 3   4   5   6   7   8   9   10
    input_ids           _   p1  p2| c1  c2  a1  a2  r1  r2  .   _
    attention_mask      0   1   1 | 1   1   1   1   1   1   1   0
    position_ids        0   0   1 | 2   3   4   5   6   7   8   8
    prompts             _   p1  p2|
    responses                     | c1  c2  a1  a2  r1  r2  .   _
    response_mask                 | 1   1   0   0   1   1   1   0
    rollout_versions              | 7   7   -1  -1  8   8   8   -1  the version that sampled the token
    rollout_log_probs             | x   x   0   0   x   x   x   0   by the version that sampled the token
    old_log_probs                 | x   x   0   0   x   x   x   0   by version 8, just before its update
    importance weights            | w   w   0   0   1   1   1   0   min(exp(old - rollout), threshold)
    token_level_scores            | 0   0   0   0   0   0   s   0   the score is on the last sampled token
    advantages, returns           | x   x   0   0   x   x   x   0

A tool's tokens are attended to (``attention_mask`` 1) but never trained on, scored or regularized
(``response_mask`` 0): every sum over a response goes over ``response_mask``. The objective computes the
weights, from log-probs: no loss reads the versions. Without their column, all tokens are of the version in
``meta_info["weights_version"]``.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple


class Column(NamedTuple):
    """One column of a batch or of a samples file."""

    shape: str
    """Dimensions, as in the module's legend; ``B*``: a list per row, of the sample's own length."""
    dtype: str
    """dtype of the tensor or parquet column; ``object`` for Python values."""
    unit: str
    writer: str
    readers: str
    meaning: str
    when: str = "always"


def _read(table: str) -> dict[str, Column]:
    rows = [[cell.strip() for cell in line.split("|")] for line in table.strip().splitlines()]
    return {name: Column(*cells) for name, *cells in rows}


ENDED_BY = ("", "stop", "length", "turns", "environment", "error")
"""Code -> the reason of a sample's end: a turn without calls, a limit of tokens, a limit of turns, the
environment, an error of the environment."""
REWARD_TEXT = "reward_text/"
"""Prefix of the columns of a scorer's texts."""

# name              | dim | dtype   | unit   | writer  | readers | meaning | when
COLUMNS = _read("""
input_ids           | BL  | int64   | id     | data    | forward passes | prompt and response; BP without
attention_mask      | BL  | int64   | 0 or 1 | data    | forward passes | 1 on tokens, 0 on padding
position_ids        | BL  | int64   | index  | data    | forward passes | clip(cumsum(attention_mask) - 1, 0)
images              | BI  | int64   | digest | data    | passes, rewards | of pictures; 0: none | pictures
images_at           | BT  | int64   | digest | rollout | passes | at its first token; -1: its others | agent
image_files         | B   | object  | files  | rollout | driver | pictures that came in turns | agent
data_source         | B   | object  | text   | data    | rewards, validation | selects the scorer
reward_model        | B   | object  | record | data    | rewards, samples | {style, ground_truth} | optional
extra_info          | B   | object  | record | data    | rewards | any further facts | optional
index               | B   | object  | row    | data    | reward functions | extra_info["index"] or row number
prompt              | B   | object  | chat   | data    | rewards | as in the file; or named by data.prompt_key
raw_prompt          | B   | object  | chat   | data    | data.rewriting | messages | return_raw_chat
raw_tools           | B   | object  | list   | data    | data.rewriting | JSON schemas | return_raw_chat
raw_prompt_ids      | B   | object  | ids    | data    | users | without template | return_raw_input_ids
uid                 | B   | object  | text   | driver  | advantages | names the prompt; its n samples share it
seeds               | Bn  | int64   | seed   | driver  | rollout | one per sample; here B counts prompts
prompts             | BP  | int64   | id     | rollout | rewards, samples | the prompt's part of input_ids
responses           | BT  | int64   | id     | rollout | forward passes | the response's part of input_ids
response_mask       | BT  | float32 | 0 or 1 | rollout | every loss | 1 on tokens that the policy sampled
follows             | BT  | int32   | index  | rollout | passes, advantages | algorithms.token_tree | a tree
rollout_log_probs   | BT  | float32 | nats   | rollout | correction, metrics | log-prob at sampling
rollout_versions    | BT  | int32   | number | rollout | samples | sampled it; else -1
truncated           | B   | bool    |        | rollout | rewards, metrics | cut, without a stop token
ended_by            | B   | int8    | code   | rollout | rewards, metrics | ENDED_BY | environment
n_turns             | B   | int16   | turns  | rollout | samples, metrics | of the policy | environment
n_calls             | B   | int16   | calls  | rollout | metrics | of tools | environment
n_malformed         | B   | int16   | turns  | rollout | metrics | with calls that cannot be run | environment
n_errors            | B   | int16   | errors | rollout | metrics | of the environment | environment
n_timeouts          | B   | int16   | turns  | rollout | metrics | of them past a deadline | environment
n_other_stop        | B   | int16   | turns  | rollout | metrics | not the template's stop token | environment
n_branches          | B   | int16   | leaves | rollout | metrics | of a session's tree | agent
n_overlapping       | B   | int16   | 0 or 1 | rollout | metrics | two requests at the same time | agent
n_replayed          | B   | int16   | turns  | rollout | metrics | recorded before a restart | agent
n_abandoned         | B   | int16   | turns  | rollout | metrics | asked for, and left by the client | agent
agent_waiting       | B   | float32 | share  | rollout | metrics | of time, for programs | agent
turn_cut            | B   | bool    |        | rollout | metrics | at a limit of its last turn | environment
conversation        | B   | object  | JSON   | rollout | rewards, samples | turns, prompt | environment
environment_scores  | BT  | float32 | score  | rollout | rewards | of a turn; NaN: none | it has `reward`
stop_tokens         | B   | int64   | tokens | rollout | metrics | eos and stop_token_ids in it | if counted
hidden_tokens       | B   | int64   | tokens | rollout | metrics | not in the decoded text | if counted
rm_scores           | B   | float32 | score  | RM      | rewards | a model's score | reward_model.enable
reward/<part>       | B   | float32 | score  | rewards | samples | a part of the score; NaN: does not apply
reward_text/<part>  | B   | object  | text   | rewards | samples | what a scorer returned besides numbers
reward_failed       | B   | bool    |        | rewards | samples | not scored | reward managers
token_level_scores  | BT  | float32 | score  | rewards | driver | the score, on the last sampled token
baseline_scores     | B   | float32 | score  | rewards | advantages | of the greedy response | remax
old_log_probs       | BT  | float32 | nats   | actor   | policy loss, KL | log-prob before the update
entropys            | BT  | float32 | nats   | actor   | metrics | entropy before the update
ref_log_prob        | BT  | float32 | nats   | ref     | KL | log-prob | a KL is used
update_log_probs    | BT  | float32 | nats   | actor   | samples | in the last epoch's step | several steps
ref_hidden          | BTH | float32 |        | ref     | actor | hidden states | a full KL is used
full_kl             | BT  | float32 | nats   | actor   | driver | KL over the vocabulary | a full KL is used
teacher             | BT  | int64   | number | driver  | teacher, actor | of its teacher | by_source
teacher_log_prob    | BT  | float32 | nats   | teacher | advantages | log-prob | a teacher
teacher_entropy     | BT  | float32 | nats   | teacher | metrics | entropy | a teacher
teacher_hidden      | BTH | float32 |        | teacher | actor | hidden states | if whole
teacher_ids         | BTK | int32   | id     | teacher | actor | its likeliest words | top_k
teacher_top         | BTK | float32 | nats   | teacher | actor | log-probs; last: all others | top_k
teacher_kl          | BT  | float32 | nats   | driver  | metrics | policy - teacher | kl=sampled
values              | BT  | float32 | score  | critic  | advantages, value loss | before the update | gae
kl                  | BT  | float32 | nats   | driver  | driver, metrics | estimate of the KL | a KL is used
token_level_rewards | BT  | float32 | score  | driver  | advantages | scores - beta kl
advantages          | BT  | float32 | score  | driver  | policy loss | whitened where configured
returns             | BT  | float32 | score  | driver  | value loss | target of the values
rejected            | BT  | int64   | id     | data    | training on pairs | rejected answer | train-rm, dpo
rejected_mask       | BT  | float32 | 0 or 1 | data    | training on pairs | 1 on its tokens | train-rm, dpo
ref_chosen_log_prob | B   | float32 | nats   | driver  | preference loss | of the reference, summed | dpo
ref_rejected_log_prob | B | float32 | nats   | driver  | preference loss | of the reference, summed | dpo
row                 | B   | int64   | row    | actor   | actor | number in its mini-batch | recorded updates
""")
"""Name in ``DataProto.batch`` or ``DataProto.non_tensor_batch`` -> its description."""

SAMPLE_COLUMNS = _read("""
uid                 | B   | string  | text   | samples | users | names the prompt; its n samples share it
data_source         | B   | string  | text   | samples | validation, view | selects the scorer
ground_truth        | B   | string  | text   | samples | view | JSON if structured | optional
prompt              | B   | string  | text   | samples | validation, view | as the model saw it
images              | B*  | string  | digest | samples | view | of pictures, hexadecimal | pictures
response            | B   | string  | text   | samples | validation, view | without special tokens
hidden_tokens       | B   | int32   | tokens | samples | validation, view | not in the text | if counted
response_with_special_tokens | B | string | text | samples | view | null without hidden tokens | if counted
truncated           | B   | bool    |        | samples | validation, view | cut, without a stop token
ended_by            | B   | string  | text   | samples | view | reason of the end | environment
n_turns             | B   | int16   | turns  | samples | view | of the policy | environment
conversation        | B   | string  | JSON   | samples | view | turns, and the prompt | environment
score               | B   | float32 | score  | samples | validation, view | sum of token_level_scores
reward/<part>       | B   | float32 | score  | samples | view | null where a part does not apply
reward_text/<part>  | B   | string  | text   | samples | view | what a scorer returned besides numbers
reward_failed       | B   | bool    |        | samples | validation | not scored | reward managers
response_length     | B   | int32   | tokens | samples | validation, view | sampled ones of response_ids
prompt_ids          | B*  | int32   | id     | samples | users | without padding
response_ids        | B*  | int32   | id     | samples | view | without padding
response_mask       | B*  | int8    | 0 or 1 | samples | users | 0 on tokens inserted by a tool
follows             | B*  | int32   | index  | samples | users | response token before each; -1, -2 | a tree
rollout_versions    | B*  | int32   | number | samples | users | version that sampled the token | optional
""")
_LOG_PROBS = ("rollout_log_probs", "old_log_probs", "update_log_probs", "ref_log_prob", "teacher_log_prob")
TOKEN_COLUMNS = {
    **dict.fromkeys((*_LOG_PROBS, "token_level_rewards"), 16),
    **dict.fromkeys(("entropys", "values", "advantages", "returns"), 11),
}
"""Per-token column [B, T] of a batch -> significant bits of its float32 numbers in a samples file.

11 are float16's, without its narrow range: an error of 2.4e-4 of the number. Log-probs are compared with one
another, and sampler and trainer differ by about 1e-3, so they keep 16 (7.6e-6).
"""
SAMPLE_COLUMNS |= {name: COLUMNS[name]._replace(shape="B*", writer="samples") for name in TOKEN_COLUMNS}
"""Column of a samples file -> its description."""
TEACHER_COLUMNS = ("teacher", "teacher_hidden", "teacher_ids", "teacher_top")
"""Columns that passes with a teacher read, as far as a batch has them."""


def sampled_runs(ids_T: Any, mask_T: Any) -> list[list[int]]:
    """Return the token ids of each turn of the policy: those between tokens that it did not sample.

    ``ids_T`` [T] and ``mask_T`` [T] are a row of ``responses`` and of ``response_mask``.
    """
    pairs = zip(ids_T.tolist(), mask_T.tolist(), strict=True)
    return [
        [token for token, _ in run]
        for is_sampled, run in itertools.groupby(pairs, key=lambda pair: pair[1])
        if is_sampled
    ]
