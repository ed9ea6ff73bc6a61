"""The bridge of a root takes from one peer, another root, what consumers here want: AMPS's Queue and GroupLocalQueue.

The bridge renames a message into a row of the peer's queue, where it is nobody's, and a carrier copies it into the
queue here by numbered lists: so it is in one root at a time, whoever dies when. Before it gives anything it makes sure
that the peer is the root that it is called, and no older state of it.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import NamedTuple

from dropq.carrier.carriers import carry
from dropq.carrier.lists import LIST_BYTES, LIST_LENGTH
from dropq.config.schema import Peer
from dropq.errors import ConfigError, DropqError, NoSuchQueue, StorageError, Unavailable
from dropq.filters import compile_filter
from dropq.format import names
from dropq.format.layout import UNSETTLED, WAITING
from dropq.format.message_file import MessageFile
from dropq.format.transfers import ENDED, is_row, own_name_of
from dropq.lifecycle.context import QueueContext, RootContext
from dropq.lifecycle.decision import count_of
from dropq.lifecycle.expiry import has_expired
from dropq.lifecycle.giving import row_to
from dropq.lifecycle.moving import Moves
from dropq.lifecycle.naming import LARGEST
from dropq.lifecycle.open_queue import open_queue, open_root, queue_names
from dropq.lifecycle.sending import into_target
from dropq.lifecycle.transfers import Row, RowDestination, marks_of, read_row, rows
from dropq.policies.build import view_of
from dropq.policies.matching import deciding
from dropq.policies.send_limits import SendLimits
from dropq.policies.wanted import LOOKED, Wanted, Wants, belonging_here, is_owned, is_owner
from dropq.storage import reading
from dropq.storage.failures import describe

log = logging.getLogger("dropq")

#: The first messages of a peer's target/ that a listing finds.
LISTED = 10_000
#: Seconds between two looks at what is wanted; or, if that is longer, how many times an average look, which is taken
#: over about so many: a bridge that has nothing to do takes a 500th of a processor, half of that while nobody waits.
TICK, RESTS, AVERAGED = 0.02, 500, 16
#: Seconds between two looks where the file server is asked; until it is asked whether a queue's configuration has
#: changed; and until what lies in its rows at the peer is carried, and a stamp says that a bridge looks.
ASKED, OPENED, ROWS = 1.0, 5.0, 5.0
#: Seconds without a want after which what a subscription gets, which doubles while it takes all, starts small again.
FORGOTTEN = 10.0
#: Seconds for which a message that could not be given comes behind the others, times the number of such messages.
BEHIND = 10.0
#: Seconds that `--once` waits for a message that may be taken soon; and how many inodes stay free on the disk here.
PATIENCE, SPARE = 10.0, 100
#: Milliseconds by which two clocks may differ where something expires or is delayed.
CLOCKS = 60_000
#: The keys of a queue that must be equal in both roots, else nothing moves.
_ALIKE = ("replication_type", "message_type", "semantics", "expiration", "expiration_model")
#: What becomes of messages where a peer is refused.
_NOTHING = "nothing was taken"
#: What tells a message from others at a peer: its file name, and when a foreign file came there.
_Key = tuple[str, int]


class _Opened(NamedTuple):
    """A queue that was opened, and what tells whether it has to be opened again; None where that is not known."""

    context: QueueContext
    origin: object

    @classmethod
    def anew(cls, root: RootContext, name: str) -> _Opened:
        """Open a queue."""
        context = open_queue(root, name)
        return cls(context, _origin(context))

    @property
    def is_current(self) -> bool:
        """Whether its root's configuration and its own are still what they were."""
        return self.origin is not None and self.origin == _origin(self.context)


