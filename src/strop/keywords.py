"""Keyword arguments of ``strop.train`` and others, for type checkers and the completion of editors.

Written by docs/generate_config_reference.py from src/strop/config/schema/: edit that, not this file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, TypedDict


class Frame(Protocol):
    """A data frame of pandas or polars."""

    @property
    def columns(self) -> Any: ...


class Table(Protocol):
    """A ``datasets.Dataset``, or a table of pyarrow."""

    @property
    def column_names(self) -> Any: ...


class PretrainedModel(Protocol):
    """A model, or a tokenizer, of transformers."""

    def save_pretrained(self, save_directory: Any, /) -> Any: ...


Rows = str | Path | Sequence[str | Path] | Sequence[Mapping[str, Any]] | Frame | Table


class RowsKeys(TypedDict, total=False):
    """Rows for training and validation."""

    tokenizer: str | Path | None
    """Tokenizer folder or name; null: the one of the model that is trained."""
    train_files: Rows
    """Training rows: .parquet, .jsonl, .json, .csv, .tsv, a saved data set, owner/name:split; or a list."""
    val_files: Rows
    """Validation rows, as train_files; [] trains without validation."""
    prompt_key: str
    """Column with the prompt: a list of chat messages, or a plain string; a.b is field b of column a."""
    tools_key: str | None
    """Column with a row's tools for the chat template: JSON schemas, a list or JSON text; null: none."""
    image_key: str | None
    """Column of a prompt's pictures, a list or one; auto: images or image, if there is one; null: none."""
    min_pixels: int | None
    """Enlarge pictures to this many pixels, in families with such a bound; null: the processor's."""
    max_pixels: int | None
    """Shrink pictures to this many pixels, in families with such a bound; null: the processor's."""
    max_images: int | None
    """Most pictures of a prompt; more are an error. null: the most of any row. Turns may bring others."""
    apply_chat_template: Literal["auto"] | bool
    """Make a plain string a user message of the chat template; auto: if the tokenizer has one."""
    system_prompt: str | None
    """System message of chats that have none."""
    chat_template: str | None
    """Chat template, as Jinja text or the path of its file; null: the tokenizer's own."""
    apply_chat_template_kwargs: Mapping[str, Any]
    """Variables of the chat template, for example {enable_thinking: False}."""
    allow_special_tokens: bool
    """Encode control tokens in the texts of rows as control tokens, as in prompts rendered beforehand."""
    train_batch_size: int
    """Rows per iteration (strop train: of rollout.n answers each). If not set, with fewer: 32 or fewer."""
    val_batch_size: int
    """Rows in one batch of validation; it never changes a result."""
    max_prompt_length: int
    """Longest prompt in tokens; shorter ones are padded on the left to it."""
    max_response_length: int
    """Longest response in tokens, its end token among them."""
    shuffle: bool
    """Visit the training rows in a new seeded order every epoch; False: in the order of the files."""
    num_workers: int | None
    """Processes that tokenise the files; null: one for each core."""
    cache_dir: str | Path
    """Folder for tokenised files and for files fetched from a URL; models from the hub go into HF_HOME."""


class TrainData(RowsKeys, total=False):
    """Prompts for training and validation."""

    reward_fn_key: str
    """Column that names the scorer of a row (its data source)."""
    data_source: str | None
    """Data source of the rows of files that lack the column reward_fn_key."""
    answer_key: str | None
    """Column whose values are the ground truths; numbers become text. null: reward_model.ground_truth."""
    val_max_samples: int | None
    """Validate on this many prompts of each data source, its first ones; null: on all."""
    return_raw_input_ids: bool
    """Also put the prompt's ids without the chat template into the batch."""
    return_raw_chat: bool
    """Also put the prompt's chat messages, as in the file, into the batch."""
    truncation: Literal["error", "left", "right", "middle"]
    """Treatment of a prompt over max_prompt_length that is not dropped: stop, or cut it on that side."""
    filter_overlong_prompts: bool
    """Drop prompts over max_prompt_length, and log how many; False: as data.truncation says."""


class RunKeys(TypedDict, total=False):
    """The run."""

    total_epochs: int
    """Passes over the training prompts."""
    total_training_steps: int | None
    """Iterations of the run; null: as many as total_epochs gives."""
    project_name: str
    """Project in the trackers and in default_local_dir."""
    experiment_name: str
    """Run in the trackers and in default_local_dir; null: that folder's name, or one from what is trained."""
    logger: str | Sequence[str | Callable[..., Any]]
    """console, tensorboard, wandb, trackio, mlflow, swanlab, or an import path; always also metrics.jsonl."""
    nnodes: int
    """Machines; more than one needs a Ray cluster that runs on them."""
    n_gpus_per_node: int
    """Processes (GPUs) on each machine. If not set: at most the GPUs of this machine, and 1 without any."""
    export_dtype: Literal["float32", "bfloat16", "float16"] | None
    """Dtype of the weights in exported models; null: that of model.path. Checkpoints' state is float32."""
    worker_group: Literal["auto", "local", "ray"]
    """Workers run in this process (local) or each in its own (ray); auto: ray if there is more than one."""
    handles: bool
    """Ray: batches stay with the workers, and the driver fetches only the columns that it reads."""
    device: Literal["auto", "cpu", "cuda"]
    """auto: the GPU if there is one."""
    seed: int
    """The one seed that all random streams derive from."""
    save_freq: int
    """Save a checkpoint every this many iterations."""
    save_minutes: float | None
    """Save one too when an iteration ends this long after the last save; null with save_freq=-1: never."""
    async_save: bool
    """Write checkpoints in the background, from a copy in CPU memory, while training goes on."""
    max_ckpt_to_keep: int | None
    """Checkpoints of save_freq to keep, the newest ones; null: all."""
    test_freq: int
    """Validate every this many iterations."""
    val_before_train: bool
    """Validate before the first iteration."""
    val_only: bool
    """Validate once and stop."""
    resume_mode: str
    """auto: newest of the same run in default_local_dir or default_hdfs_dir; disable; path or URL of one."""
    max_restarts: int
    """Most restarts from the last checkpoint, after a worker died or hung."""
    phase_timeout_s: float | None
    """Ray: seconds after which a call to workers counts as hung (loading: at least 600); null: no limit."""
    default_hdfs_dir: str | Path | None
    """Folder for copies of the checkpoints: hdfs://, s3://, any fsspec URL or path; null: none."""
    default_local_dir: str | Path
    """Run folder: checkpoints, metrics, samples, resolved config."""
    push_to_hub: bool
    """At the end, upload the trained model with a model card to the hub (strop docs publishing)."""
    hub_repo_id: str | None
    """Repository, as owner/name or a name of yours; null: experiment_name. It is created if it is missing."""
    hub_revision: str | None
    """Branch; null: EXPERIMENT__SEED__TIME (Unix), which a resume uses again."""
    hub_private: bool
    """Create the repository as a private one; one that exists stays as it is."""


