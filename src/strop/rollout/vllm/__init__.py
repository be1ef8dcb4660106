"""Rollout ``vllm``: the vLLM engine in this process, with a copy of the weights in its own layout.

vLLM reads these variables when it is imported; one that is set already stays.
"""

import os

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in this process, where the weights are
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer's threads are the same
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}

for _name, _value in _ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)
