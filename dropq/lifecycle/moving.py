"""Moving elsewhere: dead letters, routes, other queues and file systems, the archive; parts of a committed message.

A method either makes its one rename, or changes nothing in the state folders.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TypeVarTuple

from dropq.errors import DropqError, NoSuchQueue, StorageError
from dropq.format import names
from dropq.format.claims import Claim, Location
from dropq.format.credits import Via, may_have_via
from dropq.format.layout import DEAD_LETTER, SETTLED, WAITING, WITH_REASON, QueueLayout
from dropq.format.message_file import MessageFile
from dropq.format.names import Name
from dropq.format.staged import part_name
from dropq.lifecycle import credits, dead_letters, giving, naming, reasons, transfers
from dropq.lifecycle.context import OfQueue, QueueContext
from dropq.lifecycle.endings import FAILED
from dropq.lifecycle.open_queue import open_queue, open_root
from dropq.lifecycle.processing import move_out
from dropq.lifecycle.queue_notes import copied_in
from dropq.lifecycle.sending import Outlet, into_target
from dropq.storage import reading
from dropq.storage.clock import time_text
from dropq.storage.failures import describe, storage_error
from dropq.storage.system_calls import is_missing

log = logging.getLogger("dropq")

Rest = TypeVarTuple("Rest")

#: What became of a message that was moved, but not synced.
UNSYNCED = "the message is settled, but a power cut may undo it and deliver it again"
UNSYNCED_ROUTE = "the message went to its route, but a power cut may bring it back"
#: The location of a message that went to a route.
ROUTED = "routing"


class Moves(OfQueue):
    """The moves of one queue's messages that are no part of their delivery here."""

    def __init__(self, context: QueueContext) -> None:
        super().__init__(context)
        self._asked: dict[str, int] = {}  # of the rows that were given to, see `giving.row_to`

    def to_dead_letter(
        self,
        message: Claim | MessageFile,
        reason: str,
        details: Mapping[str, object] | None = None,
        *,
        cancel: bool = False,
        state: str = "target",
    ) -> Location | None:
        """Move a message that cannot be delivered to the dead-letter queue; return where it is now.

        If that queue is missing or refuses the message, or no queue is named, or the message is a dead letter that has
        made all its hops, it goes to error/, with the reason. If that queue lies on another file system, the message
        goes to a row for it. A crash leaves it where it was or there.

        Args:
            message: its claim; or its file, if it waits unclaimed, in the `state` target, or delayed.
            reason: why it cannot be delivered, in a word of at most 32 bytes.
            details: what else to keep with the reason if it goes to error/.

        Returns:
            The location, with the state `dead-letter` or `error`; None if it waited, and another process took it first.
        """
        if isinstance(message, Claim):
            name = naming.counted(self.context, message, cancel=cancel)
            fields = known_of(message, details)
            out = partial(move_out, self.context, message)
            return self._end_as_letter(out, self._layout.processing, name, reason, fields, message)
        folder = self._layout.folder(state)
        source = f"{folder}/{message.filename}"
        leave = partial(_leave, source, stays=f"the message stays where it was, {source}")
        name = replace(message.name.unmarked, delivery_count=message.delivery_count)
        return self._end_as_letter(leave, folder, name, reason, details or {}, message)

    def _end_as_letter(
        self,
        leave: Callable[..., str | None],
        folder: str,
        name: Name,
        reason: str,
        details: Mapping[str, object],
        message: Claim | MessageFile,
    ) -> Location | None:
        """Move a message from a folder to the dead-letter queue, else to error/, by `leave(move, ...)`."""
        queue, own_name = self._config.dead_letter_queue, message.own_name
        ended = partial(self._ended, own_name=own_name, claim=message if isinstance(message, Claim) else None)
        try:
            path = leave(self._move_to_dead_letter_queue, queue, name, reason)
        except (NoSuchQueue, StorageError) as error:
            why = _refusal(queue, error)
            details = {**details, "detail": "; ".join(str(text) for text in (details.get("detail"), why) if text)}
            file = leave(partial(move_with_reason, self.context), "error", name, reason, details)
            if file is None:
                return None
            ended(FAILED, reason=reason, details=details)
            log.warning("queue %s: message %s went to error/: %s", self.context.name, name.id, why)
            return settled(self.context, own_name, Location("error", file), self._layout.error, folder)
        if path is None:
            return None
        ended(DEAD_LETTER, reason=reason, details=details, to=queue or "")
        location = Location(DEAD_LETTER, os.path.basename(path))
        return settled(self.context, own_name, location, os.path.dirname(path), folder)

    def letters_from_error(self, letters: Mapping[str, str]) -> set[str]:
        """Move messages on from error/ to the dead-letter queue; return the file names of those that went.

        `letters` has the reason of each, as for `to_dead_letter`, by its file name. If the queue is missing or refuses
        a message, that stays, with its reason. A crash leaves each message in error/ or in the queue.
        """
        paths = {file: self._letter_from_error(file, reason) for file, reason in letters.items()}
        folders = {os.path.dirname(path) for path in paths.values() if path}
        try:
            if folders:
                sync_settled(self.context, *folders, self._layout.error)
        except StorageError as error:
            log.warning("queue %s: %s", self.context.name, error)
        return {file for file, path in paths.items() if path}

    def _letter_from_error(self, file: str, reason: str) -> str | None:
        source = f"{self._layout.error}/{file}"
        try:
            inode, name = reading.inode(source), self._sidecars.parse(file).unmarked
            path = self._move_to_dead_letter_queue(source, self._config.dead_letter_queue, name, reason)
        except (OSError, DropqError) as error:
            log.warning("%s stays, and `dropq move` takes it to the dead-letter queue: %s", source, describe(error))
            return None
        self.context.reasons.drop("error", file, inode)
        return path

    def part_to_dead_letters(self, path: str, own_name: str, origin: str) -> None:
        """Move a part of a committed message to the root's dead-letter queue, as its own queue `origin` is gone.

        Without such a queue, it goes to error/ of this queue, marked as a dead letter of that one.
        """
        name, queue = self._sidecars.whole(self._sidecars.parse(own_name)), self.context.root.config.dead_letter_queue
        name = replace(name, origin=origin, reason=dead_letters.NO_SUCH_QUEUE, not_before=0)
        try:
            moved = self._move_to_dead_letter_queue(path, queue, name, dead_letters.NO_SUCH_QUEUE)
            self._ended(DEAD_LETTER, own_name, reason=dead_letters.NO_SUCH_QUEUE, to=queue or "", outcome="")
            sync_settled(self.context, os.path.dirname(moved))
            log.warning("queue %s is gone: message %s for it is a dead letter in %s", origin, name.id, queue)
        except (NoSuchQueue, StorageError, OSError) as error:
            if not reading.exists(path):
                return  # RACE: another roll-forward was first
            detail = f"it was made of a message of this queue, and its queue {origin} is gone; {_refusal(queue, error)}"
            set_part_aside(self.context, path, name, dead_letters.NO_SUCH_QUEUE, {"detail": detail, "receiver": origin})
            log.warning("queue %s is gone: message %s for it is in error/ of %s", origin, name.id, self.context.name)

    def _find_dead_letter_queue(self, queue: str | None, name: Name) -> QueueLayout:
        if why := dead_letters.why_no_more(name):
            raise NoSuchQueue(why)
        if queue is None:
            is_one = self.context.name == self.context.root.config.dead_letter_queue
            raise NoSuchQueue("this is the dead-letter queue" if is_one else "no dead_letter_queue is set")
        with self.context.error_context("the dead-letter queue cannot be looked at"):
            destination = dead_letters.find_layout(self.context.root.layout.path, queue)
        if destination is None:
            raise NoSuchQueue(f"the dead-letter queue {queue} is missing")
        return destination

    def _move_to_dead_letter_queue(self, source: str, queue: str | None, name: Name, reason: str) -> str:
        """Move a file into the target/ of a dead-letter queue, where it replaces nothing; return its path there."""
        destination = self._find_dead_letter_queue(queue, name)
        origin = self._sidecars.whole(name).origin if name.reason else ""  # it may be in the sidecar
        name = dead_letters.letter(name, origin or self.context.name, reason, self.context.clock.now_ms())
        sidecars = self.context.sidecars.at(destination)
        if name.meta:
            sidecars.make_known()
        file = sidecars.fit(naming.unique(name))
        try:
            return self._add(source, destination.target, file, lambda: sidecars.fit(naming.marked(name)))
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
        row = self._row_to(transfers.RowDestination(self.context.root.layout, queue or "", destination))
        return self._move_to_row(source, row.given, name)

    def _add(self, source: str, folder: str, file: str, marked: Callable[[], str]) -> str:
        """Move a file into a folder, where it replaces nothing; return its path there.

        If its name is taken, it gets the unique name that `marked` returns. No name is reserved first: behind a link,
        the empty file would be a message of another queue.
        """
        try:
            if self._storage.rename_exclusive(source, path := f"{folder}/{file}"):
                return path
        except FileExistsError:  # the id came there by another way: both stay
            pass
        self._storage.rename(source, path := f"{folder}/{marked()}")
        return path

    def route(self, claim: Claim, folder: str) -> Location:
        """Move a claimed message into a route's folder, under its own name; the delivery is not counted."""
        path = move_out(self.context, claim, self._move_to_route, folder, claim.own_name)
        return self._routed(claim.own_name, path, folder, self._layout.processing, claim)

    def route_waiting(self, file: MessageFile, folder: str) -> Location | None:
        """Move a waiting message into a route's folder without a claim; return None if it is gone.

        A crash leaves it in target/ or in the folder.
        """
        source, own_name = f"{self._layout.target}/{file.filename}", naming.next_delivery(self.context, file)[1]
        # RACE: with each consumer of the queue, and any script. The process whose rename succeeds has the message.
        path = _leave(source, self._move_to_route, folder, own_name, stays="the message stays in target/", to=folder)
        return None if path is None else self._routed(file.own_name, path, folder, self._layout.target)

    def _routed(self, own_name: str, path: str, folder: str, left: str, claim: Claim | None = None) -> Location:
        self._ended("moved", own_name, claim, to=os.path.basename(folder), intended=True)
        location = Location(ROUTED, os.path.basename(path))
        return settled(self.context, own_name, location, os.path.dirname(path), left, fate=UNSYNCED_ROUTE)

    def _move_to_route(self, source: str, folder: str, file: str) -> str:
        """Move a file into a route's folder, where it replaces nothing; return its path there.

        Where the folder is a link to a queue on another file system, the file goes to the row for that queue.
        """
        if may_have_via(file) or names.may_be_copied(file) or names.may_be_owned(file):
            file = self._sidecars.fit(replace(self._sidecars.parse(file), via="", copied="", owned=False))
        if not names.tells_time(file) and self._is_ignored_at(folder, file):
            file = naming.coded(self.context, file, reading.changed_ms(source))
        try:
            return self._add(source, folder, file, lambda: naming.copy_name(self.context, self._sidecars.parse(file)))
        except OSError as error:
            destination = transfers.behind(folder) if error.errno == errno.EXDEV else None
            if destination is None:
                raise
        return self._move_to_row(source, self._row_to(destination).given, self._sidecars.parse(file))

    def _is_ignored_at(self, folder: str, file: str) -> bool:
        """Return whether the queue behind a route's folder takes a file for no message, or may do so."""
        if not os.path.islink(folder) or os.path.basename(target := os.path.realpath(folder)) != "target":
            return False
        destination = transfers.behind(folder)
        if destination is None:
            return True  # of a topic, or a subscription: what feeds it knows a coded name, too
        try:
            is_near = os.path.samefile(destination.root.path, self.context.root.layout.path)
            root = self.context.root if is_near else open_root(destination.root.path, self.context.clock)
            return bool(open_queue(root, destination.queue).sidecars.ignored(file))
        except (OSError, DropqError) as error:
            log.info("%s: whether %s is ignored there is not known: %s", target, file, describe(error))
            return True

    def requeue(self, source: str, filename: str, to: QueueContext, *, keep_expiration: bool = False) -> str | None:
        """Move a file from a folder into a queue's target/ as if it were new: counters and its clock start again.

        Return its name in target/, or in the row for that queue if it lies on another file system; None if another
        process moved it first.
        """
        file = self._sidecars.file(filename)
        name = naming.restarted(self.context, file, to)
        if keep_expiration:
            name = replace(name, expiration=file.name.expiration)
        if source == self._layout.processing and to.layout.home == self._layout.home:
            name = replace(name, via=file.name.via)
        return self._move_to_queue("requeued", source, filename, to, name)

    def move(self, source: str, filename: str, to: QueueContext) -> str | None:
        """Move a file into a queue's target/ with its counters and expiration; result as of `requeue`."""
        file = self._sidecars.file(filename)
        # The name of a foreign file in error/ or expired/ tells neither its tries nor its arrival: its reason does.
        name = self.context.reasons.complete(os.path.basename(source), filename, file.name)
        tries = max(name.delivery_count, file.delivery_count)
        name = replace(name, delivery_count=tries, not_before=0, lapsed="", via="")
        name = replace(name, copied=naming.stays_copied(self.context, name, to))
        return self._move_to_queue("moved", source, filename, to, name)

    def move_on(self, file: MessageFile, to: QueueContext, via: Via) -> str | None:
        """Move a waiting message into another queue's target/, under a credit that was spent on it.

        The credits under which it came stay. Counters and the queue's clock start again there; result as of `requeue`.
        """
        name = replace(naming.uncounted(file.name.unmarked), via=str(via), copied="")
        name = replace(name, hops=name.hops + 1, since=to.clock.now_ms())
        return self._move_to_queue("moved", self._layout.target, file.filename, to, name, intended=True)

    def return_to(
        self, folder: str, filename: str, to: QueueContext, via: Via | None, *, copied: bool = False
    ) -> str | None:
        """Return a message to the queue that a selector had moved it from; a consumer that holds it loses the claim.

        `via` is the credit under which it had come there. From another file system the message comes back without one,
        as no audit would find it on its way: the credit is freed. `copied`: its copies were made there before.
        """
        name = self._sidecars.file(filename, folder).name.unmarked
        name = replace(naming.uncounted(name), hops=max(name.hops - 1, 0))
        name = replace(name, via=str(via or ""), since=to.clock.now_ms(), copied="")
        if copied:
            with to.error_context("the message stays where it was"):
                name = replace(name, copied=copied_in(transfers.own_mark(to)))
        try:
            given = self._rename_to_queue(folder, filename, to, name)
        except StorageError as error:
            if error.errno != errno.EXDEV:
                raise
            given = self._give_to(f"{folder}/{filename}", to, replace(name, via=""))
            if given is not None and via is not None:
                credits.free_under(self.context, via, filename)
        return self._logged("moved", folder, filename, to, given, intended=True)

    def bounce(self, file: MessageFile, to: QueueContext) -> str | None:
        """Move a waiting message to its return address; result as of `move_on`.

        It says that this queue bounced it, unless it says already where it could not be delivered, and why.
        """
        name = self._sidecars.whole(file.name.unmarked)
        name = replace(naming.uncounted(name), via="", copied="", hops=name.hops + 1, reply_to=None)
        if not name.origin:
            name = replace(name, origin=self.context.name, reason=dead_letters.BOUNCED)
        name = replace(name, since=to.clock.now_ms())
        return self._move_to_queue("moved", self._layout.target, file.filename, to, name, intended=True)

    def _logged(
        self, event: str, source: str, filename: str, to: QueueContext, moved: str | None, *, intended: bool = False
    ) -> str | None:
        """Log that a message went from a folder to a queue, unless another process moved it first."""
        if moved is not None:
            state, stays = os.path.basename(source), to.layout.home == self._layout.home
            outcome = "moved" if not stays else "returned" if state == "processing" else ""
            self._log_taken(event, state, filename, outcome, to=to.name, intended=intended)
        return moved

    def _log_taken(
        self, event: str, state: str, filename: str, outcome: str, *, to: str = "", intended: bool = False
    ) -> None:
        """Log that a message was taken out of a state; what was settled before does not count again."""
        file, outcome = self._sidecars.file(filename), "" if state in SETTLED else outcome
        claim = file.claim if state == "processing" else None
        self._ended(event, file.own_name, claim, to=to, state=state, outcome=outcome, intended=intended)

    def _move_to_queue(
        self, event: str, source: str, filename: str, to: QueueContext, name: Name, *, intended: bool = False
    ) -> str | None:
        """Move a file to a queue, or to a row if the queue lies on another file system, and log that.

        A name without a credit frees the credits under which the file had come.
        """
        try:
            moved = self._rename_to_queue(source, filename, to, name)
        except StorageError as error:
            if error.errno != errno.EXDEV:
                raise
            moved = self._give_to(f"{source}/{filename}", to, name)
        if moved is not None and not name.via:
            credits.free(self.context, filename)
        return self._logged(event, source, filename, to, moved, intended=intended)

    def _rename_to_queue(self, source: str, filename: str, to: QueueContext, name: Name) -> str | None:
        """Move a file to a queue by one rename; StorageError with EXDEV if the queue lies on another file system."""
        file = into_target(to, f"{source}/{filename}", naming.name_at(self.context, to, name))
        if file is not None:
            sync_settled(self.context, source)
        return file

    def _give_to(self, path: str, to: QueueContext, name: Name) -> str | None:
        with self.context.error_context("the message stays where it was"):
            row = self._row_to(transfers.RowDestination(to.root.layout, to.name, to.layout))
        return self.give(path, name, row.given)

    def _row_to(self, destination: transfers.RowDestination) -> transfers.Row:
        return giving.row_to(self.context, destination, self._asked)

    def give(self, path: str, name: Name | str, given: str) -> str | None:
        """Move a file into a row; return its name there, which no file had, or None if another process moved it first.

        Its `name` is text where it is plain, and needs no change. The carrier that copies it syncs the move before.
        """
        path_there = _leave(path, self._move_to_row, given, name, stays="the message stays where it was", to=given)
        return None if path_there is None else os.path.basename(path_there)

    def give_away(self, path: str, file: MessageFile, given: str, to: str) -> str | None:
        """Give a waiting message to a row for another root's queue, which people call `to`; result as of `give`."""
        name = file.filename if file.plain else replace(file.name.unmarked, via="", copied="")
        gone = self.give(path, name, given)
        if gone is not None:
            self._ended("moved", file.own_name, to=to, intended=True)
        return gone

    def _move_to_row(self, path: str, folder: str, name: Name | str) -> str:
        """Move a file into the folder of a row, under a name that no file had before; return its path there."""
        if isinstance(name, Name):
            if not name.generated and not name.since:
                name = replace(name, since=reading.changed_ms(path))  # keeps its place in the order
            name = self._sidecars.fit(naming.unique(name))
        given = f"{folder}/{part_name(os.urandom(8).hex(), name)}"
        # RACE: with each consumer, and any script. The process whose rename succeeds has the message.
        self._storage.rename(path, given)
        return given

    def replay(self, filename: str, to: QueueContext) -> str | None:
        """Send a copy of an archived message, marked as a replay that was delivered once; the original stays.

        Return the copy's name in target/; None if the message is not in the archive any more. A crash leaves at most
        the copy in working/, as a send does.
        """
        # Its one delivery was an ack. The mark says so to readers by records, who take other deliveries for deaths.
        name = naming.restarted(self.context, self._sidecars.file(filename), to, is_replay=True)
        copy = self._copy_to(filename, to, replace(name, delivery_count=1, replayed=True))
        return self._logged("replayed", self._layout.processed, filename, to, copy)

    def copy_archived(self, filename: str, to: QueueContext) -> str | None:
        """Send a copy of an archived message to a subscription, for its first delivery; its expiration stays."""
        name = naming.without_envelope(self.context, self._sidecars.parse(filename))
        name = replace(naming.uncounted(name), via="", lapsed="", copied="", since=to.root.ids.moment(name.id))
        return self._copy_to(filename, to, naming.without_sender(self.context, name))

    def _copy_to(self, filename: str, to: QueueContext, name: Name) -> str | None:
        if to.sidecars.folder != self._sidecars.folder:
            name = self._sidecars.whole(name)  # another root has sidecars of its own
        copy = to.sidecars.fit(naming.unique(name, chosen=True))  # the original has the same id
        source, outlet = f"{self._layout.processed}/{filename}", Outlet(to)
        try:
            to.storage.copy(source, f"{to.layout.working}/{copy}")
        except OSError as error:
            if reading.is_gone(error) and not reading.exists(source):
                return None  # RACE: another process pruned or requeued it
            raise outlet.not_sent(error) from error
        outlet.send(copy)
        outlet.sent()
        return copy

    def remove(self, state: str, file: str, event: str = "") -> bool:
        """Remove a message for good, with its reason; return False if it is gone. The log tells of it as an `event`."""
        path = f"{self._layout.folder(state)}/{file}"
        try:
            inode = reading.inode(path)
            self._storage.discard(path, self._layout.private)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise storage_error(error, f"the message stays in {state}/") from error
        if event:
            self._log_taken(event, state, file, "removed")
        self.context.reasons.drop(state, file, inode)
        credits.free(self.context, file)
        sync_settled(self.context, self._layout.folder(state))
        return True

    def put_aside(self, file: MessageFile, reason: str) -> None:
        """Move a waiting message to error/, and log why; do nothing if another process moved it first.

        No reason is written with it: there may be as many such messages as a queue has room for.
        """
        source = f"{self._layout.target}/{file.filename}"
        for name in naming.kept_names(self.context, file.name.unmarked):
            try:
                self._storage.move(source, f"{self._layout.error}/{name}")
            except FileExistsError:  # a foreign file of the same name is there: both stay
                continue
            except OSError as error:
                if isinstance(error, FileNotFoundError) and is_missing(source):
                    return  # RACE: a consumer of another filter claimed it
                raise storage_error(error, "the message stays in target/") from error
            self._ended(FAILED, file.own_name, reason=reason)
            log.warning("queue %s: message %s went to error/ (%s)", self.context.name, name, reason)
            credits.free(self.context, file.own_name)
            return sync_settled(self.context, self._layout.error, self._layout.target)

    def expire_waiting(self, file: MessageFile, reason: str = "time_limit", state: str = "target") -> bool:
        """Move a message from target/, or delayed/, to expired/ with a reason; return False if it is gone."""
        folder = self._layout.folder(state)
        source = f"{folder}/{file.filename}"
        move, stays = partial(move_with_reason, self.context), f"the message stays in {state}/"
        if _leave(source, move, "expired", file.name.unmarked, reason, {}, stays=stays, to="expired/") is None:
            return False  # RACE: a consumer claimed it, and delivers it although its time is over
        self._ended("expired", file.own_name, reason=reason)
        credits.free(self.context, file.own_name)
        sync_settled(self.context, self._layout.expired, folder)
        return True


