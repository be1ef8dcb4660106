"""Keeping the rollout on the policy that is trained: which weights it has, and how it gets those of now."""

from __future__ import annotations

from typing import Any

from strop.trainer.metrics import PhaseTimer


class WeightSync:
    """Counts the actor's updates and brings a rollout that lags behind up to date.

    A rollout on the actor's own weights has nothing to take over; its worker knows. Beside the actor, in the
    same processes, every weight is handed over where it lies. In processes of its own a rollout gets buckets
    of weights: through Ray's object store, of which the driver passes on the references.
    """

    def __init__(self, actor: Any, rollout: Any, timer: PhaseTimer, *, verify_every: int) -> None:
        """``verify_every``: transfers from one check of what the rollout holds to the next; 0: never."""
        self._actor, self._rollout, self._timer = actor, rollout, timer
        self._verify_every = verify_every
        self._together = rollout is actor
        self._transfers = 0
        self.version = 0
        """Of the policy: the actor's updates in this process."""
        self.rollout_version: int | None = None
        """Of the weights that the rollout has; None: not known."""

    def policy_changes(self) -> None:
        """The actor is being updated."""
        self.version += 1

    def to_rollout(self) -> None:
        """Hand weights over if the rollout lags behind; ``ModelError`` names those that did not arrive."""
        if self.rollout_version == self.version:
            return
        with self._timer.phase("sync_weights"):
            if self._together:
                self._actor.sync_rollout(self.version)
            else:
                self._send_buckets()
        if self._verify_every and self._transfers % self._verify_every == 0:
            with self._timer.phase("verify_weights"):
                expected = None if self._together else self._actor.weight_checksums()
                self._rollout.verify_rollout(self.version, expected)
        self._transfers += 1
        self.rollout_version = self.version

    def _send_buckets(self) -> None:
        bucket = self._actor.weight_bucket(restart=True)
        while bucket is not None:
            self._rollout.load_weights(bucket)
            bucket = self._actor.weight_bucket(restart=False)
        self._rollout.load_weights(None, self.version)

    def release(self) -> None:
        """What a rollout beside the actor holds in memory is the update's; it gets its weights anew then."""
        if self._together:
            self._actor.release_rollout()
            self.rollout_version = None
