from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from strop.columns import TOKEN_COLUMNS
from strop.config.batch_plan import BatchPlan
from strop.config.load import load_config
from strop.config.memory.facts import read_model_facts
from strop.config.memory.forecast import forecast, sample_files
from strop.protocol import DataProto
from strop.rollout.base import RolloutSpec
from strop.rollout.vllm.arguments import engine_arguments, server_arguments
from strop.tracking.samples import samples_table, write_table

SHAPE = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


@pytest.fixture(scope="module", params=["tied", "untied"])
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=request.param == "tied"))
    model.save_pretrained(folder)
    return folder, sum(parameter.numel() for parameter in model.parameters())


def test_parameters_are_counted_from_the_headers_of_the_weights(model):
    folder, parameters = model
    facts = read_model_facts(str(folder))
    assert facts.parameters == parameters
    assert (facts.layers, facts.hidden, facts.vocabulary, facts.kv_width, facts.context) == (
        2,
        16,
        50,
        8,
        128,
    )


def test_parameters_are_counted_over_all_shards(tmp_path):
    model = Qwen2ForCausalLM(Qwen2Config(**SHAPE))
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert read_model_facts(str(tmp_path)).parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("ends", [["embed_tokens"], ["lm_head", "norm"], ["embed_tokens", "lm_head"]])
def test_modules_that_are_trained_whole_beside_adapters_are_counted(model, ends):
    """Weight, gradient and two moments; all weights have that of the base model."""
    folder, _ = model
    loaded = LlamaForCausalLM.from_pretrained(folder)
    chosen = [module for name, module in loaded.named_modules() if any(name.endswith(end) for end in ends)]
    numbers = sum({weight: weight.numel() for module in chosen for weight in module.parameters()}.values())

    def held(*more):
        options = ["data.train_files=train.parquet", f"actor_rollout_ref.model.path={folder}", *more]
        config = load_config([*options, "actor_rollout_ref.model.lora_rank=2"])
        plan = BatchPlan.from_config(config)
        return forecast(config, plan).resident["actor: weights, gradients, AdamW"]

    whole = held(f"actor_rollout_ref.model.modules_to_save=[{','.join(ends)}]")
    assert whole - held() == 4 * 4 * numbers


@pytest.mark.parametrize(
    ("text", "kind", "vision"),
    [
        # as published: Gemma 3 4B and LLaVA 1.5
        (
            {
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "num_hidden_layers": 34,
                "sliding_window": 1024,
            },
            "gemma3",
            {"hidden_size": 1152, "num_hidden_layers": 27, "patch_size": 14},
        ),
        ({"max_position_embeddings": 4096, "vocab_size": 32064}, "llava", {}),
    ],
)
def test_sizes_that_a_published_file_leaves_out_are_those_of_transformers(tmp_path, text, kind, vision):
    text = {**text, "model_type": "gemma3_text" if kind == "gemma3" else "llama"}
    content = {"model_type": kind, "text_config": text, "vision_config": vision}
    (tmp_path / "config.json").write_text(json.dumps(content))
    found, loaded = read_model_facts(str(tmp_path)), AutoConfig.from_pretrained(tmp_path).get_text_config()
    assert found is not None
    assert (found.layers, found.hidden, found.vocabulary, found.heads, found.kv_heads, found.context) == (
        loaded.num_hidden_layers,
        loaded.hidden_size,
        loaded.vocab_size,
        loaded.num_attention_heads,
        loaded.num_key_value_heads,
        loaded.max_position_embeddings,
    )
    assert found.kv_width == loaded.num_key_value_heads * loaded.head_dim


def test_what_is_offloaded_to_the_memory_of_a_cpu_is_not_held_on_a_gpu(model):
    folder, parameters = model

    def held(*more):
        options = ["data.train_files=train.parquet", f"actor_rollout_ref.model.path={folder}", *more]
        config = load_config([*options, "trainer.device=cuda", "trainer.n_gpus_per_node=1"])
        resident = forecast(config, BatchPlan.from_config(config)).resident
        return resident["actor: weights, gradients, AdamW"], resident["reference: weights"]

    section = "actor_rollout_ref.{}.fsdp_config"
    moments = held(f"{section.format('actor')}.optimizer_offload=True")
    frozen = held(f"{section.format('ref')}.param_offload=True")
    assert held() == (16 * parameters, 4 * parameters)
    assert (moments, frozen) == ((8 * parameters, 4 * parameters), (16 * parameters, 0))