class TrainTrainer(RunKeys, total=False):
    """The run, and the placement of its roles."""

    resource_pools: Mapping[str, Any]
    """Named groups of processes: {name: [processes on each node]}; {}: one, n_gpus_per_node on nnodes."""
    placement: Mapping[str, Any]
    """The pool of a role ({Critic: name}); ActorRollout may be Actor and Rollout, or ActorRolloutRef."""
    async_steps: int
    """Iterations by which generation may run ahead of training; 0: none (strop docs asynchronous)."""
    critic_warmup: int
    """Iterations at the start that update the critic only."""
    warn_without_signal: int | None
    """Warn when all scores are equal, or all advantages 0, for this many iterations in a row; null: never."""
    log_val_generations: int
    """Validation samples that the trackers show, the same each time; validation/ has all of them."""
    log_rollouts: bool
    """Write all samples of an iteration to a file in rollouts/ of default_local_dir."""
    log_rollouts_freq: int
    """Write them every this many iterations, and after the last."""
    rollouts_to_keep: int | None
    """Files to keep in rollouts/, the newest ones; null: all."""


class ModelKeys(TypedDict, total=False):
    """A Hugging Face model that is trained."""

    path: str | Path
    """Hugging Face model: folder, name on the hub, hdfs:// or any fsspec URL, or a GGUF file."""
    external_lib: str | Sequence[str] | None
    """Package, or list of packages, to import first: they register models or tokenizers with transformers."""
    override_config: Mapping[str, Any]
    """Values laid over the model's config.json, for example a dropout rate."""
    enable_gradient_checkpointing: Literal["selective"] | bool
    """Recompute activations in the backward pass; selective: all but matrix products and attention."""
    use_remove_padding: Literal["auto"] | bool
    """Pack sequences without padding: the same numbers in less time; auto: where the model supports it."""
    trust_remote_code: bool
    """Run Python code that comes with the model."""
    attn_implementation: (
        Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"] | None
    )
    """Attention kernel of transformers; null: its choice, or eager with attn_logit_softcapping."""
    compute_dtype: Literal["auto", "float32", "bfloat16"]
    """Precision of the passes; auto: bfloat16 on a GPU, float32 on a CPU. Weights stay float32."""
    compile: Literal["auto"] | bool
    """Compile the decoder layers for log-probs and updates (strop docs speed); auto: on a GPU."""
    use_liger: bool
    """A key of verl: the modules of the package liger_kernel."""
    lora_rank: int
    """Train LoRA adapters of this rank on frozen weights; 0: train the weights (strop docs lora)."""
    lora_alpha: float
    """Adapters are scaled by lora_alpha / lora_rank."""
    target_modules: str | Sequence[str]
    """Layers with adapters: all-linear, a list of names' ends (q_proj), or a regular expression of names."""
    exclude_modules: str | Sequence[str] | None
    """Layers without adapters, named so; null: an encoder's, unless target_modules is an expression."""
    modules_to_save: Sequence[str]
    """Ends of names of modules trained whole beside adapters, for example [embed_tokens,norm]."""
    lora_adapter_path: str | Path | None
    """Folder of an adapter of peft's to start from; it decides rank, alpha and layers."""
    lora_merge: bool
    """Write final_model as a whole model with the adapters merged in, not as an adapter."""
    freeze: Sequence[Literal["encoder", "projector"]]
    """Parts of a model with pictures that keep their weights: encoder, projector (strop docs pictures)."""


class TrainActorRolloutRefModel(ModelKeys, total=False):
    """The model that is trained, and that the reference model is a frozen copy of."""

    external_libs: str | Sequence[str] | None
    """Deprecated name of external_lib."""


