"""The vLLM rollout against transformers: what it samples and records, and which weights it computes with."""

from __future__ import annotations

import random

import pytest
import torch
from safetensors.torch import load_file
from transformers import GptOssConfig, GptOssForCausalLM, PhimoeConfig

from strop.errors import ConfigError, ModelError
from strop.models.folder import load_model_config
from strop.rollout.base import SamplingParams
from strop.rollout.vllm.keys import SamplingConfig
from strop.rollout.weights import Place, checksum, checksums, require_equal_checksums

from messages import mentions, naming
from outside import require_vllm
from tiny_lms import (
    EOS,
    FAMILIES,
    full_log_probs,
    greedy_of_transformers,
    prompts_of,
    response_ids,
    response_log_probs,
    tiny_lm,
)
from tiny_vllm import model_of, rollout_of

require_vllm()
vllm = pytest.importorskip("vllm")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("no_vllm_outlives_its_module")]

LENGTHS = [3, 9, 1, 6, 5]


@pytest.fixture(scope="module")
def model():
    return model_of("qwen2", tied=True)


def process_state():
    return torch.get_rng_state().tolist(), random.getstate(), torch.set_num_threads


@pytest.fixture(scope="module")
def shared(model, tmp_path_factory):
    """An engine for tests that leave its weights alone.

    They come before tests that build others: an engine that is dropped ends the process groups of all (vLLM
    0.32), and they cannot be kept, as an engine of experts needs one more.
    """
    before = process_state()
    rollout = rollout_of(model, tmp_path_factory.mktemp("shared"))
    assert process_state() == before, "building an engine changed random numbers or a function of torch"
    return rollout


def require_greedy_of_transformers(rollout, model):
    """Compare tokens, ends and checksums with those of ``model``."""
    prompts, stop = prompts_of(LENGTHS), 5
    params = SamplingParams(max_tokens=16, do_sample=False, stop_token_ids=(stop,))
    answers = rollout.generate(prompts, params).batch
    expected = greedy_of_transformers(model, prompts, stop=[EOS, stop])
    assert torch.equal(answers["responses"][:, : expected.shape[1]], expected)
    assert len(expected.unique()) > 5  # a model that repeats one token would prove nothing
    assert torch.equal(answers["truncated"], ~((expected == stop) | (expected == EOS)).any(1))


def saved_checksums(model, folder, dtype):
    """Checksums of the file that transformers writes."""
    model.save_pretrained(folder)
    return checksums(load_file(folder / "model.safetensors").items(), dtype)


def test_greedy_tokens_and_checksums_are_those_of_transformers(shared, model, tmp_path):
    require_greedy_of_transformers(shared, model)
    assert shared.checksums() == saved_checksums(model, tmp_path, torch.float32)


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


def test_the_engine_has_few_more_requests_than_it_runs_at_once(shared, monkeypatch):
    """Pictures of a request are prepared when it is added: of a whole batch they would fill the memory."""
    params = SamplingParams(max_tokens=12, n=3)
    prompts = prompts_of(LENGTHS, n=3)
    whole, waiting = shared.generate(prompts, params), []
    engine, add = shared._llm.llm_engine, shared._add

    def counted(*request):
        add(*request)
        waiting.append(engine.get_num_unfinished_requests())

    monkeypatch.setattr(shared, "_add", counted)
    monkeypatch.setattr(engine.vllm_config.scheduler_config, "max_num_seqs", 2)  # the scheduler runs 16
    few = shared.generate(prompts, params)
    assert (len(waiting), max(waiting)) == (15, 4)
    assert torch.equal(few.batch["responses"], whole.batch["responses"])


def test_samples_are_reported_when_they_are_finished(shared):
    reported = []
    params = SamplingParams(max_tokens=14, n=3, stop_token_ids=(7, 8, 9, 10))
    for _ in range(2):  # vLLM numbers the requests of all calls
        reported.clear()
        answers = shared.generate(
            prompts_of(LENGTHS, n=3), params, lambda *sample: reported.append(sample)
        ).batch
        rows = [prompt * 3 + number for prompt, number, _ in reported]
        assert sorted(rows) == list(range(len(LENGTHS) * 3))
        assert rows != sorted(rows)  # in the order in which they end
        responses = response_ids(answers)
        assert [token_ids for *_, token_ids in reported] == [responses[row] for row in rows]


def test_prompts_that_do_not_fit_into_one_step_are_not_split(shared):
    """vLLM's runner samples after a part of a prompt, and cannot rewind a CPU's generator."""
    params = SamplingParams(max_tokens=6, n=2)
    prompts = prompts_of([40, 41, 39, 40, 38, 37, 40, 41], n=2)
    assert prompts.batch["attention_mask"].sum() > 256  # the engine's tokens in a step
    whole = shared.generate(prompts, params).batch
    for row in range(len(prompts)):
        alone = shared.generate(prompts[[row]], params).batch
        assert torch.equal(alone["responses"], whole["responses"][2 * row : 2 * row + 2])