def test_without_weights_the_number_is_unknown(model, tmp_path):
    (tmp_path / "config.json").write_text((model[0] / "config.json").read_text())
    facts = read_model_facts(str(tmp_path))
    assert (facts.parameters, facts.layers) == (None, 2)


@pytest.mark.parametrize(
    ("config", "weights"),
    [
        ("{", None),
        ("[]", None),
        ("{}", None),
        ('{"num_attention_heads": 0, "hidden_size": "x"}', None),
        (json.dumps(SHAPE), b""),
        (json.dumps(SHAPE), b"\xff" * 16),
        (json.dumps(SHAPE), b"\x02\x00\x00\x00\x00\x00\x00\x00{]"),
    ],
)
def test_a_folder_that_cannot_be_read_has_no_facts(tmp_path, config, weights):
    (tmp_path / "config.json").write_text(config)
    if weights is not None:
        (tmp_path / "model.safetensors").write_bytes(weights)
    assert read_model_facts(str(tmp_path)) is None


def config_of(folder, *overrides):
    return load_config(
        [
            f"actor_rollout_ref.model.path={folder}", "actor_rollout_ref.rollout.name=hf",
            "data.train_batch_size=4",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4", "data.max_prompt_length=10",
            "data.max_response_length=20", "actor_rollout_ref.rollout.n=3",
            "actor_rollout_ref.actor.use_dynamic_bsz=False", *overrides,
        ]
    )  # fmt: skip


def forecast_of(folder, *overrides):
    config = config_of(folder, *overrides)
    return forecast(config, BatchPlan.from_config(config))


def test_a_model_without_layers_is_left_to_loading(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**SHAPE, "num_hidden_layers": 0}))
    assert forecast_of(tmp_path).peak is None


def test_the_parts_of_a_run_in_float32(model):
    folder, parameters = model
    memory = forecast_of(folder)
    assert memory.resident == {
        "actor: weights, gradients, AdamW": 16 * parameters,
        "reference: weights": 4 * parameters,
        "critic: weights, gradients, AdamW": 16 * parameters,
    }
    # 12 sequences of 30 tokens; keys and values of 2 layers and 8 numbers, 4 bytes each
    assert memory.phases["generation: weights' copy, KV cache"] == 4 * parameters + 12 * 30 * 2 * 2 * 8 * 4
    # 8 sequences at once; 68 bytes for each token, layer and hidden unit
    assert memory.phases["critic update: activations"] == 8 * 30 * 2 * 16 * 68
    logits = 8 * 30 * 50 * 4 * 3
    assert memory.phases["actor update: activations, logits"] == 8 * 30 * 2 * 16 * 68 + logits
    assert memory.peak == 36 * parameters + max(memory.phases.values())


def test_options_that_save_memory(model):
    folder, parameters = model
    memory = forecast_of(
        folder, "actor_rollout_ref.model.compute_dtype=bfloat16", "algorithm.adv_estimator=grpo",
        "algorithm.kl_ctrl.kl_coef=0", "actor_rollout_ref.rollout.micro_batch_size_per_gpu=2",
        "actor_rollout_ref.model.enable_gradient_checkpointing=True",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=100",
    )  # fmt: skip
    assert memory.resident == {"actor: weights, gradients, AdamW": 16 * parameters}
    assert memory.phases["generation: weights' copy, KV cache"] == 2 * parameters + 2 * 30 * 2 * 2 * 8 * 2
    # 100 tokens: the inputs of 2 layers in 2 bytes, and one layer's activations at 34 bytes
    activations = 100 * 16 * 2 * 2 + 100 * 16 * 34
    copies = 2 * parameters  # of the weights, with which one rank computes
    assert memory.phases["actor update: activations, logits"] == activations + 100 * 50 * 4 * 3 + copies


