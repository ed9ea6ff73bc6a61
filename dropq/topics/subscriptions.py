"""Making topics and subscriptions, and removing subscriptions: each appears, and goes, as a whole, by one rename."""

from __future__ import annotations

import errno
import logging
import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from typing import Any

from dropq.config.load import explain_queue, toml_text, validate_options
from dropq.errors import ConfigError, DropqError, NoSuchQueue, QueueExists, StorageError, Unavailable
from dropq.format.addresses import (
    SubscriptionName,
    check_subscription_name,
    check_topic_name,
    layouts,
    subscription_layout,
    topic_layout,
)
from dropq.format.layout import (
    KEEPER,
    NO_LOCAL,
    SUBSCRIPTIONS,
    TOPIC_ROOT,
    UNLESS_ROUTED,
    QueueLayout,
    removed_subscriptions,
    unsettled_config,
)
from dropq.lifecycle import ages, ephemeral
from dropq.lifecycle.context import QueueContext, RootContext
from dropq.lifecycle.ephemeral import EphemeralMarker
from dropq.lifecycle.folders import building, clear, close
from dropq.lifecycle.holders import claim_status
from dropq.lifecycle.open_queue import find_layout, is_hidden, open_queue, storage_of
from dropq.lifecycle.processing import claims_in
from dropq.lifecycle.queue_notes import (
    hidden_subscriptions,
    is_shared,
    make_known,
    subscription_folders,
    topics,
)
from dropq.lifecycle.transfers import in_transit
from dropq.policies import routes
from dropq.policies.circles import Circles, Planned, Waypoint, words
from dropq.policies.lock import PolicyLock
from dropq.storage import reading
from dropq.storage.failures import error_context, storage_error
from dropq.storage.files import Storage, refuse_links
from dropq.storage.liveness import Signs
from dropq.topics.views import link_views
from dropq.topics.writers import await_writers, hide, is_forced

log = logging.getLogger("dropq")


def create_topic(root: RootContext, name: str, options: Mapping[str, Any]) -> None:
    """Make a topic that closes no circle."""
    check_topic_name(name)
    layout = topic_layout(root.layout.path, name)
    found = find_layout(root.layout.path, name)
    if found is not None:
        if found.is_topic:
            raise QueueExists(f"topic {name!r} is there already: {found.home}")
        raise QueueExists(
            f"topic {name!r} was not made: the root has a queue of this name, {found.home}; give another name, or "
            f"remove the queue, by `dropq delete {shlex.quote(name)}`"
        )
    config = validate_options(
        options, f"options of topic {name}", root=root.config, root_file=root.layout.config_file, is_queue=False
    )
    planned = Planned(Waypoint(root.layout.path, name, layout))
    if circle := words(Circles(planned).through_new(planned.waypoint)):
        raise ConfigError(f"topic {name!r} was not made: {circle}")
    store = storage_of(config)
    hidden = f"{layout.base}.creating-{os.urandom(6).hex()}"
    unsettled = os.path.relpath(unsettled_config(layout.topic), layout.base)
    files = {unsettled: toml_text(options).encode()} if options else {}
    try:
        # RACE: from its first folder on no delete of the topic removes the folder above it.
        with building(QueueLayout(hidden, hidden), store, files):
            store.make_folder(f"{layout.home}/{SUBSCRIPTIONS}")
            for folder in (layout.staged, layout.receivers):
                store.make_folder(folder.replace(layout.base, hidden, 1), passing=True)
            store.move_folder(hidden, layout.base)
    except FileExistsError as error:
        raise QueueExists(f"topic {name!r} is there already: {layout.base}") from error
    except OSError as error:
        raise storage_error(error, f"topic {name!r} was not made") from error
    with error_context(f"topic {name!r} is made, but a power cut may take it back"):
        settle_config(layout, store)
        store.sync(layout.home)
    with suppress(OSError, DropqError):  # the next sweep of the root notes it; `dropq doctor` names missing links
        make_known(root.layout, layout.private, store)
        if not reading.exists(root.layout.views):
            store.make_folder_like(root.layout.views, root.layout.private)
        link_views(root)