def test_ignore_eos_goes_on_to_the_limit_unless_a_stop_id_comes(shared):
    params = SamplingParams(max_tokens=30, n=4, ignore_eos=True)
    batch = shared.generate(prompts_of(LENGTHS, n=4), params).batch
    assert (batch["responses"] == EOS).any()
    assert batch["truncated"].all()
    assert (batch["response_mask"] == 1).all()
    ends, hidden = batch["responses"] == EOS, (batch["responses"] >= 20) & (batch["responses"] < 30)
    assert batch["stop_tokens"].tolist() == ends.sum(1).tolist()
    assert batch["hidden_tokens"].tolist() == (ends | hidden).sum(1).tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "tied", "dtype"),
    [
        ("llama", True, torch.bfloat16),
        ("phi3", False, torch.float32),  # its weights are fused as vLLM fuses those of others
        ("mixtral", False, torch.float32),  # checkpoints have a weight per expert, under other names
        ("qwen3_moe", False, torch.bfloat16),
    ],
)
def test_an_update_in_buckets_leaves_nothing_of_the_old_weights(tmp_path, family, tied, dtype):
    old, new = (model_of(family, tied, seed=seed) for seed in (0, 1))
    rollout = rollout_of(old, tmp_path, dtype=dtype)
    params = SamplingParams(max_tokens=12, n=2)
    prompts = prompts_of([36, 33, 36, 34], n=2)
    before = rollout.generate(prompts, params)  # leaves the prompts in the prefix cache
    weights = list(new.named_parameters())
    random.Random(0).shuffle(weights)
    for start in range(0, len(weights), 5):
        rollout.update_weights(weights[start : start + 5], last=False)
        with pytest.raises(ModelError, match="weights"):
            rollout.generate(prompts, params)
    rollout.update_weights([], last=True)
    expected = {
        name: saved_checksums(model, tmp_path / name, dtype) for name, model in (("old", old), ("new", new))
    }
    assert rollout.checksums() == expected["new"] != expected["old"]
    batch = rollout.generate(prompts, params).batch
    assert not torch.equal(batch["responses"], before.batch["responses"])
    mask = batch["response_mask"].bool()
    mean = (batch["rollout_log_probs"] - response_log_probs(new, batch))[mask].abs().mean()
    assert mean < (1e-5 if dtype is torch.float32 else 0.2)
    if dtype is torch.float32:
        require_greedy_of_transformers(rollout, new)


@pytest.fixture(scope="module")
def changing(model, tmp_path_factory):
    """An engine for tests that change its weights."""
    return rollout_of(model, tmp_path_factory.mktemp("changing"))


@pytest.mark.slow
def test_a_layer_that_keeps_its_old_weights_is_named(changing, monkeypatch):
    from strop.rollout.vllm.settings import InProcessWeightTransfer

    newer = model_of("qwen2", tied=True, seed=3)
    receive = InProcessWeightTransfer.receive_weights

    def lose_one(self, update):
        kept = [(name, weight) for name, weight in update.weights if "layers.1.mlp.down_proj" not in name]
        receive(self, type(update)(kept))

    monkeypatch.setattr(InProcessWeightTransfer, "receive_weights", lose_one)
    changing.update_weights(newer.named_parameters())
    expected = checksums(newer.named_parameters(), torch.float32)
    with pytest.raises(ModelError, match=naming("version 7", "1 of", "layers.1.mlp.down_proj")):
        require_equal_checksums(expected, changing.checksums(), 7)
    monkeypatch.setattr(InProcessWeightTransfer, "receive_weights", receive)
    changing.update_weights(newer.named_parameters())
    require_equal_checksums(expected, changing.checksums(), 8)


def test_wrong_weights_are_named(model, changing):
    """One missing and one unknown; tests/workers has every kind. The engine is of no use afterwards."""
    (first, weight), *others = model.named_parameters()
    wrong = {f"without {first}": others, "unknown.weight is no parameter": [("unknown.weight", weight)]}
    for message, weights in wrong.items():
        with pytest.raises(ModelError, match=message):
            changing.update_weights(weights)
        with pytest.raises(ModelError, match="weights"):
            changing.generate(prompts_of(LENGTHS), SamplingParams(max_tokens=2))