class TrainActorRolloutRefActorOptim(TypedDict, total=False):
    """AdamW and its learning-rate schedule, a function of the iteration."""

    lr: float
    """Learning rate after the warm-up."""
    lr_warmup_steps: int
    """Iterations of warm-up, from the model's first update on; -1: by lr_warmup_steps_ratio."""
    lr_warmup_steps_ratio: float
    """Share of all iterations over which the learning rate rises linearly to lr, from the first one on."""
    min_lr_ratio: float | None
    """The schedule ends at this share of lr (cosine and linear); null: 0."""
    warmup_style: Literal["constant", "cosine", "linear"]
    """Schedule after the warm-up: constant, or a cosine or linear decay to min_lr_ratio x lr."""
    total_training_steps: int
    """Set by the trainer to the number of iterations; leave it at -1."""
    betas: Sequence[float]
    """AdamW's decay rates of the first and second moments."""
    weight_decay: float
    """AdamW's decoupled weight decay."""
    eps: float
    """AdamW's constant in the denominator."""


class TrainActorRolloutRefActorFsdpConfigWrapPolicy(TypedDict, total=False):
    """Modules that are sharded as one unit."""

    transformer_layer_cls_to_wrap: str | Sequence[str] | None
    """Layer classes to shard as units; null: the model's own decoder layers."""
    min_num_params: int
    """Shard modules of at least this many parameters as units; 0: by decoder layer."""


class TrainActorRolloutRefActorFsdpConfig(TypedDict, total=False):
    """Sharding of a model that is trained."""

    wrap_policy: TrainActorRolloutRefActorFsdpConfigWrapPolicy
    """Modules that are sharded as one unit."""
    reshard_after_forward: bool
    """Free gathered parameters after a layer's forward pass; False: keep them for the backward pass."""
    param_offload: bool
    """Keep the parameters in CPU memory while they are not used."""
    grad_offload: bool
    """Keep the gradients in CPU memory while they are not used."""
    optimizer_offload: bool
    """Keep the optimizer state in CPU memory; in a step it passes through the GPU, 0.5 GiB at a time."""
    fsdp_size: int
    """Ranks that share one copy of the parameters; -1: all."""
    use_no_sync_for_gradient_accumulation: bool | None
    """Keep whole gradients and reduce them once a step, not in every micro-batch; null: if they fit."""


class TrainActorRolloutRefActorMegatron(TypedDict, total=False):
    """Layout of a model with strategy=megatron; roles in one pool have the same."""

    tensor_model_parallel_size: int
    """Ranks that share every layer."""
    pipeline_model_parallel_size: int
    """Stages of layers, each on its own ranks."""
    virtual_pipeline_model_parallel_size: int | None
    """Model chunks on each stage, for the interleaved schedule; null: one."""
    context_parallel_size: int
    """Ranks that share each sequence."""
    expert_model_parallel_size: int
    """Ranks that share the routed experts of a layer; they are not more ranks, but take their own rows."""
    expert_tensor_parallel_size: int | None
    """Ranks that share each expert; null: 1."""
    sequence_parallel: bool
    """Divide the tokens between layers over the ranks of tensor_model_parallel_size; without effect for 1."""
    use_distributed_optimizer: bool
    """Divide AdamW's moments over the data-parallel ranks."""
    param_offload: bool
    """Keep the parameters in CPU memory while they are not used."""
    grad_offload: bool
    """Keep the gradients in CPU memory while they are not used."""
    optimizer_offload: bool
    """Keep the optimizer state in CPU memory while it is not used."""
    use_dist_checkpointing: bool
    """Start from a checkpoint of Megatron-LM."""
    dist_checkpointing_path: str | Path | None
    """Folder of that checkpoint."""
    use_mbridge: bool
    """Convert weights by the package mbridge; strop has its own table."""
    override_transformer_config: Mapping[str, Any]
    """Entries of megatron-core's TransformerConfig, such as recompute_granularity; null ones are left out."""
    override_ddp_config: Mapping[str, Any]
    """Entries of megatron-core's DistributedDataParallelConfig."""
    seed: int
    """Seed of dropout."""


class PpoUpdateKeys(TypedDict, total=False):
    """The update of a model on an iteration's samples."""

    strategy: Literal["fsdp", "megatron"]
    """Training back-end; the same for actor and critic."""
    optim: TrainActorRolloutRefActorOptim
    """AdamW and its learning-rate schedule, a function of the iteration."""
    ppo_mini_batch_size: int
    """Prompts in one optimizer step, over all ranks: ppo_mini_batch_size x rollout.n samples."""
    ppo_micro_batch_size: int | None
    """Deprecated: ppo_micro_batch_size_per_gpu times the number of ranks."""
    ppo_micro_batch_size_per_gpu: int | None
    """Sequences in one forward and backward pass, per rank; it changes results by rounding only."""
    use_dynamic_bsz: bool
    """Cut micro-batches by tokens, not by sequences; if not set: unless a size in sequences is set."""
    ppo_max_token_len_per_gpu: int | None
    """Most tokens in one pass, per rank, with use_dynamic_bsz; null: chosen from the memory."""
    ulysses_sequence_parallel_size: int
    """Neighbouring ranks that share each sequence, in all of its passes; needs use_remove_padding."""
    ppo_epochs: int
    """Passes over the samples of one iteration."""
    shuffle: bool
    """Draw the mini-batches in a new seeded order every pass."""
    grad_clip: float
    """Largest global norm of the gradient; above it, the gradient is scaled down."""
    loss_agg_mode: Literal[
        "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
    ]
    """Aggregation of token losses; denominators count the whole mini-batch over all ranks."""