def settle_config(layout: QueueLayout, store: Storage) -> None:
    """Put a topic's queue.toml beside `.incoming/`, unless one is there: it appears and goes with the topic, within it.

    So of two processes that make a topic the second changes nothing, and a removal leaves the file of a new topic
    alone. A file that is there counts, as an administrator wrote it meanwhile, and the topic's own is removed.
    """
    unsettled = unsettled_config(layout.topic)
    if not reading.exists(unsettled):
        return
    try:
        if not reading.exists(layout.config_file):  # without renameat2 it would be replaced
            return store.rename_guarded(unsettled, layout.config_file)
    except FileNotFoundError:
        return  # RACE: another process settled it, or removes the topic
    except FileExistsError:
        pass
    log.warning("%s was there already, and counts: what the topic was made with is removed", layout.config_file)
    store.unlink(unsettled)


def unsettle_config(layout: QueueLayout, store: Storage) -> None:
    """Take the queue.toml of a topic that is to be removed into `.incoming/`, where it counts, too.

    RACE: of two processes that remove a topic, the second finds it there, and leaves it: the first may be renaming it.
    """
    store.make_folder(layout.private, parents=False)  # RACE: not of a topic that is gone
    with suppress(FileNotFoundError):
        store.replace(layout.config_file, unsettled_config(layout.topic))


def subscribe(
    topic: QueueContext,
    subscription: SubscriptionName,
    options: Mapping[str, Any],
    *,
    recovery_point: str | None = None,
    is_ephemeral: bool = False,
    force: bool = False,
) -> tuple[str, EphemeralMarker | None]:
    """Make a subscription, unless it is there as it was asked for; return its address, and an ephemeral one's marker.

    A subscription of the same name and client with another filter, another setting of local messages, or another topic
    is removed with its messages as the new one appears, as JMS has it.

    Args:
        recovery_point: where in the topic's history a new one begins; None begins now.
        is_ephemeral: it goes with this process.
        force: also remove messages that routes of the old subscription took; else they are a StorageError.
    """
    check_subscription_name(subscription.name, subscription.client_id)
    address = f"{topic.name}/{subscription.folder}"
    validate_options(options, f"options of subscription {address}", root=topic.root.config)
    filter = options.get("filter")
    if address in of_client(topic.root, subscription, topic.name) and not replaced_by(topic, subscription, filter):
        return address, None
    layout = subscription_layout(topic.layout, subscription.folder)
    store = topic.storage
    files: dict[str, bytes] = {"queue.toml": toml_text(options).encode()} if options else {}
    if recovery_point is not None:
        files[".dropq/recovering"] = recovery_point.encode()
    hidden = f"{topic.layout.new}/{os.urandom(6).hex()}"
    try:
        with building(
            QueueLayout(hidden, hidden, topic=layout.topic), store, files, is_ephemeral=is_ephemeral
        ) as marker:
            store.make_folder(f"{layout.topic}/{SUBSCRIPTIONS}", parents=False)  # RACE: not of a topic that is gone
            if replaced_by(topic, subscription, filter):  # only now that the new one is ready, as there is no way back
                _replace(topic, subscription, filter, force=force)
            store.move_folder(hidden, layout.home)
    except FileExistsError as error:
        if is_hidden(layout) and not _take_hidden(topic.root, layout):
            raise Unavailable(
                f"subscription {address} was removed, and a DropboxMQ is writing to its folder: try again; nothing was "
                "made"
            ) from error
        if reading.exists(layout.home) and address not in of_client(topic.root, subscription, topic.name):
            raise StorageError(
                f"subscription {address} was not made: {layout.home} is there, and is no folder; move it away, or give "
                "another name",
                path=layout.home,
                errno=errno.EEXIST,
            ) from error
        return subscribe(
            topic, subscription, options, recovery_point=recovery_point, is_ephemeral=is_ephemeral, force=force
        )
    except OSError as error:
        raise topic.refused(error, f"subscription {address} was not made") from error
    with error_context(f"subscription {address} is made, but a power cut may take it back"):
        store.sync(f"{layout.topic}/{SUBSCRIPTIONS}")
    with suppress(OSError):  # the next sweep of the root notes it
        make_known(topic.root.layout, layout.private, store)
    return address, marker