def _origin(context: QueueContext) -> list[tuple[int, int, int] | None] | None:
    """Return what changes when a queue's configuration does; None where it changed just now, and may do so again."""
    root, layout, found = context.root.layout, context.layout, list[tuple[int, int, int] | None]()
    settled = context.clock.now_ms() * 1_000_000 - reading.SETTLED_NS
    for path in (root.path, root.config_file, layout.base, layout.config_file):
        try:
            status = reading.status_now(path)
        except FileNotFoundError:
            found.append(None)
            continue
        except OSError:
            return None  # a link, or closed to this user
        if status.st_ctime_ns > settled:
            return None
        found.append((status.st_ino, status.st_ctime_ns, status.st_size))
    return found


def shared_queues(
    root: RootContext,
    wanted_names: Sequence[str] | None = None,
    warned: dict[str, str] | None = None,
    known: dict[str, _Opened] | None = None,
) -> list[QueueContext]:
    """Open the queues that several roots share; of those that are named, if some are.

    Args:
        warned: why queues were passed over before, by name: the log says it once.
        known: what was opened before, by name: it is opened again when its configuration has changed.

    Raises:
        ConfigError: a queue that is named is a LocalQueue, or the configuration of one cannot be used.
        NoSuchQueue: there is no such queue.
    """
    found = []
    for context in _opened_queues(root, wanted_names, {} if warned is None else warned, {} if known is None else known):
        if context.config.replication_type != "LocalQueue":
            found.append(context)
        elif wanted_names:
            raise ConfigError(
                f"queue {context.name} is a LocalQueue, which stays in its root: replication_type says otherwise"
            )
    return found


def _opened_queues(
    root: RootContext, wanted_names: Sequence[str] | None, warned: dict[str, str], known: dict[str, _Opened]
) -> Iterator[QueueContext]:
    """Open the queues that are named, or else all that can be opened: one that cannot stops no other."""
    there = wanted_names or queue_names(root)
    for gone in known.keys() - set(there):
        del known[gone]
    for name in there:
        try:
            opened = known.pop(name, None)
            if opened is None or not opened.is_current:
                opened = _Opened.anew(root, name)
            known[name] = opened
            yield opened.context
        except (DropqError, OSError) as error:
            if wanted_names:
                raise
            if warned.get(name) != (why := describe(error)):
                warned[name] = why
                log.warning("queue %s is passed over: %s", name, why)


def opened_peer(root: RootContext, peer: Peer) -> RootContext:
    """Open a peer; refuse what is not the root that it is called.

    Raises:
        Unavailable: it is not there, as where its disk is not mounted.
        ConfigError: it is another root, or this one, or does not name this one.
    """
    own, where = root.config.instance, f"peer {peer.name} at {peer.root}"
    try:
        there = reading.exists(f"{peer.root}/dropq.toml")
        same = there and os.path.samefile(peer.root, root.layout.path)
    except OSError as error:
        raise Unavailable(f"{where} does not answer: {describe(error)}; {_NOTHING}") from error
    if not there:
        raise Unavailable(f"{where} is not there: it has no dropq.toml; mount it; {_NOTHING}")
    if same:
        raise ConfigError(f"{where} is this root itself: give the path of the other; {_NOTHING}")
    found = open_root(peer.root, None)
    if found.config.instance != peer.name:
        raise ConfigError(
            f"{where} says instance = {found.config.instance!r} in its dropq.toml: it is another root; {_NOTHING}"
        )
    if own not in {each.name for each in found.config.peer}:
        raise ConfigError(f"{where} does not name {own} as its [[peer]]: what it gave would be stranded; {_NOTHING}")
    return found


def disagreements(own: QueueContext, theirs: QueueContext) -> list[str]:
    """Return what two roots say otherwise of the same queue: then nothing moves."""
    found = [(key, getattr(own.config, key), getattr(theirs.config, key)) for key in _ALIKE]
    if own.config.replication_type == "GroupLocalQueue":
        found.append(("initial_owner", own.config.initial_owner, theirs.config.initial_owner))
        found.append(("group_local_queue_domain, else instance_group", _domain(own), _domain(theirs)))
    return [f"{key} is {here!r} here, and {there!r} there" for key, here, there in found if here != there]