@pytest.mark.parametrize(
    ("gpus", "dtype", "ranks", "in_16_bits"),
    [
        ("", "auto", 1, False),
        ("0", "auto", 1, True),
        ("0", "float32", 1, False),
        ("", "bfloat16", 1, True),
        ("0,1", "auto", 2, False),  # two ranks gather one layer at a time
    ],
)
def test_one_rank_copies_its_weights_where_it_computes_in_16_bits(
    model, monkeypatch, gpus, dtype, ranks, in_16_bits
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    options = (
        f"critic.model.compute_dtype={dtype}", f"trainer.n_gpus_per_node={ranks}", "trainer.device=auto",
        "critic.model.fsdp_config.use_no_sync_for_gradient_accumulation=False",
        "critic.use_dynamic_bsz=True", "critic.ppo_max_token_len_per_gpu=100",
    )  # fmt: skip
    update = forecast_of(model[0], *options).phases["critic update: activations"]
    activations = 100 * 2 * 16 * (34 if dtype == "bfloat16" else 68)
    assert update == activations + in_16_bits * 2 * model[1]


def test_ranks_that_share_sequences_have_a_part_of_the_activations(model):
    each = "use_no_sync_for_gradient_accumulation=False"  # no whole gradients beside the activations
    shards = f"actor_rollout_ref.actor.fsdp_config.{each}", f"critic.model.fsdp_config.{each}"
    two = "trainer.n_gpus_per_node=2", "critic.ulysses_sequence_parallel_size=2"
    memory = forecast_of(model[0], *two, *shards)
    assert memory.phases["critic update: activations"] == 8 * 30 // 2 * 2 * 16 * 68
    actors = min(8, 12 // 2)  # sequences of the actor's rank, which shares none
    assert memory.phases["actor update: activations, logits"] == actors * 30 * (2 * 16 * 68 + 50 * 4 * 3)
    once = forecast_of(model[0], *two, shards[0]).phases["critic update: activations"]
    assert once == memory.phases["critic update: activations"] + 4 * model[1]


def test_a_reward_model_counts_and_an_unknown_model_leaves_the_peak_open(model):
    folder, parameters = model
    memory = forecast_of(folder, "reward_model.enable=True", f"reward_model.model.path={folder}")
    assert memory.resident["reward model: weights"] == 4 * parameters
    unknown = forecast_of(folder, "reward_model.enable=True", "reward_model.model.path=/no/model")
    assert unknown.resident["reward model: weights"] is None
    assert unknown.peak is None
    assert forecast_of("/no/model").phases["generation: weights' copy, KV cache"] is None


def test_ranks_share_the_weights(model):
    folder, parameters = model
    memory = forecast_of(folder, "trainer.n_gpus_per_node=4", "trainer.device=cpu")
    assert memory.resident["actor: weights, gradients, AdamW"] == 16 * parameters // 4
    assert memory.resident["reference: weights"] == parameters
    hybrid = forecast_of(
        folder, "trainer.n_gpus_per_node=4", "actor_rollout_ref.actor.fsdp_config.fsdp_size=2"
    )
    assert hybrid.resident["actor: weights, gradients, AdamW"] == 16 * parameters // 2


def test_vllm_has_separate_weights_and_a_separate_cache(model):
    folder, parameters = model
    options = ("actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.max_num_seqs=6")
    memory = forecast_of(folder, *options, "trainer.device=cpu")
    assert memory.resident["vLLM: weights"] == 4 * parameters
    # 6 sequences of at most 30 tokens: two blocks of 128 each
    cache = 6 * 256 * 2 * 2 * 8 * 4
    assert memory.resident["vLLM: KV cache, at most"] == cache
    assert "generation: weights' copy, KV cache" not in memory.phases
    half = "actor_rollout_ref.model.compute_dtype=bfloat16"
    asleep = forecast_of(folder, *options, half, "trainer.device=cuda")  # it gives its memory back
    assert asleep.phases["generation: vLLM's weights, and KV cache at most"] == 2 * parameters + cache // 2
    assert not any(name.startswith("vLLM") for name in asleep.resident)


def test_a_small_batch_bounds_the_cache_of_vllm(model):
    options = ("actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.n=2", "trainer.device=cpu")
    batch = ("data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4")
    sequence = 256 * 2 * 2 * 8 * 4  # two blocks of 128 tokens
    assert forecast_of(model[0], *options, *batch).resident["vLLM: KV cache, at most"] == 8 * sequence
    ranks = forecast_of(model[0], *options, *batch, "trainer.n_gpus_per_node=2")
    assert ranks.resident["vLLM: KV cache, at most"] == 4 * sequence
    validates = ("trainer.val_only=True", "data.val_batch_size=3")
    memory = forecast_of(model[0], *options, *batch, *validates)
    assert memory.resident["vLLM: KV cache, at most"] == 3 * sequence


SEPARATE = (
    "actor_rollout_ref.hybrid_engine=False", "trainer.resource_pools={learner: [2], sampler: [1]}",
    "trainer.placement={Rollout: sampler}",
)  # fmt: skip


@pytest.mark.parametrize(("options", "processes"), [((), 1), (SEPARATE, 3)], ids=["one process", "pools"])
def test_on_a_cpu_vllm_is_given_the_cache_of_the_forecast(model, monkeypatch, options, processes):
    """Within the limit of a control group, which the sizes of the machine do not show."""
    limit = 300_000
    monkeypatch.setattr("strop.config.machine.machine_memory", lambda: limit)
    keys = ["actor_rollout_ref.rollout.name=vllm", "trainer.device=cpu", *options]
    forecasted = forecast_of(model[0], *keys).resident["vLLM: KV cache, at most"]
    loaded = {"path": str(model[0]), "override_config": {}, "trust_remote_code": False}
    spec = RolloutSpec(
        config=config_of(model[0], *keys), model=loaded, tokenizer=None, tokenizer_path=model[0],
        device=torch.device("cpu"),
    )  # fmt: skip
    shape = LlamaConfig.from_pretrained(model[0])
    assert engine_arguments(spec, shape)["kv_cache_memory_bytes"] == forecasted == limit // 2 // processes
    of_four = server_arguments(spec, shape, ranks=1, engines=4)  # servers, which are in no pool
    assert of_four["kv_cache_memory_bytes"] == limit // 2 // max(processes, 4)


@pytest.mark.parametrize(
    ("overrides", "files"),
    [
        ((), 100),
        (("trainer.rollouts_to_keep=null",), None),
        (("trainer.total_training_steps=1000", "trainer.rollouts_to_keep=null"), 1000),
        (("trainer.total_training_steps=1000", "trainer.log_rollouts_freq=30"), 34),
        (("trainer.total_training_steps=50",), 50),
    ],
)
def test_the_number_of_files_of_samples(overrides, files):
    config = load_config([*SAMPLES, *overrides])
    assert sample_files(config, BatchPlan.from_config(config)).files == files


SAMPLES = [
    "data.train_batch_size=32", "actor_rollout_ref.actor.ppo_mini_batch_size=32", "data.max_prompt_length=10",
    "data.max_response_length=500", "actor_rollout_ref.rollout.n=4",
    "teacher.model.path=teacher",
]  # fmt: skip


def test_the_size_of_a_file_of_samples_is_that_of_a_real_one(tmp_path):
    """128 samples of 500 tokens with numbers that do not repeat, about 21 bytes a token."""
    config = load_config(SAMPLES)
    tokens = torch.randint(50_000, (128, 510), generator=torch.Generator().manual_seed(1))
    numbers = {name: torch.randn(128, 500) for name in TOKEN_COLUMNS}
    batch = DataProto.from_dict(
        {
            **numbers,
            "prompts": tokens[:, :10],
            "responses": tokens[:, 10:],
            "attention_mask": torch.ones_like(tokens),
            "response_mask": torch.ones(128, 500),
        }
    )
    write_table(tmp_path / "samples.parquet", samples_table(batch, Words()))
    expected = sample_files(config, BatchPlan.from_config(config)).file
    assert 0.75 < (tmp_path / "samples.parquet").stat().st_size / expected < 1.25


class Words:
    """A token is four letters."""

    def batch_decode(self, sequences, *, skip_special_tokens):
        return ["".join(f"{token % 2000:04}" for token in tokens) for tokens in sequences]
