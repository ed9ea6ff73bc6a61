"""Two clients of a real NFS server, and one that loses replies, in a guest of user-mode-linux: see uml.py.

All of them run on one kernel, but share nothing: each has a cache of its own, and speaks to the server over TCP. What
became of the messages is told by the server's own disk, which has no cache between it and us.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from actors import note_holding
from forks import fork
from helpers import drop, until

from dropq import DropqError, LeaseLost, Message, Out, Queue, Root, Subscription
from dropq.staging import fan_out
from dropq.staging.jobs import Job
from dropq.storage import reading
from torture import nfs_calls, nfs_locks, nfs_quiet, nfs_roots, nfs_spark, root_hosts
from torture.account import Found, body, judge, look, name_of
from torture.guest import CLIENTS, mount
from torture.lossy import Lossy
from torture.table import Options, Row
from torture.uml import Guest, kernel, make_disk

#: Messages that the consumers of both clients race for, and how many of the consumers are killed meanwhile.
MESSAGES, KILLS = 200, 3
#: Messages that the consumers of both clients take one at a time, all of them together.
ONE_AT_A_TIME = 400
#: Seconds after which a switch is seen: it is looked at ten times in each.
SEEN = 0.3
#: Messages of which no consumer takes all in that time.
MORE_THAN_SEEN = 3000
#: How often each call loses its reply, and each case is run.
TIMES = 3
#: Seconds that anything may take that one waits for.
PATIENCE = 120.0
#: Seconds that a guest may take, on a machine with much to do.
AT_MOST = 3600.0


def run(options: Options) -> Iterator[Row]:
    """Boot a guest for each version of NFS, and take its rows."""
    kernel()
    for version in CLIENTS:
        folder = options.folder / version.replace(" ", "-")
        folder.mkdir()
        disk = make_disk(folder / "disk")
        with Guest(folder / "guest", [disk], "torture.nfs:inside", nfs=True, version=version) as guest:
            yield from (Row(**row) for row in guest.result(AT_MOST))
        yield nfs_roots.storm(folder, version, options.seed)
        if version != "v3 nolock":
            yield calls(folder, version)
        yield root_hosts.row(folder / "hosts", version, options.seed, cuts=2 if options.long else 1)
    for version in ("v3", "v4.2"):
        yield nfs_spark.jobs(options.folder / version, version)


def calls(folder: Path, version: str) -> Row:
    """Count what a message costs, in a guest of its own."""
    disk = make_disk(folder / "disk-of-calls")
    job: dict[str, Any] = {"version": version, "cases": list(nfs_calls.LIMITS), "tree": str(kernel())}
    job |= {"count": nfs_calls.FEW, "rounds": nfs_calls.ROUNDS}
    with Guest(folder / "guest-of-calls", [disk], "torture.nfs_calls:inside", nfs=True, **job) as guest:
        rows = guest.result(AT_MOST)
    return Row(f"RPCs a message: {version}", cases=len(rows), wrong=list(nfs_calls.beyond(version, rows)))


# -- inside --------------------------------------------------------------------------------------------------------


@dataclass
class Clients:
    """Two clients of one server, by the root that each sees, and the same root on the server's own disk."""

    version: str
    a: Path
    b: Path
    here: Path
    names: Iterator[int] = field(default_factory=lambda: iter(range(1_000_000)))

    def make(self, **options: Any) -> tuple[Queue, Queue, Path]:
        """Make a new queue; return it as each client sees it, and its folder on the server."""
        name = f"q{next(self.names)}"
        Root(self.a).create_queue(name, **{"durability": "none", "redelivery_delay": 0, **options})
        return Root(self.a).queue(name), Root(self.b).queue(name), self.here / name

    @property
    def locks(self) -> bool:
        """Whether a lock that one client takes is seen by the other."""
        return "nolock" not in self.version


def inside(disk: Path, version: str) -> list[dict[str, Any]]:
    """Run everything on one version of NFS; return rows."""
    a, b = mount(version, "a"), mount(version, "b")
    Root.create(a / "root")
    clients = Clients(version, a / "root", b / "root", disk / "root")
    held = Path("/proc/fs/nfsd/clients")
    assert version != "v4.2" or len(list(held.iterdir())) == 2, "the two clients are one to the server"
    rows = [contention(clients), work_that_is_sent_on(clients), cases(clients), lost_replies(version, disk)]
    if clients.locks:
        rows.insert(1, one_at_a_time(clients))
    return [asdict(row) for row in rows]


# -- consumers on both clients race --------------------------------------------------------------------------------