def _leave(source: str, move: Callable[[str, *Rest], str], *args: *Rest, stays: str, to: str = "") -> str | None:
    """Move an unclaimed file by `move(path, ...)`; return None if it is gone.

    An error says where the message `stays`, and that the folder `to` is missing if it is.
    """
    try:
        return move(source, *args)
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            if is_missing(source):
                return None  # RACE: a consumer claimed it, or another process moved it
            stays = f"{to} is missing; {stays}" if to else stays
        raise storage_error(error, stays) from error


def move_with_reason(
    context: QueueContext, source: str, state: str, name: Name, reason: str, details: Mapping[str, object]
) -> str:
    """Write the reason, then move the file; return its name. The reason counts only once the file is there."""
    inode = reading.inode(source)
    fields = {"delivery": name.delivery_count, **reasons.why(reason, details, context.clock.now_ms())}
    if name.cancels:
        fields["cancels"] = name.cancels
    if not name.generated:  # the file may get its own name back, which tells neither its tries nor a time
        arrived = None if name.since else details.get("arrived")
        fields["arrived"] = arrived or time_text(name.since or reading.changed_ms(source))
    for file in naming.kept_names(context, name):
        context.reasons.record(state, file, inode, fields)
        moved = f"{context.layout.folder(state)}/{file}"
        try:
            context.storage.move(source, moved)
        except FileExistsError:  # a foreign file of the same name is there: both stay
            context.reasons.withdraw(state, file, inode)
        except OSError:
            if reading.inode_or_none(moved) != inode:  # RACE: else another process moved it there: the reason stays
                context.reasons.withdraw(state, file, inode)
            raise
        else:
            context.reasons.keep(state, file, inode)
            return file
    # The last name was one that no file ever had: where nothing is ever replaced, a failing disk says so of any name.
    raise OSError(errno.EIO, "the file system says that a new name is taken", moved)


