"""The hf rollout against transformers' own generate and forward pass, and its promises about randomness."""

from __future__ import annotations

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM, LlamaForCausalLM, MambaConfig, MambaForCausalLM

from strop.errors import DataError, ModelError, TrainingError
from strop.models.passes.low_precision import low_precision
from strop.rollout.base import SamplingParams
from strop.rollout.hf.engine import HFRollout

from tiny_lms import (
    EOS,
    FAMILIES,
    PAD,
    greedy_of_transformers,
    prompts_of,
    response_ids,
    response_log_probs,
    tiny_lm,
)

LENGTHS = [3, 9, 1, 6, 5]


def rollout_of(model, pad=PAD, eos=(EOS,), **options) -> HFRollout:
    return HFRollout(model, pad_token_id=pad, eos_token_ids=eos, **options)


def count_steps(model) -> list[int]:
    """The number of rows in every forward pass from now on."""
    rows: list[int] = []
    model.register_forward_pre_hook(
        lambda _, __, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    return rows


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers_generate(family):
    model = tiny_lm(family)
    prompts, stop = prompts_of(LENGTHS), [5]
    expected = greedy_of_transformers(model, prompts, stop=stop)
    answers = rollout_of(model, eos=stop).generate(prompts, SamplingParams(max_tokens=16, do_sample=False))
    found = answers.batch["responses"][:, : expected.shape[1]]
    assert torch.equal(found, expected)
    assert len(expected.unique()) > 5  # a model that repeats one token would prove nothing


def test_decoding_leaves_out_cudnn_whose_plans_are_for_one_number_of_keys(monkeypatch):
    torch.backends.cuda.enable_cudnn_sdp(True)
    rollout, seen = rollout_of(tiny_lm()), []
    monkeypatch.setattr(
        rollout, "require_going_on", lambda: seen.append(torch.backends.cuda.cudnn_sdp_enabled())
    )
    rollout.generate(prompts_of(LENGTHS), SamplingParams(max_tokens=3, ignore_eos=True))
    assert set(seen) == {False}


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_log_probs_are_those_of_a_full_forward_pass(family):
    """Padding is the end token, as in many tokenizers: masks must come from lengths."""
    model = tiny_lm(family)
    params = SamplingParams(max_tokens=14, n=3, temperature=1.7, stop_token_ids=(7, 8, 9))
    batch = rollout_of(model, pad=EOS).generate(prompts_of(LENGTHS, n=3, pad=EOS), params).batch
    mask, found = batch["response_mask"].bool(), batch["rollout_log_probs"]
    assert 20 < mask.sum() < mask.numel()
    expected = response_log_probs(model, batch, temperature=1.7)
    torch.testing.assert_close(found[mask], expected[mask], atol=1e-5, rtol=1e-5)
    assert (found[~mask] == 0).all()


def test_columns_have_the_shapes_types_and_values_of_the_contract():
    prompts = prompts_of(LENGTHS, n=2, pad=EOS)
    params = SamplingParams(max_tokens=12, n=2, stop_token_ids=tuple(range(10, 16)))
    answers = rollout_of(tiny_lm(), pad=EOS).generate(prompts, params)
    batch, rows, width = answers.batch, 10, prompts.batch["input_ids"].shape[1]
    expected = {
        "prompts": (torch.int64, (rows, width)),
        "responses": (torch.int64, (rows, 12)),
        "input_ids": (torch.int64, (rows, width + 12)),
        "attention_mask": (torch.int64, (rows, width + 12)),
        "position_ids": (torch.int64, (rows, width + 12)),
        "response_mask": (torch.float32, (rows, 12)),
        "rollout_log_probs": (torch.float32, (rows, 12)),
        "truncated": (torch.bool, (rows,)),
        "stop_tokens": (torch.int64, (rows,)),
    }
    assert {name: (column.dtype, tuple(column.shape)) for name, column in batch.items()} == expected
    assert list(answers.non_tensor_batch["uid"]) == [f"prompt-{row // 2}" for row in range(rows)]
    assert torch.equal(batch["prompts"], prompts.batch["input_ids"].repeat_interleave(2, 0))
    assert torch.equal(batch["input_ids"], torch.cat([batch["prompts"], batch["responses"]], 1))
    assert torch.equal(batch["attention_mask"][:, width:].float(), batch["response_mask"])
    stops = {EOS, *range(10, 16)}
    for row, tokens in enumerate(response_ids(batch)):
        assert not stops & set(tokens[:-1])
        assert batch["responses"][row, len(tokens) :].tolist() == [EOS] * (12 - len(tokens))  # padding
        assert bool(batch["truncated"][row]) == (tokens[-1] not in stops)
        positions = batch["position_ids"][row][batch["attention_mask"][row].bool()]
        assert positions.tolist() == list(range(len(positions)))
    assert batch["truncated"].any()
    assert not batch["truncated"].all()


@pytest.mark.fast("7")
@pytest.mark.parametrize("micro_batch_size", [1, 7])
def test_samples_depend_on_their_seeds_alone(micro_batch_size):
    """Not on micro-batches, other samples, order, earlier calls or the global generator, which stays."""
    model, before = tiny_lm(), torch.get_rng_state()
    prompts = prompts_of(LENGTHS, n=3)
    params = SamplingParams(max_tokens=20, n=3, stop_token_ids=(7, 8, 9))
    whole = rollout_of(model).generate(prompts, params).batch
    rollout = rollout_of(model, micro_batch_size=micro_batch_size)
    order = torch.tensor([3, 0, 4, 2, 1])
    shuffled = rollout.generate(prompts[order], params).batch
    rows = (order[:, None] * 3 + torch.arange(3)).flatten()
    assert torch.equal(shuffled["responses"], whole["responses"][rows])
    torch.testing.assert_close(
        shuffled["rollout_log_probs"], whole["rollout_log_probs"][rows], atol=2e-6, rtol=1e-5
    )
    again = rollout.generate(prompts[order], params).batch
    assert all(torch.equal(again[name], shuffled[name]) for name in again)
    assert torch.equal(torch.get_rng_state(), before)
    alone = rollout.generate(prompts[[1]], params).batch
    assert torch.equal(alone["responses"], whole["responses"][3:6])
    other_seeds = prompts.select("input_ids", "attention_mask", "position_ids")
    other_seeds.batch["seeds"] = prompts.batch["seeds"] + 1
    others = rollout.generate(other_seeds, params).batch["responses"].view(5, 3, -1)
    assert torch.equal(others[:, :2], whole["responses"].view(5, 3, -1)[:, 1:])  # the next sample's seed
    assert not torch.equal(others, whole["responses"].view(5, 3, -1))


def test_prompts_are_computed_once_and_finished_rows_leave_the_batch():
    model = tiny_lm()
    rollout = rollout_of(model)
    rows = count_steps(model)
    params = SamplingParams(max_tokens=60, n=8, stop_token_ids=tuple(range(10, 20)), temperature=2.0)
    batch = rollout.generate(prompts_of(LENGTHS, n=8), params).batch
    lengths = batch["response_mask"].sum(1)
    assert rows[0] == 5
    assert rows[1] > 20
    assert rows[-1] <= 3
    assert rows == sorted(rows[:1]) + sorted(rows[1:], reverse=True)
    assert len(rows) == int(lengths.max()) < 60  # stops when the last row does
    assert sum(rows[1:]) < 1.4 * float(lengths.sum())


@pytest.mark.parametrize("micro_batch_size", [None, 7])
def test_samples_are_reported_when_they_leave_the_batch(micro_batch_size):
    model = tiny_lm("llama")
    params = SamplingParams(max_tokens=14, n=4, stop_token_ids=(7, 8, 9, 10))
    rollout = rollout_of(model, micro_batch_size=micro_batch_size)
    steps, reported = count_steps(model), {}

    def finished(prompt, number, token_ids):
        assert (prompt, number) not in reported
        reported[prompt, number] = (token_ids, len(steps))

    answers = rollout.generate(prompts_of(LENGTHS, n=4), params, finished).batch
    assert len(reported) > 5
    for (prompt, number), (token_ids, _) in reported.items():
        assert token_ids == response_ids(answers)[prompt * 4 + number]
        assert not answers["truncated"][prompt * 4 + number]
    assert min(when for _, when in reported.values()) < len(steps)


@pytest.mark.parametrize("micro_batch_size", [None, 5])
def test_progress_counts_every_sample_and_token(micro_batch_size):
    rollout = rollout_of(tiny_lm("llama"), micro_batch_size=micro_batch_size)
    counts = []
    rollout.advanced = lambda done, tokens: counts.append((done, tokens))
    params = SamplingParams(max_tokens=14, n=4, stop_token_ids=(7, 8, 9, 10))
    answers = rollout.generate(prompts_of(LENGTHS, n=4), params).batch
    done, tokens = map(sum, zip(*counts, strict=True))
    assert (done, tokens) == (len(answers["responses"]), int(answers["response_mask"].sum()))
    assert len(counts) > 3


def test_ignore_eos_ignores_the_eos_and_no_other_stop_token():
    ends, others = tuple(range(30)), (40, 41, 42, 43)
    params = SamplingParams(max_tokens=20, n=4, ignore_eos=True, stop_token_ids=others)
    batch = rollout_of(tiny_lm(), eos=ends).generate(prompts_of(LENGTHS, n=4), params).batch
    rows = response_ids(batch)
    assert any(set(row) & set(ends) for row in rows)
    assert not any(set(row[:-1]) & set(others) for row in rows)
    assert batch["truncated"].tolist() == [row[-1] not in others for row in rows]
    assert 0 < batch["truncated"].sum() < len(rows)
    assert all(len(row) == 20 for row in rows if row[-1] not in others)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_stop_tokens_and_hidden_tokens_are_counted_where_the_policy_sampled_them(ignore_eos):
    """Two eos ids and two stop ids; the padding is an end token too, and lies outside the mask."""
    ends, others = (EOS, 7, 9), (40, 41)
    params = SamplingParams(max_tokens=12, n=8, ignore_eos=ignore_eos, stop_token_ids=others, temperature=2.0)
    rollout = rollout_of(tiny_lm(), pad=EOS, eos=ends, hidden_token_ids=[*range(20, 30), *ends, *others])
    answers = rollout.generate(prompts_of(LENGTHS, n=8, pad=EOS), params)
    columns, rows = answers.batch, response_ids(answers.batch)
    stops = [sum(token in (*ends, *others) for token in row) for row in rows]
    assert columns["stop_tokens"].tolist() == stops
    assert (max(stops) > 1) == ignore_eos
    inner = [row if cut else row[:-1] for row, cut in zip(rows, columns["truncated"].tolist(), strict=True)]
    hidden = [sum(20 <= token < 30 or token in (*ends, *others) for token in row) for row in inner]
    assert columns["hidden_tokens"].tolist() == hidden
    assert 0 in hidden
    assert max(hidden) > 1
    assert "hidden_tokens" not in rollout_of(tiny_lm()).generate(prompts_of(LENGTHS, n=8), params)


def test_long_responses_outgrow_the_first_allocation(monkeypatch):
    monkeypatch.setattr("strop.rollout.hf.kv_cache._GROWTH", 3)
    monkeypatch.setattr("strop.rollout.hf.decoding._PREFILL_TOKENS", 10)
    model, prompts = tiny_lm("gemma3"), prompts_of(LENGTHS, n=3)
    params = SamplingParams(max_tokens=25, n=3, stop_token_ids=(7, 8, 9))
    in_pieces = rollout_of(model).generate(prompts, params).batch
    monkeypatch.undo()
    at_once = rollout_of(model).generate(prompts, params).batch
    assert torch.equal(in_pieces["responses"], at_once["responses"])


def test_generation_runs_without_dropout_and_restores_every_modules_mode():
    model = tiny_lm("gpt2")  # with its default dropout of 0.1
    rollout, prompts, params = rollout_of(model), prompts_of(LENGTHS), SamplingParams(max_tokens=8)
    expected = rollout.generate(prompts, params).batch["responses"]
    model.train()
    model.transformer.wte.eval()
    modes = [module.training for module in model.modules()]
    assert torch.equal(rollout.generate(prompts, params).batch["responses"], expected)
    assert [module.training for module in model.modules()] == modes
    assert model.config._attn_implementation == "sdpa"
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("attention", ["flash_attention_2", "flex_attention"])
def test_models_loaded_with_kernels_of_a_gpu_generate_as_others_do(attention):
    """Trainers pack rows with these kernels; padded contexts and the cache need none of them."""
    prompts, params = prompts_of(LENGTHS, n=2), SamplingParams(max_tokens=10, n=2)
    expected = rollout_of(tiny_lm()).generate(prompts, params).batch
    model = tiny_lm()
    model.config._attn_implementation = attention
    found = rollout_of(model).generate(prompts, params).batch
    assert torch.equal(found["responses"], expected["responses"])
    assert model.config._attn_implementation == attention


@pytest.mark.parametrize("key_value_heads", [1, 4])
def test_bfloat16_log_probs_are_those_of_a_pass_in_bfloat16_and_near_float32(key_value_heads):
    model = tiny_lm("llama", num_attention_heads=4, num_key_value_heads=key_value_heads)
    rollout = rollout_of(model, compute_dtype=torch.bfloat16)
    batch = rollout.generate(prompts_of(LENGTHS, n=4), SamplingParams(max_tokens=10, n=4)).batch
    with low_precision(model, torch.bfloat16):
        expected = response_log_probs(model, batch)
    mask, found = batch["response_mask"].bool(), batch["rollout_log_probs"]
    assert float((found - expected).abs()[mask].mean()) < 0.05
    assert 0 < float((found - response_log_probs(model, batch)).abs()[mask].mean()) < 0.2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda batch: batch.pop("seeds"), "seeds"),
        (
            lambda batch: batch.update(seeds=batch["seeds"][:, :1]),
            r"seeds .* \[5, 1\],.* \[5, 2\]",
        ),
        (lambda batch: batch["attention_mask"][3].zero_(), "prompt 3 .*left-padded"),
        (lambda batch: batch["attention_mask"][2, -1:].zero_(), "prompt 2 .*left-padded"),
        (lambda batch: batch["attention_mask"][1, 7].zero_(), "prompt 1 .*left-padded"),
    ],
)
def test_unusable_prompts_are_refused(change, message):
    prompts = prompts_of(LENGTHS, n=2)
    change(prompts.batch)
    with pytest.raises(DataError, match=message):
        rollout_of(tiny_lm()).generate(prompts, SamplingParams(max_tokens=4, n=2))


