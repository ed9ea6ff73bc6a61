"""Open a root or a queue: find its folders, check that they can be used, read its configuration."""

from __future__ import annotations

import difflib
import os
import shlex
from collections.abc import Collection

from dropq.config.load import load_queue, load_root
from dropq.config.schema import QueueConfig
from dropq.errors import ConfigError, NoSuchQueue, StorageError
from dropq.events.log import EventLog
from dropq.format.addresses import SubscriptionName, is_topic_name, layouts
from dropq.format.ids import IdSource
from dropq.format.layout import FOLDERS, QueueLayout, RootLayout, ignoring
from dropq.lifecycle import queue_notes
from dropq.lifecycle.context import QueueContext, RootContext
from dropq.lifecycle.reasons import Reasons
from dropq.lifecycle.settling import Settling
from dropq.lifecycle.sidecars import Sidecars
from dropq.lifecycle.timing import Timing
from dropq.storage import reading
from dropq.storage.clock import Clock, ServerClock
from dropq.storage.failures import error_context, storage_error
from dropq.storage.files import Storage, refuse_links


def open_root(path: str, clock: Clock | None) -> RootContext:
    layout = RootLayout(path)
    with error_context("the root cannot be opened"):
        if not reading.is_folder(layout.path):
            if reading.exists(layout.path):
                raise NoSuchQueue(f"no root at {layout.path}: this is no directory; name the directory of the queues")
            raise NoSuchQueue(f"no root at {layout.path}: `dropq init {layout.path}` makes one")
    refuse_links((layout.private, layout.meta, layout.queues, layout.views))
    clock = clock or ServerClock(layout.clock)
    with error_context("the root cannot be opened"):
        reading.ask_server(layout.path)  # on NFS another host may have written its dropq.toml just now
    return RootContext(layout, load_root(layout.config_file), clock, IdSource(clock.now_ms), Timing())


def find_layout(root: str, name: str, by: str = "target") -> QueueLayout | None:
    """Return how a queue, topic or subscription is laid out, by one of its folders; None if it is not there."""
    for _ in range(2):
        with error_context(f"whether queue {name} is there is not known"):
            for layout in layouts(root, name):
                if os.path.isdir(layout.folder(by)) and not is_hidden(layout):
                    return layout
            for folder in (root, *({os.path.dirname(layout.home)} if layout.topic else ())):
                reading.ask_server(folder)  # on NFS another host may have made it just now
    return None


def is_hidden(layout: QueueLayout) -> bool:
    """Return whether a subscription was removed, and its folder waits for a DropboxMQ that writes to it."""
    return layout.is_subscription and reading.exists(layout.removed)


def refuse_closed(root: str, name: str) -> None:
    """Refuse a name under which there may be a queue that this user may not see."""
    for layout in layouts(root, name):
        try:
            reading.exists(f"{layout.base}/.")
        except OSError as error:
            error.filename = layout.base
            raise storage_error(error, f"queue {name} cannot be opened") from error


def queue_names(root: RootContext) -> list[str]:
    """Return the names of the queues, topics and subscriptions that are there, in order."""
    with error_context("nothing was changed"):
        there = set(queue_notes.addresses(root.layout))
    return sorted(name for name in there if find_layout(root.layout.path, name))


def away_names(root: RootContext) -> list[str]:
    """Return the names of the queues that are not found and may come back, as when a disk is not mounted, in order."""
    with error_context("nothing was changed"):
        return sorted(
            name
            for name in queue_notes.once_there(root.layout)
            if find_layout(root.layout.path, name) is None and queue_notes.why_away(root.layout, name)
        )


