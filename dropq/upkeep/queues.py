"""Making a root; making a queue and removing it, each by one rename from, or to, a hidden folder.

`temporary` removes the queues for answers, which `create_temporary` makes.

A delete is undecided until its queue proves empty under the hidden name. The next sweep of the root undoes a delete
that died before that.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from dropq.config.load import toml_text, validate_options
from dropq.config.schema import QueueConfig, underlies
from dropq.config.selectors import SUFFIX, Selector, given, text
from dropq.errors import ConfigError, DropqError, QueueExists, StorageError, Unavailable
from dropq.format import names
from dropq.format.addresses import topic_layout
from dropq.format.layout import KEEPER, SUBSCRIPTIONS, UNSETTLED, QueueLayout, RootLayout
from dropq.lifecycle.claims import has_committed
from dropq.lifecycle.context import QueueContext, RootContext
from dropq.lifecycle.ephemeral import Holder
from dropq.lifecycle.known_queues import cut, forget, make_known, subscription_folders
from dropq.lifecycle.open_queue import find_layout, group_number, open_queue
from dropq.lifecycle.sidecars import collect
from dropq.lifecycle.transfers import in_transit
from dropq.policies import routes
from dropq.policies.circles import Circles, Place, Planned, View, words
from dropq.policies.selectors import reserve_token
from dropq.queue import browsing
from dropq.staging import jobs
from dropq.staging.receivers import new_word
from dropq.storage import reading
from dropq.storage.failures import error_context, storage_error
from dropq.storage.files import Storage, refuse_links
from dropq.topics import subscriptions
from dropq.topics.views import forget_view, link_views, show_view, tidy_views
from dropq.upkeep import joining, temporary
from dropq.upkeep.hidden import note_name, private_store, tidy_deletes
from dropq.upkeep.sweep import SweepReport

log = logging.getLogger("dropq")

#: States whose messages keep a queue from being deleted.
TO_WORK_ON = ("working", *UNSETTLED)


def create_root(path: str, *, dropboxmq: bool) -> None:
    """Make a directory a root, as `Root.create` says."""
    layout = RootLayout(path)
    style = 'reply_to_style = "typed"\n' if dropboxmq else ""
    refuse_links((layout.private, layout.meta, layout.queues, layout.views))
    try:
        Storage().make_folder(layout.path)
        store = private_store(layout.path)
        for folder in (layout.meta, *(layout.dropboxmq if dropboxmq else ())):
            store.make_folder(folder)
        store.touch(layout.clock)
        reading.ask_server(layout.path)
        if not reading.exists(layout.config_file):
            store.write_small(layout.config_file, f"format = 1\n{style}".encode())
    except OSError as error:
        raise storage_error(error, "the root was not made") from error


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
    is_view = options.get("underlying_topic") is not None or "UnderlyingTopic" in options
    if is_view:
        with suppress(OSError, DropqError):  # `dropq doctor` names the links that are missing
            link_views(root)
    if is_view or selectors:
        _undo_circle(root, name, layout)


def create_topic(root: RootContext, name: str, options: Mapping[str, Any]) -> None:
    """Make a topic, as `Root.create_topic` says."""
    subscriptions.create_topic(root, name, options)
    _undo_circle(root, name, topic_layout(root.layout.path, name))


def _undo_circle(root: RootContext, name: str, layout: QueueLayout) -> None:
    """Remove a queue or topic that was just made if it is on a circle, and raise ConfigError.

    RACE: of two who close a circle together, each with a part of it, the later one sees it here, or both do.
    """
    circle = words(Circles().through_new(Place(root.layout.path, name, layout)))
    if not circle:
        return
    try:
        delete(root, name, force=False)
    except StorageError as error:
        raise ConfigError(f"{name!r} was made, and stays, as it cannot be removed again: {circle}") from error
    raise ConfigError(f"{name!r} was made, and is removed again: {circle}")


def create_temporary(asked: QueueContext) -> tuple[str, Holder]:
    """Make a queue for the answer to a request; return its name, and what holds it from before it has the name.

    Args:
        asked: the queue that is asked. The new queue has its modes and its layout, so that the consumers of the
            asked queue may answer. It is not durable, and keeps no history.
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
    *_, holder = _make(root, name, options, dropboxmq=in_incoming, holds=True)
    assert holder is not None
    return name, holder


