"""The receivers of a topic: its subscriptions, those of the topics above it, and the views on it.

A receiver is a destination with its rules: its filter, its room, whether it gets what its own client publishes. The
receivers are listed for each message, after its claim. An open receiver is kept while its folder and its files are the
same.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

from dropq.config.schema import underlies
from dropq.errors import DropqError, NoSuchQueue, Unavailable
from dropq.format.addresses import SubscriptionName, ancestors, layouts, topic_layout
from dropq.format.layout import FOLDERS, SUBSCRIPTIONS, QueueLayout
from dropq.format.message_file import MessageFile
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.open_queue import find_layout, open_queue
from dropq.lifecycle.queue_notes import linked_queue, refuse_away, undecided_subscriptions
from dropq.policies.matching import deciding
from dropq.policies.send_limits import Tally
from dropq.staging.destinations import DestinationFolder, give_word, is_known, make_known
from dropq.storage import reading
from dropq.storage.failures import describe
from dropq.topics.views import keep_noted, noted_expression, view_names

log = logging.getLogger("dropq")

#: It differs if the files of a queue's configuration have changed.
Version = list[tuple[int, ...] | None]
#: Milliseconds in which a DropboxMQ makes the folders of a subscription, one by one.
MAKING = 2000
#: Seconds after which the files of the receivers' configurations are checked again.
CONFIG_AGE = 1.0


class Receiver:
    """A destination, and which messages it gets; `version` is what its files were before its configuration was read."""

    def __init__(
        self, topic: QueueContext, address: str, destination: DestinationFolder, context: QueueContext, version: Version
    ) -> None:
        self._topic = topic
        self.address = address
        self.destination = destination
        self.context = context
        config, layout = context.config, context.layout
        self.is_view = not layout.topic
        self._version = version
        self._decide: dict[str, Callable[[MessageFile], bool | None]] = {}
        if config.filter is not None:
            for state in ("target", "processing"):
                self._decide[state] = deciding(config.filter, topic, state, context)
        self._tally: Tally | None = None
        self._foreseen = 0
        if config.max_unprocessed is not None:
            folders = (layout.target, layout.delayed, layout.processing)
            self._tally = Tally(folders, config.ignore, config.max_unprocessed, context.timing)
        subscription = SubscriptionName.of(os.path.basename(layout.home)) if layout.is_subscription else None
        self._no_local = subscription.client_id if subscription is not None and subscription.no_local else None
        #: Whether it gets every message, and has room for any number.
        self.takes_all = not self._decide and self._no_local is None and self._tally is None
        #: Whether its files have the modes of the topic's.
        self.own_modes = context.storage.writes_as(topic.storage)

    @property
    def is_current(self) -> bool:
        """Whether its configuration is that of its file, and the topic knows the destination."""
        return _version_of(self.context.layout) == self._version and is_known(self._topic.layout, self.destination)

    def wants(self, file: MessageFile, state: str, client: str) -> bool:
        """Return whether it gets a message from a `client`; Unavailable if its filter cannot be evaluated."""
        if self._no_local is not None and self._no_local == client:
            return False
        decide = self._decide.get(state)
        if decide is None:
            return True
        wanted = decide(file)
        if wanted is None:
            raise Unavailable(f"the filter of {self.address} cannot be evaluated, as the body cannot be read")
        return wanted

    def has_room(self) -> bool:
        """Return whether it takes another message, and count that; Unavailable if it is full and the topic waits."""
        if self._tally is None or self._tally.enter(1 + self._foreseen, whole=True):
            return True
        if self.context.config.overflow != "discard":
            limit = f"max_unprocessed = {self.context.config.max_unprocessed}"
            raise Unavailable(f"{self.address} is full ({limit}): its consumers must settle messages first")
        log.warning("%s is full, and discards what is published", self.address)
        return False

    def foresee(self) -> None:
        """Count a message that `has_room` let in as about to come, and not as sent."""
        if self._tally is not None:
            self._tally.add(-1 - self._foreseen)
            self._foreseen += 1


class Receivers:
    """The receivers of one topic, whose root other hosts may share."""

    def __init__(self, topic: QueueContext, *, shared: bool) -> None:
        self._topic = topic
        root = topic.root.layout.path
        self._device = reading.device(topic.layout.base)
        self._above = {
            name: reading.Subfolders(f"{topic_layout(root, name).home}/{SUBSCRIPTIONS}", topic.clock, shared=shared)
            for name in ancestors(topic.name)
        }
        self._noted = reading.Listing(topic.root.layout.views, topic.clock, shared=shared)
        self._found: list[list[reading.Subfolder]] = []
        self._receivers: list[Receiver] | None = None
        self._refresh_at = 0.0
        self._known: dict[tuple[str, int], Receiver] = {}
        self._views: dict[str, Receiver] = {}
        self._broken: set[str] = set()

    def latest(self) -> list[Receiver]:
        """Return the last receivers without a listing if each takes every message; else do what `now` does."""
        latest = self._receivers
        return self.now() if latest is None or False in [receiver.takes_all for receiver in latest] else latest

    def now(self) -> list[Receiver]:
        """Return the present receivers, each queue once; the same list as before if they are the same.

        Unavailable if a receiver cannot be used now, and the message waits for it; OSError if they cannot be listed.
        """
        now = time.monotonic()
        refreshes = now >= self._refresh_at
        found = [each.now() for each in self._above.values()]
        noted = self._noted.names()
        names = view_names(noted) if noted else []
        stand = all(map(self._stands, self._receivers or ()))
        if self._receivers is not None and not refreshes and not names and found == self._found and stand:
            return self._receivers
        self._receivers = None
        self._refuse_undecided(found)
        receivers: list[Receiver] = []
        known: dict[tuple[str, int], Receiver] = {}
        links: list[str] = []
        lasting = not names
        for topic, entries in zip(self._above, found, strict=True):
            for name, inode, is_link in entries:
                if is_link:
                    links.append(f"{self._above[topic].folder}/{name}")
                    continue
                receiver = self._known.get((f"{topic}/{name}", inode))
                if (
                    receiver is None
                    or (refreshes and not receiver.is_current)
                    or (not stand and not self._stands(receiver))
                ):
                    if SubscriptionName.of(name) is None:
                        continue
                    receiver = self._receiver(f"{topic}/{name}")
                if receiver is None:
                    lasting = False
                else:
                    known[f"{topic}/{name}", inode] = receiver
                    receivers.append(receiver)
        self._known = known  # RACE: threads have equal ones; a receiver that both forget is closed when neither uses it
        views = list(self._views_now(names, refreshes=refreshes))
        if views or links:
            receivers = _each_once([*receivers, *views])
            receivers = _each_once(
                [*receivers, *self._linked(links, {receiver.destination.identity.inode for receiver in receivers})]
            )
        if refreshes:
            self._refresh_at = now + CONFIG_AGE
        if lasting and not links:
            self._found, self._receivers = found, receivers
        return receivers

    def _stands(self, receiver: Receiver) -> bool:
        return receiver.destination.is_open or receiver.destination.is_there(self._topic.root.layout.path)

    def _refuse_undecided(self, found: list[list[reading.Subfolder]]) -> None:
        """Raise Unavailable while a subscription that was taken away may come back, and get what is published.

        RACE: another listing finds a subscription that came back since the listing, and so is in neither place.
        """
        root = self._topic.root.layout.path
        for topic in self._above:
            if undecided := undecided_subscriptions(topic_layout(root, topic).home):
                raise Unavailable(
                    f"a subscription of topic {topic} is being removed, and may come back: {undecided[0]}"
                )
        if [each.now() for each in self._above.values()] != found:
            raise Unavailable(f"subscriptions of topic {self._topic.name}, or of those above it, come and go just now")

    def _views_now(self, names: list[str], *, refreshes: bool) -> Iterator[Receiver]:
        views: dict[str, Receiver] = {}
        for name in names:
            receiver, root = self._views.get(name), self._topic.root.layout.path
            if receiver is None or (refreshes and not receiver.is_current) or not receiver.destination.is_there(root):
                receiver = self._view(name)
            if receiver is None or (topics := receiver.context.config.underlying_topic) is None:
                continue
            views[name] = receiver
            try:
                underlying = underlies(topics, self._topic.name)
            except DropqError as error:
                raise Unavailable(f"whether {name} is a view on this topic is not known: {error}") from error
            if underlying:
                self._check_type(receiver)
                yield receiver
        self._views = views

    def _view(self, name: str) -> Receiver | None:
        """Open a noted view; return None if it is no queue, or cannot be used and is on other topics.

        Unavailable if it cannot be used now, as it is away, and what is published waits for it.
        """
        topic = self._topic
        try:
            receiver = self._receiver(name)
            if receiver is None:
                refuse_away(topic.root.layout, name, f"what is published to topic {topic.name} waits for it")
            else:
                keep_noted(receiver.context)
        except Unavailable:
            if not self._is_elsewhere(name):
                raise
            return None
        return receiver

    def _is_elsewhere(self, name: str) -> bool:
        """Return whether the note of a view names only other topics; False if that is not known."""
        with suppress(DropqError, OSError):
            expression = noted_expression(self._topic.root.layout, name)
            return bool(expression) and not underlies(expression, self._topic.name)
        return False

    def _check_type(self, view: Receiver) -> None:
        own, its = self._topic.config.message_type, view.context.config.message_type
        if own != its:
            raise Unavailable(
                f'topic {self._topic.name} has message_type = "{own}", and its view {view.address} has "{its}": give '
                "both the same"
            )

    def _linked(self, links: list[str], known: set[int]) -> Iterator[Receiver]:
        """Yield the queues of this root that are linked among the subscriptions, as DropboxMQ feeds them, too."""
        for link in links:
            name = linked_queue(self._topic.root.layout, link)
            if name is not None and reading.inode_behind(link) not in known and (receiver := self._receiver(name)):
                yield receiver

    def _receiver(self, address: str) -> Receiver | None:
        """Open a receiver, or raise Unavailable; log a warning and return None if it is no queue."""
        topic = self._topic
        try:
            # RACE: before the configuration is read: what changes meanwhile is another version at the next refresh.
            there = find_layout(topic.root.layout.path, address)
            version = [] if there is None else _version_of(there)
            context = open_queue(topic.root, address)
            give_word(context)
            base = context.layout.base
            destination = DestinationFolder(topic.root.layout.path, os.path.relpath(base, topic.root.layout.path))
            if destination.device != self._device:
                raise Unavailable(f"{address} is on another file system than topic {topic.name}: no rename leads there")
            if not os.access(context.layout.target, os.W_OK | os.X_OK):
                reading.device(context.layout.target)  # RACE: it may be gone by now, which is no question of rights
                raise Unavailable(f"this user may not send to {address}: somebody else distributes what is published")
            make_known(topic.layout, destination, topic.storage)
            return Receiver(topic, address, destination, context, version)
        except Unavailable:
            raise
        except (DropqError, OSError) as error:
            if not isinstance(error, NoSuchQueue | FileNotFoundError) and not self._lacks_target(address):
                made = self._is_being_made(address)
                why = "a DropboxMQ is just making its folders" if made else describe(error)
                raise Unavailable(f"{address} cannot be used: {why}") from error
            if address not in self._broken:
                self._broken.add(address)
                log.warning("topic %s: %s gets nothing: %s", topic.name, address, describe(error))
            return None

    def _is_being_made(self, address: str) -> bool:
        """Return whether a subscription lacks folders, and is so new that a DropboxMQ may be about to make them."""
        topic = self._topic
        (layout, *_) = layouts(topic.root.layout.path, address)
        lacks = [folder for folder in FOLDERS if not os.path.lexists(layout.folder(folder))]
        return bool(lacks) and layout.is_subscription and topic.age_ms(layout.home) < MAKING

    def _lacks_target(self, address: str) -> bool:
        """Return whether a receiver is seen to have no target/, and so was never whole: it must not block the topic."""
        with suppress(OSError):
            return not any(reading.exists(layout.target) for layout in layouts(self._topic.root.layout.path, address))
        return False


def _each_once(receivers: list[Receiver]) -> list[Receiver]:
    """Return the receivers without duplicates, such as a view that is also linked among the subscriptions."""
    seen: dict[int, Receiver] = {}
    for receiver in receivers:
        seen.setdefault(receiver.destination.identity.inode, receiver)
    return list(seen.values())


def _version_of(layout: QueueLayout) -> Version:
    """Return a value that differs if a queue's configuration has changed, or another queue has its name."""
    defaults = [f"{layout.topic}/queue.toml", layout.removed] if layout.is_subscription else []
    return [_file_version(path) for path in (layout.config_file, *defaults, layout.created)]


def _file_version(path: str) -> tuple[int, ...] | None:
    """Return a value that differs if a file was replaced or written; None if it is missing."""
    with suppress(OSError):
        found = os.stat(path)
        return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
    return None
