"""The contract for settling messages, and the plain claims of a queue: one rename makes a claim, one settles it.

The shares of a barrier and the records of a bundle are settled by the same five verbs.
"""

from __future__ import annotations

import errno
import logging
import os
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Protocol, Unpack

from dropq.format import names
from dropq.format.claims import Claim, Location, claim_id
from dropq.format.layout import DEAD_LETTER
from dropq.format.message_file import MessageFile
from dropq.lifecycle import credits, naming
from dropq.lifecycle.context import OfQueue, QueueContext
from dropq.lifecycle.endings import Details, HowReturned, ended_as, returned, why_returned
from dropq.lifecycle.moving import Moves, is_generated, known_of, move_with_reason, settled, sync_settled
from dropq.lifecycle.processing import find_renewed, move_out
from dropq.lifecycle.sending import move_to_wait
from dropq.storage import reading
from dropq.storage.clock import pass_tick
from dropq.storage.failures import error_context, storage_error

log = logging.getLogger("dropq")

#: The reason of a message in error/ whose body was written to between its claim and its ack.
BODY_CHANGED = (
    "its body was changed while it was worked on: undo what was done with it, and requeue it; a settle_time that is "
    "longer than its writer's pauses prevents this"
)


class Settlement(Protocol):
    """What settles claims. One rename decides about each verb; without it, nothing in the state folders has changed.

    Raises:
        LeaseLost: the claim is gone; nothing was changed.
        StorageError: the message is still held; or, if the error has a `location`, it was moved and not synced.
    """

    context: QueueContext

    def archive(self, claim: Claim, *, later: dict[str, None] | None = None) -> Location:
        """Acknowledge a message; sync that at once, or note in `later` which folders the caller is to sync."""

    def give_back(self, claim: Claim, **how: Unpack[HowReturned]) -> Location:
        """Let a message wait for its next delivery, or end it if it has reached a limit."""

    def set_aside(
        self, claim: Claim, state: str, reason: str, details: Details | None = None, *, cancel: bool = False
    ) -> Location:
        """Refuse a message: it goes to error/, expired/ or the dead-letter queue, with a reason."""

    def extend(self, claim: Claim, deadline: int) -> Claim:
        """Give a claim a new deadline, in ms since 1970; return it."""

    def release(self, claim: Claim, *, counted: bool = True) -> Location:
        """Return a message as a consumer that ends does; uncounted, it is as if it had not been delivered."""
        return self.give_back(claim, counted=counted, delay=None if counted else 0)