def _make(
    root: RootContext,
    name: str,
    options: Mapping[str, Any],
    *,
    dropboxmq: bool,
    holds: bool = False,
    selectors: Sequence[Selector] = (),
) -> tuple[QueueLayout, Storage, Holder | None]:
    """Make a queue under a hidden name, and rename it; return where it is, what wrote it, and what holds it."""
    home = f"{root.layout.path}/{name}"
    found = find_layout(root.layout.path, name)
    if found is not None and found.is_topic:
        raise QueueExists(f"queue {name!r} was not made: the root has a topic of this name, {found.home}")
    where, root_file = f"options of queue {name}", root.layout.config_file
    config = validate_options(options, where, root=root.config, root_file=root_file, queue=name)
    if config.underlying_topic is not None:
        underlies(config.underlying_topic, name)  # refused without RE2: each topic of the root would wait for this view
    _refuse_circle(root, name, config, selectors)
    group = group_number(config.group)
    store = Storage(config.durability, file_mode=config.file_mode, dir_mode=config.dir_mode, group=group)
    hidden = f"{root.layout.path}/.{cut(name)}.creating-{os.urandom(6).hex()}"
    layout = (QueueLayout.incoming if dropboxmq else QueueLayout.flat)(hidden)
    holder: Holder | None = None
    try:
        folders = layout.first_folders
        for folder in folders:
            store.make_folder(folder, parents=False, passing=True)  # synced below, each parent once
        store.write_new(layout.created, new_word())  # its modification time is when the queue was made
        if options:
            store.write_small(layout.config_file, toml_text(options).encode())
        if selectors:
            _write_selectors(root, name, layout, selectors, store)
        if holds:
            holder = Holder(layout, store)
        store.sync(*dict.fromkeys(os.path.dirname(folder) for folder in folders[1:]))
        move = partial(store.move_folder, hidden, home)
        if config.underlying_topic is None:
            move()
        else:
            show_view(root, name, config.underlying_topic, move)
    except OSError as error:
        if holder is not None:
            holder.end()
        with suppress(OSError):  # fsck finds what cannot be removed now
            store.remove_tree(hidden)
        if isinstance(error, FileExistsError):
            if find_layout(root.layout.path, name) is None:
                raise QueueExists(
                    f"queue {name!r} was not made: {home} is there, and is no queue; move it away, or give another name"
                ) from error
            raise QueueExists(f"queue {name!r} is there already: {home}") from error
        raise storage_error(error, f"queue {name!r} was not made") from error
    return layout.moved(home), store, holder


def _refuse_circle(root: RootContext, name: str, config: QueueConfig, selectors: Sequence[Selector]) -> None:
    """Raise ConfigError if a queue that is to be made would close a circle, by what sends to its name already."""
    topics, path = config.underlying_topic, root.layout.path
    if topics is None and not selectors:
        return  # nothing leads on from it
    view = None if topics is None else View(topics, config.default_publish_target or topics)
    sends_to = tuple(one.to for one in selectors if one.to is not None)
    planned = Planned(Place(path, name, QueueLayout.flat(f"{path}/{name}")), view, sends_to)
    if circle := words(Circles(planned).closed_by_planned()):
        raise ConfigError(f"options of queue {name}: {circle}; nothing was made")


def _write_selectors(
    root: RootContext, name: str, layout: QueueLayout, selectors: Sequence[Selector], store: Storage
) -> None:
    """Write the files of the selectors that a queue is made with."""
    store.make_folder(layout.selectors, parents=False, passing=True)
    for selector in selectors:
        if selector.credit is not None:
            selector = given(selector, reserve_token(root.layout, name, selector.name, store))
        store.write_small(f"{layout.selectors}/{selector.name}{SUFFIX}", text(selector).encode())
    store.sync(layout.selectors, layout.base)


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
            joining.sweep(context)
        refuse_unsettled(context)
    mark = f"{root.clock.now_ms()}-{os.urandom(3).hex()}"
    hidden = layout.base if layout.is_topic else f"{root.layout.path}/.{cut(name)}"
    away, store = f"{hidden}.deleted-{mark}", context.storage
    try:
        if force and not layout.is_topic:
            store.rename_folder(layout.home, away)
        else:
            _decide(context, f"{hidden}.deleting-{mark}", away, force=force)
        gone = (QueueLayout.flat(layout.base) if layout.is_topic else layout).moved(away)
        forget(root.layout, layout.base, gone.private, store)
        for folder in (gone.target, gone.delayed):
            store.drain(folder)
        # RACE: a call of a send that was under way at the rename makes its file now, and goes with the queue.
        store.drain(os.path.realpath(away))  # where the queue is a link, what it leads to goes first
        store.remove_tree(away)
        if layout.is_topic:
            with suppress(OSError, DropqError):  # a sweep of the root does it
                link_views(root)  # a topic below may be the topmost of a view now
            _remove_empty_folders(root, context)
        elif context.config.underlying_topic is not None:
            forget_view(root, name, store)
    except OSError as error:
        raise storage_error(error, f"queue {name!r} is not wholly removed: what is left is in {away}") from error


