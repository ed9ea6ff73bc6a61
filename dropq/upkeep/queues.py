"""Make a root; make and delete queues.

A deletion renames its queue first, and is undecided until the queue proves empty under that name. If the deleting
process dies before, a sweep of the root undoes the deletion.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from dropq.config.load import toml_text, validate_options
from dropq.config.schema import QueueConfig, underlies
from dropq.config.selectors import SUFFIX, Selector, text
from dropq.errors import ConfigError, DropqError, QueueExists, StorageError, Unavailable
from dropq.format import names
from dropq.format.addresses import topic_layout
from dropq.format.layout import SETTLED, SUBSCRIPTIONS, QueueLayout, RootLayout
from dropq.lifecycle.context import QueueContext, RootContext
from dropq.lifecycle.ephemeral import EphemeralMarker
from dropq.lifecycle.folders import begin_deletion, building, clear, close, deletion_names, restore
from dropq.lifecycle.open_queue import find_layout, open_queue, storage_of
from dropq.lifecycle.processing import has_committed
from dropq.lifecycle.queue_notes import cut, make_known, subscription_folders
from dropq.lifecycle.transfers import in_transit
from dropq.policies import routes
from dropq.policies.circles import Circles, Planned, View, Waypoint, words
from dropq.policies.selectors import reserve_token
from dropq.queue import browsing
from dropq.staging import jobs
from dropq.storage import reading
from dropq.storage.failures import describe, error_context, storage_error
from dropq.storage.files import Storage, refuse_links
from dropq.topics import subscriptions
from dropq.topics.views import forget_view, link_views, show_view
from dropq.upkeep import reassembly
from dropq.upkeep.deletion import private_store
from dropq.upkeep.recovery import recover_if_needed

log = logging.getLogger("dropq")


def create_root(path: str, *, dropboxmq: bool) -> None:
    """Make a directory a root, as `Root.create` says."""
    layout = RootLayout(path)
    style = 'reply_to_style = "typed"\n' if dropboxmq else ""
    refuse_links((layout.private, layout.meta, layout.queues, layout.views))
    with error_context("the root was not made"):
        Storage().make_folder(layout.path)
        store = private_store(layout.path)
        for folder in (layout.meta, *(layout.dropboxmq if dropboxmq else ())):
            store.make_folder(folder)
        store.touch(layout.clock)
        reading.ask_server(layout.path)
        if not reading.exists(layout.config_file):
            store.write_small(layout.config_file, f"format = 1\n{style}".encode())


def create(root: RootContext, name: str, options: Mapping[str, Any], *, dropboxmq: bool, selector: object = ()) -> None:
    """Make a queue, as `Root.create_queue` says."""
    selectors = list[Selector]()
    if selector != ():
        from dropq.routing.registry import check_new  # few queues are made with selectors

        selectors = check_new(root, name, selector)
    layout, store, _ = _make(root, name, options, dropboxmq=dropboxmq, selectors=selectors)
    with error_context(f"queue {name!r} is made, but a power cut may take it back"):
        store.sync(root.layout.path)
    with suppress(OSError):  # the next sweep of the root notes a queue that cannot be noted now
        make_known(root.layout, layout.private, store)
    with suppress(OSError, DropqError):  # it is made, whatever the log says
        open_queue(root, name).log.act("created")
    is_view = options.get("underlying_topic") is not None or "UnderlyingTopic" in options
    if is_view:
        with suppress(OSError, DropqError):  # `dropq doctor` names the links that are missing
            link_views(root)
    if is_view or selectors:
        _undo_circle(root, name, layout)
    if is_view:
        try:
            recover_if_needed(open_queue(root, name))
        except (OSError, DropqError) as error:
            log.warning(
                "queue %s is made, and a sweep fills it with what its topics archived: %s", name, describe(error)
            )


def refuse_taken(root: RootContext, wanted: Iterable[str]) -> None:
    """Raise QueueExists if something in the root has one of the names, before any of these queues is made."""
    path = root.layout.path
    taken = [name for name in wanted if os.path.lexists(f"{path}/{name}") or find_layout(path, name) is not None]
    if taken:
        raise QueueExists(
            f"no queue was made: {path} has {', '.join(taken)} already; give other names, or leave them out"
        )


def create_topic(root: RootContext, name: str, options: Mapping[str, Any]) -> None:
    """Make a topic, as `Root.create_topic` says."""
    subscriptions.create_topic(root, name, options)
    _undo_circle(root, name, topic_layout(root.layout.path, name))


def _undo_circle(root: RootContext, name: str, layout: QueueLayout) -> None:
    """Remove a queue or topic that was just made if it is on a circle, and raise ConfigError.

    RACE: of two who close a circle together, each with a part of it, the later one sees it here, or both do.
    """
    circle = words(Circles().through_new(Waypoint(root.layout.path, name, layout)))
    if not circle:
        return
    try:
        delete(root, name, force=False)
    except StorageError as error:
        raise ConfigError(f"{name!r} was made, and stays, as it cannot be removed again: {circle}") from error
    raise ConfigError(f"{name!r} was made, and is removed again: {circle}")


def create_temporary(asked: QueueContext) -> tuple[str, EphemeralMarker]:
    """Make a queue for the answer to a request; return its name, and its marker, which is there before the name.

    It has the modes and layout of the queue that is asked, so that the consumers of that may answer.
    """
    root, config = asked.root, asked.config
    options: dict[str, Any] = {"durability": "none", "history": False}
    for key, mode in (("file_mode", config.file_mode), ("dir_mode", config.dir_mode)):
        if mode is not None:
            options[key] = f"{mode:04o}"
    if config.group is not None:
        options["group"] = config.group
    name = names.temporary_name(root.ids.next())
    in_incoming = asked.layout.base != asked.layout.home
    *_, marker = _make(root, name, options, dropboxmq=in_incoming, is_ephemeral=True)
    assert marker is not None
    return name, marker


def _make(
    root: RootContext,
    name: str,
    options: Mapping[str, Any],
    *,
    dropboxmq: bool,
    is_ephemeral: bool = False,
    selectors: Sequence[Selector] = (),
) -> tuple[QueueLayout, Storage, EphemeralMarker | None]:
    """Make a queue under a hidden name, and rename it; return where it is, what wrote it, and its marker."""
    home = f"{root.layout.path}/{name}"
    found = find_layout(root.layout.path, name)
    if found is not None and found.is_topic:
        raise QueueExists(f"queue {name!r} was not made: the root has a topic of this name, {found.home}")
    where, root_file = f"options of queue {name}", root.layout.config_file
    config = validate_options(options, where, root=root.config, root_file=root_file, queue=name)
    if config.underlying_topic is not None:
        underlies(config.underlying_topic, name)  # refused without RE2: each topic of the root would wait for this view
    _refuse_circle(root, name, config, selectors)
    store = storage_of(config)
    hidden = f"{root.layout.path}/.{cut(name)}.creating-{os.urandom(6).hex()}"
    layout = (QueueLayout.incoming if dropboxmq else QueueLayout.flat)(hidden)
    try:
        files = {"queue.toml": toml_text(options).encode()} if options else {}
        files |= _selector_files(root, name, selectors, store)
        if config.underlying_topic is not None and config.recovery_point != "now":
            files[".dropq/recovering"] = (config.recovery_point or "epoch").encode()
        with building(layout, store.at(root.layout.path), files, is_ephemeral=is_ephemeral) as marker:
            move = partial(store.move_folder, hidden, home)
            if config.underlying_topic is None:
                move()
            else:
                show_view(root, name, config.underlying_topic, move)
    except FileExistsError as error:
        if find_layout(root.layout.path, name) is None:
            raise QueueExists(
                f"queue {name!r} was not made: {home} is there, and is no queue; move it away, or give another name"
            ) from error
        raise QueueExists(f"queue {name!r} is there already: {home}") from error
    except OSError as error:
        raise storage_error(error, f"queue {name!r} was not made") from error
    return layout.moved(home), store, marker


def _refuse_circle(root: RootContext, name: str, config: QueueConfig, selectors: Sequence[Selector]) -> None:
    """Raise ConfigError if a new queue would close a circle with queues that send to its name already."""
    topics, path = config.underlying_topic, root.layout.path
    if topics is None and not selectors:
        return  # nothing leads on from it
    view = None if topics is None else View(topics, config.default_publish_target or topics)
    sends_to = tuple(one.to for one in selectors if one.to is not None)
    planned = Planned(Waypoint(path, name, QueueLayout.flat(f"{path}/{name}")), view, sends_to)
    if circle := words(Circles(planned).through_new(planned.waypoint)):
        raise ConfigError(f"options of queue {name}: {circle}; nothing was made")


def _selector_files(root: RootContext, name: str, selectors: Sequence[Selector], store: Storage) -> dict[str, bytes]:
    """Return the files of the selectors that a queue is made with, by their paths in it."""
    files = {}
    for selector in selectors:
        if selector.credit is not None:
            selector = replace(selector, token=reserve_token(root.layout, name, selector.name, store))
        files[f"selectors/{selector.name}{SUFFIX}"] = text(selector).encode()
    return files


def delete(root: RootContext, name: str, *, force: bool) -> None:
    """Remove a queue, as `Root.delete_queue` says."""
    context = open_queue(root, name)
    layout = context.layout
    if layout.is_subscription:
        if not force:
            refuse_unsettled(context)
        if not subscriptions.take_away(root, layout, force=force):
            raise subscriptions.routed_error(context)
        return
    if layout.is_topic:
        refuse_subscriptions(root, context)
    if not force:
        with context.error_context("nothing was removed"):
            jobs.sweep(context)  # what was committed and is not sent yet waits to be worked on
            reassembly.sweep(context)
        refuse_unsettled(context)
    undecided, away = deletion_names(root, layout, name)
    lies = QueueLayout.flat(layout.base) if layout.is_topic else layout  # a topic's folder stays
    store = context.storage
    with error_context(f"queue {name!r} is not wholly removed: what is left is in {away}"):
        if force and not layout.is_topic:
            store.rename_folder(layout.home, away)
        else:
            _decide(context, lies.moved(undecided), away, force=force)
        context.log.sums.forget()
        clear(root.layout, layout.base, lies.moved(away), store, wholly=True)
        if layout.is_topic:
            with suppress(OSError, DropqError):  # a sweep of the root does it
                link_views(root)  # a topic below may be the topmost of a view now
            _remove_empty_folders(root, context)
        elif context.config.underlying_topic is not None:
            forget_view(root, name, store)


def _decide(context: QueueContext, gone: QueueLayout, away: str, *, force: bool) -> None:
    """Rename a queue to the name of an undecided deletion, `gone`, and from there to `away` if it may go."""
    layout, store = context.layout, context.storage
    if layout.is_topic:
        subscriptions.unsettle_config(layout, store)
        store.rename_folder(layout.base, gone.home)
        # RACE: a topic that somebody subscribed to before the rename comes back, also by force. After it nobody can: a
        # subscription is made in the topic's own folder.
        if any(True for _ in subscription_folders(context.root.layout, context.name)):
            _restore(context, gone)
            refuse_subscriptions(context.root, context)
            raise Unavailable(
                f"somebody subscribed to topic {context.name!r} for a moment: try again; nothing was removed"
            )
    else:
        begin_deletion(context, gone.home)
    if not force:
        _restore_if_unsettled(context, gone)
    store.rename_folder(gone.home, away)


def refuse_subscriptions(root: RootContext, topic: QueueContext) -> None:
    """Raise StorageError if a topic has subscriptions; nothing is changed."""
    with topic.error_context("nothing was changed"):
        found = sorted(subscription_folders(root.layout, topic.name))
        _, waiting = (0, 0) if found else subscriptions.remove_hidden(root, topic.name)
    if waiting:
        raise Unavailable(
            f"topic {topic.name!r} has {waiting} subscriptions that were removed while a DropboxMQ wrote to them: try "
            "again; nothing was removed"
        )
    if found:
        what = f"topic {topic.name!r} has {len(found)} subscriptions, such as {topic.name}/{found[0]}"
        raise _not_empty(topic, f"{what}: remove them first, by `dropq topic unsubscribe`")


def _remove_empty_folders(root: RootContext, topic: QueueContext) -> None:
    store, layout = Storage(), topic.layout
    folder = f"{layout.home}/{SUBSCRIPTIONS}"
    with suppress(OSError):  # another topic, or a subscription, is in it
        while folder != root.layout.path:
            store.remove_folder(folder)
            folder = os.path.dirname(folder)


def contents(context: QueueContext) -> dict[str, int]:
    """Return how many messages are in each state of a queue, in folders of routing/, and on the way to other disks."""
    with context.error_context("nothing was changed"):
        counts = browsing.counts(context)
        routed = routes.routed(context.layout, context.config.ignore)
        carried = in_transit(context.layout)
    counts |= {f"routing/{name}": count for name, count in routed.items()}
    return counts | {f"transit to {destination}": count for destination, count in carried.items()}


def to_work_on(counts: Mapping[str, int]) -> dict[str, int]:
    """Return which of the contents of a queue keep it from being deleted."""
    return {place: counts[place] for place in ("working", *counts) if counts[place] and place not in SETTLED}


def refuse_unsettled(context: QueueContext) -> None:
    """Raise StorageError if a queue has messages to work on; nothing is changed."""
    if waiting := to_work_on(contents(context)):
        listed = ", ".join(f"{count} in {state}" for state, count in waiting.items())
        what = f"queue {context.name!r} has messages to work on ({listed})"
        raise _not_empty(context, f"{what}: wait until they are done, or give --force")


def _restore_if_unsettled(context: QueueContext, gone: QueueLayout) -> None:
    """RACE: a send that returned before the rename is not lost: the queue comes back."""
    try:
        for folder in (gone.target, gone.delayed, gone.processing):
            close(folder, context.storage)
        if not is_under_way(gone, context.config.ignore):
            return
    except OSError:
        pass
    _restore(context, gone)
    jobs.sweep(context)
    refuse_unsettled(context)
    if reassembly.is_under_way(context.layout):
        raise Unavailable(f"parts of queue {context.name!r} are being put together: try again; nothing was removed")
    what = f"queue {context.name!r} holds what is no message in target/ or processing/"
    raise _not_empty(context, f"{what}: `dropq fsck {context.name} --repair` sets it aside, or force it")


def _not_empty(context: QueueContext, why: str) -> StorageError:
    return StorageError(f"{why}; nothing was removed", path=context.layout.home, errno=errno.ENOTEMPTY)


def is_under_way(layout: QueueLayout, ignore: tuple[str, ...] | None) -> bool:
    """Return whether messages are committed, carried away, put together or, unless `ignore` is None, in routing/."""
    committed = jobs.is_committed(layout.working) or has_committed(layout) or in_transit(layout)
    return bool(committed or reassembly.is_under_way(layout) or (ignore is not None and routes.routed(layout, ignore)))


def _restore(context: QueueContext, gone: QueueLayout) -> None:
    is_topic = context.layout.is_topic
    restore(gone, context.layout.base if is_topic else context.layout.home, context.storage)
    if is_topic:
        subscriptions.settle_config(context.layout, context.storage)
