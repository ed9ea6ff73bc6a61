"""The arrows of a message's life: one method each, one rename each, its metadata in the new name.

No other module decides what a message is called when its state changes. Every method either made its one rename or
changed nothing that a reader of the state folders could see.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import NamedTuple, TypeVar, TypeVarTuple

from dropq import names, storage
from dropq.config import QueueConfig
from dropq.errors import DropqError, LeaseLost, NoSuchQueue
from dropq.layout import QueueLayout
from dropq.names import Claim, Name
from dropq.reasons import Reasons
from dropq.sidecars import Sidecars
from dropq.storage import Clock, Storage, storage_error

log = logging.getLogger("dropq")

#: The largest count that a name can hold.
LARGEST = 2**31 - 1
#: What became of a message whose last sync was refused.
SETTLED = "the message is settled, but a power cut may undo it and deliver it again"

T = TypeVar("T")
Rest = TypeVarTuple("Rest")


class Waiting(NamedTuple):
    """A file in target/ that may be claimed.

    `arrival` is its ctime in ms where its name does not tell the time, else 0; a `plain` name has nothing but a
    priority, a generated id and a class.
    """

    file: str
    arrival: int = 0
    plain: bool = False


class Place(NamedTuple):
    """Where a message went: a state, and its file name there; `removed` and no name where no history is kept."""

    state: str
    file: str


class Held:
    """A claim: whose it is, the message's own file name, the two together (the claim's receipt), and the path.

    With `as_seen` it counts only while its deadline is the one that was seen.
    """

    __slots__ = ("arrival", "as_seen", "claim", "file", "filename", "path")

    def __init__(self, folder: str, claim: Claim, file: str, arrival: int = 0) -> None:
        self.claim = claim
        self.file = file
        self.arrival = arrival
        self.as_seen = False
        owner, deadline, number, ours = claim
        self.filename = f"{owner},{deadline},{number}~{file}" if ours else claim.prefix + file
        self.path = f"{folder}/{self.filename}"

    def follow(self, renewed: Held) -> None:
        """Take over what the claim is called now: its deadline is another."""
        self.claim, self.file = renewed.claim, renewed.file
        self.filename, self.path = renewed.filename, renewed.path


class Lifecycle:
    """The transitions of one queue's messages."""

    def __init__(
        self,
        layout: QueueLayout,
        config: QueueConfig,
        *,
        storage: Storage,
        sidecars: Sidecars,
        reasons: Reasons,
        clock: Clock,
    ) -> None:
        self.layout = layout
        self.config = config
        self._keeps_history = config.history
        self.storage = storage
        self.sidecars = sidecars
        self.reasons = reasons
        self.clock = clock
        self._missed = threading.local()

    # -- sending: working -> target | delayed --------------------------------------------------------------

    def stage(self, file: str, data: bytes | memoryview, *, synced: bool = True) -> None:
        """Write a body into working/ under the name that it will be sent by; `synced` as for `write_new`."""
        try:
            self.storage.write_new(f"{self.layout.working}/{file}", data, synced=synced)
        except OSError as error:
            raise self.not_sent(error) from error

    def send(self, file: str, *, not_before: int = 0, back_to: str | None = None) -> None:
        """Send a staged file: the rename is the send.

        Args:
            file: its name in working/.
            not_before: when it may be delivered, in ms; 0 for at once.
            back_to: where it goes when it cannot be sent; None removes it.
        """
        staged = f"{self.layout.working}/{file}"
        try:
            self.storage.rename(staged, f"{self.sent_to(not_before) if not_before else self.layout.target}/{file}")
        except OSError as error:
            with suppress(OSError):  # what cannot be taken away now, fsck finds
                if back_to is None:
                    self.storage.unlink(staged)
                else:
                    self.storage.move(staged, back_to)
            raise self.not_sent(error) from error

    def not_sent(self, error: OSError) -> DropqError:
        """Return the error for a send that was refused before its rename."""
        return self.refused(error, "the message was not sent")

    def refused(self, error: OSError, fate: str) -> DropqError:
        """Return the error for a call that was refused: the queue is gone, or the file system would not."""
        if isinstance(error, FileNotFoundError) and not storage.exists(self.layout.target):
            return NoSuchQueue(f"queue {self.layout.home} is not there any more; {fate}")
        return storage_error(error, fate)

    @contextmanager
    def telling(self, fate: str) -> Iterator[None]:
        """Raise our own error for a call that is refused meanwhile: it tells what became of the messages."""
        try:
            yield
        except OSError as error:
            raise self.refused(error, fate) from error

    def sent(self, *, not_before: int = 0) -> None:
        """Make what was sent durable, as far as the queue's durability asks."""
        try:
            self.storage.sync(self._sent_folder(not_before), self.layout.working)
        except OSError as error:
            fate = "the message is visible, but a power cut may take it back: do not send it again"
            raise storage_error(error, fate) from error

    def sent_to(self, not_before: int) -> str:
        """Return the folder that a message is sent to: target/, or delayed/ where it has to wait first."""
        folder = self._sent_folder(not_before)
        if not_before:
            self.storage.make_folder(folder)
        return folder

    def _sent_folder(self, not_before: int) -> str:
        return self.layout.delayed if not_before else self.layout.target

    def deliver_delayed(self, file: str) -> bool:
        """Move a message whose delay is over into target/; False when somebody else did.

        A mark that makes its name unique stays: a worker that gave it back knows it again by that.
        """
        name = replace(self.sidecars.parse(file), not_before=0)
        return self.into_target(f"{self.layout.delayed}/{file}", name, marked=bool(name.copy)) is not None

    # -- claiming: target -> processing ----------------------------------------------------------------------

    def claim(
        self, waiting: Waiting, owner: str, deadline: int, *, again: bool = False, state: str = "target"
    ) -> Held | None:
        """Take a waiting message; None when somebody else has it.

        Args:
            waiting: the message.
            owner: what identifies the claim.
            deadline: when its lease runs out, in ms since 1970; 0 for never.
            again: its name goes on telling whose lease ran out, since it is the same stream that takes it.
            state: where it lies: target, or delayed for who settles it before its time.
        """
        lying, arrival, plain = waiting
        number, file = (1, lying) if plain else self.next_delivery(lying, again=again)
        layout = self.layout
        folder = layout.target if state == "target" else layout.folder(state)
        held = Held(layout.processing, Claim(owner, deadline, number), file, arrival)
        try:
            # RACE: every consumer of the queue, and any script; whose rename succeeds has the message.
            self.storage.rename(f"{folder}/{lying}", held.path)
        except FileNotFoundError as error:
            if not storage.exists(self.layout.processing):
                raise storage_error(error, f"processing/ is missing; the message stays in {state}/") from error
            return None
        except OSError as error:
            raise storage_error(error, f"the message stays in {state}/") from error
        return held

    def next_delivery(self, waiting: str, *, again: bool = False) -> tuple[int, str]:
        """Return the number of the next delivery of a file, and its name without a prefix left by hand."""
        by_hand, file = names.split_claim(waiting)
        problems: list[str] = []
        name = self.sidecars.parse(file, problems)
        if problems:
            self.sidecars.tell(file, problems)
        name = replace(name, delivery_count=max(name.delivery_count, by_hand.number if by_hand else 0))
        marked = name.lapsed and not again  # whoever else takes it leaves no word of that in the name
        name = name.unmarked if marked else name
        if marked or len(file) > names.NAME_BUDGET or not file.isascii():
            file = self.sidecars.fit(replace(name, not_before=0))
        return name.delivery_count + 1, file

    def may_expire(self, waiting: Waiting) -> bool:
        """Tell at a glance whether a waiting message can expire at all: its own expiration is a name's fourth field."""
        return self.config.expiration is not None or not (waiting.plain or waiting.file.count(".") < 3)

    def expires_by_arrival(self, waiting: Waiting) -> bool:
        """Tell whether a waiting message may expire by when its file came, as its name tells no time."""
        if self.config.expiration is None:
            return False
        name = self.sidecars.parse(names.split_claim(waiting.file)[1])
        return not (name.since or name.timestamp)

    def waiting_expires_at(self, waiting: Waiting) -> int:
        """Return when a waiting message expires, in ms since 1970; 0 for never."""
        return self.expires_at(self.sidecars.parse(names.split_claim(waiting.file)[1]), waiting.arrival)

    def has_expired(self, waiting: Waiting) -> bool:
        """Tell whether a waiting message's time is over."""
        return self.may_expire(waiting) and 0 < self.waiting_expires_at(waiting) <= self.clock.now_ms()

    def expires_at(self, name: Name, arrival: int) -> int:
        """Return when a message expires, in ms since 1970; 0 for never. AMPS's four expiration models."""
        own, config = name.expiration, self.config
        if config.expiration is None:
            # An unset queue value is unlimited: only the models that look at the message's own can expire it.
            return own if config.expiration_model in ("default", "earliest") else 0
        queues = (name.since or name.timestamp or arrival) + int(config.expiration * 1000)
        match config.expiration_model:
            case "queue":
                return queues
            case "earliest":
                return min(own, queues) if own else queues
            case "latest":
                return max(own, queues)
            case _:
                return own or queues

    # -- settling: out of processing -------------------------------------------------------------------------

    def archive(self, held: Held, *, synced: bool = True) -> Place:
        """Move a held message to processed/, the ack; remove it where no history is kept.

        Args:
            held: the claim.
            synced: make it durable at once; else `archived` does, for many.

        Raises:
            LeaseLost: the claim is gone; nothing was changed.
            StorageError: the move was refused, or could not be made durable.
        """
        if not self._keeps_history:
            self._leave(held, self.storage.discard, self._private())
            place = Place("removed", "")
            if synced:
                self.archived(place)
            return place
        layout, file = self.layout, held.file
        others = None
        if held.claim.number != 1 or "JMS_dropq_" in file:
            others = self._kept_names(self._counted(held))
            file = next(others)
        while True:
            try:
                self._leave(held, self.storage.move, f"{layout.processed}/{file}")
                break
            except FileExistsError:  # a file of the same name was archived before: both stay
                others = others or self._kept_names(self._counted(held))
                file = next(others)
        place = Place("processed", file)
        if synced and self.storage.syncs_folders:
            self.archived(place)
        return place

    def archived(self, place: Place | None = None, fate: str = SETTLED) -> None:
        """Make what was archived durable, as far as the queue's durability asks; else `fate` is told."""
        folders = (self.layout.processed,) if self._keeps_history else ()
        self._settled(*folders, self.layout.processing, place=place, fate=fate)

    def withhold(self, held: Held) -> str:
        """Move a held message to a private place, for at-most-once without a history; return the path."""
        folder = f"{self.layout.held}/{held.claim.owner}"
        self._made(folder)
        path = f"{folder}/{held.file}"
        self._leave(held, self.storage.rename, path)
        return path

    def unhold(self, path: str) -> None:
        """Remove a body that was withheld, with its folder; a crash leaves what a sweep clears when its holder ends."""
        self.storage.unlink(path)
        try:
            self.storage.remove_folder(os.path.dirname(path))
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
            # An NFS client keeps the file, under another name, while somebody has it open: a sweep clears that, too.

    def give_back(
        self,
        held: Held,
        *,
        cancel: bool = False,
        counted: bool = True,
        delay: float | None = None,
        lapsed: str = "",
    ) -> Place:
        """Return a held message to target/, or to delayed/.

        A message that has been delivered `max_deliveries` times, or cancelled `max_cancels` times, goes where
        `exhausted` says instead.

        Args:
            cancel: its holder gave it back of its own will, which counts as a cancel.
            counted: the delivery counts.
            delay: seconds before it may be delivered again; None asks the queue's redelivery_delay.
            lapsed: which claim's lease ran out, for the name to say to a holder that may come again.
        """
        name = replace(self._counted(held, cancel=cancel, counted=counted), lapsed=lapsed)
        if reason := self._exhausted(name, cancel=cancel, counted=counted):
            return self.set_aside(held, self.config.exhausted, reason, cancel=cancel)
        wait = self._redelivery_delay(name) if delay is None else delay
        name = replace(name, not_before=self.clock.now_ms() + int(wait * 1000) if wait > 0 else 0)
        return self._put_back(held, name)

    def _put_back(self, held: Held, name: Name) -> Place:
        """Move a held message to where it waits for its next delivery, under its new name."""
        file = self._leave(held, self._placed, name, held.arrival)
        place = Place("delayed" if name.not_before else "target", file)
        self._settled(self._sent_folder(name.not_before), self.layout.processing, place=place)
        return place

    def set_aside(
        self,
        held: Held,
        state: str,
        reason: str,
        details: Mapping[str, object] | None = None,
        *,
        cancel: bool = False,
    ) -> Place:
        """Move a held message to error/ or expired/ with a reason; `cancel` as for give_back."""
        fields = {"owner": held.claim.owner, "delivery": held.claim.number, **(details or {})}
        for file in self._kept_names(self._counted(held, cancel=cancel)):
            try:
                self._leave(held, self._explained, state, file, reason, fields)
            except FileExistsError:
                continue  # a foreign file of the same name lies there: both stay
            place = Place(state, file)
            self._settled(self.layout.folder(state), self.layout.processing, place=place)
            return place
        raise AssertionError("unreachable: the last name tried is unique")

    def expire_waiting(self, waiting: Waiting, reason: str = "time_limit") -> bool:
        """Move a message from target/ to expired/ with a reason; False when somebody else took it."""
        _, file = names.split_claim(waiting.file)
        source = f"{self.layout.target}/{waiting.file}"
        for kept in self._kept_names(self.sidecars.parse(file).unmarked):
            try:
                self._explained(source, "expired", kept, reason, {})
            except FileExistsError:
                continue
            except FileNotFoundError as error:
                if storage.exists(source):
                    raise storage_error(error, "expired/ is missing; the message stays in target/") from error
                return False  # RACE: a consumer claimed it, and delivers what has just run out
            except OSError as error:
                raise storage_error(error, "the message stays in target/") from error
            self._settled(self.layout.expired, self.layout.target)
            return True
        raise AssertionError("unreachable: the last name tried is unique")

    def extend(self, held: Held, deadline: int) -> None:
        """Give a claim a new deadline, in ms since 1970.

        Raises:
            LeaseLost: the claim is gone; nothing was changed.
        """
        renewed = Held(self.layout.processing, held.claim._replace(deadline=deadline), held.file)
        path = renewed.path
        self._leave(held, self.storage.rename, path)
        held.follow(renewed)

    # -- bringing back: error, expired, processed -> target ---------------------------------------------------

    def requeue(self, source: str, file: str, to: Lifecycle, *, keep_expiration: bool = False) -> str | None:
        """Move a file into a queue's target/ as if it were new: counters and the queue's clock start again.

        Args:
            source: the folder that it lies in.
            file: its name there.
            to: the queue that it goes to, which may be this one.
            keep_expiration: its own expiration stays; else it is dropped.

        Returns:
            Its name in target/; None when somebody else took it.
        """
        name = self._anew(file, to)
        if keep_expiration:
            name = replace(name, expiration=self.sidecars.parse(names.split_claim(file)[1]).expiration)
        return self._carried(source, file, to, name)

    def carry(self, source: str, file: str, to: Lifecycle) -> str | None:
        """Move a file into a queue's target/ with its counters and its expiration as they are; as for requeue."""
        claim, bare = names.split_claim(file)
        name = self.sidecars.parse(bare)
        count = max(name.delivery_count, claim.number if claim else 0)
        return self._carried(source, file, to, replace(name, delivery_count=count, not_before=0, lapsed=""))

    def _carried(self, source: str, file: str, to: Lifecycle, name: Name) -> str | None:
        if to.sidecars.folder != self.sidecars.folder:
            name = self.sidecars.whole(name)  # another root has sidecars of its own
        elif name.meta:
            to.sidecars.make_known()
        placed = to.into_target(f"{source}/{file}", name)
        if placed is not None:
            self._settled(source)
        return placed

    # -- replaying: a copy of what is in processed -> target ---------------------------------------------------

    def replay(self, file: str, to: Lifecycle) -> str | None:
        """Send a copy of an archived message, as one that was delivered once before; the archive keeps its own.

        Whoever dies meanwhile leaves at most the copy in working/, as a send does.

        Args:
            file: its name in processed/.
            to: the queue that the copy goes to, which may be this one.

        Returns:
            The copy's name in target/; None when the message is not in the archive any more.
        """
        name = replace(self._anew(file, to), delivery_count=1)
        if to.sidecars.folder != self.sidecars.folder:
            name = self.sidecars.whole(name)  # another root has sidecars of its own
        copy = to.sidecars.fit(to.unique(name, chosen=True))  # the archive has its id already
        source = f"{self.layout.processed}/{file}"
        try:
            to.storage.copy(source, f"{to.layout.working}/{copy}")
        except OSError as error:
            if storage.is_gone(error) and not storage.exists(source):
                return None  # RACE: somebody pruned or requeued it
            raise to.not_sent(error) from error
        to.send(copy)
        to.sent()
        return copy

    def _anew(self, file: str, to: Lifecycle) -> Name:
        """Return the name of a message that begins anew in a queue: its counters, its expiration, the queue's clock."""
        name = self.sidecars.parse(names.split_claim(file)[1])
        if name.generated:
            with to.telling("the message stays where it was"):
                to.storage.unlink(f"{to.layout.acks}/{name.id}")  # an ack that is remembered was of its life before
        begun = replace(name, delivery_count=0, cancels=0, not_before=0, via="", hops=0, expiration=0, lapsed="")
        return replace(begun, since=to.clock.now_ms())

    def remove(self, state: str, file: str) -> bool:
        """Remove a message for good, with its reason; False when somebody else took it."""
        path = f"{self.layout.folder(state)}/{file}"
        try:
            inode = storage.inode(path)
            self.storage.discard(path, self._private())
        except FileNotFoundError:
            return False
        except OSError as error:
            raise storage_error(error, f"the message stays in {state}/") from error
        self.reasons.drop(state, file, inode)
        self._settled(self.layout.folder(state))
        return True

    # -- names ---------------------------------------------------------------------------------------------------

    def _counted(self, held: Held, *, cancel: bool = False, counted: bool = True) -> Name:
        name = self.sidecars.parse(held.file).unmarked
        number = held.claim.number if counted else held.claim.number - 1
        cancels = min(name.cancels + cancel, LARGEST)
        return replace(name, delivery_count=min(number, LARGEST), cancels=cancels)

    def _exhausted(self, name: Name, *, cancel: bool, counted: bool) -> str | None:
        config = self.config
        if counted and config.max_deliveries and name.delivery_count >= config.max_deliveries:
            return "max_deliveries"
        if cancel and config.max_cancels and name.cancels >= config.max_cancels:
            return "max_cancels"
        return None

    def _redelivery_delay(self, name: Name) -> float:
        """Return the seconds that a message waits after a delivery; the limit is not for the first wait."""
        config, tries = self.config, max(name.delivery_count - 1, 0)
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
        own = self.sidecars.full(name).born_foreign if name.meta else name.born_foreign
        if own is not None and not self.sidecars.ignored(own):
            yield own
        elif not name.foreign:
            yield self.sidecars.fit(replace(name, not_before=0))
        yield self._copy_name(replace(name, not_before=0))

    def _copy_name(self, name: Name) -> str:
        return self.sidecars.fit(replace(name, foreign=False, copy=os.urandom(5).hex()))

    # -- moves ---------------------------------------------------------------------------------------------------

    def _leave(self, held: Held, move: Callable[[str, *Rest], T], *args: *Rest) -> T:
        """Take a held file out of processing/ by `move(path, ...)`, whatever its deadline is by now."""
        try:
            while True:
                try:
                    return move(held.path, *args)
                except FileNotFoundError:
                    renewed = None if held.as_seen else self._renewed(held)
                    if renewed is None or renewed.path == held.path:
                        raise
                    held.follow(renewed)
        except FileNotFoundError as error:
            # RACE: a sweep, an expiry or an administrator was first. The claim's name is its own for ever, so this
            # cannot touch the claim of whoever has the message now.
            if not storage.exists(self.layout.processing):
                fate = "the queue is not where it was: the message went with it, and is still held"
                raise storage_error(error, fate) from error
            if storage.exists(held.path):
                fate = (
                    f"the folder that it should go to is missing; the message stays in processing/ as {held.filename}"
                )
                raise storage_error(error, fate) from error
            raise LeaseLost(self._lost(held)) from error
        except FileExistsError:
            raise
        except OSError as error:
            raise storage_error(error, f"the message stays in processing/ as {held.filename}") from error

    def _lost(self, held: Held) -> str:
        return (
            f"message {self.sidecars.parse(held.file).id}: claim {held.claim.owner} on queue {self.layout.home} is "
            "gone (its lease ran out, it expired, or somebody else settled or requeued it); nothing was changed"
        )

    def seized(self, filename: str) -> Held:
        """Return the claim of a script, or of a DropboxMQ client, to be given back as it was seen."""
        claim, file = names.split_claim(filename)
        number = self.sidecars.parse(file).delivery_count + 1
        held = Held(self.layout.processing, Claim(claim.owner if claim else "", 0, number, ours=False), file)
        held.filename, held.path, held.as_seen = filename, f"{self.layout.processing}/{filename}", True
        return held

    def find_claim(self, owner: str) -> Held | None:
        """Return a claim by its owner and sequence, whatever its deadline is by now."""
        start = f"{owner},"
        for entry in storage.entries(self.layout.processing):
            if entry.name.startswith(start):
                claim, file = names.split_claim(entry.name)
                if claim is not None:
                    return Held(self.layout.processing, claim, file)
        return None

    @contextmanager
    def listing_once(self) -> Iterator[None]:
        """Look for the claims that this thread misses in a block by one listing; it makes no claims there.

        A claim that has left processing/ never comes back, so one that the listing lacks is gone. One that was renewed
        since is looked for in another listing, which serves the rest of the block.
        """
        around = dict(vars(self._missed))  # a signal handler's block comes in the middle of its own thread's
        self._missed.listed = None
        try:
            yield
        finally:
            vars(self._missed).clear()
            vars(self._missed).update(around)

    def _renewed(self, held: Held) -> Held | None:
        """Return what a claim is called now that is not where it was."""
        owner = held.claim.owner
        if not hasattr(self._missed, "listed"):
            return self.find_claim(owner)
        listed: dict[str, Held] | None = self._missed.listed
        if listed is None or (owner in listed and listed[owner].path == held.path):
            listed = self._missed.listed = {one.claim.owner: one for one in self.claims()}
        return listed.get(owner)

    def claims(self) -> Iterator[Held]:
        """Yield the claims of dropq's own form, by a listing."""
        for entry in storage.entries(self.layout.processing):
            claim, file = names.split_claim(entry.name)
            if claim is not None and claim.ours and storage.was_message_file(entry):
                yield Held(self.layout.processing, claim, file)

    def age_ms(self, path: str) -> int:
        """Return how long ago a file was renamed or changed; 0 when it is gone."""
        try:
            return self.clock.now_ms() - storage.changed_ms(path)
        except FileNotFoundError:
            return 0

    def _explained(self, source: str, state: str, file: str, reason: str, details: Mapping[str, object]) -> None:
        """Write the reason, then move the file: the reason counts only once the file is there."""
        inode = storage.inode(source)
        time = datetime.fromtimestamp(self.clock.now_ms() / 1000, UTC).isoformat(timespec="milliseconds")
        self.reasons.record(state, file, inode, {"reason": reason, "time": time, **details})
        try:
            self.storage.move(source, f"{self.layout.folder(state)}/{file}")
        except OSError:
            self.reasons.drop(state, file, inode)
            raise

    def _placed(self, source: str, name: Name, arrival: int = 0, marked: bool = False) -> str:
        """Rename a file into target/, or delayed/, under a name of its own, unless `marked` so; return the name."""
        folder = self.sent_to(name.not_before)
        if not name.generated and not name.since:
            name = replace(name, since=arrival or storage.changed_ms(source))  # keeps its place in the order
        file = self.sidecars.fit(name if marked else self.unique(name))
        try:
            self.storage.place(source, f"{folder}/{file}")
        except FileExistsError:  # somebody copied a message, id and all: both stay
            file = self._copy_name(name)
            self.storage.place(source, f"{folder}/{file}")
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
            if not storage.exists(self.layout.target):
                raise NoSuchQueue(f"queue {self.layout.home} is not there any more; {source} was not moved") from None
            return None  # RACE: somebody else moved it first
        except OSError as error:
            raise storage_error(error, f"the message stays where it was, {source}") from error
        try:
            self.storage.sync(self.layout.target)
        except OSError as error:
            raise storage_error(error, "the message is in target/; do not move it again") from error
        return file

    def _settled(self, *folders: str, place: Place | None = None, fate: str = SETTLED) -> None:
        if not self.storage.syncs_folders:
            return
        try:
            self.storage.sync(*folders)
        except OSError as error:
            refused = storage_error(error, fate)
            refused.place = place
            raise refused from error

    def _private(self) -> str:
        return self._made(self.layout.private)

    def _made(self, folder: str) -> str:
        try:
            self.storage.make_folder(folder)
        except OSError as error:
            raise storage_error(error, "the message stays where it was") from error
        return folder
