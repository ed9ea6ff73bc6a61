"""Distribution: a message published to a topic becomes a copy for each of its receivers, by one commit.

A publisher, a consumer of a receiver, a sweep or a router may distribute, any number at once: the claim decides which
process does. A distributor asks for filters and room before the claim, and again after it for receivers that are new
then. A message that cannot be distributed now blocks the topic, so that messages arrive in order: later ones wait, too.
"""

from __future__ import annotations

import logging
import secrets
import string
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from shlex import quote
from weakref import finalize

from dropq.errors import DropqError, LeaseLost, StorageError, Unavailable
from dropq.format import names
from dropq.format.claims import Claim, claim_owners
from dropq.format.message_file import MessageFile
from dropq.lifecycle import naming
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.decision import Decision
from dropq.lifecycle.expiry import has_expired, is_to_expire
from dropq.lifecycle.moving import Moves
from dropq.lifecycle.processing import committed_files
from dropq.lifecycle.settlement import Claims
from dropq.policies.build import view_of
from dropq.policies.routes import Routes
from dropq.staging.copies import LEASE, Renewal
from dropq.staging.fan_out import fan_out, set_closed_aside
from dropq.storage import reading
from dropq.storage.clock import lease_end
from dropq.storage.failures import describe, error_context
from dropq.storage.files import COPIED_AT_ONCE
from dropq.storage.liveness import FORKS, Presence
from dropq.storage.watch import Watch
from dropq.topics.receivers import Receiver, Receivers

log = logging.getLogger("dropq")

#: Bytes, and copies, that are written from memory between two checks of the lease.
AT_ONCE, COPIES_AT_ONCE = COPIED_AT_ONCE, 1000
#: Bytes up to which a body is read once and written from memory.
IN_MEMORY = 1 << 20
#: Seconds after which a publisher that waits for another distributor tries again.
RECHECK = 0.02
#: Seconds for which a publisher waits for another distributor, which may be dead, or may not reach a receiver.
OTHERS = 10.0
#: Seconds after which the warning that a topic is blocked is repeated.
WARN_EVERY = 60.0

#: What is published, or None where it is to be read.
Body = bytes | memoryview | None

_ALPHABET = string.digits + string.ascii_lowercase


