"""The transitions of a message: one method and one rename each, with the metadata in the new name.

No other module chooses a message's name when its state changes. A method either makes its one rename, or changes
nothing in the state folders.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar, TypeVarTuple

from dropq.errors import DropqError, LeaseLost, NoSuchQueue, StorageError
from dropq.format import names
from dropq.format.claims import Claim, Location, claim_id
from dropq.format.credits import Via, may_have_via
from dropq.format.layout import DEAD_LETTER, WAITING, WITH_REASON, QueueLayout
from dropq.format.message_file import MessageFile
from dropq.format.names import Name
from dropq.format.transfers import given_name
from dropq.lifecycle import credits, dead_letters, giving, transfers
from dropq.lifecycle.claims import renewed
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.endings import delay_before, ending
from dropq.lifecycle.known_queues import copied_in
from dropq.lifecycle.open_queue import open_queue, open_root
from dropq.storage import reading
from dropq.storage.clock import pass_tick, utc
from dropq.storage.failures import describe, storage_error

log = logging.getLogger("dropq")

#: The largest count that a name can hold.
LARGEST = 2**31 - 1
#: What became of a message that was moved, but not synced.
SETTLED = "the message is settled, but a power cut may undo it and deliver it again"
UNSYNCED_ROUTE = "the message went to its route, but a power cut may bring it back"
#: Why a message is in error/ whose body was written to between its claim and its ack.
BODY_CHANGED = (
    "its body was changed while it was worked on: undo what was done with it, and requeue it; a settle_time that is "
    "longer than its writer's pauses prevents this"
)
#: The location of a message that went to a route.
ROUTED = "routing"

T = TypeVar("T")
Rest = TypeVarTuple("Rest")


class Transitions:
    """The transitions of one queue's messages.

    Args:
        context: the queue.
    """

    def __init__(self, context: QueueContext) -> None:
        self.context = context
        self._layout = context.layout
        self._config = context.config
        self._storage = context.storage
        self._sidecars = context.sidecars
        self._reasons = context.reasons
        self._clock = context.clock
        self._asked: dict[str, int] = {}  # of the rows that were given to, see `giving.row_to`

    def close(self) -> None:
        """End what the object keeps open."""

    # -- sending: working -> target | delayed --------------------------------------------------------------

    def stage(self, file: str, data: bytes | memoryview, *, synced: bool = True) -> None:
        """Write a body into working/, under the name that the message will have; `synced` as for `write_new`."""
        try:
            self._storage.write_new(f"{self._layout.working}/{file}", data, synced=synced)
        except OSError as error:
            raise self.not_sent(error) from error

    def send_new(self, file: str, data: bytes | memoryview, *, not_before: int = 0) -> bool | None:
        """Write a body and send it; make it as durable as the queue's configuration asks.

        Where this publishes to a topic, return whether every receiver has the message; else None.

        Args:
            file: the message's file name.
            data: the body.
            not_before: when it may be delivered, in ms; 0 for at once.
        """
        staged = f"{self._layout.working}/{file}"
        try:
            self._storage.write_new(staged, data)
        except OSError as error:
            raise self.not_sent(error) from error
        try:
            self._storage.rename(staged, f"{self.sent_to(not_before) if not_before else self._layout.target}/{file}")
        except OSError as error:
            raise self._take_back(staged, error) from error
        if self._storage.syncs_folders:
            self.sent(not_before=not_before)
        return None

    def send(self, file: str, *, not_before: int = 0, adopted: str = "") -> bool | None:
        """Send a staged file: the rename is the send; return what `send_new` does.

        Args:
            file: its name in working/.
            not_before: when it may be delivered, in ms; 0 for at once.
            adopted: the path of a file that is sent instead, which stays where it is if it cannot be sent.
        """
        staged = adopted or f"{self._layout.working}/{file}"
        try:
            self._storage.rename(staged, f"{self.sent_to(not_before) if not_before else self._layout.target}/{file}")
        except OSError as error:
            raise self._take_back(staged, error, adopted) from error
        return None

    def _take_back(self, staged: str, error: OSError, adopted: str = "") -> DropqError:
        """Remove a staged file that could not be sent, unless it is an adopted one; return the error to raise."""
        with suppress(OSError):  # fsck finds the file if it stays
            if not adopted:
                self._storage.unlink(staged)
        return self.not_sent(error)

    def not_sent(self, error: OSError) -> DropqError:
        """Return the error for a send that failed before its rename, or at it."""
        return self.context.refused(error, "the message was not sent")

    def sent(self, *, not_before: int = 0) -> None:
        """Sync a send, if the queue's durability asks for it."""
        try:
            self._storage.sync(self._sent_folder(not_before), self._layout.working)
        except OSError as error:
            if names.is_temporary(self.context.name) and not reading.exists(self._layout.target):
                return  # RACE: its requester has the answer already, and removed the queue
            fate = "the message is visible, but a power cut may take it back: do not send it again"
            failed = storage_error(error, fate)
            failed.unsynced = True
            raise failed from error

    def sent_to(self, not_before: int) -> str:
        """Return the folder that a message is sent to: target/, or delayed/ until its delay is over."""
        folder = self._sent_folder(not_before)
        if not_before:
            self._storage.make_folder(folder)
        return folder

    def _sent_folder(self, not_before: int) -> str:
        return self._layout.delayed if not_before else self._layout.target

    def deliver_delayed(self, file: str) -> bool:
        """Move a message whose delay is over into target/; return False if another process moved it first.

        A copy mark stays in its name, as a worker that gave the message back recognizes it by the mark.
        """
        name = replace(self._sidecars.parse(file), not_before=0)
        return self.into_target(f"{self._layout.delayed}/{file}", name, unique=bool(name.mark)) is not None

    # -- claiming: target -> processing ----------------------------------------------------------------------

    def claim(
        self, file: MessageFile, owner: str, deadline: int, *, again: bool = False, state: str = "target"
    ) -> Claim | None:
        """Claim a waiting message; return None if another consumer was first, or somebody writes to its file.

        Args:
            file: the message.
            owner: what identifies the claim.
            deadline: when its lease runs out, in ms since 1970; 0 for never.
            again: keep in its name whose lease ran out: the same stream claims it again.
            state: where it waits: target, or delayed to settle it before its delay is over.
        """
        number, own_name = (1, file.filename) if file.plain else self.next_delivery(file, again=again)
        layout = self._layout
        folder = layout.target if state == "target" else layout.folder(state)
        claim = Claim(owner, deadline, number, own_name, layout.processing, file.arrival)
        try:
            due, claim.body = self.context.settling.seen(file, folder)
            if due:
                return None
            # RACE: with each consumer of the queue, and any script. The process whose rename succeeds has the message.
            self._storage.rename(f"{folder}/{file.filename}", claim.path)
        except FileNotFoundError as error:
            if not reading.exists(self._layout.processing):
                raise storage_error(error, f"processing/ is missing; the message stays in {state}/") from error
            return None
        except OSError as error:
            raise storage_error(error, f"the message stays in {state}/") from error
        return claim

    def settles_at(self, file: MessageFile) -> int:
        """Return when a file in target/ has settled, in ms since 1970; 0 if it has. Nobody is to take it before."""
        try:
            return self.context.settling.seen(file, self._layout.target).due
        except FileNotFoundError:
            return 0  # who takes it will see that it is gone

    def is_changed(self, claim: Claim) -> bool:
        """Return whether somebody has written to a claimed body since it was claimed, as far as that is known.

        Raises:
            LeaseLost: the claim is gone.
        """
        return claim.body is not None and self._move_out(claim, self.context.settling.version) != claim.body

    def _set_changed_aside(self, claim: Claim) -> Location:
        """Move a claimed message to error/ whose body somebody wrote to while it was worked on."""
        log.warning(
            "queue %s: message %s goes to error/: %s",
            *(self.context.name, self._sidecars.parse(claim.own_name).id, BODY_CHANGED),
        )
        return Transitions.set_aside(self, claim, "error", "body_changed", {"detail": BODY_CHANGED})

    def next_delivery(self, file: MessageFile, *, again: bool = False) -> tuple[int, str]:
        """Return the number of a file's next delivery, and its name without a claim prefix that was left by hand."""
        name, own_name = file.name, file.own_name
        if problems := file.problems:
            self._sidecars.warn(own_name, problems)
        count = file.delivery_count
        unmark = name.lapsed and not again  # only the stream whose lease ran out needs the mark
        if unmark or len(own_name) > self._layout.name_budget or not own_name.isascii():
            name = name.unmarked if unmark else name
            own_name = self._sidecars.fit(replace(name, delivery_count=count, not_before=0))
        return count + 1, own_name

    # -- settling: out of processing -------------------------------------------------------------------------

    def archive(self, claim: Claim, *, synced: bool = True) -> Location:
        """Acknowledge a claimed message: move it to processed/, or remove it if the queue keeps no history.

        If somebody has written to its body since the claim, it goes to error/, with the reason `body_changed`.

        Args:
            claim: the claim.
            synced: sync it at once; else the caller syncs many by `archived`.

        Raises:
            LeaseLost: the claim is gone; nothing was changed.
            StorageError: the move failed, or the sync after it.
        """
        if claim.body is not None:
            pass_tick(claim.body.written)
            if self.is_changed(claim):
                return self._set_changed_aside(claim)
        if not self._config.history:
            self._move_out(claim, self._storage.discard, self._make_folder(self._layout.private))
            location = Location("removed", "")
            self._free(claim.own_name)
            if synced:
                self.archived(location)
            return location
        layout, file = self._layout, claim.own_name
        others = None
        marked = names.may_be_marked(file)
        if claim.number != 1 or marked:
            others = self._kept_names(self._counted(claim))
            file = next(others)
        while True:
            try:
                self._storage.move(claim.path, f"{layout.processed}/{file}")
                break
            except FileExistsError:  # a file of the same name was archived before: both stay
                others = others or self._kept_names(self._counted(claim))
                file = next(others)
            except OSError as error:
                self._find_renewed(claim, error)
        location = Location("processed", file)
        if marked:
            self._free(claim.own_name)
        if synced and self._storage.syncs_folders:
            self.archived(location)
        return location

    def archive_uncounted(self, claim: Claim) -> Location:
        """Archive a claimed message that nobody was given, as `archive` does."""
        claim.number -= 1
        return self.archive(claim)

    def archived(self, location: Location | None = None, fate: str = SETTLED) -> None:
        """Sync acks, if the queue's durability asks for it; if that fails, the error says `fate`."""
        folders = (self._layout.processed,) if self._config.history else ()
        self._sync_settled(*folders, self._layout.processing, location=location, fate=fate)

    def end_whole(self, path: str, own_name: str, end: str = "processed") -> None:
        """Archive a message whose parts have all been moved, or return it to target/; do nothing if it is gone.

        Args:
            path: where it lies, as `whole` of its staged folder.
            own_name: its file name; in target/, a unique one.
            end: processed, where it goes as by `archive`; target; or unlink, where parts of it take its place.
        """
        if end == "target":
            with suppress(FileNotFoundError):  # RACE: another roll-forward was first
                self._storage.place(path, f"{self._layout.target}/{own_name}")
            return
        self._free(own_name)  # before the last trace is gone: nobody would free them after a crash but a look
        if end == "unlink" or not self._config.history:
            with suppress(FileNotFoundError):  # RACE: another roll-forward was first
                self._storage.discard(path, self._make_folder(self._layout.private))
            return
        for file in self._names_at_the_end(own_name):
            try:
                return self._storage.move(path, f"{self._layout.processed}/{file}")
            except FileExistsError:  # a file of the same name was archived before: both stay
                continue
            except FileNotFoundError:
                if not reading.exists(path):
                    return None  # RACE: another roll-forward was first
                raise

    def _names_at_the_end(self, own_name: str) -> Iterator[str]:
        if not names.may_be_marked(own_name):
            yield own_name
        yield from self._kept_names(self._sidecars.parse(own_name).unmarked)

    def end_part(self, path: str, state: str, own_name: str, reason: str) -> None:
        """Move a part of a committed message to a state of its queue; do nothing if another process moved it first.

        Args:
            path: where it lies, in its staged folder.
            state: error, expired, target, delayed or processed.
            own_name: its file name there; if that is taken, it gets another copy mark.
            reason: the path of the file that says why it goes there, which names it and its inode.
        """
        folder = self._layout.folder(state)
        move = self._storage.move
        try:
            if state in WAITING:
                self._storage.make_folder(folder)
                move = self._storage.place
            elif state in WITH_REASON:
                self._reasons.adopt(reason, state, own_name, inode := reading.inode(path))
            file = own_name
            try:
                move(path, f"{folder}/{own_name}")
            except FileExistsError:  # somebody made a file of its name: both stay
                unneeded = file = self.copy_name(self._sidecars.parse(own_name))
                copied = state in WITH_REASON and self._reasons.copy(state, own_name, file, inode)
                try:
                    # RACE: it may be another roll-forward that has just moved the part to this name, or reserves it.
                    move(path, f"{folder}/{file}")
                    unneeded = own_name
                finally:
                    if copied:
                        self._reasons.withdraw(state, unneeded, inode)
            if state in WITH_REASON:
                self._reasons.keep(state, file, inode)
        except FileNotFoundError:
            if reading.exists(path):
                raise
            # RACE: another roll-forward was first

    def set_part_aside(self, path: str, own_name: str, reason: str, details: Mapping[str, object]) -> None:
        """Move a part of a committed message, which cannot reach its receiver any more, to error/ with a reason."""
        name = self.marked(self._sidecars.parse(own_name))
        with suppress(FileNotFoundError):  # RACE: another roll-forward was first
            self._move_with_reason(path, "error", name, reason, details)
            self._sync_settled(self._layout.error)

    def letters_from_error(self, letters: Mapping[str, str]) -> set[str]:
        """Move messages on from error/ to the dead-letter queue; return the file names of those that went.

        If that queue is missing or refuses one, it stays, with its reason. A crash leaves each in one of the two.

        Args:
            letters: why each cannot be delivered, in a word of at most 32 bytes, by its file name.
        """
        paths = {file: self._letter_from_error(file, reason) for file, reason in letters.items()}
        folders = {os.path.dirname(path) for path in paths.values() if path}
        try:
            if folders:
                self._sync_settled(*folders, self._layout.error)
        except StorageError as error:
            log.warning("queue %s: %s", self.context.name, error)
        return {file for file, path in paths.items() if path}

    def _letter_from_error(self, file: str, reason: str) -> str | None:
        source = f"{self._layout.error}/{file}"
        try:
            inode, name = reading.inode(source), self._sidecars.parse(file).unmarked
            path = self._move_to_letters(source, self._find_letters(name), name, reason)
        except (OSError, DropqError) as error:
            log.warning("%s stays, and `dropq move` takes it to the dead-letter queue: %s", source, describe(error))
            return None
        self._reasons.drop("error", file, inode)
        return path

    def hold_privately(self, claim: Claim) -> str:
        """Move a claimed message to a private folder, for at-most-once without a history; return its path there."""
        folder = self._make_folder(f"{self._layout.held}/{claim.owner}")
        path = f"{folder}/{claim.own_name}"
        self._move_out(claim, self._storage.rename, path)
        self._free(claim.own_name)
        return path

    def drop_private(self, path: str) -> None:
        """Remove a message that was held privately, and its folder; after a crash, a sweep does it."""
        self._storage.unlink(path)
        try:
            self._storage.remove_folder(os.path.dirname(path))
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
            # An NFS client keeps the file under another name while a process has it open: a sweep removes that, too.

    def give_back(
        self,
        claim: Claim,
        *,
        cancel: bool = False,
        counted: bool = True,
        delay: float | None = None,
        lapsed: str = "",
        failure: Mapping[str, object] | None = None,
    ) -> Location:
        """Return a claimed message to target/, or to delayed/.

        A message that reached a limit goes where `exhausted` says instead, as `dropq/lifecycle/endings.py` decides.

        Args:
            claim: the claim.
            cancel: count a cancel: its holder asked for this.
            counted: count the delivery.
            delay: seconds before the next delivery; None for the queue's redelivery_delay.
            lapsed: the claim whose lease ran out, which the name is to show to a stream that claims it again.
            failure: what to keep with the reason if its handler failed, and this was the last try.
        """
        name = replace(self._counted(claim, cancel=cancel, counted=counted), lapsed=lapsed)
        failed = failure is not None
        if end := ending(self.context, name, failed=failed, cancel=cancel, counted=counted):
            return self.set_aside(claim, end.state, end.reason, failure, cancel=cancel)
        wait = delay_before(self.context, name, died=claim.died) if delay is None else delay
        name = replace(name, not_before=self._clock.now_ms() + int(wait * 1000) if wait > 0 else 0)
        if claim.ours and not (name.generated or name.mark or lapsed):
            name = replace(name, foreign=False, copy=claim_id(claim.owner))  # the same from now on: see `distinction`
        return self._move_back(claim, name)

    def release(self, claim: Claim, *, counted: bool = True) -> Location:
        """Return a claimed message as a consumer that ends does; `counted` as for `give_back`."""
        return self.give_back(claim, counted=counted, delay=None if counted else 0)

    def _move_back(self, claim: Claim, name: Name) -> Location:
        """Move a claimed message to where it waits for its next delivery, under its new name."""
        is_marked = bool(name.mark) and not name.lapsed
        file = self._move_out(claim, self._move_to_wait, name, claim.arrival, is_marked)
        location = Location("delayed" if name.not_before else "target", file)
        self._sync_settled(self._sent_folder(name.not_before), self._layout.processing, location=location)
        return location

    def set_aside(
        self,
        claim: Claim,
        state: str,
        reason: str,
        details: Mapping[str, object] | None = None,
        *,
        cancel: bool = False,
    ) -> Location:
        """Move a claimed message to error/ or expired/ with a reason; `cancel` as for give_back.

        With the state `dead-letter` it goes to the dead-letter queue, as `to_dead_letter` says.
        """
        if state == DEAD_LETTER:
            location = self.to_dead_letter(claim, reason, details, cancel=cancel)
            assert location is not None  # a claim that is gone raises LeaseLost
            return location
        name = self._counted(claim, cancel=cancel)
        fields = _known_of(claim, details)
        location = Location(state, self._move_out(claim, self._move_with_reason, state, name, reason, fields))
        self._free(claim.own_name)
        self._sync_settled(self._layout.folder(state), self._layout.processing, location=location)
        return location

    def expire_waiting(self, file: MessageFile, reason: str = "time_limit", state: str = "target") -> bool:
        """Move a message from target/, or delayed/, to expired/ with a reason; return False if it is gone."""
        folder = self._layout.folder(state)
        source = f"{folder}/{file.filename}"
        try:
            self._move_with_reason(source, "expired", file.name.unmarked, reason, {})
        except FileNotFoundError as error:
            if reading.exists(source):
                raise storage_error(error, f"expired/ is missing; the message stays in {state}/") from error
            return False  # RACE: a consumer claimed it, and delivers it although its time is over
        except OSError as error:
            raise storage_error(error, f"the message stays in {state}/") from error
        self._free(file.own_name)
        self._sync_settled(self._layout.expired, folder)
        return True

    def extend(self, claim: Claim, deadline: int) -> Claim:
        """Give a claim a new deadline, in ms since 1970; return it.

        Raises:
            LeaseLost: the claim is gone; nothing was changed.
        """
        renewed = Claim(claim.owner, deadline, claim.number, claim.own_name, self._layout.processing, ours=claim.ours)
        self._move_out(claim, self._storage.rename, renewed.path)
        claim.follow(renewed)
        return claim

    # -- dead letters: processing, target -> another queue's target -------------------------------------------

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

        If that queue is missing or refuses the message, or none is named, or the message is a dead letter that has made
        all its hops, it goes to error/, with the reason.
        If that queue lies on another file system, the message goes to a row for it. A crash leaves it where it was or
        there.

        Args:
            message: its claim; or its file, if it waits unclaimed.
            reason: why it cannot be delivered, in a word of at most 32 bytes.
            details: what else to keep with the reason if it goes to error/.
            cancel: count a cancel, as for `give_back`.
            state: where it waits unclaimed: target, or delayed.

        Returns:
            The location, with the state `dead-letter` or `error`; None if it waited, and another process took it first.

        Raises:
            LeaseLost: the claim is gone; nothing was changed.
            StorageError: it stays where it was; or, if the error has a `location`, it was moved and not synced.
        """
        if isinstance(message, Claim):
            name = self._counted(message, cancel=cancel)
            fields = _known_of(message, details)
            leave = partial(self._move_out, message)
            return self._end_as_letter(leave, self._layout.processing, name, reason, fields, message.own_name)
        folder = self._layout.folder(state)
        leave = partial(self._move_waiting, f"{folder}/{message.filename}")
        name = replace(message.name.unmarked, delivery_count=message.delivery_count)
        try:
            return self._end_as_letter(leave, folder, name, reason, details or {}, message.own_name)
        except FileNotFoundError:
            return None  # RACE: a consumer claimed it, or another process moved it

    def _end_as_letter(
        self,
        leave: Callable[..., str],
        folder: str,
        name: Name,
        reason: str,
        details: Mapping[str, object],
        own_name: str,
    ) -> Location:
        """Move a message to the dead-letter queue, else to error/.

        Args:
            leave: calls a move with the message's path and more arguments.
            folder: the folder that it leaves.
            name, reason, details: what its name says, and why it goes.
            own_name: its file name until now.
        """
        queue = self._config.dead_letter_queue
        try:
            letters = self._find_letters(name)
            path = leave(self._move_to_letters, letters, name, reason)
        except (NoSuchQueue, StorageError) as error:
            why = _refusal(queue, error)
            details = {**details, "detail": "; ".join(str(text) for text in (details.get("detail"), why) if text)}
            location = Location("error", leave(self._move_with_reason, "error", name, reason, details))
            self._free(own_name)
            log.warning("queue %s: message %s went to error/: %s", self.context.name, name.id, why)
            self._sync_settled(self._layout.error, folder, location=location)
            return location
        location = Location(DEAD_LETTER, os.path.basename(path))
        self._free(own_name)
        self._sync_settled(os.path.dirname(path), folder, location=location)
        return location

    def _find_letters(self, name: Name) -> QueueLayout:
        queue = self._config.dead_letter_queue
        if why := dead_letters.why_no_more(name):
            raise NoSuchQueue(why)
        if queue is None:
            raise NoSuchQueue("no dead_letter_queue is set")
        with self.context.error_context("the dead-letter queue cannot be looked at"):
            letters = dead_letters.find_layout(self.context.root.layout.path, queue)
        if letters is None:
            raise NoSuchQueue(f"the dead-letter queue {queue} is missing")
        return letters

    def _move_to_letters(self, source: str, letters: QueueLayout, name: Name, reason: str) -> str:
        """Move a file into the target/ of a dead-letter queue, where it replaces nothing; return its path there."""
        name = dead_letters.letter(name, self.context.name, reason, self._clock.now_ms())
        sidecars = dead_letters.sidecars_at(self.context, letters)
        if name.meta:
            sidecars.make_known()
        file = sidecars.fit(self.unique(name))
        try:
            return self._add(source, letters.target, file, lambda: sidecars.fit(self.marked(name)))
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
        goal = transfers.Goal(self.context.root.layout, self._config.dead_letter_queue or "", letters)
        return self._move_to_row(source, self._row_to(goal).given, name)

    def _add(self, source: str, folder: str, file: str, marked: Callable[[], str]) -> str:
        """Move a file into a folder, where it replaces nothing; return its path there.

        No name is reserved first: behind a link, the empty file would be a message of another queue.

        Args:
            source: its path.
            folder: the folder.
            file: its name there, unless it is taken.
            marked: returns a name with a copy mark, which is never taken.
        """
        try:
            if self._storage.place_in_kernel(source, path := f"{folder}/{file}"):
                return path
        except FileExistsError:  # the id came there by another way: both stay
            pass
        self._storage.rename(source, path := f"{folder}/{marked()}")
        return path

    def _move_waiting(self, source: str, move: Callable[..., str], *args: object) -> str:
        """Move an unclaimed file by `move(path, ...)`; FileNotFoundError if it is gone."""
        try:
            return move(source, *args)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not reading.exists(source):
                raise
            raise storage_error(error, f"the message stays where it was, {source}") from error

    # -- routing: processing, target -> routing/ROUTE -----------------------------------------------------------

    def route(self, claim: Claim, folder: str) -> Location:
        """Move a claimed message into a route's folder, under its own name; the delivery is not counted.

        Raises:
            LeaseLost: the claim is gone; nothing was changed.
            StorageError: it stays in processing/; or, if the error has a `location`, it was moved and not synced.
        """
        path = self._move_out(claim, self._move_to_route, folder, claim.own_name)
        location = Location(ROUTED, os.path.basename(path))
        self._free(claim.own_name)
        self._sync_settled(os.path.dirname(path), self._layout.processing, location=location, fate=UNSYNCED_ROUTE)
        return location

    def route_waiting(self, file: MessageFile, folder: str) -> Location | None:
        """Move a waiting message into a route's folder without a claim; return None if it is gone, or written to.

        A crash leaves it in target/ or in the folder.

        Raises:
            StorageError: it stays in target/; or, if the error has a `location`, it was moved and not synced.
        """
        if self.settles_at(file):
            return None
        source = f"{self._layout.target}/{file.filename}"
        try:
            # RACE: with each consumer of the queue, and any script. The process whose rename succeeds has the message.
            path = self._move_to_route(source, folder, self.next_delivery(file)[1])
        except FileNotFoundError as error:
            if reading.exists(source):
                raise storage_error(error, f"{folder} is missing; the message stays in target/") from error
            return None
        except OSError as error:
            raise storage_error(error, "the message stays in target/") from error
        location = Location(ROUTED, os.path.basename(path))
        self._free(file.own_name)
        self._sync_settled(os.path.dirname(path), self._layout.target, location=location, fate=UNSYNCED_ROUTE)
        return location

    def _move_to_route(self, source: str, folder: str, file: str) -> str:
        """Move a file into a route's folder, where it replaces nothing; return its path there.

        Where the folder is a link to a queue on another file system, the file goes to the row for that queue.
        """
        if may_have_via(file) or names.may_be_copied(file):
            file = self._sidecars.fit(replace(self._sidecars.parse(file), via="", copied=""))
        if not names.tells_time(file) and self._is_ignored_at(folder, file):
            file = self.coded(file, reading.changed_ms(source))
        try:
            return self._add(source, folder, file, lambda: self.copy_name(self._sidecars.parse(file)))
        except OSError as error:
            goal = transfers.behind(folder) if error.errno == errno.EXDEV else None
            if goal is None:
                raise
        return self._move_to_row(source, self._row_to(goal).given, self._sidecars.parse(file))

    def _is_ignored_at(self, folder: str, file: str) -> bool:
        """Return whether the queue behind a route's folder takes a file for no message, or may do so."""
        if not os.path.islink(folder) or os.path.basename(target := os.path.realpath(folder)) != "target":
            return False
        goal = transfers.behind(folder)
        if goal is None:
            return True  # of a topic, or a subscription: what feeds it knows a coded name, too
        try:
            is_near = os.path.samefile(goal.root.path, self.context.root.layout.path)
            root = self.context.root if is_near else open_root(goal.root.path, self._clock)
            return bool(open_queue(root, goal.queue).sidecars.ignored(file))
        except (OSError, DropqError) as error:
            log.info("%s: whether %s is ignored there is not known: %s", target, file, describe(error))
            return True

    # -- bringing back: error, expired, processed -> target ---------------------------------------------------

    def requeue(self, source: str, filename: str, to: QueueContext, *, keep_expiration: bool = False) -> str | None:
        """Move a file into a queue's target/ as if it were new: counters and the queue's clock start again.

        Args:
            source: the folder that it is in.
            filename: its name there.
            to: the queue that it goes to, which may be this one.
            keep_expiration: keep its own expiration; else drop it.

        Returns:
            Its name in target/, or in the row for that queue if it lies on another file system; None if another process
            moved it first.
        """
        file = self._sidecars.file(filename)
        name = self._restarted(file, to)
        if keep_expiration:
            name = replace(name, expiration=file.name.expiration)
        if source == self._layout.processing and to.layout.home == self._layout.home:
            return self._move_to_queue(source, filename, to, replace(name, via=file.name.via))
        return self._leave(source, filename, to, name)

    def name_of_whole(self, filename: str, bundle: str, first: int, *, keep_expiration: bool = False) -> str:
        """Return the file name of the new message that parts of a bundle become.

        Args:
            filename: the file name of the first of them.
            bundle: the id of the bundle.
            first: the number of the first line, row or frame.
            keep_expiration: keep the expiration of the first; else drop it.
        """
        file = self._sidecars.file(filename)
        name = self._sidecars.whole(self._restarted(file, self.context))
        expiration = file.name.expiration if keep_expiration else 0
        name = replace(name, id=bundle, first=first, record=0, records=0, expiration=expiration)
        return self.copy_name(name)

    def move(self, source: str, filename: str, to: QueueContext) -> str | None:
        """Move a file into a queue's target/ with its counters and expiration; arguments and result as `requeue`."""
        file = self._sidecars.file(filename)
        # The name of a foreign file in error/ or expired/ tells neither its tries nor its arrival: its reason does.
        name = self._reasons.complete(os.path.basename(source), filename, file.name)
        tries = max(name.delivery_count, file.delivery_count)
        name = replace(name, delivery_count=tries, not_before=0, lapsed="", via="")
        name = replace(name, copied=self._stays_copied(name, to))
        return self._leave(source, filename, to, name)

    def move_on(self, file: MessageFile, to: QueueContext, via: Via) -> str | None:
        """Move a waiting message into another queue's target/, under a credit that was spent on it.

        Counters and the queue's clock start again there; the hop counts. The credits under which it came stay.

        Args:
            file: the message.
            to: the queue.
            via: the credit.

        Returns:
            Its name there, as of `requeue`; None if another process took it first.
        """
        name = replace(_uncounted(file.name.unmarked), via=str(via), copied="")
        if name.reason:  # a dead letter that is moved on is none any more
            name = replace(self._sidecars.whole(name), reason="", origin="")
        name = replace(name, hops=name.hops + 1, since=to.clock.now_ms())
        return self._move_to_queue(self._layout.target, file.filename, to, name)

    def return_to(
        self, folder: str, filename: str, to: QueueContext, via: Via | None, *, copied: bool = False
    ) -> str | None:
        """Return a message to the queue that a selector had moved it from; a consumer that holds it loses the claim.

        Args:
            folder: the folder that it is in.
            filename: its name there.
            to: the queue.
            via: the credit under which it had come there; None if it had come under none. From another file system the
                message comes back under none, as no look would find it on its way: this credit is freed.
            copied: whether its copies were made there before it was moved.

        Returns:
            Its name there, as of `requeue`; None if it is gone.
        """
        name = self._sidecars.file(filename, folder).name.unmarked
        name = replace(_uncounted(name), hops=max(name.hops - 1, 0))
        name = replace(name, via=str(via or ""), since=to.clock.now_ms(), copied="")
        if copied:
            with to.error_context("the message stays where it was"):
                name = replace(name, copied=copied_in(transfers.own_mark(to)))
        try:
            return self._place(folder, filename, to, name)
        except StorageError as error:
            if error.errno != errno.EXDEV:
                raise
        given = self._give_to(f"{folder}/{filename}", to, replace(name, via=""))
        if given is not None and via is not None:
            credits.free_under(self.context, via, filename)
        return given

    def bounce(self, file: MessageFile, to: QueueContext) -> str | None:
        """Move a waiting message to its return address, which is kept as `return_to`; result as of `move_on`."""
        name = self._sidecars.whole(file.name.unmarked)
        name = replace(_uncounted(name), via="", copied="", hops=name.hops + 1)
        name = replace(
            name, reply_to=None, return_to=name.reply_to or "", since=to.clock.now_ms(), reason="", origin=""
        )
        return self._leave(self._layout.target, file.filename, to, name)

    def _leave(self, source: str, filename: str, to: QueueContext, name: Name) -> str | None:
        """Move a file to a queue under a name without credits, and free those under which it had come."""
        moved = self._move_to_queue(source, filename, to, name)
        if moved is not None:
            self._free(filename)
        return moved

    def _free(self, file: str) -> None:
        """Free the credits under which a message had come that has been settled."""
        if may_have_via(file):
            credits.free(self.context, file)

    def _move_to_queue(self, source: str, filename: str, to: QueueContext, name: Name) -> str | None:
        """Move a file to a queue; give it to a row if the queue lies on another file system."""
        try:
            return self._place(source, filename, to, name)
        except StorageError as error:
            if error.errno != errno.EXDEV:
                raise
        return self._give_to(f"{source}/{filename}", to, name)

    def _place(self, source: str, filename: str, to: QueueContext, name: Name) -> str | None:
        """Move a file to a queue by one rename; raise StorageError with EXDEV where none leads there."""
        file = Transitions(to).into_target(f"{source}/{filename}", self._name_in(to, name))
        if file is not None:
            self._sync_settled(source)
        return file

    def _name_in(self, to: QueueContext, name: Name) -> Name:
        """Return a name as another queue can have it: without a sidecar of this root, if that queue is in another."""
        if to.layout.home != self._layout.home:
            with to.error_context("the message stays where it was"):
                alone = to.storage.refuses_to_replace(to.layout.private)
            name = name if alone else self.unique(name, chosen=True)  # a copy of the message may be there
        if to.sidecars.folder != self._sidecars.folder:
            name = self._sidecars.whole(name)  # another root has sidecars of its own
        elif name.meta:
            with to.error_context("the message stays where it was"):
                to.sidecars.make_known()
        return name

    # -- to another file system: any state -> .dropq/transfers/ROW/target, and a copy of it in that queue -----------

    def _give_to(self, path: str, to: QueueContext, name: Name) -> str | None:
        """Give a file to the row for a queue; return its name there, or None if another process moved it first."""
        with self.context.error_context("the message stays where it was"):
            row = self._row_to(transfers.Goal(to.root.layout, to.name, to.layout))
        return self.give(path, name, row.given)

    def _row_to(self, goal: transfers.Goal) -> transfers.Row:
        return giving.row_to(self.context, goal, self._asked)

    def give(self, path: str, name: Name, given: str) -> str | None:
        """Move a file into a row, from which no consumer takes it, and a carrier copies it to another file system.

        The move is not synced: the carrier does that before it copies.

        Args:
            path: the path of the file.
            name: what its new name says.
            given: the row's folder.

        Returns:
            Its name there, which no file had before; None if another process moved it first.
        """
        try:
            return os.path.basename(self._move_to_row(path, given, name))
        except FileNotFoundError as error:
            if reading.exists(path):
                raise storage_error(error, f"{given} is missing; the message stays where it was") from error
            return None
        except OSError as error:
            raise storage_error(error, "the message stays where it was") from error

    def _move_to_row(self, path: str, folder: str, name: Name) -> str:
        """Move a file into the folder of a row, under a name that no file had before; return its path there."""
        if not name.generated and not name.since:
            name = replace(name, since=reading.changed_ms(path))  # keeps its place in the order
        given = f"{folder}/{given_name(os.urandom(8).hex(), self._sidecars.fit(self.unique(name)))}"
        # RACE: with each consumer, and any script. The process whose rename succeeds has the message.
        self._storage.rename(path, given)
        return given

    def name_of_copy(self, given: str, name: Name, to: QueueContext) -> str:
        """Return the file name that the copy of a given message gets in its queue.

        Args:
            given: the path of the message.
            name: what its new name says.
            to: the queue.

        Raises:
            FileNotFoundError: the message is gone.
        """
        if not name.generated and not name.since:
            name = replace(name, since=reading.changed_ms(given))
        return to.sidecars.fit(self.unique(self._name_in(to, name)))

    # -- replaying: a copy of what is in processed -> target ---------------------------------------------------

    def replay(self, filename: str, to: QueueContext) -> str | None:
        """Send a copy of an archived message, marked as a replay that was delivered once; the original stays.

        A crash leaves at most the copy in working/, as a send does.

        Args:
            filename: its name in processed/.
            to: the queue that the copy goes to, which may be this one.

        Returns:
            The copy's name in target/; None if the message is not in the archive any more.
        """
        # Its one delivery was an ack. The mark says so to readers by records, who take other deliveries for deaths.
        name = replace(self._restarted(self._sidecars.file(filename), to), delivery_count=1, replayed=True)
        return self._copy_to(filename, to, name)

    def copy_archived(self, filename: str, to: QueueContext) -> str | None:
        """Send a copy of an archived message for its first delivery; its expiration stays; result as of `replay`.

        Args:
            filename: its name in processed/.
            to: the subscription that the copy is for.
        """
        name = replace(_uncounted(self._sidecars.parse(filename)), via="")
        name = replace(name, lapsed="", from_client="", copied="", since=to.root.ids.moment(name.id))
        return self._copy_to(filename, to, name)

    def _copy_to(self, filename: str, to: QueueContext, name: Name) -> str | None:
        if to.sidecars.folder != self._sidecars.folder:
            name = self._sidecars.whole(name)  # another root has sidecars of its own
        copy = to.sidecars.fit(Transitions(to).unique(name, chosen=True))  # the original has the same id
        source = f"{self._layout.processed}/{filename}"
        try:
            to.storage.copy(source, f"{to.layout.working}/{copy}")
        except OSError as error:
            if reading.is_gone(error) and not reading.exists(source):
                return None  # RACE: another process pruned or requeued it
            raise Transitions(to).not_sent(error) from error
        Transitions(to).send(copy)
        Transitions(to).sent()
        return copy

    def _restarted(self, file: MessageFile, to: QueueContext) -> Name:
        """Return the name of a message that starts again in a queue: without counters, expiration and early ack.

        In another queue it is no dead letter any more.
        """
        name = file.name
        if name.reason and to.layout.home != self._layout.home:
            name = replace(self._sidecars.whole(name), origin="", reason="")  # the origin may be in the sidecar
        if name.generated:
            with to.error_context("the message stays where it was"):
                to.storage.unlink(f"{to.layout.acks}/{name.id}")  # an early ack was for the delivery before
        name = replace(_uncounted(name), via="", hops=0, expiration=0, lapsed="")
        return replace(name, since=to.root.ids.moment(name.id), copied=self._stays_copied(name, to))

    def _stays_copied(self, name: Name, to: QueueContext) -> str:
        """Return what a name says of copies that were made, as it goes to a queue: nothing to another than this one."""
        return name.copied if to.layout.home == self._layout.home else ""

    def remove(self, state: str, file: str) -> bool:
        """Remove a message for good, with its reason; return False if it is gone."""
        path = f"{self._layout.folder(state)}/{file}"
        try:
            inode = reading.inode(path)
            self._storage.discard(path, self._make_folder(self._layout.private))
        except FileNotFoundError:
            return False
        except OSError as error:
            raise storage_error(error, f"the message stays in {state}/") from error
        self._reasons.drop(state, file, inode)
        self._free(file)
        self._sync_settled(self._layout.folder(state))
        return True

    # -- names ---------------------------------------------------------------------------------------------------

    def _counted(self, claim: Claim, *, cancel: bool = False, counted: bool = True) -> Name:
        name = self._sidecars.parse(claim.own_name).unmarked
        number = claim.number if counted else claim.number - 1
        cancels, died = min(name.cancels + cancel, LARGEST), min(name.died + claim.died, LARGEST)
        return replace(name, delivery_count=min(number, LARGEST), cancels=cancels, died=died)

    def unique(self, name: Name, *, chosen: bool = False) -> Name:
        """Return a name that no other file has: a generated id is unique, any other name gets a random mark.

        Args:
            name: the name.
            chosen: a sender chose its id, perhaps twice: it gets a mark even if the id looks generated.
        """
        if name.generated and not chosen:
            return name
        is_unique = name.lapsed or name.via  # each by itself
        return replace(name, foreign=False, copy="" if is_unique else names.copy_mark(name))

    def _kept_names(self, name: Name) -> Iterator[str]:
        """Yield the names to try in processed/, expired/ and error/: a foreign file's own first, a unique name last."""
        own = self._sidecars.full(name).born_foreign if name.meta else name.born_foreign
        if own is not None and not self._sidecars.ignored(own):
            yield own
        elif not name.foreign:
            yield self._sidecars.fit(replace(name, not_before=0))
        yield self.copy_name(replace(name, not_before=0))

    def copy_name(self, name: Name) -> str:
        """Return a file name for a message whose own name is taken: with a mark that no other has."""
        return self._sidecars.fit(self.marked(name))

    def coded(self, file: str, arrival: int) -> str:
        """Return the name of a foreign file as a coded one, which no queue takes for no message.

        Args:
            file: its name.
            arrival: when it came, in ms since 1970: it keeps its place in the order.
        """
        name = self._sidecars.parse(file)
        return self.copy_name(replace(name, since=name.since or arrival))

    def marked(self, name: Name) -> Name:
        """Return a name with a mark that no other has."""
        return replace(name, foreign=False, copy=names.copy_mark(name))

    # -- moves ---------------------------------------------------------------------------------------------------

    def _move_out(self, claim: Claim, move: Callable[[str, *Rest], T], *args: *Rest) -> T:
        """Move a claimed file by `move(path, ...)`; if its lease was renewed, move it under its new name."""
        while True:
            try:
                return move(claim.path, *args)
            except FileExistsError:
                raise
            except OSError as error:
                self._find_renewed(claim, error)

    def _find_renewed(self, claim: Claim, error: OSError) -> None:
        """Find the new name of a claim that could not be moved because its lease was renewed.

        Args:
            claim: the claim; it takes over the new name.
            error: the error of the move.

        Raises:
            LeaseLost: the claim is gone.
            StorageError: the move failed for another reason.
        """
        try:
            if not isinstance(error, FileNotFoundError):
                raise error
            now = None if claim.exact else renewed(self.context, claim)
            if now is None or now.path == claim.path:
                raise error
            claim.follow(now)
        except FileNotFoundError as missing:
            # RACE: a sweep, an expiry or an administrator was first. No two claims ever share a name, so this move
            # cannot have touched a later claim on the message.
            if not reading.exists(self._layout.processing):
                fate = "the queue is not where it was: the message went with it, and is still held"
                raise storage_error(missing, fate) from missing
            if reading.exists(claim.path):
                fate = f"the folder it should go to is missing; the message stays in processing/ as {claim.filename}"
                raise storage_error(missing, fate) from missing
            raise LeaseLost(self._lost(claim)) from missing
        except OSError as refused:
            raise storage_error(refused, f"the message stays in processing/ as {claim.filename}") from refused

    def _lost(self, claim: Claim) -> str:
        return (
            f"message {self._sidecars.parse(claim.own_name).id}: claim {claim.owner} on queue {self._layout.home} is "
            "gone (its lease ran out, it expired, or somebody else settled or requeued it); nothing was changed"
        )

    def _move_with_reason(self, source: str, state: str, name: Name, reason: str, details: Mapping[str, object]) -> str:
        """Write the reason, then move the file; return its name. The reason counts only once the file is there."""
        inode = reading.inode(source)
        fields = {"delivery": name.delivery_count, **details, "reason": reason, "time": _text(self._clock.now_ms())}
        if name.cancels:
            fields["cancels"] = name.cancels
        if not name.generated:  # the file may get its own name back, which tells neither its tries nor a time
            arrived = None if name.since else details.get("arrived")
            fields["arrived"] = arrived or _text(name.since or reading.changed_ms(source))
        for file in self._kept_names(name):
            self._reasons.record(state, file, inode, fields)
            moved = f"{self._layout.folder(state)}/{file}"
            try:
                self._storage.move(source, moved)
            except FileExistsError:  # a foreign file of the same name is there: both stay
                self._reasons.withdraw(state, file, inode)
            except OSError:
                if reading.inode_or_none(moved) != inode:  # RACE: else another process moved it there: the reason stays
                    self._reasons.withdraw(state, file, inode)
                raise
            else:
                self._reasons.keep(state, file, inode)
                return file
        raise AssertionError("unreachable: the last name tried is unique")

    def _move_to_wait(self, source: str, name: Name, arrival: int = 0, unique: bool = False) -> str:
        """Move a file into target/, or delayed/, under a unique name; return that. `unique`: the name is already."""
        folder = self.sent_to(name.not_before)
        if not name.generated and not name.since:
            name = replace(name, since=arrival or reading.changed_ms(source))  # keeps its place in the order
        file = self._sidecars.fit(name if unique else self.unique(name))
        try:
            self._storage.place(source, f"{folder}/{file}")
        except FileExistsError:  # somebody copied a message with its id: both stay
            file = self.copy_name(name)
            self._storage.place(source, f"{folder}/{file}")
        return file

    def into_target(self, source: str, name: Name, *, unique: bool = False) -> str | None:
        """Move a file into target/ under a unique name; return the name, or None if the file is gone.

        Args:
            source: its path.
            name: what its new name says.
            unique: `name` is unique already.
        """
        try:
            file = self._move_to_wait(source, name, unique=unique)
        except FileNotFoundError:
            if not reading.exists(self._layout.target):
                raise NoSuchQueue(f"queue {self._layout.home} is not there any more; {source} was not moved") from None
            return None  # RACE: another process moved it first
        except OSError as error:
            raise storage_error(error, f"the message stays where it was, {source}") from error
        try:
            self._storage.sync(self._layout.target)
        except OSError as error:
            raise storage_error(error, "the message is in target/; do not move it again") from error
        return file

    def _sync_settled(self, *folders: str, location: Location | None = None, fate: str = SETTLED) -> None:
        if not self._storage.syncs_folders:
            return
        try:
            self._storage.sync(*folders)
        except OSError as error:
            failed = storage_error(error, fate)
            failed.location = location
            raise failed from error

    def _make_folder(self, folder: str) -> str:
        try:
            self._storage.make_folder(folder)
        except OSError as error:
            raise storage_error(error, "the message stays where it was") from error
        return folder


def _uncounted(name: Name) -> Name:
    """Return a name without what was counted of its message; it stays the part of a bundle that it was."""
    return replace(name, delivery_count=0, cancels=0, died=0, not_before=0, cut=0, replayed=False)


def _known_of(claim: Claim, details: Mapping[str, object] | None) -> dict[str, object]:
    """Return what a reason says of a delivery, besides what its holder said of it."""
    arrived = {"arrived": _text(claim.arrival)} if claim.arrival else {}
    return {"owner": claim.owner, "delivery": claim.number, **arrived, **(details or {})}


def _text(ms: int) -> str:
    """Return a time as reasons have it."""
    return utc(ms).isoformat(timespec="milliseconds")


def _refusal(queue: str | None, error: DropqError) -> str:
    """Return why a message cannot go to a dead-letter queue."""
    cause = error.__cause__
    if not isinstance(error, StorageError) or not isinstance(cause, OSError):
        return str(error)
    return f"the dead-letter queue {queue} refuses it: {describe(cause)}"