def _domain(context: QueueContext) -> str | None:
    return context.config.group_local_queue_domain or context.root.config.instance_group


@dataclass
class Bridge:
    """Takes from one peer, for the queues of one root; `names` are the queues, None all that several roots share."""

    root: RootContext
    peer: Peer
    names: Sequence[str] | None
    #: How many messages came, by queue.
    taken: Counter[str] = field(default_factory=Counter)
    _queues: dict[str, _Crossing] = field(default_factory=dict)
    _opened: float = -math.inf
    _known: dict[str, _Opened] = field(default_factory=dict)
    _passed_over: dict[str, str] = field(default_factory=dict)

    def run(self, wait: Callable[[float], bool]) -> None:
        """Take what is wanted until `wait`, which waits so many seconds, says that it is over.

        The log says once of each queue why nothing can be taken, or why the first message that cannot be taken stays.
        """
        said: dict[str, str] = {}
        pause = average = 0.0
        while not wait(pause):
            began = time.thread_time()
            taken, failed = self._round()
            now = {what: describe(why) for what, why in (self._kept() | failed).items()}
            for what, why in now.items():
                if said.get(what) != why:
                    log.warning("%s: %s", what, why)
            said = now
            pause = ASKED
            due = min((crossing.due for crossing in self._queues.values()), default=math.inf) - time.monotonic()
            if not taken and due == math.inf:  # a look that found something to do is no measure of the others
                average += (time.thread_time() - began - average) / AVERAGED
            if not failed and not any(crossing.is_far for crossing in self._queues.values()):
                rests = RESTS if any(crossing.is_wanted for crossing in self._queues.values()) else 2 * RESTS
                # While messages grow old enough, each look goes over all of them.
                look = average if due == math.inf else max(average, time.thread_time() - began)
                pause = 0.0 if taken else min(max(rests * look, TICK), max(due, TICK), ASKED)

    def once(self, wait: Callable[[float], bool] | None = None) -> None:
        """Take what is wanted now, as soon as it may be taken, and end; or once `wait` says that it is over.

        What may not be taken within `PATIENCE` is left to the next time.

        Raises:
            DropqError, OSError: why a queue could not be served, or a message not be taken; the others were. That
                there is no room here for a message is an error only if no other came.
        """
        errors: dict[str, Exception] = {}
        before, until, wait = self.taken.total(), time.monotonic() + PATIENCE, wait or threading.Event().wait
        while True:
            stuck = self._stuck()
            taken, failed = self._round()
            errors |= failed
            due = min((crossing.due for crossing in self._queues.values()), default=math.inf)
            goes_on = due <= until or (self._stuck() > stuck and time.monotonic() < until)  # to those behind them
            if taken or failed or not goes_on or wait(TICK):
                break
        came = self.taken.total() > before
        kept = {what: why for what, why in self._kept().items() if not (came and isinstance(why, Unavailable))}
        for error in (kept | errors).values():
            raise error

    def _stuck(self) -> int:
        return sum(crossing.stuck for crossing in self._queues.values())

    def _kept(self) -> dict[str, Exception]:
        """Return of each queue why the first message that could not be taken stays."""
        return {self._of(name): why for name, crossing in self._queues.items() if (why := crossing.kept) is not None}

    def _of(self, name: str) -> str:
        return f"queue {name}, peer {self.peer.name}"

    def _round(self) -> tuple[int, dict[str, Exception]]:
        """Serve each queue once; return how many messages came, and why queues could not be served."""
        failed: dict[str, Exception] = {}
        if time.monotonic() >= self._opened + OPENED:
            try:
                there = shared_queues(self.root, self.names, self._passed_over, self._known)
            except (DropqError, OSError) as error:
                failed["the queues of this root"] = error
            else:
                self._opened = time.monotonic()
                known = self._queues
                self._queues = {own.name: known.get(own.name) or _Crossing(self.peer, own) for own in there}
                for own in there:
                    self._queues[own.name].open(own)
        before = self.taken.total()
        for name, crossing in self._queues.items():
            try:
                self.taken[name] += crossing.round()
            except (DropqError, OSError) as error:
                crossing.forget()
                self._known.pop(name, None)
                failed[self._of(name)] = error
        return self.taken.total() - before, failed