def test_diverged_weights_are_an_error_and_not_a_batch():
    model = tiny_lm()
    rollout = rollout_of(model)
    with torch.no_grad():
        model.lm_head.weight[3] = torch.nan
    with pytest.raises(TrainingError, match="not finite"):
        rollout.generate(prompts_of(LENGTHS), SamplingParams(max_tokens=4))
    assert model.config._attn_implementation == "sdpa"


class ForgetsPositions(LlamaForCausalLM):
    """Decodes as if every new token stood at the beginning."""

    def forward(self, input_ids=None, position_ids=None, past_key_values=None, logits_to_keep=0, **options):
        if past_key_values is not None and input_ids.shape[1] == 1:
            position_ids = torch.zeros_like(position_ids)
        return super().forward(
            input_ids=input_ids,
            position_ids=position_ids,
            past_key_values=past_key_values,
            logits_to_keep=logits_to_keep,
            **options,
        )


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ForgetsPositions(FAMILIES["llama"]()).eval(), "ForgetsPositions"),
        (
            lambda: MambaForCausalLM(MambaConfig(vocab_size=61, hidden_size=16, num_hidden_layers=2)),
            "linear_attention",
        ),
        (
            lambda: BloomForCausalLM(BloomConfig(vocab_size=61, hidden_size=16, n_layer=2, n_head=2)),
            "[Bb]loom",
        ),
    ],
)
def test_models_that_would_be_decoded_wrongly_are_refused(build, message):
    torch.manual_seed(0)
    with pytest.raises(ModelError, match=message):
        rollout_of(build())
