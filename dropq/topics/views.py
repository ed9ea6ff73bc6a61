"""Views: queues that get what is published to the topics that their `underlying_topic` names.

What is a view stands in its queue.toml. `.dropq/views/` of the root has an empty file for each, called after the queue,
so that a publisher need not read every queue's configuration: it is made before the view appears, and whenever a view
is opened. A file whose queue is gone, or is no view any more, is removed by a sweep of the root.
"""

from __future__ import annotations

from dropq.errors import NoSuchQueue
from dropq.format import names
from dropq.format.layout import RootLayout
from dropq.lifecycle.context import QueueContext, RootContext
from dropq.queue.open_queue import open_queue
from dropq.storage.files import Storage
from dropq.storage.reading import exists, names_in, written_ms

#: Milliseconds after which a view that is known, and not there, is forgotten.
UNSEEN_AGE = 60_000


def view_names(root: RootLayout, *, shared: bool = True) -> list[str]:
    """Return the names of the queues that are known as views.

    Args:
        root: the root.
        shared: whether other hosts may change it.
    """
    if not shared and not exists(root.views):
        return []
    return sorted(name for name in names_in(root.views) if names.can_name_queue(name))


def note_view(root: RootLayout, name: str, storage: Storage) -> None:
    """Make a view known to the publishers of its topics."""
    if not exists(f"{root.views}/{name}"):
        storage.make_folder_like(root.views, root.private)
        storage.touch(f"{root.views}/{name}")


def forget_view(root: RootLayout, name: str, storage: Storage) -> None:
    """Stop feeding a view."""
    storage.unlink(f"{root.views}/{name}")


def tidy_views(root: RootContext) -> None:
    """Forget the views that are gone, or are no views any more.

    RACE: a view is known before it appears: so one that is not there is forgotten after a minute.
    """
    storage = Storage()
    for name in view_names(root.layout):
        try:
            topics = open_queue(root, name).config.underlying_topic
        except NoSuchQueue:
            topics = None
        old = root.clock.now_ms() - written_ms(f"{root.layout.views}/{name}") > UNSEEN_AGE
        if topics is None and old:
            forget_view(root.layout, name, storage)


def is_view(context: QueueContext) -> bool:
    """Return whether a queue is a view on topics."""
    return context.config.underlying_topic is not None