def _decide(context: QueueContext, undecided: str, away: str, *, force: bool) -> None:
    """Rename a queue that is to be deleted to a hidden name, and from there to another if it may go.

    Args:
        context: the queue.
        undecided: the name from which a sweep brings it back if this process dies.
        away: the name of what is being removed.
        force: remove messages that are to be worked on, too.
    """
    layout, store = context.layout, context.storage
    if layout.is_topic:
        subscriptions.unsettle_config(layout, store)
        layout = QueueLayout.flat(layout.base)
    else:
        note_name(context)
    store.rename_folder(layout.home, undecided)
    if context.layout.is_topic:
        _restore_if_subscribed(context, layout.moved(undecided), layout.home)
    if not force:
        _restore_if_unsettled(context, layout.moved(undecided), layout.home)
    store.rename_folder(undecided, away)


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
        raise StorageError(
            f"topic {topic.name!r} has {len(found)} subscriptions, such as {topic.name}/{found[0]}: remove them first, "
            "by `dropq topic unsubscribe`; nothing was removed",
            path=topic.layout.home,
            errno=errno.ENOTEMPTY,
        )


def _remove_empty_folders(root: RootContext, topic: QueueContext) -> None:
    """Remove the folders of a topic that is gone of which nothing is left."""
    store, layout = Storage(), topic.layout
    folder = f"{layout.home}/{SUBSCRIPTIONS}"
    with suppress(OSError):  # another topic, or a subscription, is in it
        while folder != root.layout.path:
            store.remove_folder(folder)
            folder = os.path.dirname(folder)


def refuse_unsettled(context: QueueContext) -> None:
    """Raise StorageError if a queue has messages to work on; nothing is changed."""
    with context.error_context("nothing was changed"):
        counts = browsing.counts(context)
        routed = routes.routed(context.layout, context.config.ignore)
        carried = in_transit(context.layout)
    waiting = {state: counts[state] for state in TO_WORK_ON if counts.get(state)}
    waiting |= {f"routing/{name}": count for name, count in routed.items()}
    waiting |= {f"transit to {goal}": count for goal, count in carried.items()}
    if waiting:
        listed = ", ".join(f"{count} in {state}" for state, count in waiting.items())
        raise StorageError(
            f"queue {context.name!r} has messages to work on ({listed}): wait until they are done, or give --force; "
            "nothing was removed",
            path=context.layout.home,
            errno=errno.ENOTEMPTY,
        )


def _restore_if_subscribed(context: QueueContext, gone: QueueLayout, home: str) -> None:
    """RACE: a topic that somebody subscribed to before the rename comes back, to its `home`, also by force.

    After the rename nobody can subscribe: a subscription is made in the topic's own folder.
    """
    if any(True for _ in subscription_folders(context.root.layout, context.name)):
        _restore(context, gone, home)
        refuse_subscriptions(context.root, context)
        raise Unavailable(f"somebody subscribed to topic {context.name!r} for a moment: try again; nothing was removed")


def _restore_if_unsettled(context: QueueContext, gone: QueueLayout, home: str) -> None:
    """RACE: a send that returned before the rename is not lost: the queue comes back, to its `home`."""
    name, store = context.name, context.storage
    try:
        for folder in (gone.target, gone.delayed, gone.processing):
            store.unlink(f"{folder}/{KEEPER}")
            store.remove_folder(folder)  # from here on whatever was half-way into it fails
        if jobs.is_committed(gone.working):
            raise OSError(errno.ENOTEMPTY, "a job was committed", gone.working)
        if has_committed(gone):
            raise OSError(errno.ENOTEMPTY, "a message was committed", gone.staged)
        if routes.routed(gone, context.config.ignore) or in_transit(gone):
            raise OSError(errno.ENOTEMPTY, "a consumer routed a message", gone.routing)
    except OSError:
        _restore(context, gone, home)
        jobs.sweep(context)
        joining.sweep(context)
        refuse_unsettled(context)
        raise StorageError(
            f"queue {name!r} holds what is no message in target/ or processing/: `dropq fsck {name} --repair` sets "
            "it aside, or force it; nothing was removed",
            path=home,
            errno=errno.ENOTEMPTY,
        ) from None


def _restore(context: QueueContext, gone: QueueLayout, home: str) -> None:
    """Bring a queue back whose delete is not decided."""
    for folder in (gone.target, gone.processing):
        context.storage.make_folder(folder)
    context.storage.move_folder(gone.home, home)
    if context.layout.is_topic:
        subscriptions.settle_config(context.layout, context.storage)


def tidy(root: RootContext) -> SweepReport:
    """Do what a sweep does outside of the queues, as `Root.tidy` says."""
    with error_context("the queues are swept; the next sweep goes on with what is the root's"):
        tidy_deletes(root)
        tidy_views(root)
        ephemeral = sum(temporary.clear(root))
        sidecars = sum(collect(root.layout.path, root.layout.meta, Storage(), root.clock))
        return SweepReport(ephemeral=ephemeral, sidecars=sidecars)