class TrainActorRolloutRefActor(PpoUpdateKeys, total=False):
    """The policy update."""

    clip_ratio: float
    """PPO's clip range of the probability ratio, on both sides."""
    clip_ratio_low: float | None
    """Clip range below 1; null: clip_ratio. From 1 on there is no lower bound."""
    clip_ratio_high: float | None
    """Clip range above 1; null: clip_ratio."""
    clip_ratio_c: float | None
    """Dual clip: bound of the loss at -A x this where the advantage A is negative; null: off."""
    policy_loss: str | Callable[..., Any]
    """ppo, gspo, cispo, or an import path."""
    policy_loss_kwargs: Mapping[str, Any]
    """Values for further parameters of the policy loss."""
    entropy_coeff: float
    """Weight of the entropy bonus."""
    use_kl_loss: bool
    """Put the KL to the reference model into the loss instead of the reward (usual for GRPO)."""
    kl_loss_coef: float
    """Weight of that KL loss."""
    kl_loss_type: Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "low_var_kl_clamped", "full"]
    """Estimator of that KL."""
    rollout_is: Literal["token", "sequence"] | None
    """Weigh the loss by trainer over sampler probability, per token or per sequence; null: off."""
    rollout_is_mode: Literal["truncate", "mask"]
    """Weights beyond the bounds: truncate (those above become the upper bound), or mask (they become 0)."""
    rollout_is_threshold: float
    """Upper bound of those weights."""
    rollout_is_threshold_low: float | None
    """Lower bound of those weights, with rollout_is_mode=mask (IcePop); null: none."""
    use_rollout_log_probs: bool
    """Take the sampler's log-probs as the old ones, in the ratio and in the KL; no pass computes them."""
    old_log_prob_from_update: bool
    """One step an iteration: take old log-probs from its forward pass where possible; False: compute them."""
    fsdp_config: TrainActorRolloutRefActorFsdpConfig
    """Sharding of a model that is trained."""
    megatron: TrainActorRolloutRefActorMegatron
    """Layout of a model with strategy=megatron; roles in one pool have the same."""


class TrainActorRolloutRefRefFsdpConfig(TypedDict, total=False):
    """Sharding of a model that is only evaluated."""

    wrap_policy: TrainActorRolloutRefActorFsdpConfigWrapPolicy
    """Modules that are sharded as one unit."""
    reshard_after_forward: bool
    """Free gathered parameters after a layer's forward pass; False: keep them for the backward pass."""
    param_offload: bool
    """Keep the parameters in CPU memory while they are not used."""


class TrainActorRolloutRefRef(TypedDict, total=False):
    """The reference model; it is loaded only when a KL term is on."""

    log_prob_micro_batch_size: int | None
    """Deprecated: log_prob_micro_batch_size_per_gpu times the number of ranks."""
    log_prob_micro_batch_size_per_gpu: int | None
    """Sequences in one forward pass for the reference log-probs, per rank; memory only."""
    log_prob_use_dynamic_bsz: bool
    """Cut micro-batches by tokens, not by sequences; if not set: unless a size in sequences is set."""
    log_prob_max_token_len_per_gpu: int | None
    """Most tokens in one forward pass, per rank, if cut by tokens; null: chosen from the memory."""
    ulysses_sequence_parallel_size: int
    """Neighbouring ranks that share each sequence; needs use_remove_padding."""
    fsdp_config: TrainActorRolloutRefRefFsdpConfig
    """Sharding of a model that is only evaluated."""
    megatron: TrainActorRolloutRefActorMegatron
    """Layout of a model with strategy=megatron; roles in one pool have the same."""


class TrainActorRolloutRefRolloutHttpStart(TypedDict, total=False):
    """Servers that the run starts on this machine, of `rollout.tensor_model_parallel_size` processes each."""

    n: int
    """Servers; they end with the run, however it ends."""
    args: Sequence[str]
    """Further arguments of vLLM's command."""


class TrainActorRolloutRefRolloutHttp(TypedDict, total=False):
    """Servers that generate (strop docs http_rollout)."""

    urls: Sequence[str]
    """Servers that run already, or a file with a URL on each line, read again at every transfer."""
    keep_weights: bool
    """The weights of the servers are evaluated: none are loaded here or sent; for trainer.val_only."""
    start: TrainActorRolloutRefRolloutHttpStart
    """Servers that the run starts on this machine, of `rollout.tensor_model_parallel_size` processes each."""
    slots: int | None
    """Samples at once on the clock of batches ahead; null: max_num_seqs x servers at the start of the run."""
    min_servers: int
    """With fewer live servers the rollout waits patience_s, and then fails."""
    max_restarts: int
    """Restarts of a server in a row, without an answer between."""
    retries: int
    """Failures of a request on one server, or of its health route, before another one is taken."""
    deadline_s: float | None
    """Seconds for an answer; null: 10 x the slowest so far, at least patience_s."""
    patience_s: float
    """Seconds that the rollout waits for servers, and they may take for a transfer."""
    token_env: str | None
    """Environment variable with the servers' token (STROP_TOKEN there); needed beyond this machine."""
    open_network: bool
    """Allow URLs beyond this machine without a token."""
    proxy: str | None
    """URL of a proxy for the servers, or the environment variable with it; HTTP_PROXY is ignored."""


class TrainActorRolloutRefRolloutValKwargs(TypedDict, total=False):
    """Sampling of validation answers."""

    do_sample: bool
    """Sample; False: take the likeliest token."""
    temperature: float
    """Sampling temperature; 0: take the likeliest token."""
    top_k: int
    """Sample among the k likeliest tokens."""
    top_p: float
    """Sample among the likeliest tokens that hold this much probability."""
    n: int
    """Answers per validation prompt."""


