"""Names of Ray without a public counterpart, read in 2.60; the rest of strop imports none.

``tests/test_private_names.py`` fails by name where Ray moves one, and where another file uses one.
"""

from __future__ import annotations

from typing import Any

from ray._private import ray_constants
from ray._private.authentication import authentication_token_setup as authentication
from ray._private.authentication.authentication_token_setup import (
    maybe_enable_token_auth_if_token_available,
)
from ray._private.node import Node
from ray._private.parameter import RayParams
from ray._private.services import find_bootstrap_address, find_gcs_addresses
from ray._private.state import available_resources_per_node

__all__ = [
    "Node",
    "RayParams",
    "authentication",
    "available_resources_per_node",
    "find_bootstrap_address",
    "find_gcs_addresses",
    "maybe_enable_token_auth_if_token_available",
    "ray_constants",
    "wrapped_class",
]


# Under `uv run` ray.init would send the folder, with its data and checkpoints, to workers, and let each make
# an environment of its own; the processes of a run have the driver's path.
ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV = False


def wrapped_class(actor_class: Any) -> type:
    """Return the class that ``ray.remote`` has made ``actor_class`` of."""
    return actor_class.__ray_metadata__.modified_class.__ray_actor_class__