class Claims(OfQueue, Settlement):
    """The claims of one queue: each is made by one rename, and settled by one."""

    def __init__(self, context: QueueContext) -> None:
        super().__init__(context)
        self._moves = Moves(context)

    def claim(
        self, file: MessageFile, owner: str, deadline: int, *, again: bool = False, state: str = "target"
    ) -> Claim | None:
        """Claim a waiting message; return None if another consumer was first, or somebody writes to its file.

        Its lease runs out at the `deadline`, in ms since 1970; 0 for never. `again` keeps in its name the claim whose
        lease ran out, as the same stream claims it again. It waits in the `state` target, or delayed.
        """
        number, own_name = (1, file.filename) if file.plain else naming.next_delivery(self.context, file, again=again)
        layout = self._layout
        folder = layout.target if state == "target" else layout.folder(state)
        claim = Claim(owner, deadline, number, own_name, layout.processing, file.arrival)
        try:
            seen = self.context.settling.seen(file, folder)
            if seen.due:
                return None
            # RACE: with each consumer of the queue, and any script. The process whose rename succeeds has the message.
            self._storage.rename(f"{folder}/{file.filename}", claim.path)
        except FileNotFoundError as error:
            with self.context.error_context(f"the message stays in {state}/, unless another process took it"):
                if not reading.exists(self._layout.processing):
                    raise storage_error(error, f"processing/ is missing; the message stays in {state}/") from error
            return None
        except OSError as error:
            raise storage_error(error, f"the message stays in {state}/") from error
        claim.taken = monotonic()
        if seen.body is not None:
            claim.body = self.context.settling.claimed(seen, claim.path)
        return claim

    def is_changed(self, claim: Claim) -> bool:
        """Return whether somebody has written to a claimed body since it was claimed, as far as that is known."""
        return claim.body is not None and move_out(self.context, claim, self.context.settling.version) != claim.body

    def set_changed_aside(self, claim: Claim) -> Location:
        """Move a claimed message to error/ whose body somebody wrote to while it was worked on."""
        log.warning(
            "queue %s: message %s goes to error/: %s",
            *(self.context.name, self._sidecars.parse(claim.own_name).id, BODY_CHANGED),
        )
        return self.set_aside(claim, "error", "body_changed", {"detail": BODY_CHANGED})

    def archive(self, claim: Claim, *, later: dict[str, None] | None = None) -> Location:
        """Acknowledge a claimed message: move it to processed/, or remove it if the queue keeps no history.

        If somebody has written to its body since the claim, it goes to error/, with the reason `body_changed`.
        """
        if claim.body is not None:
            pass_tick(claim.body.written)
            if self.is_changed(claim):
                return self.set_changed_aside(claim)
        if not self._config.history:
            move_out(self.context, claim, self._storage.discard, self._layout.private)
            self._ended("acked", claim.own_name, claim)
            credits.free(self.context, claim.own_name)
            return self._sync_ack(Location("removed", ""), later)
        file = claim.own_name
        others = None
        marked = names.may_be_marked(file)
        if claim.number != 1 or marked:
            others = naming.kept_names(self.context, naming.counted(self.context, claim))
            file = next(others)
        while True:
            try:
                self._storage.move(claim.path, f"{self._layout.processed}/{file}", is_generated)
                break
            except FileExistsError as error:  # a file of the same name was archived before: both stay
                others = others or naming.kept_names(self.context, naming.counted(self.context, claim))
                if not (file := next(others, "")):  # the last one was new: a failing disk says so of any name
                    raise storage_error(error, f"the message stays in processing/ as {claim.filename}") from error
            except OSError as error:
                find_renewed(self.context, claim, error)
        self._ended("acked", claim.own_name, claim)
        if marked:
            credits.free(self.context, claim.own_name)
        location = Location("processed", file)
        return self._sync_ack(location, later) if self._storage.syncs_folders else location

    def _sync_ack(self, location: Location, later: dict[str, None] | None) -> Location:
        """Sync an ack, if the queue's durability asks for it, or note what the caller syncs later."""
        folders = (self._layout.processed,) if self._config.history else ()
        if later is None:
            sync_settled(self.context, *folders, self._layout.processing, location=location)
        else:
            later.update(dict.fromkeys((*folders, self._layout.processing)))
        return location

    def archive_uncounted(self, claim: Claim) -> Location:
        """Archive a claimed message that nobody was given, as `archive` does."""
        claim.number -= 1
        return self.archive(claim)

    def give_back(self, claim: Claim, *, lapsed: str = "", **how: Unpack[HowReturned]) -> Location:
        """Return a claimed message to target/, or to delayed/; or end it, as `after_delivery` decides.

        Its name shows the `lapsed` claim, whose lease ran out, to a stream that claims the message again.
        """
        name, state, reason, details = returned(self.context, claim, **how)
        if reason:
            return self.set_aside(claim, state, reason, details, cancel=how.get("cancel", False))
        if lapsed:
            name = replace(name, lapsed=lapsed)
        elif claim.ours and not (name.generated or name.mark):
            name = replace(name, foreign=False, copy=claim_id(claim.owner))  # the same from now on: see `distinction`
        move, is_marked = partial(move_to_wait, self.context), bool(name.mark) and not lapsed
        location = Location(state, move_out(self.context, claim, move, name, claim.arrival, is_marked))
        if how.get("counted", True):
            why, said = why_returned(**how)
            self._ended("returned", claim.own_name, claim, reason=why, details=said)
        sync_settled(self.context, self._layout.folder(state), self._layout.processing, location=location)
        return location

    def set_aside(
        self, claim: Claim, state: str, reason: str, details: Details | None = None, *, cancel: bool = False
    ) -> Location:
        """Move a claimed message to error/ or expired/ with a reason; `cancel` as for give_back.

        With the state `dead-letter` it goes to the dead-letter queue, as `Moves.to_dead_letter` says.
        """
        if state == DEAD_LETTER:
            location = self._moves.to_dead_letter(claim, reason, details, cancel=cancel)
            assert location is not None  # a claim that is gone raises LeaseLost
            return location
        name, move = naming.counted(self.context, claim, cancel=cancel), partial(move_with_reason, self.context)
        file = move_out(self.context, claim, move, state, name, reason, known_of(claim, details))
        self._ended(ended_as(state, reason), claim.own_name, claim, reason=reason, details=details)
        folders = self._layout.folder(state), self._layout.processing
        return settled(self.context, claim.own_name, Location(state, file), *folders)

    def extend(self, claim: Claim, deadline: int) -> Claim:
        """Give a claim a new deadline, in ms since 1970; return it."""
        renewed = Claim(claim.owner, deadline, claim.number, claim.own_name, self._layout.processing, ours=claim.ours)
        move_out(self.context, claim, self._storage.rename, renewed.path)
        claim.follow(renewed)
        return claim

    def hold_privately(self, claim: Claim) -> str:
        """Move a claimed message to a private folder, for at-most-once without a history; return its path there."""
        folder = f"{self._layout.held}/{claim.owner}"
        with error_context("the message stays where it was"):
            self._storage.make_folder(folder)
        path = f"{folder}/{claim.own_name}"
        move_out(self.context, claim, self._storage.rename, path)
        self._ended("acked", claim.own_name, claim)
        credits.free(self.context, claim.own_name)
        return path


def drop_private(context: QueueContext, path: str) -> None:
    """Remove a message that was held privately, and its folder; after a crash, a sweep does it."""
    context.storage.unlink(path)
    try:
        context.storage.remove_folder(os.path.dirname(path))
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
        # An NFS client keeps the file under another name while a process has it open: a sweep removes that, too.