class _Left(NamedTuple):
    """A message that could not be given: when that was tried last, and why it stays, if the log is to say so."""

    at: float
    why: DropqError | None


class _Crossing:
    """Takes from one queue of a peer into the queue of the same name here."""

    def __init__(self, peer: Peer, own: QueueContext) -> None:
        self._root = own.root
        self._peer = peer
        self._own = own
        self._wants = Wants(own)
        self._theirs_until = self._rows_at = -math.inf
        self._theirs: _Opened | None = None
        #: Whether the peer lies on a file server, which is not asked many times a second.
        self.is_far = False
        #: Whether somebody waited at the last look, or all is taken at once.
        self.is_wanted = False
        #: Of the last listing at the peer: the messages, in order, and when each was first seen; those that no root
        #: owns yet; and the folders' times.
        self._files: list[MessageFile] = []
        self._unowned: list[MessageFile] = []
        self._seen: dict[_Key, float] = {}
        self._listed: tuple[object, ...] = ()
        #: Of the messages that were listed, those that could not be given.
        self._left: dict[_Key, _Left] = {}
        self._list_again = 0.0
        #: When messages were last chosen of those that were listed.
        self._chosen_at = 0.0
        self._shares: dict[str, _Share] = {}
        self._test: _Test | None = None

    @property
    def due(self) -> float:
        """When the next of the messages that were listed may be taken, on the monotonic clock; infinity without any."""
        patience = 0.0 if self._theirs is None else self._theirs.context.config.transfer_after
        young = (seen + patience for seen in self._seen.values() if seen + patience > self._chosen_at)
        return min(young, default=math.inf)

    @property
    def stuck(self) -> int:
        """How many messages that were listed could not be given."""
        return len(self._left)

    @property
    def kept(self) -> DropqError | None:
        """Why the first of the messages that could not be given stays; None if there is nothing to say of any."""
        return min(((key, left.why) for key, left in self._left.items() if left.why), default=(None, None))[1]

    def forget(self) -> None:
        """Open the peer's queue anew the next time; what was listed is listed again once it has changed."""
        self._theirs = self._test = None

    def open(self, own: QueueContext) -> None:
        """Take for the queue here what was opened anew, if it was."""
        if own is not self._own:
            self._own, self._wants = own, Wants(own)
            self.forget()

    def round(self) -> int:
        """Carry what was given, and take what is wanted; return how many messages came."""
        own = self._own
        now = time.monotonic()
        wants = self._wants.now()
        is_initial = own.config.replication_type == "GroupLocalQueue" and is_owner(own)
        self.is_wanted = bool(wants) or is_initial
        taken, failed = 0, dict[str, Exception]()
        if is_due := now >= self._rows_at + ROWS:
            taken += self._carry_rows(failed)
            with suppress(OSError):  # without rights, health cannot tell that a bridge looks
                own.storage.renew(f"{own.layout.wanted}/{LOOKED}")
        if wants or is_initial:
            taken += self._take(wants, failed, takes_unowned=is_initial)
        else:
            self._files, self._unowned, self._seen, self._listed, self._test = [], [], {}, (), None
        for error in failed.values():
            raise error
        if is_due:
            self._rows_at = now
        return taken

    def _open_theirs(self, *, anew: bool = False) -> QueueContext:
        """Open the peer's queue, `anew` or when it may be another, and make sure that both roots mean the same."""
        now = time.monotonic()
        if self._theirs is not None and not anew and now >= self._theirs_until and self._theirs.is_current:
            self._theirs_until = now + OPENED
        if self._theirs is None or anew or now >= self._theirs_until:
            opened = _Opened.anew(opened_peer(self._root, self._peer), self._own.name)
            theirs = opened.context
            if wrong := disagreements(self._own, theirs):
                raise ConfigError(f"{theirs.layout.home}: {'; '.join(wrong)}; {_NOTHING}")
            self.is_far = reading.on_nfs(theirs.layout.target)
            self._theirs, self._theirs_until = opened, now + OPENED
        return self._theirs.context

    # -- what was given ------------------------------------------------------------------------------------------

    def _carry_rows(self, failed: dict[str, Exception]) -> int:
        """Carry what this bridge, or another, was given before.

        A row that cannot be carried stops no other; it is noted in `failed`, by its folder.
        """
        theirs, sent = self._open_theirs(), 0
        for row in list(rows(theirs.layout)):
            is_ours = (row.peer, row.queue) == (self._root.config.instance, self._own.name)
            if is_ours and row.mark in marks_of(self._own.layout):
                try:
                    sent += self._carry(row, theirs)[0] if _has_any(row) else 0
                except (DropqError, OSError) as error:
                    failed[row.folder] = error
        return sent

    def _carry(self, row: Row, theirs: QueueContext) -> tuple[int, dict[str, str]]:
        """Carry a row; return how many messages came, and their names here by their names there."""
        arrived = dict[str, str]()
        sent = sum(carry(row, theirs, self._own, owned=not is_owner(self._own), arrived=arrived))
        return sent, arrived

    # -- what is wanted ------------------------------------------------------------------------------------------

    def _take(self, wants: list[Wanted], failed: Mapping[str, Exception], *, takes_unowned: bool) -> int:
        """Give to the row for this queue what is wanted here, and carry it; give nothing to one that has `failed`."""
        own, theirs = self._own, self._open_theirs()
        self._list(theirs, with_unowned=takes_unowned)
        if not self._files and not self._unowned:
            return 0
        if not (room := self._room()):
            raise Unavailable(f"queue {own.name} is full: max_unprocessed is {own.config.max_unprocessed}; {_NOTHING}")
        chosen = list(islice(self._chosen(theirs, wants), room))
        if not chosen:
            return 0
        theirs = self._open_theirs(anew=True)
        self._refuse_stopped(theirs)
        row = row_to(theirs, RowDestination(own.root.layout, own.name, own.layout, str(self._root.config.instance)))
        if row.folder in failed:
            return 0
        given = self._give(theirs, chosen, row)
        if not given:
            return 0
        log.info("queue %s: %s taken from peer %s", own.name, count_of(len(given)), self._peer.name)
        sent, arrived = self._carry(row, theirs)
        for name, taker in given.items():
            if taker in self._shares and name in arrived:
                self._shares[taker].came.add(arrived[name])
        return sent

    def _list(self, theirs: QueueContext, *, with_unowned: bool) -> None:
        """List the peer's waiting messages, where they have changed since they were listed."""
        states = WAITING if with_unowned else ("target",)
        folders, began = [theirs.layout.folder(state) for state in states], time.monotonic()
        if began < self._list_again:
            return
        for folder in folders if self.is_far else ():
            reading.ask_server(folder)
        found = tuple(_changed(folder) for folder in folders)
        if found == self._listed:
            return
        view = view_of(theirs, depth=LISTED)
        self._files = self._in_turn(view.files())
        self._unowned = self._in_turn(islice(_unowned(theirs), LISTED)) if with_unowned else []
        if self._left:
            here = set(map(_key, (*self._files, *self._unowned)))
            self._left = {key: left for key, left in self._left.items() if key in here}
        now = time.monotonic()
        self._seen = {key: self._seen.get(key, now) for key in map(_key, self._files)}
        # RACE: a change within the tick of the listing may keep the folder's time; then it is listed once more, as
        # it is while files have not settled: that changes nothing in the folder.
        is_fresh = any(time.time_ns() - changed < 1_000_000_000 for changed in found)
        self._listed = () if is_fresh or view.unsettled else found
        self._list_again = now + theirs.timing.listing_share * (now - began)

    def _in_turn(self, files: Iterable[MessageFile]) -> list[MessageFile]:
        """Put what could not be given behind the others, but not for good: each has its own place again in the end."""
        since = time.monotonic() - BEHIND * len(self._left)
        behind = {key: left.at for key, left in self._left.items() if left.at > since}
        return sorted(files, key=lambda file: behind.get(_key(file), 0.0)) if behind else list(files)

    def _room(self) -> int:
        own = self._own
        if (most := own.config.max_unprocessed) is None:
            return LIST_LENGTH
        waiting = sum(sum(reading.message_counts(own.layout.folder(state), own.config.ignore)) for state in UNSETTLED)
        return max(min(most - waiting, LIST_LENGTH), 0)

    def _chosen(self, theirs: QueueContext, wants: list[Wanted]) -> Iterator[tuple[MessageFile, str]]:
        """Yield the messages to take, in order: what nobody owns yet, and what subscriptions want, each with which."""
        own = self._own
        test = self._test = self._test or _Test(own, theirs)
        test.keep(self._seen, {own.config.filter, *(want.filter for want in wants)})
        asked = self._asked(wants)
        belongs = belonging_here(theirs)
        now = self._chosen_at = time.monotonic()
        before = now - theirs.config.transfer_after
        is_timed = abs(own.clock.now_ms() - theirs.clock.now_ms()) <= CLOCKS

        def may_move(file: MessageFile) -> bool:
            return is_timed or not (own.config.expiration or file.name.expiration or file.name.not_before)

        yield from ((file, "") for file in self._unowned if may_move(file))
        missing = sum(asked.values())
        for file in self._files:
            if not missing:
                return
            if self._seen[_key(file)] > before or not may_move(file) or has_expired(theirs, file):
                continue
            if belongs is not None and not belongs(file):
                continue
            if own.config.filter is not None and not (file.is_part or test(own.config.filter, file)):
                continue
            takers = (want for want, left in asked.items() if left and (not want.filter or test(want.filter, file)))
            if (taker := next(takers, None)) is None:
                continue
            if not file.plain and names.is_temporary(theirs.sidecars.full(file.name).reply_to or ""):
                continue  # the answer could not come back: its requester's queue is of its root alone
            asked[taker] -= 1
            missing -= 1
            yield file, taker.subscription

    def _asked(self, wants: list[Wanted]) -> dict[Wanted, int]:
        """Return how many messages each subscription gets now: its free backlog, doubled when it took all that came."""
        now, known = time.monotonic(), self._shares
        here = reading.names_in(self._own.layout.target) if any(share.came for share in known.values()) else frozenset()
        self._shares, asked = {}, dict[Wanted, int]()
        for want in wants:
            share = known.get(want.subscription)
            if share is None or now - share.wanted_at > FORGOTTEN:
                share = _Share(want.room)
            if share.came and not (left := share.came & here):
                share.size, share.came = min(2 * share.size, LIST_LENGTH), set()
            elif share.came:
                share.came = left
            share.wanted_at = now
            self._shares[want.subscription] = share
            asked[want] = max(share.size - len(share.came), 0)
        return asked

    def _refuse_stopped(self, theirs: QueueContext) -> None:
        """Refuse to take while one of both queues is paused or write-locked; a peer that is full is helped."""
        for context, where in ((self._own, "here"), (theirs, f"in root {self._peer.name}")):
            if context.paused:
                raise Unavailable(f"queue {context.name} is paused {where}; {_NOTHING}")
            if why := SendLimits(context.name, context).refusals().get("write-lock"):
                raise Unavailable(f"queue {context.name} {where}: {why}; {_NOTHING}")

    def _give(self, theirs: QueueContext, chosen: list[tuple[MessageFile, str]], row: Row) -> dict[str, str]:
        """Give messages to a row, each by a rename, which another process may win; return who wanted what was given.

        What has no room here for twice its bytes, beside what is given before it, stays; and what cannot be renamed.
        """
        base, moves, given = self._own.layout.base, Moves(theirs), dict[str, str]()
        space = os.statvfs(base)
        free = space.f_bavail * space.f_frsize // 2
        if space.f_files and space.f_favail < 2 * len(chosen) + SPARE:
            raise Unavailable(f"{base} has no room for {count_of(len(chosen), 'file')}; {_NOTHING}")
        size, to, now = 0, f"{self._root.config.instance}/{self._own.name}", time.monotonic()
        for file, taker in chosen:
            self._left.pop(_key(file), None)
            waits = "target" if file.plain or not file.name.not_before else "delayed"
            path = f"{theirs.layout.folder(waits)}/{file.filename}"
            length = reading.readable_size(path)
            if length is None or size + length > free:
                why = None  # it is gone, no file, closed to this user, or too large only beside the others
                if length is not None and length > free:
                    why = Unavailable(f"{base} has no room for twice the bytes of {path}; it stays there")
                self._left[_key(file)] = _Left(now, why)
                continue
            try:
                gone = moves.give_away(path, file, row.given, to)
            except (StorageError, OSError) as error:
                self._left[_key(file)] = _Left(now, _not_taken(path, error))
                continue
            size += length
            if gone is not None:
                given[gone] = taker
            if size >= LIST_BYTES:
                break
        tried = {file.filename for file, _ in chosen}
        self._files = [file for file in self._files if file.filename not in tried]
        self._unowned = [file for file in self._unowned if file.filename not in tried]
        self._seen = {key: self._seen[key] for key in map(_key, self._files)}
        if len(given) < len(chosen):
            self._listed = ()  # the folder does not change when what stays can be given
        return given