def _replace(topic: QueueContext, subscription: SubscriptionName, filter: object, *, force: bool) -> None:
    """Remove the subscriptions that a new one replaces.

    RACE: of two processes that ask for the same, the first removes the old subscription, and makes the new one; the
    second must not remove that. So each lists them again when it has the lock.
    """
    with PolicyLock(topic).acquire() as alone:
        if not alone:
            raise Unavailable(f"another process is subscribing to topic {topic.name}: try again; nothing was changed")
        for found in replaced_by(topic, subscription, filter):
            (layout,) = layouts(topic.root.layout.path, found)
            if is_shared(topic.root.layout) and not await_writers(topic.root, layout):
                raise Unavailable(
                    f"a DropboxMQ is writing to subscription {found}, or a send to its topic died less than a minute "
                    "ago: try again; nothing was changed"
                )
            try:
                remove(topic.root, found, force=force)
            except NoSuchQueue:
                pass  # RACE: a sweep, or an unsubscribe, was first
            except StorageError as error:
                if found in of_client(topic.root, subscription, topic.name):
                    raise
                log.warning("subscription %s is replaced: %s", found, error)


def of_client(root: RootContext, subscription: SubscriptionName, asked: str) -> Iterator[str]:
    """Yield the addresses of the subscriptions of a name and client, of any topic, with local messages or without.

    Anybody may make topics that this user may not list: they are passed over, except the topic that is `asked` for.
    """
    stem = subscription._replace(no_local=False).folder

    def closed(address: str, error: OSError) -> None:
        if address == TOPIC_ROOT or f"{asked}.".startswith(f"{address}."):
            raise error
        _tell_closed(root.layout.path, address, error.strerror)

    with error_context("nothing was changed"):
        for topic in topics(root.layout, closed=closed):
            try:
                found = [each for each in subscription_folders(root.layout, topic) if each in (stem, stem + NO_LOCAL)]
            except OSError as error:
                closed(topic, error)
            else:
                yield from (f"{topic}/{folder}" for folder in found)


@cache  # once in a process
def _tell_closed(root: str, topic: str, why: str | None) -> None:
    log.warning("root %s: topic %s is passed over, also if it has a subscription of that name: %s", root, topic, why)


def replaced_by(topic: QueueContext, subscription: SubscriptionName, filter: object) -> list[str]:
    """Return the addresses of the subscriptions that are removed when one with a filter, or without, is made."""
    address = f"{topic.name}/{subscription.folder}"
    found = of_client(topic.root, subscription, topic.name)
    return [each for each in found if each != address or _filter_of(topic, each) != filter]


def _filter_of(topic: QueueContext, address: str) -> object:
    """Return the filter that a subscription was made with; None without a filter of its own."""
    root = topic.root
    layout = subscription_layout(topic.layout, address.partition("/")[2])
    settings = explain_queue(address, root.config, root.layout.config_file, layout)
    return next((each.value for each in settings if each.key == "filter" and each.source == layout.config_file), None)


def remove(root: RootContext, address: str, *, force: bool) -> None:
    """Remove a subscription with its messages; a copy on its way to it goes with it, or to the topic's error/.

    Only `force` also removes messages that its routes took, or that are on their way to other file systems; else they
    are a StorageError, and nothing is changed. A subscription in use is Unavailable.
    """
    context = open_queue(root, address)
    with error_context(f"subscription {address} was not removed"):
        claims, signs, now = list(claims_in(context)), Signs(context.layout.consumers), context.clock.now_ms()
        alive = [*filter(signs.is_verifiable, signs.living)]
        # A shell command holds without a sign of life: until its lease ends.
        alive += [claim.subscription for claim in claims if claim_status(claim, signs, now) == "lease"]
        if alive:
            raise Unavailable(
                f"subscription {address} is in use by {', '.join(sorted(set(alive)))}: end that, or settle what it "
                "holds, first; nothing was removed"
            )
        leaving = not force and bool(routes.routed(context.layout, context.config.ignore) or in_transit(context.layout))
    if leaving or not take_away(root, context.layout, force=force):
        raise routed_error(context)