class TrainActorRolloutRefRollout(TypedDict, total=False):
    """Generation of responses, and the log-probs of what was generated."""

    http: TrainActorRolloutRefRolloutHttp
    """Servers that generate (strop docs http_rollout)."""
    micro_batch_size_per_gpu: int | None
    """Sequences that hf generates at once, per rank; null: as many as fit. It never changes a sample."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"]
    """Precision of vLLM's copy of the weights. If not set, or auto: actor_rollout_ref.model.compute_dtype."""
    gpu_memory_utilization: float
    """Share of the GPU's memory for vLLM's weights and KV cache; on a CPU the KV cache's limit."""
    enforce_eager: bool
    """Generate without CUDA graphs. If not set: False on a GPU, True on a CPU, where vLLM has none."""
    free_cache_engine: bool
    """Free the memory of vLLM's weights and KV cache for the update; on a GPU. CUDA graphs keep theirs."""
    load_format: Literal["auto", "megatron", "dtensor", "hf", "dummy_megatron", "dummy_dtensor", "dummy_hf"]
    """Weights that vLLM starts with. The dummy_* are the same: none; the others too: the model folder's."""
    seed_per_sample: Literal["auto"] | bool
    """vLLM: a seed for each sample, or False: one for each call; auto: False where that is faster."""
    tensor_model_parallel_size: int
    """Ranks over which vLLM spreads one copy of the model. If not set: 1 where it fits on one GPU."""
    max_num_batched_tokens: int
    """Most tokens in one step of vLLM."""
    max_num_seqs: int
    """Most sequences in one step of vLLM."""
    min_p: float
    """vLLM: sample only tokens with this share of the likeliest token's probability; 0: off."""
    min_tokens: int
    """vLLM: no end of a response before this many tokens."""
    presence_penalty: float
    """vLLM: subtracted from the logit of every token that the response already has; 0: off."""
    frequency_penalty: float
    """vLLM: subtracted from the logit of a token, once for each time that the response has it; 0: off."""
    repetition_penalty: float
    """vLLM: divides positive logits of tokens in prompt and response, multiplies negative ones; 1: off."""
    logit_bias: Mapping[str, Any] | None
    """vLLM: added to the logits of these token ids."""
    allowed_token_ids: Sequence[int] | None
    """vLLM: sample among these token ids only; null: all."""
    bad_words: Sequence[str]
    """vLLM: texts that are not generated."""
    stop: Sequence[str]
    """vLLM: texts that end a response; their tokens stay in it."""
    structured_outputs: Mapping[str, Any] | None
    """vLLM: keep to a grammar: one of json, regex, choice, grammar, as in its StructuredOutputsParams."""
    repetition_detection: Mapping[str, Any] | None
    """vLLM: end a response that repeats itself, as in its RepetitionDetectionParams."""
    extra_args: Mapping[str, Any] | None
    """vLLM: for your own logits processors."""
    name: Literal["vllm", "hf", "http"]
    """Engine: vllm, with its own weights; hf, on the actor's; auto: vllm or hf (strop docs generation)."""
    temperature: float
    """Sampling temperature; the same one is used for all log-probs."""
    top_k: int
    """Sample among the k likeliest tokens; then the sampler differs from the policy that is trained."""
    top_p: float
    """Sample among the likeliest tokens that hold this much probability; 1: off."""
    prompt_length: int
    """Follows data.max_prompt_length, which is the key to set."""
    response_length: int
    """Follows data.max_response_length, which is the key to set."""
    weight_transfer: Literal["auto", "broadcast", "object_store", "memory", "disk"]
    """Way of weights; auto: broadcast between GPUs, else Ray's store; memory, disk, broadcast to servers."""
    ignore_eos: bool
    """Generate up to the full length, past the end-of-sequence token."""
    log_prob_micro_batch_size: int | None
    """Deprecated: log_prob_micro_batch_size_per_gpu times the number of ranks."""
    log_prob_micro_batch_size_per_gpu: int | None
    """Sequences in one forward pass for the old log-probs, per rank; memory only."""
    log_prob_use_dynamic_bsz: bool
    """Cut micro-batches by tokens, not by sequences; if not set: unless a size in sequences is set."""
    log_prob_max_token_len_per_gpu: int | None
    """Most tokens in one forward pass, per rank, if cut by tokens; null: chosen from the memory."""
    do_sample: bool
    """Sample; False: take the likeliest token."""
    n: int
    """Answers per training prompt; above 1 for grpo, rloo and other group estimators."""
    stop_token_ids: Sequence[int]
    """Token ids that end a response, besides the model's end-of-sequence token."""
    verify_weights_every: int
    """Transfers from one comparison of the rollout's weights with the actor's to the next; 0: never."""
    val_kwargs: TrainActorRolloutRefRolloutValKwargs
    """Sampling of validation answers."""


class TrainActorRolloutRef(TypedDict, total=False):
    """The policy: its model, its update (actor), its generation (rollout), and the reference model (ref)."""

    hybrid_engine: bool
    """Actor and rollout share processes; False: two roles, each in the pool that trainer.placement names."""
    model: TrainActorRolloutRefModel
    """The model that is trained, and that the reference model is a frozen copy of."""
    actor: TrainActorRolloutRefActor
    """The policy update."""
    ref: TrainActorRolloutRefRef
    """The reference model; it is loaded only when a KL term is on."""
    rollout: TrainActorRolloutRefRollout
    """Generation of responses, and the log-probs of what was generated."""


