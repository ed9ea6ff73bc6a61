"""The arrows of a message's life: one method each, one rename each, its metadata in the new name.

No other module decides what a message is called when its state changes. Every method either made its one rename or
changed nothing that a reader of the state folders could see.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import TypeVar, TypeVarTuple

from dropq.errors import DropqError, LeaseLost, NoSuchQueue
from dropq.format import names
from dropq.format.claims import Claim, Location
from dropq.format.message_file import MessageFile
from dropq.format.names import Name
from dropq.lifecycle.claims import renewed
from dropq.lifecycle.context import QueueContext
from dropq.storage import reading
from dropq.storage.failures import storage_error

log = logging.getLogger("dropq")

#: The largest count that a name can hold.
LARGEST = 2**31 - 1
#: What became of a message whose last sync was refused.
SETTLED = "the message is settled, but a power cut may undo it and deliver it again"

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

    # -- sending: working -> target | delayed --------------------------------------------------------------

    def stage(self, file: str, data: bytes | memoryview, *, synced: bool = True) -> None:
        """Write a body into working/ under the name that it will be sent by; `synced` as for `write_new`."""
        try:
            self._storage.write_new(f"{self._layout.working}/{file}", data, synced=synced)
        except OSError as error:
            raise self.not_sent(error) from error

    def send_new(self, file: str, data: bytes | memoryview, *, not_before: int = 0) -> None:
        """Write a body, and send it, as durable as the queue's durability asks.

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

    def send(self, file: str, *, not_before: int = 0, back_to: str | None = None) -> None:
        """Send a staged file: the rename is the send.

        Args:
            file: its name in working/.
            not_before: when it may be delivered, in ms; 0 for at once.
            back_to: where it goes when it cannot be sent; None removes it.
        """
        staged = f"{self._layout.working}/{file}"
        try:
            self._storage.rename(staged, f"{self.sent_to(not_before) if not_before else self._layout.target}/{file}")
        except OSError as error:
            raise self._take_back(staged, error, back_to) from error

    def _take_back(self, staged: str, error: OSError, back_to: str | None = None) -> DropqError:
        """Remove a staged file that could not be sent, or move it back; return the error to raise."""
        with suppress(OSError):  # what cannot be taken away now, fsck finds
            if back_to is None:
                self._storage.unlink(staged)
            else:
                self._storage.move(staged, back_to)
        return self.not_sent(error)

    def not_sent(self, error: OSError) -> DropqError:
        """Return the error for a send that was refused before its rename."""
        return self.context.refused(error, "the message was not sent")

    def sent(self, *, not_before: int = 0) -> None:
        """Make what was sent durable, as far as the queue's durability asks."""
        try:
            self._storage.sync(self._sent_folder(not_before), self._layout.working)
        except OSError as error:
            fate = "the message is visible, but a power cut may take it back: do not send it again"
            raise storage_error(error, fate) from error

    def sent_to(self, not_before: int) -> str:
        """Return the folder that a message is sent to: target/, or delayed/ where it has to wait first."""
        folder = self._sent_folder(not_before)
        if not_before:
            self._storage.make_folder(folder)
        return folder

    def _sent_folder(self, not_before: int) -> str:
        return self._layout.delayed if not_before else self._layout.target

    def deliver_delayed(self, file: str) -> bool:
        """Move a message whose delay is over into target/; False when somebody else did.

        A mark that makes its name unique stays: a worker that gave it back knows it again by that.
        """
        name = replace(self._sidecars.parse(file), not_before=0)
        return self.into_target(f"{self._layout.delayed}/{file}", name, marked=bool(name.copy)) is not None

    # -- claiming: target -> processing ----------------------------------------------------------------------

    def claim(
        self, file: MessageFile, owner: str, deadline: int, *, again: bool = False, state: str = "target"
    ) -> Claim | None:
        """Take a message that waits; None when somebody else has it.

        Args:
            file: the message.
            owner: what identifies the claim.
            deadline: when its lease runs out, in ms since 1970; 0 for never.
            again: its name goes on telling whose lease ran out, since it is the same stream that takes it.
            state: where it lies: target, or delayed for who settles it before its time.
        """
        number, own_name = (1, file.filename) if file.plain else self.next_delivery(file, again=again)
        layout = self._layout
        folder = layout.target if state == "target" else layout.folder(state)
        claim = Claim(owner, deadline, number, own_name, layout.processing, file.arrival)
        try:
            # RACE: every consumer of the queue, and any script; whose rename succeeds has the message.
            self._storage.rename(f"{folder}/{file.filename}", claim.path)
        except FileNotFoundError as error:
            if not reading.exists(self._layout.processing):
                raise storage_error(error, f"processing/ is missing; the message stays in {state}/") from error
            return None
        except OSError as error:
            raise storage_error(error, f"the message stays in {state}/") from error
        return claim

    def next_delivery(self, file: MessageFile, *, again: bool = False) -> tuple[int, str]:
        """Return the number of the next delivery of a file, and its name without a prefix left by hand."""
        name, own_name = file.name, file.own_name
        if problems := file.problems:
            self._sidecars.tell(own_name, problems)
        count = file.delivery_count
        marked = name.lapsed and not again  # whoever else takes it leaves no word of that in the name
        if marked or len(own_name) > names.NAME_BUDGET or not own_name.isascii():
            name = name.unmarked if marked else name
            own_name = self._sidecars.fit(replace(name, delivery_count=count, not_before=0))
        return count + 1, own_name

    # -- settling: out of processing -------------------------------------------------------------------------

    def archive(self, claim: Claim, *, synced: bool = True) -> Location:
        """Move a held message to processed/, the ack; remove it where no history is kept.

        Args:
            claim: the claim.
            synced: make it durable at once; else `archived` does, for many.

        Raises:
            LeaseLost: the claim is gone; nothing was changed.
            StorageError: the move was refused, or could not be made durable.
        """
        if not self._config.history:
            self._leave(claim, self._storage.discard, self._private())
            location = Location("removed", "")
            if synced:
                self.archived(location)
            return location
        layout, file = self._layout, claim.own_name
        others = None
        if claim.number != 1 or names.may_be_marked(file):
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
                self._follow(claim, error)
        location = Location("processed", file)
        if synced and self._storage.syncs_folders:
            self.archived(location)
        return location

    def archived(self, location: Location | None = None, fate: str = SETTLED) -> None:
        """Make what was archived durable, as far as the queue's durability asks; else `fate` is told."""
        folders = (self._layout.processed,) if self._config.history else ()
        self._settled(*folders, self._layout.processing, location=location, fate=fate)

    def hold_privately(self, claim: Claim) -> str:
        """Move a held message to a private place, for at-most-once without a history; return the path."""
        folder = f"{self._layout.held}/{claim.owner}"
        self._made(folder)
        path = f"{folder}/{claim.own_name}"
        self._leave(claim, self._storage.rename, path)
        return path

    def drop_private(self, path: str) -> None:
        """Remove a body that was withheld, with its folder; a crash leaves what a sweep clears when its holder ends."""
        self._storage.unlink(path)
        try:
            self._storage.remove_folder(os.path.dirname(path))
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
            # An NFS client keeps the file, under another name, while somebody has it open: a sweep clears that, too.

    def give_back(
        self,
        claim: Claim,
        *,
        cancel: bool = False,
        counted: bool = True,
        delay: float | None = None,
        lapsed: str = "",
    ) -> Location:
        """Return a held message to target/, or to delayed/.

        A message that has been delivered `max_deliveries` times, or cancelled `max_cancels` times, goes where
        `exhausted` says instead.

        Args:
            cancel: its holder gave it back of its own will, which counts as a cancel.
            counted: the delivery counts.
            delay: seconds before it may be delivered again; None asks the queue's redelivery_delay.
            lapsed: which claim's lease ran out, for the name to say to a holder that may come again.
        """
        name = replace(self._counted(claim, cancel=cancel, counted=counted), lapsed=lapsed)
        if reason := self._exhausted(name, cancel=cancel, counted=counted):
            return self.set_aside(claim, self._config.exhausted, reason, cancel=cancel)
        wait = self._redelivery_delay(name) if delay is None else delay
        name = replace(name, not_before=self._clock.now_ms() + int(wait * 1000) if wait > 0 else 0)
        return self._put_back(claim, name)

    def _put_back(self, claim: Claim, name: Name) -> Location:
        """Move a held message to where it waits for its next delivery, under its new name."""
        file = self._leave(claim, self._placed, name, claim.arrival)
        location = Location("delayed" if name.not_before else "target", file)
        self._settled(self._sent_folder(name.not_before), self._layout.processing, location=location)
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
        """Move a held message to error/ or expired/ with a reason; `cancel` as for give_back."""
        fields = {"owner": claim.owner, "delivery": claim.number, **(details or {})}
        for file in self._kept_names(self._counted(claim, cancel=cancel)):
            try:
                self._leave(claim, self._explained, state, file, reason, fields)
            except FileExistsError:
                continue  # a foreign file of the same name lies there: both stay
            location = Location(state, file)
            self._settled(self._layout.folder(state), self._layout.processing, location=location)
            return location
        raise AssertionError("unreachable: the last name tried is unique")

    def expire_waiting(self, file: MessageFile, reason: str = "time_limit") -> bool:
        """Move a message from target/ to expired/ with a reason; False when somebody else took it."""
        source = f"{self._layout.target}/{file.filename}"
        for kept in self._kept_names(file.name.unmarked):
            try:
                self._explained(source, "expired", kept, reason, {})
            except FileExistsError:
                continue
            except FileNotFoundError as error:
                if reading.exists(source):
                    raise storage_error(error, "expired/ is missing; the message stays in target/") from error
                return False  # RACE: a consumer claimed it, and delivers what has just run out
            except OSError as error:
                raise storage_error(error, "the message stays in target/") from error
            self._settled(self._layout.expired, self._layout.target)
            return True
        raise AssertionError("unreachable: the last name tried is unique")

    def extend(self, claim: Claim, deadline: int) -> Claim:
        """Give a claim a new deadline, in ms since 1970; return it.

        Raises:
            LeaseLost: the claim is gone; nothing was changed.
        """
        renewed = Claim(claim.owner, deadline, claim.number, claim.own_name, self._layout.processing, ours=claim.ours)
        self._leave(claim, self._storage.rename, renewed.path)
        claim.follow(renewed)
        return claim

    # -- bringing back: error, expired, processed -> target ---------------------------------------------------

    def requeue(self, source: str, filename: str, to: QueueContext, *, keep_expiration: bool = False) -> str | None:
        """Move a file into a queue's target/ as if it were new: counters and the queue's clock start again.

        Args:
            source: the folder that it lies in.
            filename: its name there.
            to: the queue that it goes to, which may be this one.
            keep_expiration: its own expiration stays; else it is dropped.

        Returns:
            Its name in target/; None when somebody else took it.
        """
        file = self._sidecars.file(filename)
        name = self._anew(file, to)
        if keep_expiration:
            name = replace(name, expiration=file.name.expiration)
        return self._carried(source, filename, to, name)

    def carry(self, source: str, filename: str, to: QueueContext) -> str | None:
        """Move a file into a queue's target/ with its counters and its expiration as they are; as for requeue."""
        file = self._sidecars.file(filename)
        name = replace(file.name, delivery_count=file.delivery_count, not_before=0, lapsed="")
        return self._carried(source, filename, to, name)

    def _carried(self, source: str, filename: str, to: QueueContext, name: Name) -> str | None:
        if to.sidecars.folder != self._sidecars.folder:
            name = self._sidecars.whole(name)  # another root has sidecars of its own
        elif name.meta:
            to.sidecars.make_known()
        placed = Transitions(to).into_target(f"{source}/{filename}", name)
        if placed is not None:
            self._settled(source)
        return placed

    # -- replaying: a copy of what is in processed -> target ---------------------------------------------------

    def replay(self, filename: str, to: QueueContext) -> str | None:
        """Send a copy of an archived message, as one that was delivered once before; the archive keeps its own.

        Whoever dies meanwhile leaves at most the copy in working/, as a send does.

        Args:
            filename: its name in processed/.
            to: the queue that the copy goes to, which may be this one.

        Returns:
            The copy's name in target/; None when the message is not in the archive any more.
        """
        name = replace(self._anew(self._sidecars.file(filename), to), delivery_count=1)
        if to.sidecars.folder != self._sidecars.folder:
            name = self._sidecars.whole(name)  # another root has sidecars of its own
        copy = to.sidecars.fit(Transitions(to).unique(name, chosen=True))  # the archive has its id already
        source = f"{self._layout.processed}/{filename}"
        try:
            to.storage.copy(source, f"{to.layout.working}/{copy}")
        except OSError as error:
            if reading.is_gone(error) and not reading.exists(source):
                return None  # RACE: somebody pruned or requeued it
            raise Transitions(to).not_sent(error) from error
        Transitions(to).send(copy)
        Transitions(to).sent()
        return copy

    def _anew(self, file: MessageFile, to: QueueContext) -> Name:
        """Return the name of a message that begins anew in a queue: its counters, its expiration, the queue's clock."""
        name = file.name
        if name.generated:
            with to.error_context("the message stays where it was"):
                to.storage.unlink(f"{to.layout.acks}/{name.id}")  # an ack that is remembered was of its life before
        begun = replace(name, delivery_count=0, cancels=0, not_before=0, via="", hops=0, expiration=0, lapsed="")
        return replace(begun, since=to.clock.now_ms())

    def remove(self, state: str, file: str) -> bool:
        """Remove a message for good, with its reason; False when somebody else took it."""
        path = f"{self._layout.folder(state)}/{file}"
        try:
            inode = reading.inode(path)
            self._storage.discard(path, self._private())
        except FileNotFoundError:
            return False
        except OSError as error:
            raise storage_error(error, f"the message stays in {state}/") from error
        self._reasons.drop(state, file, inode)
        self._settled(self._layout.folder(state))
        return True

    # -- names ---------------------------------------------------------------------------------------------------

    def _counted(self, claim: Claim, *, cancel: bool = False, counted: bool = True) -> Name:
        name = self._sidecars.parse(claim.own_name).unmarked
        number = claim.number if counted else claim.number - 1
        cancels = min(name.cancels + cancel, LARGEST)
        return replace(name, delivery_count=min(number, LARGEST), cancels=cancels)

    def _exhausted(self, name: Name, *, cancel: bool, counted: bool) -> str | None:
        config = self._config
        if counted and config.max_deliveries and name.delivery_count >= config.max_deliveries:
            return "max_deliveries"
        if cancel and config.max_cancels and name.cancels >= config.max_cancels:
            return "max_cancels"
        return None

    def _redelivery_delay(self, name: Name) -> float:
        """Return the seconds that a message waits after a delivery; the limit is not for the first wait."""
        config, tries = self._config, max(name.delivery_count - 1, 0)
        if not config.redelivery_delay:
            return 0
        longest = max(config.redelivery_delay, config.redelivery_delay_limit)
        try:
            return min(config.redelivery_delay * config.redelivery_backoff**tries, longest)
        except OverflowError:
            return longest

    def unique(self, name: Name, *, chosen: bool = False) -> Name:
        """Code a name so that no other file has it: a generated id sees to that, any other takes a random mark.

        Args:
            name: the name.
            chosen: its id was given by a sender, who may give it twice, of whatever form it is.
        """
        if name.generated and not chosen:
            return name
        return replace(name, foreign=False, copy="" if name.lapsed else os.urandom(5).hex())  # either is unique

    def _kept_names(self, name: Name) -> Iterator[str]:
        """Yield the names to try in processed/, expired/ and error/: a foreign file's own first, last a unique one."""
        own = self._sidecars.full(name).born_foreign if name.meta else name.born_foreign
        if own is not None and not self._sidecars.ignored(own):
            yield own
        elif not name.foreign:
            yield self._sidecars.fit(replace(name, not_before=0))
        yield self._copy_name(replace(name, not_before=0))

    def _copy_name(self, name: Name) -> str:
        return self._sidecars.fit(replace(name, foreign=False, copy=os.urandom(5).hex()))

    # -- moves ---------------------------------------------------------------------------------------------------

    def _leave(self, claim: Claim, move: Callable[[str, *Rest], T], *args: *Rest) -> T:
        """Take a held file out of processing/ by `move(path, ...)`, whatever its deadline is by now."""
        while True:
            try:
                return move(claim.path, *args)
            except FileExistsError:
                raise
            except OSError as error:
                self._follow(claim, error)

    def _follow(self, claim: Claim, error: OSError) -> None:
        """Find the new name of a claim that could not be moved because its lease was renewed.

        Args:
            claim: the claim; it takes over the new name.
            error: of the move.

        Raises:
            LeaseLost: the claim is gone.
            StorageError: the move was refused for another reason.
        """
        try:
            if not isinstance(error, FileNotFoundError):
                raise error
            now = None if claim.exact else renewed(self.context, claim)
            if now is None or now.path == claim.path:
                raise error
            claim.follow(now)
        except FileNotFoundError as missing:
            # RACE: a sweep, an expiry or an administrator was first. The claim's name is its own for ever, so this
            # cannot touch the claim of whoever has the message now.
            if not reading.exists(self._layout.processing):
                fate = "the queue is not where it was: the message went with it, and is still held"
                raise storage_error(missing, fate) from missing
            if reading.exists(claim.path):
                fate = (
                    f"the folder that it should go to is missing; the message stays in processing/ as {claim.filename}"
                )
                raise storage_error(missing, fate) from missing
            raise LeaseLost(self._lost(claim)) from missing
        except OSError as refused:
            raise storage_error(refused, f"the message stays in processing/ as {claim.filename}") from refused

    def _lost(self, claim: Claim) -> str:
        return (
            f"message {self._sidecars.parse(claim.own_name).id}: claim {claim.owner} on queue {self._layout.home} is "
            "gone (its lease ran out, it expired, or somebody else settled or requeued it); nothing was changed"
        )

    def _explained(self, source: str, state: str, file: str, reason: str, details: Mapping[str, object]) -> None:
        """Write the reason, then move the file: the reason counts only once the file is there."""
        inode = reading.inode(source)
        time = datetime.fromtimestamp(self._clock.now_ms() / 1000, UTC).isoformat(timespec="milliseconds")
        self._reasons.record(state, file, inode, {"reason": reason, "time": time, **details})
        try:
            self._storage.move(source, f"{self._layout.folder(state)}/{file}")
        except OSError:
            self._reasons.drop(state, file, inode)
            raise

    def _placed(self, source: str, name: Name, arrival: int = 0, marked: bool = False) -> str:
        """Rename a file into target/, or delayed/, under a name of its own, unless `marked` so; return the name."""
        folder = self.sent_to(name.not_before)
        if not name.generated and not name.since:
            name = replace(name, since=arrival or reading.changed_ms(source))  # keeps its place in the order
        file = self._sidecars.fit(name if marked else self.unique(name))
        try:
            self._storage.place(source, f"{folder}/{file}")
        except FileExistsError:  # somebody copied a message, id and all: both stay
            file = self._copy_name(name)
            self._storage.place(source, f"{folder}/{file}")
        return file

    def into_target(self, source: str, name: Name, *, marked: bool = False) -> str | None:
        """Rename a file into target/ under a name of its own; return the name, None when it is gone.

        Args:
            source: where it lies.
            name: what its new name says.
            marked: that is unique already.
        """
        try:
            file = self._placed(source, name, marked=marked)
        except FileNotFoundError:
            if not reading.exists(self._layout.target):
                raise NoSuchQueue(f"queue {self._layout.home} is not there any more; {source} was not moved") from None
            return None  # RACE: somebody else moved it first
        except OSError as error:
            raise storage_error(error, f"the message stays where it was, {source}") from error
        try:
            self._storage.sync(self._layout.target)
        except OSError as error:
            raise storage_error(error, "the message is in target/; do not move it again") from error
        return file

    def _settled(self, *folders: str, location: Location | None = None, fate: str = SETTLED) -> None:
        if not self._storage.syncs_folders:
            return
        try:
            self._storage.sync(*folders)
        except OSError as error:
            refused = storage_error(error, fate)
            refused.location = location
            raise refused from error

    def _private(self) -> str:
        return self._made(self._layout.private)

    def _made(self, folder: str) -> str:
        try:
            self._storage.make_folder(folder)
        except OSError as error:
            raise storage_error(error, "the message stays where it was") from error
        return folder
