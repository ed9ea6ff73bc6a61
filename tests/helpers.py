"""What several test files share: a settable clock, what lies where as `os` alone sees it, waits with a deadline."""

from __future__ import annotations

import errno
import gc
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from forks import die_after

from dropq import Health, Message, Queue, Root
from dropq.events.log import OUTCOMES
from dropq.events.reader import Event, Reader
from dropq.lifecycle.timing import Timing
from dropq.queue.subscription import Subscription
from dropq.storage import clock, exclusive_rename, reading, system_calls, watch
from dropq.storage import files as storage_files
from dropq.storage.system_calls import HERE
from dropq.worker import loop

#: What the fixture `make` is: it makes a queue with the given options.
Make = Callable[..., Queue]


class Ran(NamedTuple):
    """What a command left: exit code, standard output and standard error."""

    code: int
    out: str
    err: str


#: What the fixture `run` is: it runs a command line.
Run = Callable[..., Ran]

#: Where the kernel says how many events it keeps for who does not read them.
MOST_EVENTS = Path("/proc/sys/fs/inotify/max_queued_events")

#: The folders of a queue in which a message can be, below the folder that holds its target/.
FOLDERS = {
    "working": "working",
    "target": "target",
    "processing": "processing",
    "processed": "processed",
    "expired": "expired",
    "error": "error",
    "delayed": ".dropq/delayed",
}

#: Consumers list target/ for every message, and sweep on the way each time. It is for tests that move a clock, as that
#: moves no pause of a consumer, and for those that look at what a listing brings.
FRESH = Timing(max_age=0, listing_share=0, sweep_interval=0, sweep_share=0, after_death=0, written_in_place=0)
#: What a dead holder held is back at once, and no file settles.
AT_ONCE = Timing(after_death=0, written_in_place=0)

#: The verbs that end a claim.
SETTLED: dict[str, Callable[[Message], None]] = {
    "ack": lambda message: message.ack(),
    "nack": lambda message: message.nack(),
    "fail": lambda message: message.fail("f"),
    "reject": lambda message: message.reject("r"),
    "expire": lambda message: message.expire(),
    "release": lambda message: message.release(),
}
#: The verbs that take a claim: those that end it, and `extend`.
VERBS: dict[str, Callable[[Message], None]] = {**SETTLED, "extend": lambda message: message.extend(60)}


class Clock:
    """A clock that stands still until it is moved; it begins with the real time, as files' times do."""

    def __init__(self) -> None:
        self.ms = int(time.time() * 1000)

    def now_ms(self) -> int:
        return self.ms

    def advance(self, seconds: float) -> None:
        self.ms += int(seconds * 1000)


def timed(root: Root, timing: Timing | None) -> Root:
    """Let what is opened of a root from now on pace itself by another timing; None leaves it as it is."""
    if timing is not None:
        root.context = replace(root.context, timing=timing)
    return root


def make_queue(
    path: Path, *, clock: Clock | None = None, dropboxmq: bool = False, timing: Timing | None = None, **options: Any
) -> Queue:
    """Make a queue `q` in a new root at `path`; without syncs and waits where the test does not say."""
    root = timed(Root.create(path, clock=clock, dropboxmq=dropboxmq), timing or AT_ONCE)
    return root.create_queue("q", dropboxmq=dropboxmq, **{"durability": "none", "redelivery_delay": 0, **options})


def health(queue: Queue, **limits: Any) -> Health:
    """How a queue is."""
    return queue.health(**limits)


def base(queue: Queue) -> Path:
    """The folder that holds the queue's target/."""
    return Path(queue.layout.base)


def add_route(queue: Queue, name: str, selector: str | None, *, to: Path | None = None, folder: bool = True) -> Path:
    """Make a route of a queue, in use; return its folder. `to` makes that a link."""
    routing = base(queue) / "routing"
    routing.mkdir(exist_ok=True)
    if to is not None:
        (routing / name).symlink_to(to)
    elif folder:
        (routing / name).mkdir()
    with open(base(queue) / "routing.properties", "a") as properties:
        properties.write("" if selector is None else f"{name}.selector={selector}\n")
    (routing / f"{name}.in-use").touch()
    return routing / name


def files(folder: Path) -> dict[str, bytes]:
    """The regular files of a folder by name, with their content; no dot files, no reservations, none just gone."""
    found = {}
    for entry in sorted(os.listdir(folder)) if folder.exists() else ():
        path = folder / entry
        with suppress(FileNotFoundError):  # moved on since the listing
            about = path.lstat()
            reserved = about.st_mode & 0o7777 == 0o1000 and about.st_size == 0  # by a mover that died
            if not entry.startswith(".") and path.is_file() and not reserved:
                found[entry] = path.read_bytes()
    return found