class TrainCriticModel(ModelKeys, total=False):
    """The model under the value head."""

    path: str | Path
    """Hugging Face model whose body the critic starts from."""
    tokenizer_path: str | Path
    """Tokenizer that is saved next to the critic's checkpoint."""
    fsdp_config: TrainActorRolloutRefActorFsdpConfig
    """Sharding of a model that is trained."""


class TrainCritic(PpoUpdateKeys, total=False):
    """The value model and its update."""

    model: TrainCriticModel
    """The model under the value head."""
    forward_micro_batch_size: int | None
    """Deprecated: forward_micro_batch_size_per_gpu times the number of ranks."""
    forward_micro_batch_size_per_gpu: int | None
    """Sequences in one forward pass for the values, per rank; memory only."""
    forward_max_token_len_per_gpu: int | None
    """Most tokens in one forward pass, per rank, with use_dynamic_bsz; null: chosen from the memory."""
    cliprange_value: float
    """A new value may move this far from the old one before its loss is clipped."""
    megatron: TrainActorRolloutRefActorMegatron
    """Layout of a model with strategy=megatron; roles in one pool have the same."""


class TrainRewardModelModelFsdpConfig(TypedDict, total=False):
    """Sharding of the reward model."""

    min_num_params: int
    """Shard modules of at least this many parameters as units; 0: by decoder layer."""
    param_offload: bool
    """Keep the parameters in CPU memory while they are not used."""
    reshard_after_forward: bool
    """Free gathered parameters after a layer's forward pass; False: when all micro-batches are done."""


class TrainRewardModelModel(TypedDict, total=False):
    """The sequence classifier that scores responses."""

    input_tokenizer: str | Path | None
    """Tokenizer of the policy, when the reward model's chat template differs; null: they share one."""
    path: str | Path
    """Model for AutoModelForSequenceClassification: folder, name, hdfs:// or any fsspec URL."""
    external_lib: str | Sequence[str] | None
    """Package, or list of packages, to import first."""
    trust_remote_code: bool
    """Run Python code that comes with the model."""
    fsdp_config: TrainRewardModelModelFsdpConfig
    """Sharding of the reward model."""


class TrainRewardModelJudge(TypedDict, total=False):
    """A language model on a server that rates responses: the part `judge` of the score."""

    url: str | None
    """Server with OpenAI's chat completions, as http://127.0.0.1:8000; null: no judge."""
    token_env: str | None
    """Environment variable with the server's key; needed beyond this machine."""
    model: str | None
    """Name of the model there; null: the first one that the server names."""
    rubric: str | Path | None
    """Text, or a file, with {prompt}, {response} and {ground_truth}; null: the one of strop docs rewards."""
    scale: Sequence[float]
    """Lowest and highest number that it may give, mapped to 0 and 1; the last number of its answer counts."""
    temperature: float | None
    """Temperature of its answers, 0: greedy; null: its own, of services that take no other."""


class TrainRewardModel(TypedDict, total=False):
    """The reward model (only with enable), and the reward manager (always)."""

    enable: bool
    """Score with a model as well; False: with functions only."""
    model: TrainRewardModelModel
    """The sequence classifier that scores responses."""
    micro_batch_size: int | None
    """Deprecated: micro_batch_size_per_gpu times the number of ranks."""
    micro_batch_size_per_gpu: int | None
    """Sequences that the model scores in one forward pass, per rank; memory only."""
    use_dynamic_bsz: bool
    """Cut micro-batches by tokens, not by sequences; if not set: unless a size in sequences is set."""
    forward_max_token_len_per_gpu: int | None
    """Most tokens in one forward pass, per rank, with use_dynamic_bsz; null: chosen from the memory."""
    ulysses_sequence_parallel_size: int
    """Neighbouring ranks that share each sequence; needs use_remove_padding of actor_rollout_ref.model."""
    max_length: int | None
    """With input_tokenizer: longest sequence in the reward model's tokens; its end is kept; null: any."""
    judge: TrainRewardModelJudge
    """A language model on a server that rates responses: the part `judge` of the score."""
    sees: bool
    """Score samples with their pictures; False: with the words [picture] in their places."""
    reward_manager: str | Callable[..., Any]
    """naive (one process), prime (num_workers processes), none (a teacher alone), or an import path."""
    num_workers: int | None
    """Scoring processes of prime, on the driver's machine; null: one for each core, at most 16."""
    reward_kwargs: Mapping[str, Any]
    """Further keyword arguments of the reward manager."""
    timeout_s: float
    """Seconds that a reward function may take for one sample before it is cut off."""
    error_score: float
    """Score of a sample whose reward failed, was cut off or is not finite; see strop docs rewards."""
    max_error_rate: float
    """Share of such samples, among the last 256 or a larger batch, above which the run stops."""
    memory_limit_mb: int | None
    """Limit of a scoring process's private memory, and of each that it starts, in MiB; null: none."""
    max_concurrency: int
    """Samples that an async reward function scores at the same time, in one process."""
    parts: Mapping[str, Any]
    """Terms of a score: name of a part -> weight, or {weight, scorer, kwargs}; see strop docs rewards."""
    non_stop_penalty: bool
    """Give a response that did not end with a stop token the score penalty_reward_value."""
    penalty_reward_value: float
    """Score of such a response."""
    min_response_length: int
    """Responses that stopped before this many tokens get that score, too."""
    num_examine: int
    """Training samples per data source to log with their score, each iteration."""
    val_num_examine: int
    """Validation samples per data source to log with their score, in the first and the last validation."""
    megatron: TrainActorRolloutRefActorMegatron
    """Layout of a model with strategy=megatron; roles in one pool have the same."""