def set_part_aside(context: QueueContext, path: str, name: Name, reason: str, details: Mapping[str, object]) -> None:
    """Move a part of a committed message, which cannot reach its destination any more, to error/ with a reason."""
    name = naming.marked(name)
    with suppress(FileNotFoundError):  # RACE: another roll-forward was first
        file = move_with_reason(context, path, "error", name, reason, details)
        context.log.ended(FAILED, file, reason=reason, details=details, outcome="")
        sync_settled(context, context.layout.error)


def end_part(context: QueueContext, path: str, state: str, own_name: str, reason: str) -> None:
    """Move a part of a committed message to a state of its queue; do nothing if another process moved it first.

    If its name is taken there, it gets another copy mark. The file at the path `reason`, which has its name and inode,
    says why it goes there.
    """
    folder = context.layout.folder(state)
    move: Callable[[str, str], None] = context.storage.move
    try:
        if state in WAITING:
            context.storage.make_folder(folder)
            move = context.storage.rename_guarded
        elif state in WITH_REASON:
            context.reasons.adopt(reason, state, own_name, inode := reading.inode(path))
        file = own_name
        try:
            move(path, f"{folder}/{own_name}")
        except FileExistsError:  # somebody made a file of its name: both stay
            unneeded = file = naming.copy_name(context, context.sidecars.parse(own_name))
            copied = state in WITH_REASON and context.reasons.copy(state, own_name, file, inode)
            try:
                # RACE: it may be another roll-forward that has just moved the part to this name, or reserves it.
                move(path, f"{folder}/{file}")
                unneeded = own_name
            finally:
                if copied:
                    context.reasons.withdraw(state, unneeded, inode)
        if state in WITH_REASON:
            context.reasons.keep(state, file, inode)
    except FileNotFoundError:
        if not is_missing(path):
            raise
        # RACE: another roll-forward was first