def lying(folder: Path) -> dict[str, list[bytes]]:
    """The bodies that lie in each state of the queue at `folder`, as plain system calls see them; no empty states."""
    states = {state: sorted(files(folder / folder_name).values()) for state, folder_name in FOLDERS.items()}
    return {state: bodies for state, bodies in states.items() if bodies}


def where(queue: Queue) -> dict[str, list[bytes]]:
    """The bodies that lie in each state of a queue."""
    return lying(base(queue))


def names_in(queue: Queue, state: str) -> list[str]:
    """The file names in a state of a queue."""
    return sorted(files(base(queue) / FOLDERS[state]))


def processed(queue: Queue) -> int:
    """How many messages were acknowledged, without a look at any."""
    return len(os.listdir(base(queue) / "processed"))


def private(queue: Queue, name: str) -> list[str]:
    """The names in a private folder of a queue."""
    folder = base(queue) / ".dropq" / name
    return sorted(os.listdir(folder)) if folder.exists() else []


def events(queue: Queue, **chosen: Any) -> list[Event]:
    """What the log of a queue says, without sums."""
    return [event for event in Reader(queue.layout.log).events(**chosen) if event.event != "sum"]


def told(queue: Queue) -> list[tuple[str, object]]:
    """The events of a queue's log, with their reasons; not that it was made."""
    return [(event.event, event.fields.get("reason")) for event in events(queue) if event.event != "created"]


def sums(queue: Queue) -> Counter[str]:
    """All that the sums in a queue's log count."""
    found = Counter[str]()
    for event in Reader(queue.layout.log).events():
        if event.event == "sum":
            found += Counter({key: int(value) for key, value in event.fields.items() if key in OUTCOMES})
    return found


def drop(queue: Queue, name: str, body: bytes) -> None:
    """Send a file as a script does: write it in working/, move it to target/."""
    working = base(queue) / "working" / name
    working.write_bytes(body)
    arrive(working, base(queue) / "target" / name)


def arrive(draft: Path, path: Path) -> Path:
    """Move a file that was written a second ago, so that it has settled; return where it is."""
    os.utime(draft, (time.time() - 1,) * 2)
    return draft.rename(path)


def take(queue: Queue) -> Message:
    """Receive a message that is known to wait."""
    message = queue.receive()
    assert message is not None, f"nothing to receive in {where(queue)}"
    return message


def leave_claimed(queue: Queue, lease: str | None = None) -> None:
    """Let a consumer take a message and die."""

    def claim() -> None:
        subscription = reopened(queue).subscribe(lease_period=lease)
        assert subscription.receive() is not None

    die_after(claim)


def died(message: Message) -> None:
    """Give a message back at once, as a sweep gives back what a dead consumer held."""
    assert message._claim is not None
    message._claim.died = True
    message._records = None
    message._give_back(delay=0)


def archive(queue: Queue, *bodies: bytes) -> None:
    """Send messages and acknowledge each."""
    for body in bodies:
        queue.send(body)
        take(queue).ack()


def reopened(queue: Queue, timing: Timing | None = None) -> Queue:
    """The same queue as another process opens it, with the same timing where no other is given."""
    root = Root(queue.root.path, clock=queue.root.clock)
    return timed(root, timing or queue.root.context.timing).queue(queue.name)


def other_file_system(folder: Path) -> Path | None:
    """Return where temporary folders may be made on another file system than a folder's; None where there is none."""
    folders = (Path(each) for each in ("/dev/shm", tempfile.gettempdir(), "/var/tmp"))
    device = reading.device(str(folder))
    return next((each for each in folders if each.is_dir() and reading.device(str(each)) != device), None)


