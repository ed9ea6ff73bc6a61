"""Where the messages of living workers go, by their own words, and which workers take nothing because of that."""

from __future__ import annotations

from functools import cached_property

from dropq.errors import DropqError
from dropq.format.addresses import is_address
from dropq.lifecycle.context import QueueContext, RootContext
from dropq.lifecycle.open_queue import open_queue
from dropq.lifecycle.sending import Outlet
from dropq.policies.send_limits import SendLimits, limits_of_sends
from dropq.queue.missing_queue import missing_queue_sender
from dropq.queue.outputs import Destinations
from dropq.queue.sender import Sender
from dropq.storage import liveness
from dropq.storage.liveness import Signs


class _Asked(Sender):
    """An address that is asked whether it takes what is sent; nothing is sent to it."""

    def __init__(self, root: RootContext, address: str) -> None:
        self.name = address
        self._root = root

    @cached_property
    def _own(self) -> QueueContext:
        return open_queue(self._root, self.name)

    @property
    def _outlet(self) -> Outlet:
        if self._opened is None:
            from dropq.topics.publishing import outlet

            self._opened = outlet(self._own)
        return self._opened

    def _limits_of_sends(self) -> SendLimits:
        return limits_of_sends(self._own, self._destination, waits=self._waits)

    def _missing_queue_sender(self) -> Sender | None:
        return missing_queue_sender(self._root, self.name)


class Workers:
    """The living workers of a queue that send what they make of its messages to other queues.

    Attributes:
        to: where the messages of each go, by the worker's subscription.
    """

    def __init__(self, context: QueueContext, signs: Signs | None = None) -> None:
        self._context = context
        folder = context.layout.consumers
        told = {
            one: list(filter(is_address, liveness.announced(folder, one))) for one in (signs or Signs(folder)).living
        }
        self.to = {one: addresses for one, addresses in told.items() if addresses}

    @cached_property
    def blocked(self) -> dict[str, str]:
        """Why each worker takes nothing that does, by its subscription."""
        return {one: why for one, addresses in self.to.items() if (why := what_blocks(self._context, addresses))}


def what_blocks(context: QueueContext, addresses: list[str]) -> str:
    """Return which address takes nothing now from workers of a queue, and why; "" if each does."""
    destinations = Destinations(context, lambda address: _Asked(context.root, address))
    return destinations.what_blocks(addresses)


def waiting_for_each_other(context: QueueContext) -> list[str]:
    """Return the queues from this one on, and back to it, whose workers wait each for room in the next; or none.

    It follows only workers that take nothing as a destination is full, write-locked or away.
    """
    ahead, seen = [[context]], set[str]()
    while ahead:
        way = ahead.pop()
        here = way[-1]
        for address in {each for addresses in Workers(here).to.values() for each in addresses}:
            if not what_blocks(here, [address]):
                continue
            if address == context.name:
                return [*(each.name for each in way), address]
            if address not in seen:
                seen.add(address)
                try:
                    ahead.append([*way, open_queue(context.root, address)])
                except DropqError:
                    continue  # it is away, and has no workers that are seen
    return []
