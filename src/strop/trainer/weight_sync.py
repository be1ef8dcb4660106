"""Track the rollout's policy version, and transfer weights from the actor."""

from __future__ import annotations

from typing import Any

from strop.controller.group import Future
from strop.trainer.metrics import PhaseTimer


class WeightSync:
    """Bring the rollout to the current policy before it generates.

    A rollout on the actor's own weights has nothing to copy; its worker returns at once. A co-located copy is
    loaded from the actor's tensors in the process. A rollout in a separate pool gets them by broadcast, or in
    buckets through Ray's object store (``rollout.weight_transfer``), where the driver passes on references
    with ``trainer.handles``.
    """

    def __init__(
        self,
        actor: Any,
        rollout: Any,
        *,
        verify_every: int,
        ahead: bool = False,
        shares_pool: bool = False,
    ) -> None:
        """``verify_every``: transfers between two comparisons of checksums; 0: none.

        ``ahead``: the rollout may be generating. It loads what is sent when its earlier calls are done, and
        the actor goes on meanwhile. ``shares_pool``: a rollout that is not the actor has a pool with others.
        """
        self._actor, self._rollout = actor, rollout
        self._verify_every, self._ahead = verify_every, ahead
        self._together = rollout is actor
        self._makes_room = self._together or (shares_pool and not ahead)
        self._transfers = 0
        self._loading: list[Future] = []
        self._broadcasts: bool | None = None  # unknown before the first transfer
        self.version = 0
        """Current version of the policy: the last iteration that updated the actor, set by the trainer."""
        self.rollout_version: int | None = None
        """Version of the weights that the rollout has, or has been sent; None if it holds none."""

    def to_rollout(self, timer: PhaseTimer) -> list[Future]:
        """Transfer the current weights unless the rollout has them; returns the calls that load them.

        Without ``ahead`` these are complete. They raise ``ModelError`` naming the weights that did not arrive
        intact.
        """
        self._loading = []
        if self.rollout_version == self.version:
            return []
        with timer.phase("sync_weights"):
            if self._together:
                self._actor.sync_rollout(self.version)
            elif self._connected():
                receiving = self._rollout.receive_weights.start(self.version)
                self._actor.send_weights()  # waits for the rollout, also with ``ahead``
                self._load(receiving)
            else:
                self._send_buckets()
        # the first transfer, number 0, is always verified
        if self._verify_every and self._transfers % self._verify_every == 0:
            with timer.phase("verify_weights"):
                expected = None if self._together else self._actor.weight_checksums()
                self._load(self._rollout.verify_rollout.start(self.version, expected))
        self._transfers += 1
        self.rollout_version = self.version
        return self._loading

    def _connected(self) -> bool:
        """Return True if there is a broadcast channel, which the first call opens where one is configured."""
        if self._broadcasts is None:
            address = self._actor.address_for(self._rollout)
            port = None if address is None else self._actor.open_channel(address)
            if port is not None:
                where = address, port, 1 + self._rollout.world_size
                joining = self._rollout.join_channel.start(*where)
                self._actor.join_channel(*where)
                joining.get()
            self._broadcasts = port is not None
        return self._broadcasts

    def _send_buckets(self) -> None:
        """Send buckets in order; a last call without one names the version."""
        bucket = self._actor.weight_bucket(restart=True)
        while bucket is not None:
            self._load(self._rollout.load_weights.start(bucket))
            bucket = self._actor.weight_bucket(restart=False)
        self._load(self._rollout.load_weights.start(None, self.version))

    def _load(self, call: Future) -> None:
        if self._ahead:
            self._loading.append(call)
        else:
            call.get()

    def release(self) -> None:
        """Free the rollout's weights for the update where other roles have its memory, unless it generates.

        The next transfer reloads them.
        """
        if self._makes_room:
            self._rollout.release_rollout()
            self.rollout_version = None
