"""Locks across the border: clients of an NFS server, clients without locks, and who works on the server's own disk.

Each function is a case of nfs.py's: it takes the two clients, on queues of its own, and raises what is wrong.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from forks import fork
from helpers import until

from dropq import Queue, Root
from dropq.policies.lock import PolicyLock
from dropq.storage import liveness
from torture.account import body, name_of
from torture.guest import mount

if TYPE_CHECKING:
    from torture.nfs import Clients

#: Seconds that anything may take that one waits for: a client keeps what it knows of a folder for a minute.
PATIENCE = 120.0
#: Messages that two sides take, one at a time.
MESSAGES = 30
#: Seconds of a lease that is to run out, and of one that is not.
SHORT, LONG = 6, 600


def the_servers_own_host_and_a_client_tell_each_others_living_from_their_dead(clients: Clients) -> None:
    for holder, other in ((clients.b, clients.here), (clients.here, clients.b)):
        _found_dead(clients, holder, other, by_locks=clients.locks)


def who_has_locks_and_who_has_none_leave_each_other_to_leases(clients: Clients) -> None:
    """A client of the other kind beside one of these: with `nolock`, or without."""
    mixed = _mixed("v3 nolock" if clients.locks else "v3") / "root"
    for holder, other in ((mixed, clients.b), (clients.b, mixed)):
        _found_dead(clients, holder, other, by_locks=False)


def what_a_client_sent_is_read_on_the_servers_own_host_and_the_other_way_round(clients: Clients) -> None:
    for sender, reader in ((clients.b, clients.here), (clients.here, clients.b)):
        name = _queue(clients)
        Root(sender).queue(name).send(body("m", 9000))
        with Root(reader).queue(name).subscribe() as subscription:
            message = subscription.receive(timeout=PATIENCE)
            assert message is not None and name_of(message.body) == "m"
            message.ack()
        assert len(os.listdir(clients.here / name / "processed")) == 1


def the_policy_lock_excludes_the_servers_own_host_and_a_client(clients: Clients) -> None:
    name = _queue(clients)
    sides = [Root(root).queue(name) for root in (clients.here, clients.b)]
    for holder, other in (sides, sides[::-1]):
        with _locked(holder) as first, _locked(other) as second:
            # Without locks on the server each side has one of its own, as the papers say.
            assert first and second is not clients.locks, f"{first}, {second}: who has the policy lock"
        with _locked(other) as second:
            assert second, "a lock that was let go is not to be had"


def a_limit_holds_for_the_servers_own_host_and_a_client_together(clients: Clients) -> None:
    """Without locks on the server a few too many may be held; none is lost or handed out twice."""
    name = _queue(clients, limit=1)
    Root(clients.here).queue(name).send_many([body(f"m{number}") for number in range(MESSAGES)])
    folder = clients.here / name
    pids = [_child(_take_one_by_one, root, folder, clients.locks) for root in (clients.here, clients.b)]
    ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert ends == [0, 0], "two messages were held at once, or a consumer failed: the console tells"
    assert len(os.listdir(folder / "processed")) == MESSAGES


CASES: tuple[Callable[[Clients], None], ...] = (
    the_servers_own_host_and_a_client_tell_each_others_living_from_their_dead,
    who_has_locks_and_who_has_none_leave_each_other_to_leases,
    what_a_client_sent_is_read_on_the_servers_own_host_and_the_other_way_round,
    the_policy_lock_excludes_the_servers_own_host_and_a_client,
    a_limit_holds_for_the_servers_own_host_and_a_client_together,
)


@cache
def _mixed(version: str) -> Path:
    """Return where one more client has mounted the disk, in its own way; it does so once."""
    return mount(version, "mixed")


def _queue(clients: Clients, *, limit: int | None = None) -> str:
    """Make a queue on the server's own disk, so that no client remembers anything of its folders."""
    name = f"locks{next(clients.names)}"
    Root(clients.here).create_queue(name, durability="none", max_backlog=limit)
    return name


def _found_dead(clients: Clients, holder: Path, other: Path, *, by_locks: bool) -> None:
    """Let a consumer hold a message, and die: who sweeps elsewhere leaves it alone first, and then finds it dead."""
    name = _queue(clients)
    Root(holder).queue(name).send(body("m"))
    pid = _child(_hold, holder, name, LONG if by_locks else SHORT)
    processing = clients.here / name / "processing"
    until(lambda: os.listdir(processing), "the claim", timeout=PATIENCE)
    sweeper = Root(other).queue(name)
    folder = sweeper.layout.consumers
    until(
        lambda: os.listdir(sweeper.layout.processing) and liveness.known(folder), "the other to see", timeout=PATIENCE
    )
    way = f"{holder} holds, {other} sweeps"
    swept = sweeper.sweep()
    # Leases end while one looks: a lapsed one says nothing of locks.
    assert swept.dead == 0, f"{way}: a living consumer was found dead"
    assert not by_locks or (swept.total == 0 and os.listdir(processing)), f"{way}: {swept.counts()}"
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    lapsed = swept.lapsed

    def is_swept() -> bool:
        nonlocal lapsed
        again = sweeper.sweep()
        lapsed += again.lapsed
        assert by_locks or not again.dead, f"{way}: a lock told of another mount's consumer"
        return bool(again.dead if by_locks else lapsed)

    until(is_swept, f"{way}: the dead consumer's message to come back", timeout=PATIENCE)


def _hold(root: Path, name: str, lease: int) -> None:
    """Take a message, and live on."""
    with Root(root).queue(name).subscribe(lease_period=lease) as subscription:
        assert subscription.receive(timeout=PATIENCE) is not None
        signal.pause()


def _take_one_by_one(root: Path, folder: Path, alone: bool) -> None:
    """Take messages until all are processed; with `alone`, no more than one is held at a time, on the server's disk."""
    with Root(root).queue(folder.name).subscribe() as subscription:
        while len(os.listdir(folder / "processed")) < MESSAGES:
            message = subscription.receive(timeout=0.2)
            if message is not None:
                held = os.listdir(folder / "processing")
                assert len(held) == 1 or not alone, f"{root} took one too many: {held}"
                message.ack()


@contextmanager
def _locked(queue: Queue) -> Iterator[bool]:
    """Take a queue's policy lock, as a process of its own would: nothing is shared with who has it."""
    with PolicyLock(queue.context).acquire(lambda: None) as taken:
        yield taken


def _child(work: Callable[..., None], *arguments: object) -> int:
    """Do some work in a process of its own; return its id."""
    return fork(partial(work, *arguments), longest=0)