class TrainCustomRewardFunction(TypedDict, total=False):
    """Your own reward function: compute_score(response, ground_truth, ...); see strop docs rewards."""

    path: str | Path | None
    """Python file that defines it; null: the built-in scorers, by data source."""
    name: str
    """Name of the function in that file."""


class TrainTeacherModel(TypedDict, total=False):
    """The teacher's model; precision and packing are the policy's."""

    path: str | Path
    """Model as of the policy's path; reference: the policy with its LoRA adapters off; empty: no teacher."""
    external_lib: str | Sequence[str] | None
    """Package, or list of packages, to import first."""
    override_config: Mapping[str, Any]
    """Values laid over the model's config.json."""
    trust_remote_code: bool
    """Run Python code that comes with the model."""
    attn_implementation: (
        Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"] | None
    )
    """Attention kernel of transformers; null: its choice."""
    fsdp_config: TrainActorRolloutRefRefFsdpConfig
    """Sharding of a model that is only evaluated."""


class TrainTeacher(TypedDict, total=False):
    """A teacher, alone or beside a reward."""

    model: TrainTeacherModel
    """The teacher's model; precision and packing are the policy's."""
    kl: Literal["reverse", "forward", "js", "sampled"]
    """Divergence of whole distributions, or the reverse KL's estimate by the sampled token alone."""
    js_weight: float
    """The teacher's share of the mixture of js (beta of generalized JSD); at 0 and 1 it would be 0."""
    top_k: int | None
    """Compare the teacher's k likeliest words, and all others as one; null: all words."""
    coef: float
    """Weight of the teacher's part."""
    use: Literal["auto", "loss", "advantage"]
    """auto: a part of the advantages with sampled, of the loss with the other kinds."""
    by_source: Mapping[str, Any]
    """Teacher of each data_source, as {math: {model: {path: A}}, code: {servers: [URL]}}; {}: one for all."""
    servers: Sequence[str]
    """URLs of servers of vLLM that have the teacher, in place of a model, with teacher.kl=sampled."""
    token_env: str | None
    """Environment variable with the servers' token."""
    megatron: TrainActorRolloutRefActorMegatron
    """Layout of a model with strategy=megatron; roles in one pool have the same."""


class TrainAlgorithmKlCtrl(TypedDict, total=False):
    """The weight of the KL penalty in the reward; unused with actor_rollout_ref.actor.use_kl_loss."""

    type: Literal["fixed", "adaptive"]
    """fixed: kl_coef throughout; adaptive: steered so that the KL stays near target_kl."""
    kl_coef: float
    """Weight of the penalty (its first value, when adaptive); 0: off."""
    horizon: int
    """Samples over which the adaptive weight reacts."""
    target_kl: float
    """KL that the adaptive weight steers to."""


class TrainAlgorithmFilterGroups(TypedDict, total=False):
    """Dynamic sampling (DAPO): train on prompts whose answers differ, and generate until there are enough."""

    enable: bool
    """Drop prompts whose answers all have one score, and generate further batches in their place."""
    metric: str
    """Value that must differ: score, acc (the rule's part), or another part of the score."""
    max_num_gen_batches: int
    """End the run with an error if an iteration would need more batches than this; 0: no limit."""


class TrainAlgorithm(TypedDict, total=False):
    """From scores to advantages."""

    gamma: float
    """Discount factor per token."""
    lam: float
    """GAE's trade-off between bias and variance."""
    adv_estimator: str | Callable[..., Any]
    """gae, grpo, rloo, remax, turn_level, reinforce_plus_plus, reinforce_plus_plus_baseline, or yours."""
    whiten_advantages: bool
    """Scale GAE's advantages to mean 0 and variance 1 over the batch."""
    norm_adv_by_std_in_grpo: bool
    """Divide GRPO's advantages by the group's standard deviation; False: Dr. GRPO."""
    kl_penalty: Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "low_var_kl_clamped", "full"]
    """Estimator of the KL between policy and reference in the reward and in metrics."""
    kl_ctrl: TrainAlgorithmKlCtrl
    """The weight of the KL penalty in the reward; unused with actor_rollout_ref.actor.use_kl_loss."""
    filter_groups: TrainAlgorithmFilterGroups
    """Dynamic sampling (DAPO): train on prompts whose answers differ, and generate until there are enough."""


class EvaluateKeys(TypedDict, total=False):
    """Further keys of ``strop train``."""

    trainer: TrainTrainer
    """The run, and the placement of its roles."""
    actor_rollout_ref: TrainActorRolloutRef
    """The policy: its model, its update (actor), its generation (rollout), and the reference model (ref)."""
    critic: TrainCritic
    """The value model and its update."""
    reward_model: TrainRewardModel
    """The reward model (only with enable), and the reward manager (always)."""
    custom_reward_function: TrainCustomRewardFunction
    """Your own reward function: compute_score(response, ground_truth, ...); see strop docs rewards."""
    teacher: TrainTeacher
    """A teacher, alone or beside a reward."""


class TrainKeys(EvaluateKeys, total=False):
    """Further keys of ``strop train``."""

    lr: float
    """Short for actor_rollout_ref.actor.optim.lr.

    Learning rate after the warm-up."""
    steps: int | None
    """Short for trainer.total_training_steps.

    Iterations of the run; null: as many as total_epochs gives."""
    n: int
    """Short for actor_rollout_ref.rollout.n.

    Answers per training prompt; above 1 for grpo, rloo and other group estimators."""
    out: str | Path
    """Short for trainer.default_local_dir.

    Run folder: checkpoints, metrics, samples, resolved config."""