@dataclass
class _Share:
    """What one subscription gets: so many at a time; which of those lie here still; when it wanted something last."""

    size: int
    came: set[str] = field(default_factory=set)
    wanted_at: float = 0.0


@dataclass
class _Test:
    """Tests messages of a peer by filters of consumers here; what does not match is not read again."""

    own: QueueContext
    theirs: QueueContext
    _ask: dict[str, Callable[[MessageFile], bool | None]] = field(default_factory=dict)
    _no: dict[str, set[_Key]] = field(default_factory=dict)

    def keep(self, keys: Collection[_Key], filters: Collection[str | None]) -> None:
        """Forget all but the messages that still wait, and the filters that are still wanted."""
        self._ask = {filter: ask for filter, ask in self._ask.items() if filter in filters}
        self._no = {filter: no.intersection(keys) for filter, no in self._no.items() if filter in filters}

    def __call__(self, filter: str, file: MessageFile) -> bool:
        no, key = self._no.setdefault(filter, set()), _key(file)
        if key in no:
            return False
        if filter not in self._ask:
            self._ask[filter] = self._asking(filter)
        answer = self._ask[filter](file)
        if answer is False:
            no.add(key)
        return answer is True

    def _asking(self, filter: str) -> Callable[[MessageFile], bool | None]:
        """Return a test; one that cannot be used, or whose result changes with time, never says a lasting no."""
        try:
            ask = deciding(filter, self.theirs, "target", self.own)
            changes = compile_filter(filter).changes
        except DropqError as error:
            log.warning("queue %s: nothing is taken for the filter %r: %s", self.own.name, filter, error)
            return lambda file: None
        return (lambda file: ask(file) or None) if changes else ask


