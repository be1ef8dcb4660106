"""The engine ``megatron``: tensor, pipeline and data parallelism by megatron-core."""
