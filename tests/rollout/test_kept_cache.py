"""Keys and values that stay from one turn to the next, against those that are computed again."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from transformers import LlamaForCausalLM

from strop.errors import ModelError
from strop.models.passes.low_precision import low_precision
from strop.protocol import DataProto
from strop.rollout.base import SamplingParams
from strop.rollout.hf import decoding, engine
from strop.rollout.hf.engine import HFRollout

from tiny_lms import EOS, FAMILIES, PAD, prompts_of, response_log_probs, tiny_lm

LENGTHS = [3, 9, 1, 6, 5]
PARAMS = SamplingParams(max_tokens=44, n=3, stop_token_ids=(7, 8, 9, 10, 11, 12, 13, 14))
TURNS = 4


class Inserts:
    """Answers of 1 to 9 tokens, which follow from the turn; a sample has up to four turns."""

    options: ClassVar = {"turn_length": 20}

    def begin(self, batch):
        return batch

    def columns(self, batch):
        return DataProto()

    def complete(self, batches, decode, *, advanced):
        while True:
            for batch in batches:
                for row in batch.waiting.nonzero()[:, 0].tolist():
                    sampled = (batch.versions[row] >= 0).int()
                    if int((sampled.diff(prepend=sampled.new_zeros(1)) > 0).sum()) == TURNS:
                        batch.end(row, "turns")
                    else:
                        last = sum(batch.ids(row))
                        batch.insert(row, [20 + (last + place) % 40 for place in range(1 + (last + row) % 9)])
            if bool(batches[0].complete.all()):
                return
            decode()


def rollout_of(model, **options) -> HFRollout:
    return HFRollout(model, pad_token_id=PAD, eos_token_ids=[EOS], episodes=Inserts(), **options)


@pytest.fixture
def passes(monkeypatch):
    """An entry for each continuation from what was kept."""
    insert, found = decoding._insert, []
    monkeypatch.setattr(decoding, "_insert", lambda *arguments: found.append(1) or insert(*arguments))
    return found


def _afresh(monkeypatch) -> None:
    decode = decoding.decode
    monkeypatch.setattr(engine, "decode", lambda *a, kept, names, **options: decode(*a, **options))


@pytest.mark.fast("qwen3_moe", "gpt2", "qwen2 with windows", "gemma2 eager")
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_those_of_a_full_pass_and_samples_those_computed_afresh(family, monkeypatch, passes):
    monkeypatch.setattr(decoding, "_PREFILL_TOKENS", 60)  # several passes
    model, tolerance = tiny_lm(family), 5e-5
    if not any(word in family for word in ("eager", "moe", "mixtral")):  # these have float32 parts
        model, tolerance = model.double(), 1e-6
    prompts = prompts_of(LENGTHS, n=3)
    rollouts = [rollout_of(model) for _ in range(2)]
    passes.clear()
    kept, again = (rollout.generate(prompts, PARAMS).batch for rollout in rollouts)
    assert len(passes) >= 2 * (TURNS - 2)
    assert all(torch.equal(kept[name], again[name]) for name in kept)
    mask = kept["response_mask"].bool()
    assert kept["n_turns"].max() >= TURNS - 1
    expected = response_log_probs(model, kept)
    assert (kept["rollout_log_probs"] - expected)[mask].abs().max() < tolerance
    _afresh(monkeypatch)
    afresh = rollout_of(model).generate(prompts, PARAMS).batch
    assert torch.equal(kept["responses"], afresh["responses"])
    assert (kept["rollout_log_probs"] - afresh["rollout_log_probs"]).abs().max() < tolerance


@pytest.mark.fast("None")
@pytest.mark.parametrize("size", [None, 7])
def test_samples_of_later_batches_and_other_weights_go_on_as_if_computed_afresh(size, monkeypatch, passes):
    """Rows of the second batch end their turn, or are in its middle, when those of the first one have."""

    def run() -> list[DataProto]:
        model = tiny_lm().double()
        rollout = rollout_of(model, micro_batch_size=size)
        passes.clear()
        answers = []
        for number in range(4):
            prompts = prompts_of(LENGTHS, n=3)
            prompts.batch["seeds"] += 100 * number
            rollout.admit(number, prompts, PARAMS)
            if number:
                answers.append(rollout.finish(number - 1, number))
                with torch.no_grad():
                    for weight in model.parameters():
                        weight.mul_(1.02)
        return answers

    kept = run()
    assert bool(passes) == (size is None)
    _afresh(monkeypatch)
    for found, expected in zip(kept, run(), strict=True):
        for name in ("responses", "rollout_versions", "response_mask", "ended_by"):
            assert torch.equal(found.batch[name], expected.batch[name]), name
        assert (found.batch["rollout_log_probs"] - expected.batch["rollout_log_probs"]).abs().max() < 1e-6
    versions = kept[-1].batch["rollout_versions"]
    assert len(versions[versions >= 0].unique()) == 2  # a sample that two versions of the weights generated


def test_bfloat16_log_probs_are_near_those_of_a_pass_in_bfloat16(passes):
    model = tiny_lm("llama")
    rollout = rollout_of(model, compute_dtype=torch.bfloat16)
    passes.clear()
    batch = rollout.generate(prompts_of(LENGTHS, n=3), PARAMS).batch
    assert passes
    with low_precision(model, torch.bfloat16):
        expected = response_log_probs(model, batch)
    mask = batch["response_mask"].bool()
    assert float((batch["rollout_log_probs"] - expected)[mask].abs().mean()) < 0.05


class TakesAnyPassForTheFirst(LlamaForCausalLM):
    """Masks a pass of several tokens as if none came before, as decoders of old do."""

    def forward(self, input_ids=None, position_ids=None, past_key_values=None, logits_to_keep=0, **options):
        if input_ids.shape[1] > 1:
            options["attention_mask"] = options["attention_mask"].clone()
            options["attention_mask"][:, : -input_ids.shape[1]] = 0
        return super().forward(
            input_ids=input_ids,
            position_ids=position_ids,
            past_key_values=past_key_values,
            logits_to_keep=logits_to_keep,
            **options,
        )


def test_models_that_would_continue_wrongly_are_refused():
    torch.manual_seed(0)
    model = TakesAnyPassForTheFirst(FAMILIES["llama"]()).eval()
    HFRollout(model, pad_token_id=PAD, eos_token_ids=[EOS])
    with pytest.raises(ModelError, match="TakesAnyPassForTheFirst"):
        rollout_of(model)


def test_the_cache_grows_with_its_longest_row_only(monkeypatch):
    """Not with the longest turn and answer of each wave, and it has the rows of the samples that go on."""
    monkeypatch.setattr("strop.rollout.hf.kv_cache._GROWTH", 4)
    sizes = []
    insert = decoding._insert

    def inserting(model, kept, names, contexts, *rest):
        found = insert(model, kept, names, contexts, *rest)
        sizes.append((len(names), contexts.input_ids.shape[1], kept.cache.layers[0].stored_keys.shape))
        return found

    monkeypatch.setattr(decoding, "_insert", inserting)
    rollout_of(tiny_lm()).generate(prompts_of(LENGTHS, n=3), PARAMS)
    assert len(sizes) >= TURNS - 1
    for rows, longest, shape in sizes:
        assert shape[0] == rows
        assert shape[2] <= min(longest + 4, max(LENGTHS) + PARAMS.max_tokens)


@pytest.mark.parametrize("size", [None, 7])
def test_a_turn_that_ends_is_no_sample_of_the_progress(size):
    rollout, found = rollout_of(tiny_lm(), micro_batch_size=size), [0.0, 0.0]

    def advanced(done, tokens):
        found[0] += done
        found[1] += tokens

    rollout.advanced = advanced
    batch = rollout.generate(prompts_of(LENGTHS, n=3), PARAMS).batch
    assert found[0] == 0  # which ``Episodes`` reports
    assert int(batch["n_turns"].max()) > 1
    assert found[1] > 0
