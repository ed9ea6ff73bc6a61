"""The lease of a claim whose message is copied: it is renewed as long as copies are written, and ends soon after that.

RACE: a sweep takes a claim back whose lease is over, also from a process that lives and copies.
"""

from __future__ import annotations

import time

from dropq.format.claims import Claim
from dropq.lifecycle.settlement import Claims
from dropq.storage.clock import lease_end

#: Seconds that the claim of a process that copies a message lasts, if no lock shows that the process lives.
LEASE = 60.0


class Renewal:
    """Renews a claim that was just made, or renewed, for `LEASE` seconds."""

    def __init__(self, claims: Claims, claim: Claim) -> None:
        self._claims = claims
        self._claim = claim
        self._began = time.monotonic()

    def __call__(self) -> None:
        """Renew the claim, if a third of its lease is over; call this often."""
        if (now := time.monotonic()) - self._began >= LEASE / 3:
            self._claims.extend(self._claim, lease_end(self._claims.context.clock, LEASE))
            self._began = now
