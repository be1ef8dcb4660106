"""Rollout ``vllm``: a vLLM engine in the worker's process, with a copy of the weights in vLLM's layout."""