def end_whole(context: QueueContext, path: str, own_name: str, end: str) -> None:
    """Archive a message whose parts have all been moved, or return it to target/; do nothing if it is gone.

    Its `own_name` is a unique one if it ends in target/. It ends by `unlink` where parts of it take its place.
    """
    if end == "target":
        with suppress(FileNotFoundError):  # RACE: another roll-forward was first
            context.storage.rename_guarded(path, f"{context.layout.target}/{own_name}")
        return
    credits.free(context, own_name)  # before the last trace is gone: nobody would free them after a crash but an audit
    if end == "unlink" or not context.config.history:
        with suppress(FileNotFoundError):  # RACE: another roll-forward was first
            context.storage.discard(path, context.layout.private)
        return
    for file in naming.names_at_the_end(context, own_name):
        try:
            return context.storage.move(path, f"{context.layout.processed}/{file}", is_generated)
        except FileExistsError:  # a file of the same name was archived before: both stay
            continue
        except FileNotFoundError:
            if is_missing(path):
                return None  # RACE: another roll-forward was first
            raise


def is_generated(path: str) -> bool:
    """Return whether the id in a path's name is a generated one: only a copy made by hand has the same name."""
    return bool(names.tells_time(os.path.basename(path)))


def settled(context: QueueContext, own_name: str, location: Location, *folders: str, fate: str = UNSYNCED) -> Location:
    """Free the credits of a message that was moved, and sync the folders of its move; return its location."""
    credits.free(context, own_name)
    sync_settled(context, *folders, location=location, fate=fate)
    return location


def sync_settled(context: QueueContext, *folders: str, location: Location | None = None, fate: str = UNSYNCED) -> None:
    """Sync what was moved from the last folder, if the queue's durability asks for it; if it fails, `fate` is said."""
    if not context.storage.syncs_folders:
        return
    try:
        context.storage.sync(*(folders[::-1] if context.storage.leaves_both_names(folders[-1]) else folders))
    except OSError as error:
        failed = storage_error(error, fate)
        failed.location = location
        raise failed from error


def known_of(claim: Claim, details: Mapping[str, object] | None) -> dict[str, object]:
    """Return what a reason says of a delivery, besides what its holder said of it."""
    arrived = {"arrived": time_text(claim.arrival)} if claim.arrival else {}
    return {"owner": claim.owner, "delivery": claim.number, **arrived, **(details or {})}


def _refusal(queue: str | None, error: DropqError | OSError) -> str:
    cause = error.__cause__
    if not isinstance(error, StorageError) or not isinstance(cause, OSError):
        return str(error)
    return f"the dead-letter queue {queue} refuses it: {describe(cause)}"
