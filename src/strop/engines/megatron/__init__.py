"""The engine ``megatron``: tensor, pipeline and data parallelism by megatron-core."""

import warnings

# megatron-core calls functions that torch has renamed, in every step, and advises on options that are set.
warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated")
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core\.")
