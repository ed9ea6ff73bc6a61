"""Publishing: a send to a topic, or to a view, which distributes what it has sent before it returns.

A publisher sends a message straight into `processing/` of the topic's `.incoming/`, under a claim of its own: from that
rename on it is published, and another program distributes it if the publisher dies. `Distributor.claim_staged` says
when it is sent into `target/` instead, as by a script.
"""

from __future__ import annotations

import threading

from dropq.errors import NoSuchQueue
from dropq.lifecycle.context import QueueContext, RootContext
from dropq.lifecycle.open_queue import open_queue
from dropq.lifecycle.queue_notes import refuse_away
from dropq.lifecycle.sending import Outlet
from dropq.topics.distribution import Distributor


class Publishing(Outlet):
    """Sends to one topic, by publishing."""

    def __init__(self, context: QueueContext) -> None:
        super().__init__(context)
        self._distributors = threading.local()
        #: Seconds for which a publish waits for a pause to end, or a full subscription, in this thread; None: it does
        #: not wait.
        self.patience = threading.local()

    def close(self) -> None:
        """End this thread's distributor."""
        distributor: Distributor | None = getattr(self._distributors, "own", None)
        self._distributors.own = None
        if distributor is not None and distributor.is_ours:
            distributor.close()

    def distribute(self) -> None:
        """Distribute what waits, until a message blocks the topic."""
        self._distributor().run()

    def send_new(self, file: str, data: bytes | memoryview, *, not_before: int = 0) -> bool:
        """Publish a body; return whether every receiver has it; they get a delayed message later."""
        self.stage(file, data)
        return self.send(file, not_before=not_before, body=data)

    def send(
        self, file: str, *, not_before: int = 0, adopted: str = "", body: bytes | memoryview | None = None
    ) -> bool:
        """Publish a staged file, or an adopted one, as `send_new` does; its `body` is read, if it is not known."""
        distributor = self._distributor()
        claim = None if not_before else distributor.claim_staged(file)
        if claim is None:
            super().send(file, not_before=not_before, adopted=adopted)
            super().sent(not_before=not_before)
            if not_before:
                return False
        else:
            staged = adopted or f"{self._layout.working}/{file}"
            try:
                self._storage.rename(staged, claim.path)
            except OSError as error:
                raise self._take_back(staged, error, adopted) from error
        return distributor.publish(file, claim, body, patience=getattr(self.patience, "seconds", None))

    def sent(self, *, not_before: int = 0) -> None:
        """Do nothing: what is published is synced as it is distributed, or as it is sent to wait."""

    def _distributor(self) -> Distributor:
        """Return this thread's distributor: each claims under a name of its own."""
        distributor: Distributor | None = getattr(self._distributors, "own", None)
        if distributor is None or not distributor.is_ours:
            distributor = self._distributors.own = Distributor(self.context)
        return distributor


def outlet(context: QueueContext) -> Outlet:
    """Return what sends to a queue: of a topic, or of a view's topic, what publishes; NoSuchQueue without that."""
    if context.layout.is_topic:
        return Publishing(context)
    if context.config.underlying_topic is not None:
        return Publishing(open_target(context.root, context))
    return Outlet(context)


def open_target(root: RootContext, view: QueueContext) -> QueueContext:
    """Open the topic that a view's sends are published to; NoSuchQueue or Unavailable without it."""
    target = view.config.default_publish_target or view.config.underlying_topic or ""
    try:
        context = open_queue(root, target)
    except NoSuchQueue as error:
        refuse_away(root.layout, target, f"nothing was sent to queue {view.name}, which is a view on it")
        raise NoSuchQueue(
            f"queue {view.name} is a view, and sends to it go to topic {target!r}, which is not there: "
            f"`dropq topic ls` shows which there are, `dropq topic create {target}` makes it"
        ) from error
    if not context.layout.is_topic:
        raise NoSuchQueue(f"queue {view.name} is a view on topic {target!r}, and {target!r} is a queue")
    return context
