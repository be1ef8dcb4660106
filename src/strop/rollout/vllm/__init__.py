"""Rollout ``vllm``: a vLLM engine in the worker's process, with a copy of the weights in vLLM's layout.

Importing the package sets environment variables that vLLM reads at import; those already set are kept.
"""

import os

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # run in this process, which holds the weights
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # share the trainer's threads
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}

for _name, _value in _ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)
