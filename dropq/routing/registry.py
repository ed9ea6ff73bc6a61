"""Making and removing selectors: each is a file, which routers see at their next pass.

A selector is removed by a rename of its file, under the policy lock: from then on no router spends a credit of it. What
it has moved returns to its source, wherever it is by now; any router or sweep goes on with that after a crash.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, NamedTuple

from dropq.carrier.carriers import Carriers
from dropq.config import selectors as files
from dropq.config.selectors import Selector
from dropq.errors import ConfigError, DropqError, NoSuchQueue, QueueExists, Unavailable
from dropq.format.credits import HOPS_LIMIT, Credit, Via, via_of
from dropq.lifecycle import credits, named
from dropq.lifecycle.context import QueueContext, RootContext
from dropq.lifecycle.moving import Moves
from dropq.lifecycle.open_queue import open_queue
from dropq.lifecycle.queue_notes import refuse_away
from dropq.lifecycle.transfers import vias_in_transit
from dropq.policies import selectors
from dropq.policies.circles import Circles, Waypoint, words
from dropq.policies.lock import PolicyLock
from dropq.routing.credit_audit import AUDIT_INTERVAL, CreditAudit, all_credits
from dropq.storage import reading
from dropq.storage.failures import describe
from dropq.storage.watch import Watch

log = logging.getLogger("dropq")

#: Seconds for which a command waits until all has returned.
PATIENCE = 10.0

_TABLES = 'give a list of tables, each with a name, such as [{"name": "eu", "to": "orders-eu"}]'


def add(context: QueueContext, name: str, options: dict[str, Any]) -> Selector:
    """Make a selector, which takes messages from the next pass of a router on; return it.

    Raises:
        ConfigError: an option cannot be used; or messages would go round.
        NoSuchQueue: the queue that it sends to is not there.
        QueueExists: the queue has a selector of this name, or another of its role.
        Unavailable: another process keeps the policy lock; nothing was changed.
    """
    files.check_name(name)
    if context.layout.is_topic:
        raise ConfigError(
            f"{context.name} is a topic, and has no selectors: give them to a queue or a subscription; what is "
            "published goes elsewhere by a route"
        )
    path = selectors.path_of(context, name)
    selector = files.check(name, options, f"selector {name}", queue=context.name)
    with context.error_context("the selector was not made"):
        _refuse_while_removed(context, name)
        present, _ = selectors.read(context)
        if selector.to is not None:
            open_queue(context.root, selector.to)
            if circle := _circle_by(context, selector):
                raise ConfigError(f"selector {name}: {circle}; nothing was changed")
    for other in present:
        if _exclude_each_other(other, selector):
            raise QueueExists(
                f"queue {context.name} has a selector {other.name}, with role {other.role}, already: "
                f"`dropq selector rm {context.name} {other.name}` removes it; nothing was changed"
            )
    with context.error_context("the selector was not made"):
        if selector.credit is not None:
            token = selectors.reserve_token(context.root.layout, context.name, name, context.storage)
            selector = replace(selector, token=token)
        context.storage.make_folder(context.layout.selectors)
        temporary = f"{context.layout.selectors}/.{name}.{os.urandom(6).hex()}.tmp"
        context.storage.write_new(temporary, files.text(selector).encode())
        try:
            with _sole_writer(context):
                _refuse_while_removed(context, name)  # RACE: a removal begins under this lock, too
                _remove_reservation(context, path)
                context.storage.move(temporary, path)
        except FileExistsError as error:
            raise QueueExists(f"{path} was made just now by somebody else; nothing was changed") from error
        finally:
            context.storage.unlink(temporary)
        context.storage.sync(context.layout.selectors)
        named.keep(context)
    # RACE: of two who close a circle together, each with a part of it, the later one sees it here, or both do.
    if circle := _circle_by(context, selector):
        remove(context, name)
        raise ConfigError(f"selector {name} was made, and is removed again: {circle}")
    return selector


def _circle_by(context: QueueContext, selector: Selector) -> str:
    if selector.to is None:
        return ""
    return words(Circles().through(Waypoint(context.root.layout.path, context.name, context.layout), selector.to))


@contextmanager
def _sole_writer(context: QueueContext) -> Iterator[None]:
    """Hold the policy lock of a queue for a block that changes its selectors; Unavailable if another process has it."""
    with PolicyLock(context).acquire() as locked:
        if not locked:
            raise Unavailable(f"{context.layout.lock} is held by another process; nothing was changed")
        yield


def _refuse_while_removed(context: QueueContext, name: str) -> None:
    if name in removed_in(context):
        raise QueueExists(
            f"selector {name} of queue {context.name} is being removed, and what it moved is on its way back: `dropq "
            f"selector rm {context.name} {name}` waits for that, or any sweep does it; nothing was changed"
        )


def _remove_reservation(context: QueueContext, path: str) -> None:
    """Remove the empty file that reserved the name of a selector for a process that died; call this under the lock."""
    with suppress(FileNotFoundError):
        if reading.is_reservation(os.lstat(path)):
            context.storage.unlink(path)


def check_new(root: RootContext, queue: str, tables: object) -> list[Selector]:
    """Return the selectors that a new queue is made with, from `tables` with their names and the keys of their files.

    Errors are as of `add`, but for circles.
    """
    where = f"options of queue {queue}: selector"
    if not isinstance(tables, list | tuple):
        raise ConfigError(f"{where}: {_TABLES}")
    found = list[Selector]()
    for table in tables:
        name = table.get("name") if isinstance(table, Mapping) else None
        if not isinstance(name, str):
            raise ConfigError(f"{where}: {_TABLES}")
        files.check_name(name)
        if "token" in table:
            raise ConfigError(f"{where} {name}: token: leave it out: each selector gets one that is its own")
        options = {key: value for key, value in table.items() if key != "name" and value is not None}
        selector = files.check(name, options, f"{where} {name}", queue=queue)
        for other in found:
            if _exclude_each_other(other, selector):
                which = f"the name {name}" if other.name == name else f"the role {selector.role}"
                raise ConfigError(f"{where}: two selectors have {which}: a queue has one")
        if selector.to is not None:
            open_queue(root, selector.to)
        found.append(selector)
    return found


def _exclude_each_other(one: Selector, other: Selector) -> bool:
    return one.name == other.name or (one.role == other.role != "normal")


def remove(context: QueueContext, name: str, *, patience: float = PATIENCE) -> bool:
    """Remove a selector, and bring back what it moved and nobody settled; return False if others must finish that.

    NoSuchQueue if the queue has no such selector. Unavailable, and nothing was changed, while another process keeps the
    policy lock, or while an earlier selector of the name is being removed beside one that a script put there.
    """
    files.check_name(name)
    path = selectors.path_of(context, name)
    with context.error_context("the selector was not removed"), _sole_writer(context):
        if reading.exists(path):
            if name in removed_in(context):
                raise Unavailable(
                    f"an earlier selector {name} of queue {context.name} is being removed, and what it moved is on its "
                    f"way back: `dropq sweep {context.name}` goes on with that; nothing was changed"
                )
            context.storage.rename(path, _removed(context, name))
            context.storage.sync(context.layout.selectors)
        elif not reading.exists(_removed(context, name)):
            there = ", ".join(selectors.names_in(context)) or "it has none"
            raise NoSuchQueue(f"queue {context.name} has no selector {name}: {there}; nothing was changed")
    with context.error_context("the selector takes nothing more, and a sweep returns what it moved"):
        audit, until, said = CreditAudit(context), time.monotonic() + patience, set[str]()
        watch = Watch(leaving=_folders_of(context, name))  # a credit leaves as its message is settled
        while not (state := finish(context, name)).is_gone:
            for why in state.waits.keys() - said:
                said.add(why)
                log.warning("selector %s: %d messages wait: %s", name, state.waits[why], why)
            if time.monotonic() >= until:
                return False
            audit.run()
            watch.wait(AUDIT_INTERVAL)
    return True


def _removed(context: QueueContext, name: str) -> str:
    return f"{context.layout.selectors}/.{name}{selectors.REMOVED}"


def removed_in(context: QueueContext) -> list[str]:
    """Return the names of the selectors that are being removed."""
    end = selectors.REMOVED
    found = (file for file in reading.names_in(context.layout.selectors) if file[0] == "." and file.endswith(end))
    return sorted(file[1 : -len(end)] for file in found)


def finish_removed(context: QueueContext) -> int:
    """Go on with the removal of selectors; return how many are gone now."""
    gone = 0
    for name in removed_in(context):
        state = finish(context, name)
        gone += state.is_gone
        for why, count in state.waits.items():
            log.info("queue %s: selector %s: %d messages wait: %s", context.name, name, count, why)
    return gone


class Removal(NamedTuple):
    """How far the removal of a selector is: whether it is gone, and how many messages are not back, by cause."""

    is_gone: bool
    waits: Mapping[str, int]


def finish(context: QueueContext, name: str) -> Removal:
    """Bring back what a removed selector has moved, and remove its credits."""
    token, waits = _token_of(context, name), Counter[str]()
    if token is None:
        return Removal(True, waits)  # RACE: another process finished it
    Carriers(context).run()  # what is on its way to another file system can only return from there
    left, listed = dict[str, QueueContext](), dict[str, _Listed | None]()
    with credits.opened(context.layout, token) as spent:
        for key in credits.spent(context.layout, token) if token else ():
            try:
                said = None if spent is None else credits.read_in(spent, key)
                found = None if said is None else _bring_back(context, Via(token, key), said, listed)
                if found is not None:
                    left[found.name] = found
            except (DropqError, OSError) as error:
                waits[describe(error)] += 1
    for found in left.values():
        Carriers(found).run()  # what comes from another file system
    waits["it cannot be carried to another file system now"] = sum(
        via.token == token for via in vias_in_transit(context.layout)
    )
    if token and credits.spent(context.layout, token):
        return Removal(False, +waits)
    if token:
        folder = f"{context.layout.credits}/{token}"
        for file in reading.names_in(folder):
            if file.startswith("."):  # what routers wrote there, or were about to write
                context.storage.unlink(f"{folder}/{file}")
        context.storage.remove_folder(folder)
    context.storage.unlink(_removed(context, name))
    return Removal(True, waits)


def _token_of(context: QueueContext, name: str) -> str | None:
    """Return the token of a selector that is being removed; "" if no credit has the token, None if it is gone."""
    content = reading.read_small(_removed(context, name))
    if content is None:
        return None
    token = files.token_in(content)  # also of a file that was broken since
    # A copy of another selector's file took nothing under that token.
    return token if credits.queue_of(context.root.layout, token) == (context.name, name) else ""


def _folders_of(context: QueueContext, name: str) -> list[str]:
    folder = f"{context.layout.credits}/{_token_of(context, name) or ''}"
    return [folder] if reading.is_folder(folder) else []


def return_from(context: QueueContext, folder: str, file: str) -> bool:
    """Return a message that a selector moved into a queue to where it came from, and remove its credit.

    Return whether it is back; False if it came under no credit, or the selector or queue that spent the credit is gone.
    A crash in between leaves a credit without a message, which a credit audit removes.
    """
    via = via_of(file)
    said = None if via is None else credits.find(context.root.layout, via)
    known = None if via is None else credits.queue_of(context.root.layout, via.token)
    if via is None or known is None or said is None or not credits.led_here(context, said, file):
        return False
    source = open_queue(context.root, known[0])
    with _locked(source, said.below) as locked:
        if not locked:
            raise Unavailable(f"another process keeps the lock of a queue above {source.name}; the message stays")
        under = said.below[0] if said.below else None
        if Moves(context).return_to(folder, file, source, under, copied=said.copied) is None:
            return False
    credits.unspend(source, via)
    return True


class _Found(NamedTuple):
    """A message that is under way: where it lies, and the credits above the credit by which it was found."""

    context: QueueContext
    folder: str
    file: str
    above: tuple[tuple[QueueContext, Via], ...]


class _Listed:
    """A queue that messages went to: the credits under which they lie there, and those under which they left.

    Each round lists a queue once, however many messages come back from it.
    """

    def __init__(self, context: QueueContext) -> None:
        self.context = context
        layout = context.layout
        self.files: dict[Via, list[tuple[str, str]]] = {}
        for folder in (layout.delayed, layout.target, layout.processing):
            for file in reading.names_in(folder):
                if (via := via_of(file)) is not None:
                    self.files.setdefault(via, []).append((folder, file))
        self.above: dict[Via, list[tuple[Via, str]]] = {}
        for upper, said in all_credits(layout):
            if said is not None:
                for via in said.below:
                    self.above.setdefault(via, []).append((upper, said.to))


def _bring_back(
    context: QueueContext, via: Via, said: Credit, listed: dict[str, _Listed | None]
) -> QueueContext | None:
    """Bring back the message that went under a credit, and remove the credit and all above it; return where it was.

    RACE: with programs that move it on, or settle it: the rename decides. The next round finds what was missed, and an
    audit finds credits whose messages are gone.
    """
    for found in _under(context, said.to, via, listed):
        with _locked(context, said.below) as locked:
            if not locked:
                return None
            under = said.below[0] if said.below else None
            moved = Moves(found.context).return_to(found.folder, found.file, context, under, copied=said.copied)
        if moved is not None:
            for upper, credit in found.above:
                credits.unspend(upper, credit)
            credits.unspend(context, via)
            return found.context
    return None


@contextmanager
def _locked(context: QueueContext, below: Sequence[Via]) -> Iterator[bool]:
    """Hold the policy lock of the queue under whose credit a message comes back; yield False without the lock.

    RACE: with an audit of that queue, which lists messages, credits, and messages again: a message that came nearer
    meanwhile could be missing from all three.
    """
    owner = credits.queue_of(context.root.layout, below[0].token) if below else None
    if owner is None or credits.layout_of(context.root.layout, owner[0]) is None:
        yield True
        return
    with PolicyLock(open_queue(context.root, owner[0])).acquire() as locked:
        yield locked


def _under(
    source: QueueContext, address: str, via: Via, listed: dict[str, _Listed | None], depth: int = 0
) -> Iterator[_Found]:
    """Yield the message that lies under a credit, in the queue that the credit names, or further on."""
    if depth > HOPS_LIMIT:
        return
    if address not in listed:
        listed[address] = _list(source, address)
    if (queue := listed[address]) is None:
        return
    for folder, file in queue.files.get(via, ()):
        yield _Found(queue.context, folder, file, ())
    for upper, further in queue.above.get(via, ()):
        for found in _under(source, further, upper, listed, depth + 1):
            yield found._replace(above=(*found.above, (queue.context, upper)))


def _list(source: QueueContext, address: str) -> _Listed | None:
    """List a queue that messages went to; return None if it is gone for good."""
    if credits.layout_of(source.root.layout, address) is None:
        refuse_away(source.root.layout, address, "what lies there returns when it is back")
        return None
    return _Listed(open_queue(source.root, address))