def _key(file: MessageFile) -> _Key:
    """Return what tells a message from others; a second foreign file of its name comes at another time."""
    return file.filename, file.arrival


def _not_taken(path: str, error: StorageError | OSError) -> StorageError:
    """Return why a message stays, in words that are the same at each try, as its name in the row is not."""
    reason = str(error) if error.errno is None else os.strerror(error.errno)
    return StorageError(f"{path} cannot be taken: {reason}; it stays there", path=path, errno=error.errno)


def _has_any(row: Row) -> bool:
    return any(True for _ in reading.entries(row.given))


def _changed(folder: str) -> int:
    try:
        return os.stat(folder).st_mtime_ns
    except FileNotFoundError:
        return 0


def _unowned(context: QueueContext) -> Iterator[MessageFile]:
    """Yield the waiting messages of a queue that no root owns yet, which have settled; delayed ones, too."""
    for state in WAITING:
        for files in reading.message_names(context.layout.folder(state), context.config.ignore):
            for name in files:
                file = context.sidecars.file(name, context.layout.folder(state))
                if not is_owned(file) and (state != "target" or not context.settling.settles_at(file)):
                    yield file


# -- by hand -----------------------------------------------------------------------------------------------------------


def recall(root: RootContext, peer: Peer, names: Sequence[str] | None) -> int:
    """Bring back what is on its way between this root and a peer; return how many messages came back.

    The newest list is settled first, for which the peer must answer.

    Raises:
        Unavailable, ConfigError: as of `opened_peer`.
    """
    back, passed_over = 0, dict[str, str]()
    there: RootContext | None = None
    for own in _opened_queues(root, names, passed_over, {}):
        for row in [row for row in rows(own.layout) if row.peer == peer.name and _has_any(row)]:
            there = there or opened_peer(root, peer)
            back += _recall_row(row, own, open_queue(there, own.name))
    try:
        there = there or opened_peer(root, peer)
    except Unavailable as error:
        log.warning("what peer %s gave to this root stays on its way: %s", peer.name, error)
        return back
    for own in shared_queues(root, names, passed_over):
        try:
            theirs = open_queue(there, own.name)
        except NoSuchQueue as error:
            log.info("peer %s gave nothing to queue %s: %s", peer.name, own.name, error)
            continue
        for row in [row for row in rows(theirs.layout) if row.peer == root.config.instance and _has_any(row)]:
            back += _recall_row(row, theirs, own)
    return back