def routed_error(context: QueueContext) -> StorageError:
    """Return the error for a subscription that is not removed, because its routes took messages."""
    with error_context(f"subscription {context.name} was not removed, as its routes took something"):
        counts = {f"in routing/{name}": count for name, count in routes.routed(context.layout, ()).items()}
        counts |= {f"on the way to {destination}": count for destination, count in in_transit(context.layout).items()}
    listed = ", ".join(f"{count} {where}" for where, count in counts.items()) or "what is no message, in routing/"
    return StorageError(
        f"subscription {context.name} has messages that its routes took, or that go to another file system ({listed}): "
        f"move these elsewhere, or remove them with it by `dropq delete {shlex.quote(context.name)} --force`; nothing "
        "was removed",
        path=context.layout.routing,
        errno=errno.ENOTEMPTY,
    )


def take_away(root: RootContext, layout: QueueLayout, *, force: bool | None) -> bool:
    """Remove a subscription: from the rename on, it gets nothing, and nobody finds it; `force` as for `remove`.

    None goes on with the removal of a hidden subscription. Return False if it stays, as its routes took messages.
    """
    store, goes_on = Storage(lenient=True), force is None
    try:
        if force is not None and is_shared(root.layout):
            hide(root, layout, store, force=force)
            force = None
        if hides := force is None:
            if not await_writers(root, layout):
                log.info("subscription %s is removed when no DropboxMQ writes to it, by a sweep", layout.home)
                return True
            force = is_forced(layout)
        away = _rename_away(root, layout, store, force=bool(force))
        gone = QueueLayout(away, away, topic=layout.topic)
        if hides and not is_hidden(gone) and os.path.isdir(gone.target):  # a sweep removes target/ first
            store.move_folder(away, layout.home)  # RACE: another process was first, and this one was made just now
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), layout.home)
    except FileNotFoundError:
        raise NoSuchQueue(f"subscription {layout.home} is not there any more") from None
    except OSError as error:
        if not goes_on:
            with suppress(OSError):  # then it stays hidden, and a sweep removes it
                store.unlink(layout.removed)
        raise storage_error(error, f"subscription {layout.home} was not removed") from error
    if not force and not _end_routes(layout, away):
        return False
    clear_away(root, layout, away)
    return True


def _rename_away(root: RootContext, layout: QueueLayout, store: Storage, *, force: bool) -> str:
    mark, above = f"{root.clock.now_ms()}", removed_subscriptions(layout.topic)
    if reading.exists(os.path.dirname(above)):
        store.make_folder(above)
        name = os.path.basename(layout.home)
        away = f"{above}/{name}.deleting-{mark}-{os.urandom(3).hex()}{'' if force else UNLESS_ROUTED}"
    else:  # a folder above topics has no place of its own: DropboxMQ names what it removes so
        away = f"{layout.home}.deleted-{mark}"
    store.rename_folder(layout.home, away)
    return away


def _take_hidden(root: RootContext, layout: QueueLayout) -> bool:
    """Go on with the removal of a hidden subscription; return whether it is gone, or back."""
    with suppress(NoSuchQueue):  # RACE: another process was first
        take_away(root, layout, force=None)
    return not is_hidden(layout)


def remove_hidden(
    root: RootContext, topic: str, passing: Callable[[str], AbstractContextManager[object]] = nullcontext
) -> tuple[int, int]:
    """Go on with the removal of a topic's hidden subscriptions; return how many are gone, and how many still wait.

    `passing` handles the errors of each.
    """
    layout = topic_layout(root.layout.path, topic)
    found = [subscription_layout(layout, folder) for folder in hidden_subscriptions(root.layout, topic)]
    gone = 0
    for each in found:
        with passing(each.home):
            gone += _take_hidden(root, each)
    return gone, len(found) - gone


