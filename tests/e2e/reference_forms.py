"""Programs in the forms that the reference documents have, for machines without the documents.

``test_reference_documents.py`` runs the documents' own blocks where they are, and compares their calls with
those of these programs.
"""

from __future__ import annotations

MAIN = """
if config.actor_rollout_ref.actor.strategy == "fsdp":
    assert config.actor_rollout_ref.actor.strategy == config.critic.strategy
    from verl.workers.fsdp_workers import ActorRolloutRefWorker, CriticWorker
    from verl.single_controller.ray import RayWorkerGroup
    ray_worker_group_cls = RayWorkerGroup
elif config.actor_rollout_ref.actor.strategy == "megatron":
    assert config.actor_rollout_ref.actor.strategy == config.critic.strategy
    from verl.workers.megatron_workers import ActorRolloutRefWorker, CriticWorker
    from verl.single_controller.ray.megatron import NVMegatronRayWorkerGroup
    ray_worker_group_cls = NVMegatronRayWorkerGroup
else:
    raise NotImplementedError

from verl.trainer.ppo.ray_trainer import ResourcePoolManager, Role

workers = {Role.ActorRollout: ActorRolloutRefWorker, Role.RefPolicy: ActorRolloutRefWorker}
role_worker_mapping = {**workers, Role.Critic: CriticWorker}
resource_pool_spec = {"all": [config.trainer.n_gpus_per_node] * config.trainer.nnodes}
mapping = dict.fromkeys(role_worker_mapping, "all")

if config.reward_model.enable:
    from verl.workers.fsdp_workers import RewardModelWorker
    role_worker_mapping[Role.RewardModel] = RewardModelWorker
    mapping[Role.RewardModel] = "all"

reward_fn = RewardManager(tokenizer=tokenizer, num_examine=0)
val_reward_fn = RewardManager(tokenizer=tokenizer, num_examine=1)
resource_pool_manager = ResourcePoolManager(resource_pool_spec=resource_pool_spec, mapping=mapping)

trainer = RayPPOTrainer(config=config, tokenizer=tokenizer, role_worker_mapping=role_worker_mapping,
                        resource_pool_manager=resource_pool_manager,
                        ray_worker_group_cls=ray_worker_group_cls,
                        reward_fn=reward_fn, val_reward_fn=val_reward_fn)
trainer.init_workers()
trainer.fit()
"""

SCORERS = """
def _select_rm_score_fn(data_source):
    if data_source == "openai/gsm8k":
        return gsm8k.compute_score
    elif data_source == "lighteval/MATH":
        return math.compute_score
    else:
        raise NotImplementedError
"""

WORKERS = """
role_worker_mapping = {
    Role.RefPolicy: ray.remote(ActorRolloutRefWorker),
    Role.ActorRollout: ray.remote(ActorRolloutRefWorker),
    Role.Critic: ray.remote(CriticWorker),
}
"""

INPUTS = """
options = config.reward_model.get("reward_kwargs", {})
assert config.reward_model.get("reward_manager", "naive") == "naive"
reward_fn = load_reward_manager(config, tokenizer, num_examine=0, **options)
val_reward_fn = load_reward_manager(config, tokenizer, num_examine=1, **options)
train_dataset = create_rl_dataset(config.data.train_files, config.data, tokenizer, processor)
val_dataset = create_rl_dataset(config.data.val_files, config.data, tokenizer, processor)
"""

LOADERS = """
self._create_dataloader(train_dataset, val_dataset, collate_fn, train_sampler)
"""

ITERATION = """
settings = self.config.algorithm
gen_batch_output = self.actor_rollout_wg.generate_sequences(gen_batch)
batch = batch.union(gen_batch_output)
batch = batch.union(self.ref_policy_wg.compute_ref_log_prob(batch))
batch = batch.union(self.critic_wg.compute_values(batch))
batch.batch["token_level_scores"] = self.reward_fn(batch)
batch, kl_metrics = apply_kl_penalty(batch, kl_ctrl=self.kl_ctrl, kl_penalty=settings.kl_penalty)
batch = compute_advantage(
    batch,
    adv_estimator=settings.adv_estimator,
    gamma=settings.gamma,
    lam=settings.lam,
    num_repeat=self.config.actor_rollout_ref.rollout.n,
)
critic_output = self.critic_wg.update_critic(batch)
actor_output = self.actor_rollout_wg.update_actor(batch)
self._validate()
"""

LOSS = """
log_probs = logprobs_from_logits(logits, micro_batch["responses"])
pg_loss, pg_clipfrac, ppo_kl = core_algos.compute_policy_loss(
    old_log_prob=old_log_prob, log_prob=log_prob, advantages=advantages
)
"""
