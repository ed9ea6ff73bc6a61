"""Named subscriptions: those of a client that comes back, such as a worker that is restarted.

`.dropq/named/CLIENT` says that a client has had a named subscription; the file stays when the client goes. A client is
alive while a sign of life in `consumers/` shows that a subscription of it is. Without locks nobody can prove a client
dead, so it counts as alive, and its file says so.

`.dropq/kept` says that the queue has had a selector or a named subscription. Without it, a queue with `self_destruct`
stays: it is new.
"""

from __future__ import annotations

from dropq.format.claims import client_of, client_part
from dropq.format.layout import QueueLayout
from dropq.lifecycle.context import QueueContext
from dropq.storage import liveness, reading

#: The content of a client's file if no lock shows whether the client is alive.
_UNLOCKED = b"no lock\n"


def note(context: QueueContext, client_id: str) -> None:
    """Note that a client has a named subscription of a queue; call it before the subscription shows its life."""
    path = _path(context.layout, client_id)
    if not reading.exists(path):
        context.storage.make_folder(context.layout.named)
        context.storage.touch(path)
    keep(context)


def note_unlocked(context: QueueContext, client_id: str) -> None:
    """Note that no lock shows whether a client lives: it counts as alive until a person removes its file."""
    context.storage.write_small(_path(context.layout, client_id), _UNLOCKED)


def keep(context: QueueContext) -> None:
    """Note that a queue has a selector or a named subscription, so that nothing destroys it now."""
    if not reading.exists(context.layout.kept):
        context.storage.make_folder(context.layout.private)  # a DropboxMQ makes queues without it
        context.storage.touch(context.layout.kept)
    if reading.exists(context.layout.alone):
        context.storage.unlink(context.layout.alone)


def is_alive(layout: QueueLayout) -> bool:
    """Return whether a client of a named subscription lives, or may live."""
    clients = {name for name in reading.names_in(layout.named) if not name.startswith(".")}
    if any(reading.read_small(f"{layout.named}/{client}") == _UNLOCKED for client in clients):
        return True
    known = liveness.known(layout.consumers) if clients else frozenset[str]()
    return any(client_of(one) in clients and not liveness.is_dead(layout.consumers, one) for one in known)


def _path(layout: QueueLayout, client_id: str) -> str:
    return f"{layout.named}/{client_part(client_id)}"
