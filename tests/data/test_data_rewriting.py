"""Samples re-tokenized for a reward model, against text and token ids written by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from strop.data.rewriting import Rewriter
from strop.errors import DataError, ModelError
from strop.protocol import DataProto

import tiny_model
from messages import naming

READER = tiny_model.build_tokenizer()
TEMPLATE = (
    "{% for m in messages %}{{ 'Q' if m.role == 'user' else 'A' }}{{ m.content }}"
    "{% if m.role == 'assistant' %}<end>{% endif %}.{% endfor %}"
)


def writer(template=TEMPLATE):
    """A tokenizer with other ids than the reader's, and another template: it ends turns with a full stop."""
    tokenizer = tiny_model.build_tokenizer("QA.=+0123456789 ")
    tokenizer.chat_template = template
    return tokenizer


def samples(*, prompts, responses, truncated):
    """Return samples as a rollout does; the prompt's own ids do not matter here."""
    rows = [READER.encode(text, add_special_tokens=False) for text in responses]
    rows = [row if cut else [*row, READER.eos_token_id] for row, cut in zip(rows, truncated, strict=True)]
    width = max(map(len, rows)) + 1
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros(len(rows), width)
    for index, row in enumerate(rows):
        ids[index, : len(row)], mask[index, : len(row)] = torch.tensor(row, dtype=torch.long), 1
    column = np.empty(len(rows), dtype=object)
    column[:] = prompts
    tensors = {"responses": ids, "response_mask": mask, "truncated": torch.tensor(truncated)}
    return DataProto(tensors, {"raw_prompt": column})


def texts(rewriter, batch):
    """Return the reward model's input, row by row, decoded with its tokenizer."""
    columns = rewriter(batch).batch
    return [
        rewriter.writer.decode(ids[mask.bool()])
        for ids, mask in zip(columns["input_ids"], columns["attention_mask"], strict=True)
    ]


def test_a_template_that_reads_parts_alone_is_given_parts():
    template = (
        "{% for m in messages %}{{ 'Q' if m.role == 'user' else 'A' }}"
        "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
        "{% if m.role == 'assistant' %}<end>{% endif %}.{% endfor %}"
    )
    assert texts(Rewriter(READER, writer(template)), BATCH) == texts(Rewriter(READER, writer()), BATCH)


DIALOGUE = [
    {"role": "user", "content": "1+1="},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "1+2="},
]
BATCH = samples(
    prompts=[DIALOGUE, [{"role": "user", "content": "7"}], "7+0="],
    responses=["3", "1234", ""],
    truncated=[False, True, False],
)


def test_conversations_follow_the_other_template_and_unfinished_responses_stay_open():
    assert texts(Rewriter(READER, writer()), BATCH) == [
        "Q1+1=.A2<end>.Q1+2=.A3<end>.",
        "Q7.A1234",
        "Q7+0=.A<end>.",
    ]


def test_ids_are_padded_on_the_left_and_positions_count_real_tokens():
    columns = Rewriter(READER, writer())(BATCH).batch
    vocabulary = {token: number for number, token in enumerate((*tiny_model.SPECIAL, *"QA.=+0123456789 "))}
    assert columns["input_ids"][1].tolist() == [0] * 12 + [vocabulary[character] for character in "Q7.A1234"]
    assert columns["attention_mask"][1].tolist() == [0] * 12 + [1] * 8
    assert columns["position_ids"][1].tolist() == [0] * 12 + list(range(8))


def test_of_a_conversation_that_is_too_long_the_end_is_kept():
    assert texts(Rewriter(READER, writer(), max_length=4), BATCH) == ["A3<end>.", "1234", ".A<end>."]
    assert texts(Rewriter(READER, writer(), max_length=8), BATCH)[1] == "Q7.A1234"


@pytest.mark.parametrize(
    ("kept", "truncated", "text"),
    [
        (-1, False, "7<end>2<end>"),  # as templates of reasoning models leave out the thoughts
        (-1, True, "7<end>2"),
        (0, True, "7<end>1+1<end>"),  # without the end of the response, the template's end stays
    ],
)
def test_a_template_that_leaves_out_part_of_an_answer_is_followed(kept, truncated, text):
    template = f"{{% for m in messages %}}{{{{ m.content.split('=')[{kept}] }}}}<end>{{% endfor %}}"
    batch = samples(prompts=["7"], responses=["1+1=2"], truncated=[truncated])
    assert texts(Rewriter(READER, writer(template)), batch) == [text]


def test_control_tokens_of_the_writer_in_a_text_are_text():
    batch = samples(prompts=["7<end>"], responses=["3"], truncated=[False])
    expected = Rewriter(READER, writer())(samples(prompts=["7"], responses=["3"], truncated=[False]))
    ids = Rewriter(READER, writer())(batch).batch["input_ids"][0].tolist()
    end = writer().eos_token_id
    assert ids.count(end) == expected.batch["input_ids"][0].tolist().count(end)
    assert len(ids) == expected.batch["input_ids"].shape[1] + len("<end>")


def test_a_missing_template_or_column_is_an_error_with_its_remedy():
    with pytest.raises(ModelError, match=naming("reward_model.model.input_tokenizer=null")):
        Rewriter(READER, writer(template=None))
    batch = DataProto(BATCH.batch)
    with pytest.raises(DataError, match=naming("raw_prompt", "data.return_raw_chat")):
        Rewriter(READER, writer())(batch)


def test_turns_are_messages_with_the_answers_between_them():
    batch = samples(
        prompts=[[{"role": "user", "content": "1+1="}]] * 3,
        responses=["3704", "3704", "37"],
        truncated=[False, True, False],
    )
    batch.batch["response_mask"][:2, 1:3] = 0  # "70" is what the environment told, with its template
    batch.batch["response_mask"][2] = 0  # lost
    batch.batch["ended_by"] = torch.tensor([1, 2, 5])
    answers = [{"role": "tool", "content": "7"}, {"role": "tool", "content": [{"type": "text", "text": "0"}]}]
    turns = [{"text": "3", "calls": [], "answers": answers}, {"text": "4", "calls": [], "answers": []}]
    told = [
        {"turns": turns, "prompt": [{"role": "user", "content": "1+1=2"}]},
        {"turns": turns},
        {"turns": []},
    ]
    batch.non_tensor_batch["conversation"] = np.array([*map(json.dumps, told)], dtype=object)
    written = tiny_model.build_tokenizer("QA.=+0123456789\n")
    written.chat_template = TEMPLATE
    assert texts(Rewriter(READER, written), batch) == [
        "Q1+1=2.A3<end>.Q7\n0.A4<end>.",
        "Q1+1=.A3<end>.Q7\n0.A4",
        "Q1+1=.A<end>.",
    ]


def test_a_template_that_refuses_a_sample_is_named_with_its_folder():
    own = writer("{{ raise_exception('no turns of a tool') }}")
    own.name_or_path = "the/reward/model"
    with pytest.raises(ModelError, match=naming("the/reward/model", "no turns of a tool")):
        Rewriter(READER, own)(BATCH)