def _end_routes(layout: QueueLayout, away: str) -> bool:
    """Let no route take a message of a subscription that was taken away; if a route has, bring the subscription back.

    RACE: a message may have come into a route's folder before the rename, and a move that was half-way comes into it
    even later. An empty folder is removed, and then nothing comes into it. A folder that is not empty stays, so a sweep
    that does this at the same time comes to the same end. Return whether it may be removed; else it is where it was.
    """
    routing, removed, store = QueueLayout(away, away).routing, list[str](), Storage(lenient=True)
    if os.path.islink(away) or os.path.islink(routing):
        return True  # what a link leads to stays
    try:
        folders = [entry.path for entry in reading.entries(routing) if entry.is_dir(follow_symlinks=False)]
        for folder in folders:
            if reading.names_in(folder) - {KEEPER}:
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), folder)
        if in_transit(QueueLayout(away, away)):
            raise OSError(errno.ENOTEMPTY, "messages are on their way to other file systems", away)
        for folder in folders:
            close(folder, store)
            removed.append(folder)
    except OSError as error:
        lost = f"subscription {layout.home} was taken away, and what its routes took is in {routing}"
        with error_context(lost), suppress(FileNotFoundError):  # RACE: another process has brought it back
            for folder in removed:
                store.make_folder(folder, parents=False)
            store.unlink(QueueLayout(away, away).removed)
            store.move_folder(away, layout.home)
        if error.errno != errno.ENOTEMPTY:
            raise storage_error(error, f"subscription {layout.home} was not removed") from error
        return False
    return True


def clear_away(root: RootContext, layout: QueueLayout, away: str) -> None:
    """Remove a subscription that was taken away; a sweep of its topic goes on with what is left."""
    try:
        clear(root.layout, layout.base, QueueLayout(away, away), Storage(lenient=True))
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EBUSY):
            raise storage_error(error, f"a sweep removes the rest: {away}") from error


def _may_go(layout: QueueLayout, away: str) -> bool:
    """Decide whether a subscription is removed that another process has taken away; log it if it is not."""
    if _end_routes(layout, away):
        return True
    log.warning("subscription %s is not removed, as its routes took messages: it is back", layout.home)
    return False


def tidy_topic(
    topic: QueueContext,
    passing: Callable[[str], AbstractContextManager[object]],
    *,
    ephemeral_older_than: float | None = None,
) -> int:
    """Remove subscriptions that were half made or half removed, and ephemeral ones of the dead; return how many.

    `passing` handles the errors of each.
    """
    root, count = topic.root, 0
    above = removed_subscriptions(topic.layout.topic)
    refuse_links((above, topic.layout.new))
    for entry in list(reading.entries(above)):
        layout = subscription_layout(topic.layout, entry.name.rpartition(".deleting-")[0])
        with passing(entry.path):
            if not entry.name.endswith(UNLESS_ROUTED) or _may_go(layout, entry.path):
                clear_away(root, layout, entry.path)
                count += 1
    count += remove_hidden(root, topic.name, passing)[0]
    for entry in list(reading.entries(topic.layout.new)):
        with passing(entry.path):
            if topic.age_ms(entry.path) > ages.DEAD_SUBSCRIBER:
                topic.storage.remove_tree(entry.path)
                count += 1
    config = unsettled_config(topic.layout.topic)
    with passing(config):
        if topic.age_ms(config) > ages.DEAD_SUBSCRIBER:  # who makes it, or removes it, died
            settle_config(topic.layout, topic.storage)
    for folder in list(subscription_folders(root.layout, topic.name)):
        layout = subscription_layout(topic.layout, folder)
        with passing(layout.home), suppress(NoSuchQueue):  # RACE: another sweep was first
            with ephemeral.left(layout, topic.clock, ephemeral_older_than) as is_left:
                pass
            if is_left:
                take_away(root, layout, force=True)
                count += 1
    return count
