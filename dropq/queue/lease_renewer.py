"""The renewal of leases, in a thread of its own, while their messages are worked on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from functools import partial

from dropq.queue.message import Message, extend_all

log = logging.getLogger("dropq")

#: The leases are renewed when this part of one has gone by: two renewals may fail before it runs out.
RENEWAL = 1 / 3


class LeaseRenewer:
    """Renews leases by `renew` in a thread, from its beginning until it is stopped.

    A round that fails is logged, and the next round tries again: until then, no lease has run out.
    """

    def __init__(self, lease: float, renew: Callable[[], object]) -> None:
        self._stopped = threading.Event()
        run = partial(self._run, lease * RENEWAL, renew)
        self._thread = threading.Thread(target=run, name="dropq-lease-renewer", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, after the round that it is in."""
        self._stopped.set()
        self._thread.join()

    def _run(self, period: float, renew: Callable[[], object]) -> None:
        while not self._stopped.wait(period):
            try:
                renew()
            except Exception as error:
                log.warning("leases were not renewed: %s", error)


def renew_held(messages: Iterable[Message], lease: float) -> None:
    """Renew the leases of those messages that are held; log those that were not renewed.

    A message whose lease is lost is not held any more: its next reader gets the error.
    """
    for _, error in extend_all([message for message in messages if message.held], lease):
        log.warning("%s", error)
