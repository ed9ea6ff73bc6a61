"""Which destinations a configuration names: a process moves the part that another user staged to no others.

Else a user who may write in `.dropq/staged/` and `.dropq/receivers/` of a queue could have a process with more rights
put a file into any queue of the root.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from dropq.config.schema import underlies
from dropq.errors import DropqError
from dropq.format.addresses import SubscriptionName, ancestors, layouts, topic_layout
from dropq.format.layout import SUBSCRIPTIONS, TOPIC_ROOT
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.open_queue import open_queue
from dropq.lifecycle.transfers import rows
from dropq.policies import selectors
from dropq.staging.destinations import Identity


def is_named(context: QueueContext, destination: Identity) -> bool:
    """Return whether a configuration names a destination of messages in a queue.

    These are the subscriptions of a topic and of those above it, the views on it, and the queues that the selectors of
    a queue name, or their rows if they are on another file system.
    """
    root = context.root.layout.path
    path = f"{root}/{destination.path}"
    return _is_fed(context, path) if context.layout.is_topic else path in _bases(context)


def _is_fed(topic: QueueContext, path: str) -> bool:
    """Return whether a topic feeds a path: a subscription, a view, or a queue that is linked among these."""
    root = topic.root.layout.path
    folders = [f"{topic_layout(root, name).home}/{SUBSCRIPTIONS}" for name in ancestors(topic.name)]
    above, name = os.path.split(path)
    if above in folders:
        return SubscriptionName.of(name) is not None
    if path.startswith(f"{root}/{TOPIC_ROOT}/"):
        return False
    try:
        expression = open_queue(topic.root, os.path.relpath(path, root).partition("/")[0]).config.underlying_topic
        if expression is not None and underlies(expression, topic.name):
            return True
    except DropqError:
        return False
    return any(
        os.path.realpath(f"{folder}/{link}") == os.path.realpath(path)
        for folder in folders
        for link in (os.listdir(folder) if os.path.isdir(folder) else ())
        if os.path.islink(f"{folder}/{link}")
    )


def _bases(context: QueueContext) -> Iterator[str]:
    """Yield the folders of the queues that the selectors of a queue name, and of the rows for them."""
    root, addresses = context.root, set[str]()
    for one in selectors.read(context)[0]:
        if one.to is not None:
            addresses.add(one.to)
            try:
                addresses.add(open_queue(root, one.to).config.default_publish_target or one.to)
            except DropqError:
                continue  # the part for it stays, or goes to error/, as if the destination were gone
    for address in addresses:
        yield from (layout.base for layout in layouts(root.layout.path, address))
    yield from (row.folder for row in rows(context.layout) if not row.is_abroad and row.queue in addresses)