def test_more_of_vllms_sampling_parameters(model, tmp_path):
    allowed, stop = [4, 5, 6], 4
    repetition = {"max_pattern_size": 1, "min_pattern_size": 1, "min_count": 3}
    sampling = {"allowed_token_ids": allowed, "min_tokens": 3, "min_p": 0.01}
    rollout = rollout_of(model, tmp_path, sampling={**sampling, "repetition_detection": repetition})
    params = SamplingParams(max_tokens=12, n=8, stop_token_ids=(stop,))
    batch = rollout.generate(prompts_of(LENGTHS, n=8), params).batch
    rows = response_ids(batch)
    assert {token for row in rows for token in row} <= set(allowed)
    assert min(map(len, rows)) >= 3
    stopped = [row[-1] == stop for row in rows]
    repeated = [row[-3:] in ([5] * 3, [6] * 3) for row in rows]
    assert any(stopped)
    assert any(repeated)
    whole = [len(row) == 12 for row in rows]
    assert all(any(ends) for ends in zip(stopped, repeated, whole, strict=True))
    assert (~batch["truncated"]).tolist() == stopped
    with pytest.raises(ConfigError, match=naming("repetition_detection", "wrong", "max_pattern_size")):
        rollout_of(model, tmp_path, sampling={"repetition_detection": {"wrong": 1}})


def test_every_sampling_key_is_a_parameter_of_vllm():
    assert set(SamplingConfig.model_fields) <= set(vllm.SamplingParams.__struct_fields__)


def test_heads_without_a_kernel_are_refused_before_the_engine_starts(tmp_path):
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    from strop.rollout.vllm.kind import HEAD_SIZES_ON_A_CPU

    assert tuple(CPUAttentionBackend.get_supported_head_sizes()) == HEAD_SIZES_ON_A_CPU
    with pytest.raises(ModelError, match=naming("heads of 32", "8")):
        rollout_of(tiny_lm("qwen2"), tmp_path)


@pytest.mark.parametrize(
    "other", [{"router_jitter_noise": 0.1}, {"attention_bias": False}, {"lm_head_bias": True}], ids=str
)
def test_settings_that_vllm_computes_otherwise_are_refused(other):
    from strop.rollout.vllm.arguments import why_unsupported

    config = PhimoeConfig(hidden_size=128, num_attention_heads=4, attention_bias=True)
    assert why_unsupported(config, "cpu") is None
    ((name, value),) = other.items()
    computed = f"{name}={getattr(config, name)}"
    setattr(config, name, value)
    found = why_unsupported(config, "cpu")
    assert all(word in found for word in (computed, f"{name}={value}", "rollout.name=hf"))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plain_server_has_the_facts_of_the_runs_model(family, tmp_path):
    from vllm.transformers_utils.config import get_config

    from strop.rollout.http.wire import differences
    from strop.rollout.vllm.arguments import model_facts

    FAMILIES[family]().save_pretrained(tmp_path)
    run = {"max_model_len": 64, **model_facts(load_model_config(tmp_path))}
    server = {"max_model_len": 64, **model_facts(get_config(tmp_path, trust_remote_code=False))}
    assert differences(server, run) == []
    assert len(server.keys() & run.keys()) > 10


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_family_that_vllm_runs_with_transformers_code_leaves_the_trainers_model_alone(tmp_path):
    model = model_of("olmo2", tied=False)  # vLLM has no class of its own for it
    hooked = []
    model.model.register_forward_hook(lambda *_: hooked.append(True))
    rollout = rollout_of(model, tmp_path / "model")
    require_greedy_of_transformers(rollout, model)
    assert hooked
    assert rollout.checksums() == saved_checksums(model, tmp_path / "saved", torch.float32)
    again = tiny_lm("olmo2", seed=1)
    assert type(again) is type(model)
    assert type(again.model) is type(model.model)


@pytest.mark.slow
def test_experts_that_take_no_new_weights_are_an_error_before_the_first_sample(tmp_path):
    """vLLM copies into the experts' parameters, which are on the meta device in an update."""
    sizes = {"head_dim": 32, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    torch.manual_seed(0)
    config = GptOssConfig(
        **sizes, vocab_size=61, num_attention_heads=2, num_key_value_heads=1, num_local_experts=2
    )
    with pytest.raises(ModelError, match=naming("takes no new weights of", "experts", "rollout.name=hf")):
        rollout_of(GptOssForCausalLM(config), tmp_path)


@pytest.mark.slow
def test_weights_that_cannot_be_read_back_are_reported_once_and_not_as_wrong(tmp_path, caplog):
    model = tiny_lm("gpt2", n_embd=64, n_layer=2, n_head=2)
    rollout = rollout_of(model, tmp_path)
    held = rollout.checksums()
    require_equal_checksums(checksums(model.named_parameters(), torch.float32), held, 0)
    rollout.checksums()
    (line,) = [record.getMessage() for record in caplog.records if "not verified" in record.getMessage()]
    assert mentions(line, "8 of 28")
    held["transformer.wte.weight"] += 1
    with pytest.raises(ModelError, match=r"transformer\.wte\.weight"):
        require_equal_checksums(checksums(model.named_parameters(), torch.float32), held, 0)