def until(condition: Callable[[], object], what: str, *, timeout: float = 600.0) -> None:
    """Wait until something is so; fail with `what` was waited for when it is not within the timeout."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout} s for: {what}"
        time.sleep(0.005)


def next_moment(folder: Path) -> None:
    """Wait until what is done next has a later ctime, and a later id, than what was done."""
    probe = folder / ".probe"

    def now() -> int:
        probe.touch()
        return probe.stat().st_ctime_ns

    moment = now()
    until(lambda: now() > moment + 10_000_000, "the file system's clock")


def overflow(folder: Path) -> None:
    """Let more files come into a folder than the kernel keeps events of, and leave again."""
    if not MOST_EVENTS.exists() or int(MOST_EVENTS.read_text()) > 100_000:
        pytest.skip("this kernel keeps too many events to lose any")
    outside = folder.parent / ".comes-and-goes"
    outside.touch()
    for number in range(int(MOST_EVENTS.read_text()) + 1):
        inside = folder / f".comes-and-goes-{number % 2}"  # two equal events, one after the other, would be one
        os.rename(outside, inside)
        os.rename(inside, outside)
    outside.unlink()


def open_files() -> int:
    """How many files this process has open, but for sockets: Spark's session, if it has one, opens some at any time."""
    gc.collect()
    open_now = []
    for number in os.listdir("/dev/fd"):
        with suppress(FileNotFoundError):  # such as that of the listing
            open_now.append(os.readlink(f"/dev/fd/{number}"))
    return len([path for path in open_now if not path.startswith("socket:")])


def gone_mount(path: str, *args: Any, **kwargs: Any) -> Any:
    """Stand for a system call on a mount whose server is gone."""
    raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN), path)


#: The modules that make system calls of a root.
STORAGE = (clock, storage_files, exclusive_rename, reading, system_calls)


def stand_in_for_os(monkeypatch: Any, stand_in: object) -> None:
    """Let dropq.storage call something else than the module `os`."""
    for module in STORAGE:
        monkeypatch.setattr(module, "os", stand_in)


class RecordingOs:
    """Stands for the module `os` in dropq.storage, and keeps what was called on which path, in order."""

    WATCHED = ("open", "write", "fsync", "rename", "unlink", "link", "mkdir", "rmdir", "utime", "close")

    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []
        self._paths: dict[int, str] = {}

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in self.WATCHED:
            return real

        def call(*args: Any, **kwargs: Any) -> Any:
            result = real(*args, **kwargs)
            if name == "open":
                self._paths[result] = args[0]
            subject = self._paths.get(args[0], str(args[0])) if isinstance(args[0], int) else os.fspath(args[0])
            self.calls.append((name, subject, os.fspath(args[1])) if name == "rename" else (name, subject))
            return result

        return call

    def record(self, monkeypatch: Any) -> RecordingOs:
        """Watch dropq.storage from now on, renameat2 included."""
        real = system_calls.rename_noreplace

        def rename_noreplace(source: str, destination: str, folder: int = HERE, source_folder: int = HERE) -> None:
            real(source, destination, folder, source_folder)
            within = (self._paths.get(source_folder, ""), self._paths.get(folder, ""))
            self.calls.append(("rename", os.path.join(within[0], source), os.path.join(within[1], destination)))

        whole = system_calls.sync_whole

        def sync_whole(fd: int, path: str) -> None:
            whole(fd, path)
            self.calls.append(("syncfs", path))

        monkeypatch.setattr(system_calls, "sync_whole", sync_whole)
        stand_in_for_os(monkeypatch, self)
        monkeypatch.setattr(system_calls, "rename_noreplace", rename_noreplace)
        return self

    def briefly(self, names: tuple[str, ...], folder: Path) -> list[str]:
        """Return the calls of some names as `fsync target`: by the folder below `folder`, files by their folder."""
        told = []
        for name, *paths in self.calls:
            if name not in names:
                continue
            parts = []
            for path in paths:
                relative = os.path.relpath(path, folder)
                parts.append(relative if os.path.isdir(path) else f"{os.path.dirname(relative)}/*")
            told.append(" ".join([name, *parts]))
        return told


def only_woken(monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """Let nobody look but for an event, or for being woken; return what says whether somebody waits so now."""
    monkeypatch.setattr(Subscription, "_next_attempt", 60.0)
    monkeypatch.setattr(watch, "PATIENCE", 0.0)
    monkeypatch.setattr(loop, "RESCAN", 60.0)
    waiting: list[watch.Watch] = []
    wait = watch.Watch.wait

    def noted(self: watch.Watch, timeout: float = watch.RESCAN) -> bool:
        if not self.events:
            return wait(self, timeout)
        waiting.append(self)
        try:
            return wait(self, timeout)
        finally:
            waiting.remove(self)

    monkeypatch.setattr(watch.Watch, "wait", noted)
    return lambda: bool(waiting)


def first_and_long(values: Iterable[object], first: int = 1) -> list[object]:
    """Return values for a parameter of a test: with any but the first of them, the test is `long`."""
    each = (value if isinstance(value, tuple) else (value,) for value in values)
    return [pytest.param(*value, marks=pytest.mark.long if at >= first else ()) for at, value in enumerate(each)]