def contention(clients: Clients) -> Row:
    """Let consumers and sweeps of both clients race for what producers of both send, and kill some of them."""
    row = Row(f"two clients race: {clients.version}", cases=MESSAGES)
    _, _, folder = clients.make()
    notes = Path("/run/notes")
    for name in ("holding", "violations", "acked"):
        (notes / name).mkdir(parents=True)
    lease = 0 if clients.locks else 5
    roots = (clients.a, clients.b)
    consumers = [_child(consume, root, folder.name, notes, lease) for root in roots * 2]
    others = [_child(produce, root, folder.name, f"from-{root.parent.name}", MESSAGES // 2) for root in roots]
    others += [_child(sweep, root, folder.name, notes) for root in roots]
    processed = folder / "processed"
    with suppress(AssertionError):  # the account tells which are missing, and the notes why
        for kill in range(KILLS):
            _come_to(MESSAGES * (kill + 1) // (KILLS + 2), processed, notes)
            os.kill(consumers[0], signal.SIGKILL)
            _, status = os.waitpid(consumers.pop(0), 0)
            row.kills += os.WIFSIGNALED(status)
            consumers.append(_child(consume, roots[kill % 2], folder.name, notes, lease))
        _come_to(MESSAGES, processed, notes)
    (notes / "stop").touch()
    for pid in (*consumers, *others):
        os.waitpid(pid, 0)
    sent = [f"from-{root.parent.name}-{number}" for root in roots for number in range(MESSAGES // 2)]
    found = look(clients.here)
    row.count(judge(found, must=sent), "the race")
    row.wrong += [
        f"{name} ended in {state}" for name, state in found.states().items() if not state.endswith("processed")
    ]
    row.wrong += [f"{mark.name}: {mark.read_text()[-2500:]}" for mark in (notes / "violations").iterdir()]
    acked = Counter(path.name.partition(".")[0] for path in (notes / "acked").iterdir())
    row.wrong += [f"{name} was acked {count} times" for name, count in acked.items() if count > 1]
    return row


def _come_to(count: int, processed: Path, notes: Path) -> None:
    """Wait until so many messages were processed, or something went wrong."""
    until(
        lambda: _messages_in(processed) >= count or os.listdir(notes / "violations"),
        f"{count} messages to be processed",
        timeout=PATIENCE,
    )


def _messages_in(folder: Path) -> int:
    """Count the messages in a folder; an empty file only reserves a name, and may go."""
    count = 0
    for entry in os.scandir(folder):
        with suppress(FileNotFoundError):
            count += entry.stat().st_size > 0
    return count


def _child(work: Callable[..., None], root: Path, queue: str, *arguments: Any) -> int:
    """Do some work on a queue in a process of its own; return its id."""

    def working() -> None:
        try:
            work(Root(root).queue(queue), *arguments)
        except BaseException:
            with suppress(OSError):
                (Path("/run/notes/violations") / f"{work.__name__}-{os.getpid()}").write_text(traceback.format_exc())
            raise

    return fork(working, longest=0)


def produce(queue: Queue, prefix: str, count: int) -> None:
    """Send bodies, some of them of a few pages."""
    for number in range(count):
        name = f"{prefix}-{number}"
        queue.send(body(name, number % 5 * 2000))


def consume(queue: Queue, notes: Path, lease: int) -> None:
    """Take messages and ack them until there is a file `stop`; give some back now and then."""
    with queue.subscribe(lease_period=lease or None, max_backlog=3) as subscription:
        taken = 0
        while not (notes / "stop").exists():
            for message in subscription.receive_many(3, timeout=0.2):
                taken += 1
                name = name_of(message.body) or f"half {message.file}"
                note_holding(notes, name)
                if taken % 7 == 0:
                    (notes / "holding" / name).unlink()
                    message.nack()
                    continue
                message.ack()
                (notes / "acked" / f"{name}.{os.getpid()}").touch()
                (notes / "holding" / name).unlink(missing_ok=True)


def sweep(queue: Queue, notes: Path) -> None:
    """Sweep all the time, but for breaths in which others get on: there is one processor."""
    while not (notes / "stop").exists():
        queue.sweep()
        time.sleep(0.05)


# -- work that is sent on ------------------------------------------------------------------------------------------


def work_that_is_sent_on(clients: Clients) -> Row:
    """Let consumers of both clients send on what they take, with its ack; kill some, and let sweeps of both go on."""
    row = Row(f"work that is sent on with its ack, by two clients: {clients.version}", cases=MESSAGES)
    _, _, folder = clients.make()
    _, _, made = clients.make()
    notes = Path("/run/sent-on")
    notes.mkdir()
    Root(clients.here).queue(folder.name).send_many(
        [body(f"m{number}", number % 5 * 2000) for number in range(MESSAGES)]
    )
    roots, lease = (clients.a, clients.b), 0 if clients.locks else 5
    workers = [_child(send_on, root, folder.name, made.name, notes, lease) for root in roots * 2]
    sweepers = [_child(sweep, root, folder.name, notes) for root in roots]
    with suppress(AssertionError):  # the account tells which are missing
        for kill in range(KILLS):
            _come_to(MESSAGES * (kill + 1) // (KILLS + 2), made / "target", Path("/run/notes"))
            os.kill(workers[0], signal.SIGKILL)
            _, status = os.waitpid(workers.pop(0), 0)
            row.kills += os.WIFSIGNALED(status)
            workers.append(_child(send_on, roots[kill % 2], folder.name, made.name, notes, lease))
        _come_to(MESSAGES, folder / "processed", Path("/run/notes"))
    (notes / "stop").touch()
    for pid in (*workers, *sweepers):
        if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
            said = [path.read_text()[-2500:] for path in Path("/run/notes/violations").glob(f"*-{pid}")]
            row.wrong.append(f"process {pid} failed: {said}")
    Root(clients.here).queue(folder.name).sweep()
    names = [f"m{number}" for number in range(MESSAGES)]
    found = look(clients.here)
    ours = {name: lies for name, lies in found.locations.items() if lies[0].queue in (folder.name, made.name)}
    account = judge(Found(ours, found.damaged), must=[*names, *(f"{name} made" for name in names)])
    row.count(account, "what was sent on")
    for name in names:
        if (states := [where.state for where in found.locations.get(name, [])]) != ["processed"]:
            row.wrong.append(f"{name} is in {states}")
    staged = folder / ".dropq/staged"
    row.wrong += [f"{path} is left" for path in staged.rglob("*") if path.is_file() and path.name != "whole"]
    return row


def send_on(queue: Queue, to: str, notes: Path, lease: int) -> None:
    """Take messages, and send on what is made of each with its ack, until there is a file `stop`."""
    with queue.subscribe(lease_period=lease or None) as subscription:
        while not (notes / "stop").exists():
            if (message := subscription.receive(timeout=0.2)) is not None:
                name = name_of(message.body) or f"half {message.file}"
                with suppress(LeaseLost):
                    message.ack(send=Out(to, body(f"{name} made", 3000)))


# -- a limit over both clients -------------------------------------------------------------------------------------


def one_at_a_time(clients: Clients, count: int = ONE_AT_A_TIME) -> Row:
    """Let consumers of both clients take messages of which one may be held, and look at the server's disk each time."""
    row = Row(f"max_backlog = 1 over two clients: {clients.version}", cases=count)
    _, _, folder = clients.make(max_backlog=1)
    Root(clients.here).queue(folder.name).send_many([body(f"m{number}") for number in range(count)])
    beside = Path("/run/beside")
    beside.mkdir()
    children = [_child(take_alone, root, folder.name, folder, count, beside) for root in (clients.a, clients.b)]
    for pid in children:
        os.waitpid(pid, 0)
    if (found := _states(folder)) != {"processed": sorted(f"m{number}" for number in range(count))}:
        row.wrong.append(f"not each was taken once: { ({state: len(names) for state, names in found.items()}) }")
    row.wrong += [f"{mark.name}: {mark.read_text()}" for mark in beside.iterdir()]
    return row


def take_alone(queue: Queue, folder: Path, count: int, beside: Path) -> None:
    """Take and ack messages until all are processed; note what lies beside the one that is held."""
    with queue.subscribe() as subscription:
        deadline = time.monotonic() + PATIENCE
        while len(os.listdir(folder / "processed")) < count:
            assert time.monotonic() < deadline, "the others did not come"
            message = subscription.receive(timeout=0.2)
            if message is None:
                continue
            if len(held := os.listdir(folder / "processing")) > 1:
                (beside / f"{message.file} was not held alone").write_text(f"{held}")
            message.ack()


# -- one case at a time --------------------------------------------------------------------------------------------


def cases(clients: Clients) -> Row:
    """Run each case some times, on queues of their own."""
    row = Row(f"what one client does and the other sees: {clients.version}")
    for case in (
        stale_views_are_passed_over,
        a_lease_that_ran_out_is_seen_by_the_other_client,
        an_extended_lease_holds_against_the_other_client,
        the_living_are_left_alone_and_the_dead_are_found_dead,
        foreign_names_go_back_and_forth,
        one_of_two_requeues_moves_a_message,
        sweeps_at_once_return_a_message_once,
        a_renewed_claim_is_read_by_its_first_name,
        what_is_kept_for_an_open_file_is_no_message,
        a_body_that_the_other_client_removed_is_gone_or_whole,
        names_are_kept_apart_in_processed,
        a_pause_is_seen_by_the_other_client,
        a_pause_of_the_root_is_seen_by_the_other_client,
        a_write_lock_is_seen_by_the_other_client,
        a_job_that_one_client_sent_is_not_sent_by_the_other,
        an_ack_that_came_first_is_met_by_the_other_client,
        the_first_barrier_holds_back_the_other_client,
        a_barrier_waits_for_what_the_other_client_holds,
        who_passes_by_leaves_the_turn_to_who_waits_on_the_other_client,
        the_first_delayed_message_is_delivered_by_the_other_client,
        a_queue_is_there_for_the_other_client_as_soon_as_it_is_made,
        *nfs_locks.CASES,
        *nfs_quiet.CASES,
    ):
        for _ in range(TIMES):
            row.cases += 1
            try:
                case(clients)
            except Exception as error:
                last = traceback.extract_tb(error.__traceback__)[-1]
                mine = [
                    frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == __file__
                ]
                row.wrong.append(f"{case.__name__}, line {mine[-1]}: {error!r} ({last.filename}:{last.lineno})")
    return row


def _states(folder: Path) -> dict[str, list[str]]:
    """Return the names of the bodies in each state of a queue, on the server's disk."""
    found = look(folder.parent)
    states: dict[str, list[str]] = {}
    for name, locations in found.locations.items():
        for location in locations:
            if location.queue == folder.name:
                states.setdefault(location.state, []).append(name)
    assert not found.damaged, found.damaged
    return {state: sorted(names) for state, names in states.items()}


def _expect(folder: Path, **states: list[str]) -> None:
    found = _states(folder)
    assert found == states, f"{found} instead of {states}"


def _take(source: Queue | Subscription, name: str) -> Message:
    """Receive a message that waits; the other client may see it a little later."""
    message = source.receive(timeout=PATIENCE)
    assert message is not None, "nothing to receive"
    assert name_of(message.body) == name, f"{message.body[:50]!r} is not {name}"
    return message


def stale_views_are_passed_over(clients: Clients) -> None:
    one, other, folder = clients.make()
    one.send_many([body(f"m{number}") for number in range(20)])
    with other.subscribe(max_backlog=None) as late, one.subscribe(max_backlog=None) as early:
        first = late.receive(timeout=PATIENCE)  # it has listed all
        taken = early.receive_many(30)
        missed = late.receive_many(30)
        assert first is not None
        held = [name_of(message.body) for message in (first, *taken, *missed)]
        assert len(held) == len(set(held)), "one was handed out twice"
        for message in (first, *taken, *missed):
            message.ack()
        late_ones = len(held)
        while late_ones < 20:
            another = late.receive(timeout=PATIENCE)
            assert another is not None, f"only {late_ones} of 20 came"
            another.ack()
            late_ones += 1
        assert late.receive() is None and early.receive() is None
    _expect(folder, processed=sorted(f"m{number}" for number in range(20)))


def a_lease_that_ran_out_is_seen_by_the_other_client(clients: Clients) -> None:
    one, other, folder = clients.make()
    one.send(body("m"))
    with one.subscribe(lease_period="1s") as early, other.subscribe() as late:
        held = _take(early, "m")
        again = _take(late, "m")
        assert again.delivery_count == 2
        for verb in (held.ack, held.nack, lambda: held.extend("1m")):
            _refused(verb, LeaseLost)
        again.ack()
    _expect(folder, processed=["m"])


def _refused(verb: Callable[[], object], error: type[DropqError]) -> None:
    try:
        verb()
    except error:
        return
    raise AssertionError(f"{verb} was not refused")


def an_extended_lease_holds_against_the_other_client(clients: Clients) -> None:
    one, other, folder = clients.make()
    one.send(body("m"))
    with one.subscribe(lease_period="2s") as early, other.subscribe() as late:
        held = _take(early, "m")
        first = held.deadline
        held.extend("1h")
        assert first is not None
        until(lambda: other.root.clock.now_ms() > first.timestamp() * 1000, "the first lease's end")
        assert other.sweep().total == 0 and late.receive() is None
        held.ack()
    _expect(folder, processed=["m"])


def the_living_are_left_alone_and_the_dead_are_found_dead(clients: Clients) -> None:
    one, other, folder = clients.make()
    one.send(body("m"))
    lease = None if clients.locks else 6
    pid = _child(hold, clients.a, folder.name, lease)
    until(lambda: "processing" in _states(folder), "the claim")
    assert other.sweep().total == 0, "a living consumer was found dead"
    _expect(folder, processing=["m"])
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    report = other.sweep()
    if clients.locks:
        assert report.dead == 1, f"a dead consumer was not found: {report}"
    else:
        until(lambda: other.sweep().lapsed == 1, "the dead consumer's lease to run out")
    _take(other, "m").ack()
    _expect(folder, processed=["m"])


def hold(queue: Queue, lease: int | None) -> None:
    """Take a message, and live on."""
    with queue.subscribe(lease_period=lease) as subscription:
        subscription.receive(timeout=PATIENCE)
        signal.pause()


def foreign_names_go_back_and_forth(clients: Clients) -> None:
    one, other, folder = clients.make()
    drop(one, "a report.2024.csv", body("m"))
    message = _take(other, "m")
    assert message.id == "a report.2024.csv"
    message.nack()
    other.close()
    message = _take(one, "m")
    assert (message.id, message.delivery_count) == ("a report.2024.csv", 2)
    message.ack()
    one.close()
    _expect(folder, processed=["m"])
    assert os.listdir(folder / "processed") == ["a report.2024.csv"]
    # As a script does it: whose mv succeeds has it.
    drop(other, "by hand", body("n"))
    os.rename(clients.a / folder.name / "target/by hand", clients.a / folder.name / "processing/x1~by hand")
    _refused_by_system(
        lambda: os.rename(clients.b / folder.name / "target/by hand", clients.b / folder.name / "processing/x2~by hand")
    )
    assert other.sweep().total == 0
    assert other.sweep(foreign_older_than=0).foreign == 1
    _take(one, "n").ack()


def _refused_by_system(call: Callable[[], object]) -> None:
    try:
        call()
    except FileNotFoundError:
        return
    raise AssertionError("two renames of one file succeeded")


def one_of_two_requeues_moves_a_message(clients: Clients) -> None:
    one, other, folder = clients.make()
    names = [f"m{number}" for number in range(10)]
    one.send_many([body(name) for name in names])
    with one.subscribe(max_backlog=None) as subscription:
        for message in subscription.receive_many(10, timeout=PATIENCE):
            message.reject("as it comes")
    assert {bool(message.reason) for message in other.browse("error")} == {True}
    _together(lambda: one.requeue(), lambda: other.requeue())
    _expect(folder, target=sorted(names))


def _together(*calls: Callable[[], object]) -> None:
    failed: list[BaseException] = []

    def one(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=one, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def sweeps_at_once_return_a_message_once(clients: Clients) -> None:
    one, other, folder = clients.make()
    names = [f"m{number}" for number in range(10)]
    one.send_many([body(name) for name in names])
    other.send(body("later"), delay="300ms")
    with one.subscribe(max_backlog=None, lease_period="300ms") as subscription:
        held = subscription.receive_many(10, timeout=PATIENCE)
        assert held
        deadline = time.monotonic() + PATIENCE
        while _states(folder) != {"target": sorted([*names, "later"])}:
            assert time.monotonic() < deadline, f"not all came back: {_states(folder)}"
            _together(lambda: one.sweep(), lambda: other.sweep())
    _expect(folder, target=sorted([*names, "later"]))
    counts = [message.delivery_count for message in other.browse() if name_of(message.body) != "later"]
    assert set(counts) <= {0, 1}, f"deliveries counted twice: {counts}"


def a_renewed_claim_is_read_by_its_first_name(clients: Clients) -> None:
    one, other, folder = clients.make(leasing="sublet")
    one.send(body("m"))
    message = one.subscribe(lease_period="1h").receive(timeout=PATIENCE)
    assert message is not None
    theirs = other.find(message.id)
    for _ in range(3):
        message.extend("1h")
        assert name_of(theirs.body) == "m" == name_of(message.body)
    message.ack()
    _expect(folder, processed=["m"])


def what_is_kept_for_an_open_file_is_no_message(clients: Clients) -> None:
    one, other, folder = clients.make(history=False)
    for name in ("m", "n", "o"):
        one.send(body(name))
    with one.subscribe(max_backlog=None) as subscription, ExitStack() as open_files:
        message = _take(subscription, "m")
        opened = open_files.enter_context(message.open())
        message.ack()  # the file is removed while it is open
        assert name_of(opened.read()) == "m"
        # As a script does it that should not: in target/ itself.
        waiting = sorted((clients.a / folder.name / "target").iterdir())
        also = open_files.enter_context(open(waiting[0], "rb"))
        waiting[0].unlink()
        assert len(_kept(folder)) == 2, f"the client keeps {_kept(folder)} for two open files"
        taken = _take(other, "o")
        assert other.receive() is None and subscription.receive() is None
        assert other.counts()["target"] == one.counts()["target"] == 0
        assert other.sweep().total == 0 == one.sweep().total
        other.fsck()
        assert name_of(also.read()) == "n"
        taken.ack()
        other.close()
    until(lambda: not _kept(folder), "the client to remove what nobody has open any more", timeout=PATIENCE)
    _expect(folder)


def _kept(folder: Path) -> list[str]:
    return [name for _, _, files in os.walk(folder) for name in files if name.startswith(".nfs")]


class Between:
    """Stands for the module `os` in dropq.storage.files: something happens after each file is opened."""

    def __init__(self, happening: Callable[[], object]) -> None:
        self._happening = happening

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, *arguments: Any, **options: Any) -> int:
        fd = os.open(*arguments, **options)
        self._happening()
        return fd


def a_body_that_the_other_client_removed_is_gone_or_whole(clients: Clients) -> None:
    """The server may still have it open for this client, and then gives it out; what it gives is never another's."""
    one, _, folder = clients.make(history=False)
    for name in ("m", "n"):
        one.send(body(name, 300_000))
    with one.subscribe(max_backlog=None, lease_period="1h") as subscription:
        for name, after in (("m", False), ("n", True)):
            message = subscription.receive(timeout=PATIENCE)
            assert message is not None and message.receipt is not None
            claimed = clients.b / folder.name / "processing" / message.receipt

            def remove(claimed: Path = claimed) -> None:
                os.unlink(claimed)

            if not after:
                remove()
            else:
                vars(reading)["os"] = Between(remove)
            try:
                read = message.body
            except LeaseLost:
                pass  # as it is
            else:
                assert name_of(read) == name, f"{len(read)} bytes were read, but not the whole body of {name}"
            finally:
                vars(reading)["os"] = os
            _refused(message.ack, LeaseLost)
    _expect(folder)


def names_are_kept_apart_in_processed(clients: Clients) -> None:
    one, other, folder = clients.make()
    for queue, name in ((one, "m"), (other, "n")):
        drop(queue, "same.csv", body(name))
        _take(queue, name).ack()
        queue.close()
    _expect(folder, processed=["m", "n"])
    drop(one, "same.csv", body("o"))
    _take(other, "o").reject("as it comes")
    other.close()
    _expect(folder, processed=["m", "n"], error=["o"])


# What one client makes where the other has looked already. An NFS client remembers what is not there.


def a_pause_is_seen_by_the_other_client(clients: Clients) -> None:
    one, other, _ = clients.make()
    _pause_is_seen(one, other, one)


def a_pause_of_the_root_is_seen_by_the_other_client(clients: Clients) -> None:
    one, other, _ = clients.make()
    _pause_is_seen(one, other, one.root)


def _pause_is_seen(one: Queue, other: Queue, switch: Queue | Root) -> None:
    one.send_many([body(f"m{number}") for number in range(MORE_THAN_SEEN)])
    with other.subscribe() as subscription:
        _take(subscription, "m0").ack()
        switch.pause()
        try:
            seen = time.monotonic() + SEEN
            while time.monotonic() < seen:
                if message := subscription.receive():
                    message.ack()
            assert other.counts()["target"] > 0, "all were taken before it could be seen"
            assert subscription.receive() is None, f"the pause is not seen {SEEN} s after it"
        finally:
            switch.resume()
        until(subscription.receive, "the end of the pause", timeout=SEEN)


def a_write_lock_is_seen_by_the_other_client(clients: Clients) -> None:
    one, other, _ = clients.make()
    other.send(body("m"))
    lock = clients.a / one.name / "write-lock.properties"
    lock.write_text("target-limit=0\ndelay-milliseconds=400\n")

    def send() -> float:
        began = time.monotonic()
        other.send(body("n"))
        return time.monotonic() - began

    until(lambda: send() > 0.3, "a sender that waits", timeout=1.0)
    lock.unlink()
    until(lambda: send() < 0.3, "a sender that does not wait any more", timeout=1.0)


def a_job_that_one_client_sent_is_not_sent_by_the_other(clients: Clients) -> None:
    one, other, folder = clients.make(durability="full")
    assert _run_job(one, "before", ["x"]) == 1  # the ledger has been written before
    assert not Job(other.context, "job").sent
    assert _run_job(one, "job", ["m", "n"]) == 2
    assert Job(other.context, "job").sent and _run_job(other, "job", ["m", "n"]) == 0
    _expect(folder, target=["m", "n", "x"])


def _run_job(queue: Queue, job_id: str, names: list[str]) -> int:
    job = Job(queue.context, job_id)
    job.begin()
    attempt = job.attempt("0")
    attempt.write_all(queue._plain_addresses(len(names), "B"), [body(name) for name in names])
    return job.commit([attempt.finish()])


def an_ack_that_came_first_is_met_by_the_other_client(clients: Clients) -> None:
    one, other, folder = clients.make()
    with other.subscribe() as subscription:
        for number in range(3):
            assert subscription.receive() is None
            early = one.root.context.ids.next()
            assert not one.ack(early, defer=True)
            drop(one, f"4.{early}.B", body(f"m{number}"))
            until(partial(_settles, subscription, folder, number + 1), "the message to be settled by its ack")


def _settles(subscription: Subscription, folder: Path, count: int) -> bool:
    message = subscription.receive()
    assert message is None, f"{message} was delivered, although its ack had come"
    return len(os.listdir(folder / "processed")) == count


def the_first_barrier_holds_back_the_other_client(clients: Clients) -> None:
    one, other, folder = clients.make(barrier_expression="JMSType = 'b'")
    with one.subscribe(max_backlog=5) as early, other.subscribe(max_backlog=5) as late:
        for number in range(3):
            assert late.receive() is None and early.receive() is None
            one.send(body("barrier"), type="b")
            one.send(body("behind"))
            held = _take(early, "barrier")
            share = _take(late, "barrier")
            assert late.receive() is None and early.receive() is None, "what is behind a barrier was handed out"
            held.ack()
            assert late.receive() is None and early.receive() is None, "what is behind a barrier was handed out"
            share.ack()
            _take(late, "behind").ack()
            assert len(_states(folder)["processed"]) == 2 * (number + 1)


def a_barrier_waits_for_what_the_other_client_holds(clients: Clients) -> None:
    one, other, folder = clients.make(barrier_expression="JMSType = 'b'")
    with one.subscribe(max_backlog=5) as early, other.subscribe(max_backlog=5) as late:
        for number in range(5):
            one.send_many([body("before")])
            held = _take(early, "before")
            one.send(body("barrier"), type="b")
            assert late.receive() is None, "a barrier was handed out before what is before it was settled"
            held.ack()
            for share in (_take(late, "barrier"), _take(early, "barrier")):
                share.ack()
            assert len(_states(folder)["processed"]) == 2 * (number + 1)


def who_passes_by_leaves_the_turn_to_who_waits_on_the_other_client(clients: Clients) -> None:
    one, other, _ = clients.make(fairness_model="round-robin")
    by_the_way = other.subscribe(detached=True, lease_period="1h")
    assert by_the_way.receive() is None
    with one.subscribe(max_backlog=None) as waits:
        assert waits.receive() is None
        one.send(body("m"))
        looked = time.monotonic()
        message = by_the_way._next()
        assert message is None or time.monotonic() - looked > 0.1, "it was taken from who waits for it"
        if message is None:
            message = _take(waits, "m")
        message.ack()


def the_first_delayed_message_is_delivered_by_the_other_client(clients: Clients) -> None:
    one, other, folder = clients.make()
    assert other.sweep().delayed == 0
    one.send(body("m"), delay="50ms")
    (waiting,) = one.browse("delayed")
    due = waiting.not_before
    assert due is not None
    until(lambda: other.root.clock.now_ms() > due.timestamp() * 1000, "the delay")
    assert other.sweep().delayed == 1
    _expect(folder, target=["m"])


def a_queue_is_there_for_the_other_client_as_soon_as_it_is_made(clients: Clients) -> None:
    name = f"q{next(clients.names)}"
    root = Root(clients.b)
    assert not root.queue(name).exists()
    Root(clients.a).create_queue(name, durability="none").send(body("m"))
    _take(root.queue(name), "m").ack()
    _expect(clients.here / name, processed=["m"])


# -- replies that get lost -----------------------------------------------------------------------------------------


def lost_replies(version: str, disk: Path) -> Row:
    """Lose the reply to the call that each verb makes, and hold what the verb says against the server's disk."""
    row = Row(f"replies lost: {version}")
    lossy = Lossy(port=2050)
    folder = mount(version, "lossy", port=2050)
    root = Root(folder / "root")
    numbers = iter(range(1_000_000))
    for verb, call, attempt in VERBS:
        for _ in range(TIMES):
            row.cases += 1
            name = f"lost{next(numbers)}"
            history = "no history" not in verb
            queue = root.create_queue(name, durability="none", history=history, redelivery_delay=0)
            lost = lossy.lost
            try:
                attempt(queue, disk / "root" / name, lambda call=call: lossy.lose(call))  # type: ignore[misc]
            except Exception as error:
                frames = traceback.extract_tb(error.__traceback__)
                where = [frame.lineno for frame in frames if frame.filename == __file__]
                row.wrong.append(f"{verb}, reply to {call} lost, line {where[-1]}: {error!r}, from {frames[-1][:3]}")
            lossy.forgive()
            if lossy.lost == lost:
                row.wrong.append(f"{verb}: no reply to {call} was lost, so nothing is proven")
            row.faults += lossy.lost - lost
            queue.close()
    return row


Lose = Callable[[], None]


def _lost_send(queue: Queue, folder: Path, lose: Lose) -> None:
    lose()
    queue.send(body("m"))
    _expect(folder, target=["m"])


def _lost_send_many(queue: Queue, folder: Path, lose: Lose) -> None:
    lose()
    assert len(queue.send_many([body("m"), body("n")])) == 2
    _expect(folder, target=["m", "n"])


def _lost_writer(queue: Queue, folder: Path, lose: Lose) -> None:
    lose()
    with queue.writer() as file:
        file.write(body("m"))
    _expect(folder, target=["m"])


def _lost_delivery(queue: Queue, folder: Path, lose: Lose) -> None:
    queue.send(body("m"), delay="1ms")
    (waiting,) = queue.browse("delayed")
    due = waiting.not_before
    assert due is not None
    until(lambda: queue.root.clock.now_ms() > due.timestamp() * 1000, "the delay")
    lose()
    assert queue.sweep().delayed == 1
    _expect(folder, target=["m"])


def _lost_job(queue: Queue, folder: Path, lose: Lose) -> None:
    job = Job(queue.context, "job")
    job.begin()
    attempt = job.attempt("0")
    attempt.write_all(queue._plain_addresses(3, "B"), [body(name) for name in "mno"])
    staged = attempt.finish()
    lose()
    assert job.commit([staged]) == 3
    _expect(folder, target=["m", "n", "o"])
    assert job.sent and os.listdir(folder / "working") == []


def _lost_claim(queue: Queue, folder: Path, lose: Lose) -> None:
    queue.send(body("m"))
    lose()
    _take(queue, "m").ack()
    _expect(folder, processed=["m"])


def _settling(settle: Callable[[Message], None], **states: list[str]) -> Callable[[Queue, Path, Lose], None]:
    def lost(queue: Queue, folder: Path, lose: Lose) -> None:
        queue.send(body("m"))
        message = _take(queue, "m")
        lose()
        settle(message)
        _expect(folder, **states)

    return lost


def _sending(step: str) -> Callable[[Queue, Path, Lose], None]:
    """Lose the reply to the first call of a step of an ack that sends."""

    def lost(queue: Queue, folder: Path, lose: Lose) -> None:
        queue.root.create_queue(f"{queue.name}-to", durability="none")
        queue.send(body("m"))
        message = _take(queue, "m")
        real = getattr(fan_out, step)

        def first(*given: Any, **how: Any) -> Any:
            lose()
            return real(*given, **how)

        with mock.patch.object(fan_out, step, first):
            message.ack(send=[Out(f"{queue.name}-to", body("n")), Out(queue.name, body("o"))])
        _expect(folder, processed=["m"], target=["o"])
        _expect(folder.with_name(f"{queue.name}-to"), target=["n"])

    return lost


def _lost_foreign_ack(queue: Queue, folder: Path, lose: Lose) -> None:
    drop(queue, "report.csv", body("m"))
    message = _take(queue, "m")
    lose()
    message.ack()
    _expect(folder, processed=["m"])
    assert os.listdir(folder / "processed") == ["report.csv"]


def _extend(message: Message) -> None:
    message.extend("1h")
    assert name_of(message.body) == "m"
    message.ack()


def _lost_requeue(queue: Queue, folder: Path, lose: Lose) -> None:
    queue.send(body("m"))
    _take(queue, "m").reject("as it comes")
    lose()
    (outcome,) = queue.requeue()
    assert outcome.ok, outcome
    _expect(folder, target=["m"])


def _lost_return(queue: Queue, folder: Path, lose: Lose) -> None:
    queue.send(body("m"))
    with queue.subscribe(lease_period="50ms") as subscription:
        message = _take(subscription, "m")
        until(lambda: message.deadline is None or queue.root.clock.now_ms() > message.deadline.timestamp() * 1000, "it")
        lose()
        assert queue.sweep().lapsed == 1
        _expect(folder, delayed=["m"])


def _lost_link(queue: Queue, folder: Path, lose: Lose) -> None:
    queue.send(body("m"))
    message = _take(queue, "m")
    path = queue.root.path / queue.name / ".dropq/linked"
    lose()
    message.link(str(path))
    assert name_of(path.read_bytes()) == "m"
    message.ack()


def _lost_expiry(queue: Queue, folder: Path, lose: Lose) -> None:
    queue.send(body("m"), expires_in="1ms")
    lose()
    until(lambda: queue.sweep().expired == 1, "the expiry")
    _expect(folder, expired=["m"])


def _lost_removal(queue: Queue, folder: Path, lose: Lose) -> None:
    queue.send(body("m"))
    _take(queue, "m").ack()
    lose()
    removed = [outcome for outcome in queue.purge(state="processed") if outcome.ok]
    assert len(removed) == 1
    _expect(folder)


VERBS: tuple[tuple[str, str, Callable[[Queue, Path, Lose], None]], ...] = (
    ("send", "RENAME", _lost_send),
    ("send", "CREATE", _lost_send),
    ("send_many", "RENAME", _lost_send_many),
    ("writer", "RENAME", _lost_writer),
    ("a delay that is over", "RENAME", _lost_delivery),
    ("a job's commit", "RENAME", _lost_job),
    ("a job's commit", "REMOVE", _lost_job),
    ("claim", "RENAME", _lost_claim),
    ("ack", "RENAME", _settling(Message.ack, processed=["m"])),
    ("ack of a foreign name", "RENAME", _lost_foreign_ack),
    ("ack with no history", "RENAME", _settling(Message.ack)),
    ("ack with no history", "REMOVE", _settling(Message.ack)),
    ("ack that sends: its folder", "MKDIR", _sending("new_folder")),
    ("ack that sends: a part", "RENAME", _sending("write_part")),
    ("ack that sends: its commit", "RENAME", _sending("_commit")),
    ("ack that sends: the first move", "RENAME", _sending("roll_forward")),
    ("ack that sends: its end", "RENAME", _sending("end_whole")),
    ("nack", "RENAME", _settling(Message.nack, target=["m"])),
    ("reject", "RENAME", _settling(lambda message: message.reject("as it comes"), error=["m"])),
    ("expire", "RENAME", _settling(Message.expire, expired=["m"])),
    ("extend", "RENAME", _settling(_extend, processed=["m"])),
    ("requeue", "RENAME", _lost_requeue),
    ("a lease that ran out", "RENAME", _lost_return),
    ("an expiry", "RENAME", _lost_expiry),
    ("purge", "RENAME", _lost_removal),
    ("purge", "REMOVE", _lost_removal),
    ("a second name for a body", "LINK", _lost_link),
)