def _recall_row(row: Row, source: QueueContext, destination: QueueContext) -> int:
    before = sum(1 for _ in reading.entries(row.given))
    return before - sum(carry(row, source, destination, owned=not is_owner(destination), recalls=True))


def end_rows(root: RootContext, peer: str, names: Sequence[str] | None) -> int:
    """Bring back what is on its way to a peer that does not answer; return how many messages came back.

    Each row to it becomes ROW.ended, which stays. What the peer has got already, or gets at this instant, comes twice.
    """
    back = 0
    for own in _opened_queues(root, names, {}, {}):
        for row in list(rows(own.layout)):
            if row.peer == peer:
                with own.error_context("what was given stays where it is"):
                    own.storage.move_folder(row.folder, f"{row.folder}{ENDED}")
                    own.storage.sync(own.layout.transfers)
        back += sum(_empty_ended(own, peer))
    return back


def _empty_ended(own: QueueContext, peer: str) -> Iterator[bool]:
    """Move back what lies in rows to a peer that were ended; yield of each message whether this process moved it."""
    for folder in sorted(reading.names_in(own.layout.transfers)):
        if not (folder.endswith(ENDED) and is_row(folder.removesuffix(ENDED))):
            continue
        try:
            row = read_row(f"{own.layout.transfers}/{folder}")
        except (OSError, ValueError) as error:
            log.warning("%s/%s is passed over: %s", own.layout.transfers, folder, error)
            continue
        for given in sorted(reading.names_in(row.given)) if row.peer == peer else ():
            if (file := own_name_of(given)) is not None:
                name = own.sidecars.parse(file)
                name = replace(name, delivery_count=min(name.delivery_count + 1, LARGEST))  # as redelivered
                yield into_target(own, f"{row.given}/{given}", name) is not None