class Distributor:
    """Distributes what is published to one topic, for one process; counts in `routed` what went to which route."""

    def __init__(self, context: QueueContext, routed: Counter[str] | None = None) -> None:
        self.context = context
        self._claims = Claims(context)
        shared = reading.is_shared(context.layout.base)
        self._receivers = Receivers(context, shared=shared)
        self._routes = Routes(context)
        self._target = reading.Listing(context.layout.target, context.clock, shared=shared)
        random = "".join(secrets.choice(_ALPHABET) for _ in range(10))
        self._id = f"distributor-{random}"
        self._owners = claim_owners(self._id)
        self._presence: Presence | None = None
        self._unless_closed: finalize[[Presence, int], Distributor] | None = None
        self._watch: Watch | None = None
        self._forks = FORKS.count
        self._paused = False
        self._refresh_at = 0.0
        self._empty: frozenset[str] = frozenset()  # the names in target/ when no message waited last
        self._warned: dict[str, float] = {}
        self._routed = Counter[str]() if routed is None else routed
        #: Why the first message that waits cannot be distributed; "" if nothing keeps it.
        self.blocked_by = ""
        #: When the first of the files settles that the last run left out, in ms since 1970; 0 if it left out no file.
        self.settles_at = 0

    @property
    def is_ours(self) -> bool:
        """Whether this process made it: after a fork, the sign of life is the parent's."""
        return self._forks == FORKS.count

    def close(self) -> None:
        """End its sign of life; it holds nothing between two calls."""
        presence, self._presence = self._presence, None
        if presence is not None:
            if self._unless_closed is not None:
                self._unless_closed.detach()
            with error_context("nothing is held, and a sweep removes the file"):
                presence.end()

    # -- one message -------------------------------------------------------------------------------------------------

    def claim_staged(self, file: str) -> Claim | None:
        """Return a claim for a staged file that is about to be published; None if it has to wait in target/ first.

        It waits while the topic is paused, or other messages wait. If neither is known, or this process cannot show
        that it lives, send the file into target/; another process distributes it.
        """
        try:
            if self._is_paused() or self._has_waiting():
                return None
            self._show()
        except DropqError as error:
            log.warning("topic %s: %s is sent for others to distribute: %s", self.context.name, file, describe(error))
            return None
        deadline = lease_end(self.context.clock, LEASE)
        return Claim(next(self._owners), deadline, 1, file, self.context.layout.processing)

    def publish(self, file: str, claim: Claim | None, body: Body, *, patience: float | None) -> bool:
        """Distribute a message that this process has just published; return whether every receiver has it.

        Args:
            claim: its claim; None if it waits in target/.
            body: its body; None reads it.
            patience: seconds to wait for a pause to end, or a full receiver; None does not wait.
        """
        try:
            return self._until_distributed(file, claim, body, patience)
        except (OSError, DropqError) as error:  # it is sent, whatever is the matter now
            why = describe(error)
            log.warning("topic %s: %s was sent, and is not distributed yet: %s", self.context.name, file, why)
            return False

    def _until_distributed(self, file: str, claim: Claim | None, body: Body, patience: float | None) -> bool:
        began = time.monotonic()
        until = None if patience is None else began + patience
        mine = claim
        while True:
            blocked = False
            try:
                if mine is not None:
                    return self._share_out_or_release(mine, self.context.layout.working, body, [], [])
                self.run()  # what waits before it goes first
                blocked = bool(self.blocked_by)
            except Unavailable as error:
                self._block(str(error))
                blocked = True
            except LeaseLost:
                pass  # RACE: a sweep took this process for dead: somebody else distributes it, or this process again
            mine = None
            if not self._is_on_its_way(file):
                return reading.exists(self.context.layout.processing)  # RACE: a delete may have taken the topic away
            blocked = blocked or self._is_paused()
            last = until if blocked else max(began + OTHERS, until or 0)
            left = 0 if last is None else last - time.monotonic()
            if left <= 0:
                return False
            self._watch = self._watch or Watch(self.context.layout.processing)
            self._watch.wait(min(left, RECHECK))

    def _has_waiting(self) -> bool:
        with error_context("whether a message waits is not known"):
            found = self._target.names()
            ignored, target = self.context.sidecars.ignored, self.context.layout.target
            if found is not self._empty and any(
                not ignored(file) and not reading.is_folder(f"{target}/{file}") for file in found
            ):
                return True
        self._empty = found
        return False

    def _is_on_its_way(self, file: str) -> bool:
        """Return whether a message waits, is claimed, or is committed and not wholly rolled forward."""
        layout, bears = self.context.layout, names.bears(self.context.sidecars.parse(file).id)
        for _ in range(2):  # RACE: a sweep may take it back from processing/ to target/ between two listings
            with error_context("whether the message is distributed is not known"):
                names_now = [*reading.names_in(layout.target), *reading.names_in(layout.processing)]
                names_now += [file.filename for file in committed_files(self.context)]
            if any(map(bears, names_now)):
                return True
        return False

    # -- all that waits ----------------------------------------------------------------------------------------------

    def run(self, *, stopped: Callable[[], bool] = bool) -> int:
        """Distribute what waits, in order, until a message blocks the topic; return how many were distributed.

        `stopped` says whether to end after the message at hand. DropqError if the topic is gone, or cannot be used.
        """
        self.settles_at = 0
        if self._is_paused():
            return 0
        count, again = 0, False
        self.blocked_by = ""
        with self.context.error_context("what waits is distributed later"):
            view = view_of(self.context, depth=self.context.timing.view_depth)
            view.refresh()
            self.settles_at = min(view.unsettled.values(), default=0)
            while not stopped():
                file = next(view.view, None)
                if file is None:
                    if view.go_on():
                        continue
                    break
                try:
                    if is_to_expire(self.context, file) and Moves(self.context).expire_waiting(file):
                        continue
                    count += self._distribute(file, again=again) is not None
                    again = True
                except Unavailable as error:
                    if not reading.exists(f"{self.context.layout.target}/{file.filename}"):
                        continue  # RACE: another distributor claimed it, and its body could not be read here any more
                    self._block(str(error))
                    break
                if self._is_paused():
                    break
        return count

    def _is_closed(self, file: MessageFile) -> bool:
        """Return whether this user may not read the body of a message that waits: then it goes to error/."""
        return reading.is_closed(f"{self.context.layout.target}/{file.filename}")

    def decide(self, file: MessageFile) -> Decision:
        """Return whether a message that waits can be distributed now, and to whom; ask in the order of delivery."""
        if self._is_closed(file):
            text = "this user may not read its body: a process that may distributes it, any other moves it to error/"
            return Decision(True, "unreadable", text)
        try:
            chosen = self._chosen(self._receivers.now(), file, "target")
        except Unavailable as error:
            return Decision(False, "receiver", str(error))
        for receiver in chosen:
            receiver.foresee()
        text = f"the next publisher, consumer of a receiver, or `dropq sweep {quote(self.context.name)}` distributes it"
        return Decision(True, "ready", text, tuple(receiver.address for receiver in chosen))

    def what_blocks(self) -> str:
        """Return why the first message that waits cannot be distributed now; "" if it can, or no message waits."""
        first = next(view_of(self.context).files(), None)
        self._routes.refresh()
        if first is None or self._is_to_be_routed(first):
            return ""
        found = self.decide(first)
        return "" if found.allowed else found.detail

    def _block(self, why: str) -> None:
        self.blocked_by = why
        now = time.monotonic()
        if now - self._warned.get(why, -WARN_EVERY) >= WARN_EVERY:
            self._warned[why] = now
            log.warning("topic %s waits: %s", self.context.name, why)

    def _is_paused(self) -> bool:
        now = time.monotonic()
        if now >= self._refresh_at:
            with error_context("what is published waits"):
                self._paused, has_routes = self.context.switches()
                self._routes.refresh(are_there=has_routes)
                if self._presence is not None:
                    self._presence.keep()
            self._refresh_at = now + self.context.timing.max_age
        return self._paused

    # -- the steps ---------------------------------------------------------------------------------------------------

    def _distribute(self, file: MessageFile, *, again: bool) -> bool | None:
        """Claim a message that waits, and distribute it; return whether all receivers have it, None after a lost race.

        It asks for filters and room before the claim, so that a message that cannot be distributed now is Unavailable,
        and not touched; unless a route takes it. `again` says whether another message was distributed just before.
        """
        asked, chosen = list[Receiver](), list[Receiver]()
        if not self._is_to_be_routed(file):
            asked = self._receivers.latest() if again else self._receivers.now()
            try:
                chosen = self._chosen(asked, file, "target")
            except Unavailable:
                if not self._is_closed(file):
                    raise
                asked, chosen = [], []  # a filter cannot read it: claim it, and find that again
        self._show()
        claim = self._claims.claim(file, next(self._owners), lease_end(self.context.clock, LEASE))
        if claim is None:
            return None
        try:
            return self._share_out_or_release(claim, self.context.layout.target, None, asked, chosen)
        except LeaseLost:
            return None  # RACE: a sweep took this process for dead: somebody else distributes it

    def _share_out_or_release(
        self, claim: Claim, came_from: str, body: Body, asked: Sequence[Receiver], chosen: Sequence[Receiver]
    ) -> bool:
        """Distribute a claimed message, as `_share_out` does; give it back if that fails."""
        try:
            return self._share_out(claim, came_from, body, asked, chosen)
        except LeaseLost:
            raise
        except BaseException as error:
            with suppress(LeaseLost):
                if isinstance(error, DropqError | OSError) and set_closed_aside(self.context, claim):
                    return True
                self._claims.release(claim, counted=False)
            raise

    def _show(self) -> None:
        """Show that this process lives, before its first claim."""
        if self._presence is None:
            with error_context("the message waits in target/"):
                presence = self._presence = Presence(self.context.layout.consumers, self._id, self.context.storage)
            self._unless_closed = finalize(self, _end, presence, FORKS.count)

    def _share_out(
        self, claim: Claim, came_from: str, body: Body, asked: Sequence[Receiver], chosen: Sequence[Receiver]
    ) -> bool:
        """Distribute a claimed message; `asked` are the receivers that were asked before, and `chosen` get it."""
        claimed = MessageFile(claim.filename, claim.arrival, typed_replies=self.context.sidecars.typed_replies)
        if has_expired(self.context, claimed):
            self._claims.set_aside(claim, "expired", "time_limit")
            return True
        if self._routes.in_use and self._is_routed(claim):
            return True
        own_name = self._copied_name(claim)
        while True:
            standing = self._receivers.now()
            if standing is not asked:
                known, still = set(map(id, asked)), set(map(id, standing))
                new = [receiver for receiver in standing if id(receiver) not in known]
                chosen = [receiver for receiver in chosen if id(receiver) in still] + self._chosen(
                    new, claimed, "processing"
                )
            if not chosen:
                self._claims.archive_uncounted(claim)
                return True
            if not names.tells_time(own_name) and any(
                receiver.context.sidecars.ignored(own_name) for receiver in chosen
            ):
                own_name = naming.coded(self.context, own_name, claim.arrival or reading.changed_ms(claim.path))
            if names.sidecar_of(own_name):
                for receiver in chosen:
                    receiver.context.sidecars.make_known()
            destinations = [receiver.destination for receiver in chosen]
            done = fan_out(self.context, claim, destinations, self._writer(claim, body, chosen), own_name, came_from)
            if done is not None:
                return done
            asked = standing

    def _is_to_be_routed(self, file: MessageFile) -> bool:
        """Return whether a route takes a message that waits."""
        return next(self._routes.taking(file, file.own_name), None) is not None

    def _is_routed(self, claim: Claim) -> bool:
        """Move a claimed message into the folder of the first route that takes it; return whether one did."""
        waited = MessageFile(claim.own_name, claim.arrival, typed_replies=self.context.sidecars.typed_replies)
        for route in self._routes.taking(waited, claim.own_name):
            try:
                Moves(self.context).route(claim, route.folder)
                self._routed[route.name] += 1
            except StorageError as error:
                if error.location is not None:
                    raise  # it was moved, and is not durable
                self._routes.skip(route, error)
                continue
            return True
        return False

    def _chosen(self, receivers: list[Receiver], file: MessageFile, state: str) -> list[Receiver]:
        if False not in [receiver.takes_all for receiver in receivers]:
            return receivers
        client = ""
        if names.may_be_marked(file.filename):
            client = self.context.sidecars.full(file.name).from_client
        matching = [receiver for receiver in receivers if receiver.takes_all or receiver.wants(file, state, client)]
        return [receiver for receiver in matching if receiver.takes_all or receiver.has_room()]

    def _copied_name(self, claim: Claim) -> str:
        """Return the file name of the copies: the message's own, without its counters and marks."""
        if not names.may_be_marked(claim.own_name) and "JMSXDeliveryCount" not in claim.own_name:
            return claim.own_name
        sidecars = self.context.sidecars
        name = naming.without_envelope(self.context, sidecars.parse(claim.own_name).unmarked)
        name = replace(name, delivery_count=0, cancels=0, died=0, not_before=0, cut=0, replayed=False)
        return sidecars.fit(naming.without_sender(self.context, replace(name, via="")))

    def _writer(
        self, claim: Claim, body: Body, receivers: Sequence[Receiver]
    ) -> Callable[[str, int, Sequence[str]], None]:
        """Return the function that writes the copies into a staged folder."""
        storage = self.context.storage
        small: Body = body
        read_times: tuple[int, int] | None = None
        if body is None:
            with suppress(OSError):  # it is too long, or gone: then the copy says so
                small, read_times = reading.read_with_times(claim.path, IN_MEMORY)
        if False in [receiver.own_modes for receiver in receivers]:
            small = None

        def write(folder: str, at: int, parts: Sequence[str]) -> None:
            times = None
            if small is not None and not names.tells_time(claim.own_name):
                times = read_times or reading.times(claim.path)
            size = len(small) if small is not None else reading.regular_size(claim.path) or 0
            if small is not None and len(parts) <= COPIES_AT_ONCE and len(parts) * size <= AT_ONCE:
                return storage.write_all(folder, parts, [small] * len(parts), at=at, times=times)
            renew = Renewal(self._claims, claim)
            step = 1 if small is None else max(min(AT_ONCE // (size or 1), COPIES_AT_ONCE), 1)
            for begin in range(0, len(parts), step):
                some = parts[begin : begin + step]
                renew()
                if small is not None:
                    storage.write_all(folder, some, [small] * len(some), at=at, times=times)
                else:
                    like = receivers[begin].context.storage
                    storage.copy(claim.path, f"{folder}/{some[0]}", like=like, between=renew)

        return write


def _end(presence: Presence, forks: int) -> None:
    """End the sign of life of a distributor that nobody closed, with its thread or with the program that made it."""
    if forks == FORKS.count:
        with suppress(OSError):  # a sweep removes the file
            presence.end()