class AnsweredDataKeys(RowsKeys, total=False):
    """Prompts with their answers, for training and validation."""

    truncation: Literal["error", "left", "right", "middle"]
    """Treatment of rows that are too long: stop, or cut the prompt on that side; answers lose their end."""
    filter_overlong: bool
    """Drop rows with a prompt or an answer over its limit, and log how many; False: see data.truncation."""


class SftData(AnsweredDataKeys, total=False):
    """Prompts with a response each."""

    response_key: str
    """Column that holds the response, a string."""


class SftModel(ModelKeys, total=False):
    """The model that is trained."""

    fsdp_config: TrainActorRolloutRefActorFsdpConfig
    """Sharding of a model that is trained."""


class UpdateKeys(TypedDict, total=False):
    """The update: one optimizer step per iteration."""

    strategy: Literal["fsdp", "megatron"]
    """Training back-end."""
    micro_batch_size_per_gpu: int | None
    """Rows in one pass, per rank; it changes results by rounding only."""
    use_dynamic_bsz: bool
    """Cut micro-batches by tokens, not by rows; if not set: unless a size in rows is set."""
    max_token_len_per_gpu: int | None
    """Most tokens in one pass, per rank, with use_dynamic_bsz; null: chosen from the memory."""
    grad_clip: float
    """Largest global norm of the gradient; above it, the gradient is scaled down."""
    optim: TrainActorRolloutRefActorOptim
    """AdamW and its learning-rate schedule, a function of the iteration."""


class SftUpdate(UpdateKeys, total=False):
    """The update: one optimizer step per iteration."""

    nll_coef: float
    """Weight in the loss of the answers' own negative log-likelihood, with a teacher; 0: off."""


class SftTeacher(TypedDict, total=False):
    """A teacher of given answers."""

    model: TrainTeacherModel
    """The teacher's model; precision and packing are the policy's."""
    kl: Literal["reverse", "forward", "js"]
    """Divergence of whole distributions."""
    js_weight: float
    """The teacher's share of the mixture of js (beta of generalized JSD); at 0 and 1 it would be 0."""
    top_k: int | None
    """Compare the teacher's k likeliest words, and all others as one; null: all words."""
    coef: float
    """Weight of the teacher's part."""


class SftKeys(TypedDict, total=False):
    """Further keys of ``strop sft``."""

    trainer: RunKeys
    """The run."""
    update: SftUpdate
    """The update: one optimizer step per iteration."""
    teacher: SftTeacher
    """A teacher of given answers."""
    lr: float
    """Short for update.optim.lr.

    Learning rate after the warm-up."""
    steps: int | None
    """Short for trainer.total_training_steps.

    Iterations of the run; null: as many as total_epochs gives."""
    out: str | Path
    """Short for trainer.default_local_dir.

    Run folder: checkpoints, metrics, samples, resolved config."""


class TrainRmData(AnsweredDataKeys, total=False):
    """Prompts with two answers, one of them preferred."""

    chosen_key: str
    """Column that holds the preferred answer, a string."""
    rejected_key: str
    """Column that holds the other answer, a string."""


class TrainRmTrainer(RunKeys, total=False):
    """The run."""

    log_val_generations: int
    """Validation pairs that the trackers show with both scores (dpo: rewards), the same each time."""


class TrainRmUpdate(UpdateKeys, total=False):
    """The update: one optimizer step per iteration."""

    center_rewards_coefficient: float
    """Weight of the mean of (chosen + rejected score)^2, which keeps scores near 0; 0: off."""


class TrainRmKeys(TypedDict, total=False):
    """Further keys of ``strop train-rm``."""

    trainer: TrainRmTrainer
    """The run."""
    update: TrainRmUpdate
    """The update: one optimizer step per iteration."""
    lr: float
    """Short for update.optim.lr.

    Learning rate after the warm-up."""
    steps: int | None
    """Short for trainer.total_training_steps.

    Iterations of the run; null: as many as total_epochs gives."""
    out: str | Path
    """Short for trainer.default_local_dir.

    Run folder: checkpoints, metrics, samples, resolved config."""


class DpoUpdate(UpdateKeys, total=False):
    """The update: one optimizer step per iteration."""

    loss: str | Callable[..., Any]
    """Loss of a pair: dpo, cdpo, ipo, hinge, simpo, orpo, or an import path (strop docs preference)."""
    beta: float | None
    """Weight of log-probs in the reward (ipo: tau; orpo: lambda); null: 0.1, with simpo 2.0."""
    label_smoothing: float | None
    """Share of pairs assumed to be labelled the wrong way round; null: 0, with cdpo 0.1."""
    gamma: float | None
    """Margin by which simpo's rewards should differ; null: 1."""
    loss_kwargs: Mapping[str, Any]
    """Further settings of a loss of your own, by parameter name."""
    nll_coef: float
    """Weight in the loss of the chosen answers' negative log-likelihood, a mean over tokens (RPO); 0: off."""


class DpoKeys(TypedDict, total=False):
    """Further keys of ``strop dpo``."""

    trainer: TrainRmTrainer
    """The run."""
    update: DpoUpdate
    """The update: one optimizer step per iteration."""
    lr: float
    """Short for update.optim.lr.

    Learning rate after the warm-up."""
    steps: int | None
    """Short for trainer.total_training_steps.

    Iterations of the run; null: as many as total_epochs gives."""
    out: str | Path
    """Short for trainer.default_local_dir.

    Run folder: checkpoints, metrics, samples, resolved config."""