def open_queue(root: RootContext, name: str, public: object = None) -> QueueContext:
    """Open a queue of a root; `public` is as of `QueueContext`, and None where no message of it is handed out.

    Raises:
        NoSuchQueue: there is no such queue.
        ConfigError: its configuration cannot be used.
        StorageError: a folder is missing, or lies on another file system.
    """
    # A queue that lacks target/ alone is refused below.
    layout = find_layout(root.layout.path, name) or find_layout(root.layout.path, name, "processing")
    if layout is None:
        refuse_closed(root.layout.path, name)
        if any(map(is_hidden, layouts(root.layout.path, name))):
            raise NoSuchQueue(f"subscription {name} was removed; its folder goes when no DropboxMQ writes to it")
        if away := queue_notes.why_away(root.layout, name):
            raise NoSuchQueue(away)
        if reading.exists(home := layouts(root.layout.path, name)[0].home):
            raise NoSuchQueue(f"{home} is no queue: it has no folder target/; `dropq ls` shows the queues of the root")
        there = queue_names(root)
        if near := [address for address in there if _is_subscription(address, name)]:
            is_it = f"is it the subscription {' or '.join(map(repr, near))}?"
            raise NoSuchQueue(f"no queue {name!r} in {root.layout.path}: {is_it} `dropq ls` shows which there are")
        near = difflib.get_close_matches(name, there, n=1)
        hint = f"is it {near[0]!r}? " if near else ""
        raise NoSuchQueue(
            f"no queue {name!r} in {root.layout.path}: {hint}`dropq ls` shows which there are, {_makers(name)}"
        )
    with error_context(f"queue {name} cannot be opened"):
        reading.know(layout.base)  # on NFS another host may have written its queue.toml just now
        listed = reading.know(layout.private)
    _check_folders(layout, name, listed)
    config = load_queue(name, root.config, root.layout.config_file, layout)
    return context_of(root, name, layout, config, storage_of(config, layout.base), public=public)


def context_of(
    root: RootContext, name: str, layout: QueueLayout, config: QueueConfig, store: Storage, *, public: object = None
) -> QueueContext:
    """Return the context of a queue that may not be whole, which `open_queue` makes sure of."""
    sidecars = Sidecars(
        root.layout.meta,
        store,
        typed_replies=root.config.reply_to_style == "typed",
        ignored=ignoring(config.ignore),
        queue=layout.private,
        name_budget=layout.name_budget,
    )
    return QueueContext(
        root=root,
        name=name,
        public=public,
        layout=layout,
        config=config,
        storage=store,
        sidecars=sidecars,
        reasons=Reasons(layout.reasons, store),
        settling=Settling(layout.target, config.settle_time, root.clock, root.timing),
        log=EventLog(layout.log, config.log, store, root.clock, sidecars.parse),
    )


def _is_subscription(address: str, name: str) -> bool:
    folder = address.partition("/")[2]
    subscription = SubscriptionName.of(folder) if folder else None
    return subscription is not None and name in (subscription.name, folder)


def _makers(name: str) -> str:
    topic, slash, folder = name.partition("/")
    made = SubscriptionName.of(folder) if slash else None
    if made is not None:
        options = f"{shlex.quote(made.name)} --client-id {shlex.quote(made.client_id)}"
        return f"`dropq topic subscribe {topic} {options}` makes one"
    if "." in name and is_topic_name(name):
        return f"`dropq create {shlex.quote(name)}` makes a queue, `dropq topic create {shlex.quote(name)}` a topic"
    return f"`dropq create {shlex.quote(name)}` makes one"


def _check_folders(layout: QueueLayout, name: str, listed: Collection[str] | None) -> None:
    """Refuse folders that are missing, on two file systems, or links; `listed` is what lies in `.dropq/`, if known."""
    devices: dict[int, str] = {}
    made_when_needed = layout.private, layout.delayed
    for path in (*(layout.folder(folder) for folder in FOLDERS), *made_when_needed):
        try:
            devices.setdefault(reading.device(path), path)
        except FileNotFoundError as error:
            if path in made_when_needed:
                continue
            if not reading.exists(layout.home):  # RACE: it was deleted since it was found
                raise NoSuchQueue(f"queue {name} is not there any more: {layout.home}") from error
            way_out = f"`dropq fsck {name} --repair` makes it"
            raise storage_error(error, f"queue {name} lacks its folder {os.path.basename(path)}/: {way_out}") from error
        except OSError as error:
            raise storage_error(error, f"queue {name} cannot be opened") from error
    if len(devices) > 1:
        first, second = list(devices.values())[:2]
        raise StorageError(
            f"queue {name} spans two file systems, {first} and {second}: a rename between them is not atomic; "
            "put all of its folders on one",
            path=second,
        )
    start = f"{layout.private}/"
    refuse_links(
        path
        for path in layout.private_folders
        if listed is None or not path.startswith(start) or path.removeprefix(start).partition("/")[0] in listed
    )


def storage_of(config: QueueConfig, base: str | None = None) -> Storage:
    """Return the storage of a queue, with the modes and durability of its configuration; it never makes `base`."""
    group = _group_number(config.group)
    return Storage(config.durability, file_mode=config.file_mode, dir_mode=config.dir_mode, group=group, base=base)


def _group_number(group: int | str | None) -> int | None:
    if group is None or isinstance(group, int):
        return group
    import grp

    try:
        return grp.getgrnam(group).gr_gid
    except KeyError as error:
        raise ConfigError(f"group = {group!r}: there is no such group on this host") from error
