"""Strangers: whatever somebody may write into a root by hand, each verb ends well or in an error of dropq's own.

Hypothesis makes up the deeds of a stranger who may write anywhere in the root, then a list of verbs, of the library and
of the command line. Meanwhile an audit hook of the interpreter sees every path that is opened, listed, made, renamed or
removed. A folder beside the root, to which the stranger's links and paths lead, has to stay as it was.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from helpers import Clock, health
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from dropq import DropqError, Message, Queue, Root
from dropq.cli import main as cli
from dropq.cli import output
from dropq.diagnosis.fsck import fsck_root
from dropq.diagnosis.health import Limits, health_root
from dropq.queue.stream_journal import Journal
from dropq.staging.jobs import Epoch, Job
from dropq.storage import system_calls
from dropq.upkeep import bulk
from torture.account import body, judge, look
from torture.table import Options, Row

#: Seconds after which a verb is taken to hang, as one does that waits for the other end of a fifo.
PATIENCE = 300
#: Days that the clock of the root is ahead of its files: whatever grows old is old.
AHEAD = 100
STATES = ("target", "processing", "processed", "expired", "error", "working", ".dropq/delayed")

# -- what is watched -------------------------------------------------------------------------------------------


class Watch:
    """Every path that this process uses while `on`, as the interpreter's audit events tell it."""

    #: What changes something: where its paths, and the descriptors of folders that they begin at, stand in the event.
    CHANGES: ClassVar[dict[str, tuple[tuple[int, int], ...]]] = {
        "os.rename": ((0, 2), (1, 3)),
        "os.link": ((0, 2), (1, 3)),
        "os.symlink": ((1, 2),),
        "os.mkdir": ((0, 2),),
        "os.remove": ((0, 1),),
        "os.rmdir": ((0, 1),),
        "os.chmod": ((0, 2),),
        "os.chown": ((0, 3),),
        "os.utime": ((0, 3),),
        "os.truncate": ((0, -1),),
    }
    LISTS = ("os.listdir", "os.scandir", "shutil.rmtree")

    def __init__(self) -> None:
        self.on = False
        self.inside = self.outside = ""
        self.wrong: list[str] = []
        sys.addaudithook(self._event)

    @contextlib.contextmanager
    def watching(self, inside: Path, outside: Path) -> Iterator[list[str]]:
        """Yield what uses a path in `outside`, or changes one that is not in `inside`, while the block runs."""
        self.inside, self.outside = os.path.realpath(inside), os.path.realpath(outside)
        self.wrong = []
        real, compiles_nothing = system_calls.rename_noreplace, sys.dont_write_bytecode

        def logged_rename(
            source: str, destination: str, folder: int = system_calls.HERE, source_folder: int = system_calls.HERE
        ) -> None:
            sys.audit("os.rename", source, destination, max(source_folder, -1), max(folder, -1))  # ctypes says nothing
            real(source, destination, folder, source_folder)

        system_calls.rename_noreplace = logged_rename
        sys.dont_write_bytecode = self.on = True
        try:
            yield self.wrong
        finally:
            self.on = False
            sys.dont_write_bytecode = compiles_nothing
            system_calls.rename_noreplace = real

    def _event(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.on:
            return
        self.on = False  # what is asked for here is no concern of ours
        try:
            if event == "open":
                self._opened(*args)
            elif event in self.LISTS:
                self._used(event, args[0], follows=True, changes=False)
            for at, folder in self.CHANGES.get(event, ()):
                follows = event in ("os.chmod", "os.truncate")  # os.utime is told to follow no link
                self._used(event, args[at], args[folder] if folder >= 0 else -1, follows=follows, changes=True)
        finally:
            self.on = True

    def _opened(self, path: object, mode: str | None, flags: int) -> None:
        changes = bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))
        if isinstance(path, str | bytes) and b"/" not in os.fsencode(path) and not changes:
            return  # beside a folder that was opened before; the event does not tell which
        self._used("open", path, follows=not flags & os.O_NOFOLLOW, changes=changes)

    def _used(self, event: str, path: object, folder: int = -1, *, follows: bool, changes: bool) -> None:
        if isinstance(path, int) or path is None:
            return
        text = os.fsdecode(path)  # type: ignore[arg-type]
        if folder >= 0:
            text = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), text)
        above, name = os.path.split(os.path.abspath(text) if not os.path.isabs(text) else text)
        # Not by `abspath`: it would take `..` for the folder above, where the kernel takes a link on the way.
        real = os.path.realpath(text) if follows or name in ("", ".", "..") else f"{os.path.realpath(above)}/{name}"
        out = f"{real}/".startswith(f"{self.outside}/")
        if out or (changes and real != os.devnull and not f"{real}/".startswith(f"{self.inside}/")):
            stack = "".join(traceback.format_stack(sys._getframe(3), limit=8))
            self.wrong.append(f"{event} of {text!r}, which is {real!r}\n{stack}")


_watch: list[Watch] = []


def watch() -> Watch:
    """Return the watch of this process: an audit hook cannot be taken back."""
    if not _watch:
        _watch.append(Watch())
    return _watch[0]


class Canary:
    """A folder outside the root that nobody is to touch; it has what a follower of links would act on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        files = dict.fromkeys(("secret", "x.json", ".gone-x", ".x.json.0123456789ab.tmp", "4.x.B"), "not yours")
        claim = "c-0123456789-1,1,1~4.x.B"
        for place in (".", "target", "processing", "error", "expired", "delayed", "0", "1", "c-0123456789-1", "part"):
            for name, content in {**files, claim: "not yours", "run-c-0123456789": "", "note.txt": "x"}.items():
                (folder / place).mkdir(parents=True, exist_ok=True)
                (folder / place / name).write_text(content)
        (folder / "manifest.json").write_text(json.dumps({"format": 1, "job": "x", "attempts": {"part": ["secret"]}}))
        self._before = self._now()

    def changed(self) -> str:
        """Tell what is not as it was; empty where all is."""
        now = self._now()
        return ", ".join(sorted(str(path) for path in self._before.keys() ^ now.keys())) or ", ".join(
            sorted(path for path, was in self._before.items() if now[path] != was)
        )

    def _now(self) -> dict[str, tuple[object, ...]]:
        found: dict[str, tuple[object, ...]] = {}
        for path in [self.folder, *self.folder.rglob("*")]:
            about = path.lstat()
            content = path.read_bytes() if stat.S_ISREG(about.st_mode) else b""
            found[str(path)] = about.st_mode, about.st_uid, about.st_gid, about.st_mtime_ns, content
        return found


# -- what a stranger does ----------------------------------------------------------------------------------------


class Deed(NamedTuple):
    """Something that a stranger puts somewhere: `what` is file, message, folder, fifo, socket, link or hard link."""

    what: str
    place: bytes
    content: bytes = b""


#: Where links and paths of a stranger lead: below the canary, from anywhere in the root.
AWAY = ("", "/secret", "/x.json", "/target", "/error", "/part", "/manifest.json", "/c-0123456789-1")
ABOVE = "../../../../outside"
TOKEN = "0123456789abcdef"
CLAIM = "c-0123456789-1"
QUEUES = ("q", "q/incoming")


def _bounded(raw: bytes) -> bytes:
    """Return what can be a file's name of some bytes."""
    name = raw.replace(b"/", b"_").replace(b"\0", b"_")[:255]
    return name if name not in (b"", b".", b"..") else b"dots"


_fragments = st.sampled_from([
    "", "x", "..", "%2E%2E%2F%2E%2E%2Foutside%2Fsecret", "%00", "%0A", "%1B[31m", "%ED%A0%80", "%FF", "+", "%", "~",
    "=", "&", "\n", "\r", "\x1b]0;x\x07", "'\"$(id)`id`;", "-rf", "\u202e", "x" * 200, "9" * 19, "-1", "1e999", "NaN",
    "QTopic", "T", "tmp", ".part", "*", "{}",
])  # fmt: skip
_numbers = st.sampled_from(["0", "1", "-1", "9223372036854775807", "9" * 18, "9" * 40, "253402300800000", "x", ""])
_properties = st.one_of(
    st.builds("JMS_dropq_{}={}".format, st.sampled_from(
        ["cancelsI", "notBeforeL", "sinceL", "hopsI", "copyS", "lapsedS", "viaS", "originS", "metaS"]
    ), _numbers | _fragments),
    st.just(f"JMS_dropq_metaS={TOKEN}"),
    st.builds("JMSXDeliveryCountI={}".format, _numbers),
    st.builds("{}{}={}".format, _fragments, st.sampled_from("BYHILFDS"), _fragments | _numbers),
)  # fmt: skip
_ids = st.sampled_from(["1140429201295000-9262574723", "9999999999999999-9999999999", "order", "%2E%2E%2Fx"])
_coded = st.builds(
    lambda priority, id, kind, fields, properties: ".".join([priority, id, kind, *fields, "&".join(properties)]),
    st.sampled_from(["4", "-2147483648", "2147483648", "007"]),
    _ids | _fragments,
    st.sampled_from("BTMX"),
    st.tuples(_numbers, _fragments, _fragments, _fragments),
    st.lists(_properties, max_size=3),
)
_claimed = st.builds(
    "{},{},{}~{}".format,
    st.sampled_from([CLAIM, "c-0123456789-2", "-0000000000-zzzzzzzz", "%00-0123456789-1"]),
    st.sampled_from(["0", "1", "9" * 16, "253402300800000"]),
    st.sampled_from(["0", "1", "9" * 10]),
    _coded | _fragments,
)
names = st.one_of(
    _coded.map(os.fsencode),
    _claimed.map(os.fsencode),
    st.builds("client~{}".format, _coded).map(os.fsencode),
    _fragments.map(os.fsencode),
    st.binary(min_size=1, max_size=255),
    st.sampled_from([b"\xff" * 255, "\u20ac".encode() * 85, b".hidden", b"_SUCCESS", b"x.tmp", b".keep"]),
).map(_bounded)

_hostile = st.sampled_from(
    [f"{ABOVE}{away}" for away in AWAY]
    + [
        "/etc/passwd",
        "..",
        ".",
        "",
        "a/b",
        "a\0b",
        "\ud800",
        "\udcff",
        "x" * 300,
        "\x1b[31m",
        "4.x.B",
        TOKEN,
        "1",
        "part",
    ]
)
_values = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), _hostile, st.just([]), st.just({}), st.just(10**400)
)
_json = st.recursive(
    _values, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_hostile, inner, max_size=3), max_leaves=8
)
_tables = st.one_of(
    st.fixed_dictionaries({"attempts": st.dictionaries(_hostile, st.lists(_hostile, max_size=4) | _json, max_size=3)}),
    st.fixed_dictionaries({"claims": st.lists(_hostile, max_size=3) | _json}),
    st.fixed_dictionaries({"name": _hostile, "inode": _values, "reason": _json, "detail": _json, "stderr": _json}),
    st.fixed_dictionaries({"id": _hostile, "properties": st.dictionaries(_hostile, _json, max_size=2), "type": _json}),
    _json,
)
papers = st.one_of(
    _tables.map(lambda value: json.dumps(value).encode()),
    st.sampled_from([b"", b"{", b"[" * 100_000, b'{"attempts":' * 50_000, b'{"a":' * 400 + b"1" + b"}" * 400, b"\xff",
                     b'{"inode": null, "name": "x", "reason": ' + b"[" * 900 + b"]" * 900 + b"}", b"9" * 5000]),
    st.binary(max_size=64),
)  # fmt: skip
_toml_keys = st.sampled_from([
    "lease_period", "semantics", "expiration", "redelivery_delay", "redelivery_backoff", "max_deliveries", "ignore",
    "file_mode", "dir_mode", "group", "filter", "priority", "format", "exhausted", "LeasePeriod", "\x1b[31m",
])  # fmt: skip
_toml_values = st.sampled_from([
    "1", "-1", "'1h'", "'9999999d'", "true", "[]", "['*']", "['[']", "['\\u001b']", "'0666'", "'0700'", "'error'",
    "1e308", "inf", "nan", "'no-such-group'", "[" * 5000, "9" * 5000, "'\x1b'", "{a = 1}", "1979-05-27",
])  # fmt: skip
tomls = st.one_of(
    st.lists(st.builds("{} = {}\n".format, _toml_keys, _toml_values), max_size=3).map(
        lambda rows: "".join(rows).encode()
    ),
    st.sampled_from([b"\xff", b"[defaults]\n", b"format = 99\n", b"a." * 3000 + b"b = 1\n", b"[[selector]]\n"]),
    st.binary(max_size=40),
)

_jobs = st.sampled_from([".job-x", ".job-", ".job-..", ".drop-x-1", ".drop-", ".job-row.1", ".job-" + "x" * 250])
_papers_at = st.one_of(
    st.builds("working/{}/manifest.json".format, _jobs),
    st.builds(".dropq/ledger/{}".format, st.sampled_from(["x.json", "row.1.json", "row.99999.json", ".json", "y"])),
    st.builds(
        ".dropq/streams/s/{}".format, st.sampled_from(["1.json", "2.json", "run-c-0123456789", "run-", "settled-9"])
    ),
    st.builds(".dropq/reasons/{}/{}.json".format, st.sampled_from(["error", "expired"]), st.sampled_from([TOKEN, "a"])),
    st.builds(".dropq/consumers/{}".format, st.sampled_from(["c-0123456789", "-0000000000", "x"])),
    st.sampled_from([".dropq/.gone-x", ".dropq/.x.json.0123456789ab.tmp", f".dropq/held/{CLAIM}", "read-lock"]),
)
_private = st.sampled_from([
    ".dropq", ".dropq/consumers", ".dropq/held", ".dropq/reasons", ".dropq/reasons/error", ".dropq/delayed",
    ".dropq/ledger", ".dropq/streams", ".dropq/streams/s", ".dropq/set-aside", ".dropq/set-aside/target", "routing",
    f".dropq/held/{CLAIM}", "working/.job-x", "working/.drop-x-1", "working/.job-x/part",
    "working/.job-x/manifest.json",
])  # fmt: skip
_of_root = st.sampled_from([
    ".dropq", ".dropq/meta", ".dropq/clock", f".dropq/meta/{TOKEN}.json", ".dropq/meta/old.json",
    ".dropq/meta/.unreferenced", "global-read-lock", ".x.deleting-1-012345", ".x.creating-0123456789ab",
    ".x.deleted-1-012345", "x\x1b[31m",
])  # fmt: skip
_states = st.sampled_from(STATES)
_links = st.sampled_from(AWAY)

in_queue = st.one_of(
    st.builds(lambda state, name: Deed("message", os.fsencode(state) + b"/" + name), _states, names),
    st.builds(lambda state, name: Deed("message", os.fsencode(state) + b"/" + name), st.just("target"), names),
    st.builds(lambda name: Deed("message", b"working/.job-x/part/" + name), names),
    st.builds(
        lambda what, state, name, away: Deed(what, os.fsencode(state) + b"/" + name, os.fsencode(away)),
        st.sampled_from(["link", "fifo", "socket", "folder", "hard"]), _states, names, _links,
    ),
    st.builds(lambda place, paper: Deed("file", os.fsencode(place), paper), _papers_at, papers),
    st.builds(
        lambda what, place, away: Deed(what, os.fsencode(place), os.fsencode(away)),
        st.sampled_from(["link", "link", "fifo", "folder", "file"]), _private | _papers_at, _links,
    ),
    st.builds(lambda what, place: Deed(what, os.fsencode(place)), st.sampled_from(["file", "fifo", "gone"]), _states),
)  # fmt: skip
in_root = st.one_of(
    st.builds(
        lambda what, place, away: Deed(what, os.fsencode(place), os.fsencode(away)),
        st.sampled_from(["link", "fifo", "folder", "file"]), _of_root, _links,
    ),
    st.builds(lambda what: Deed(what, b"x"), st.sampled_from(["fifo", "folder", "file"])),  # a queue may be a link
    st.builds(lambda place, paper: Deed("file", os.fsencode(place), paper), _of_root, papers),
)  # fmt: skip
#: What else stands for a file of the configuration; it is seldom, as little is done with a queue that is refused.
configs = st.one_of(
    st.none(),
    st.none(),
    st.none(),
    st.builds(lambda place, text: Deed("file", place, text), st.sampled_from([b"dropq.toml", b"q/queue.toml"]), tomls),
    st.builds(Deed, st.sampled_from(["fifo", "folder"]), st.sampled_from([b"dropq.toml", b"q/queue.toml"])),
)


@dataclass
class Stranger:
    """Does deeds in a root; those that are not possible are left out."""

    root: Path
    outside: Path
    base: str
    sent: list[str] = field(default_factory=list)
    #: Those of them that were not sent, but staged: they go with their job.
    staged: list[str] = field(default_factory=list)

    def do(self, deeds: Sequence[Deed], in_root: Sequence[Deed]) -> None:
        """Do what stands in the way of folders first, then the rest."""
        here = os.fsencode(self.root)
        placed = [deed._replace(place=here + b"/" + os.fsencode(self.base) + b"/" + deed.place) for deed in deeds]
        placed += [deed._replace(place=here + b"/" + deed.place) for deed in in_root]
        for deed in sorted(placed, key=lambda deed: deed.what == "message"):
            with suppress(OSError):
                self._do(deed)

    def _do(self, deed: Deed) -> None:
        path = deed.place
        if not os.path.realpath(os.path.dirname(path)).startswith(os.fsencode(self.root)):
            return  # his own link leads there: he would be the one who touches it
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if deed.what == "message":
            name = f"m{len(self.sent)}"
            with open(path, "xb") as file:
                file.write(body(name))
            self.sent.append(name)
            self.staged += [name] if b"/.job-" in path else []
            return
        if not os.path.islink(path) and os.path.isdir(path):
            shutil.rmtree(path)
        elif os.path.lexists(path):
            os.unlink(path)
        away = os.fsencode(self.outside) + deed.content
        match deed.what:
            case "file":
                Path(os.fsdecode(path)).write_bytes(deed.content)
            case "folder":
                os.mkdir(path)
                Path(os.fsdecode(path), "inner").write_bytes(b"x")
            case "fifo":
                os.mkfifo(path)
            case "socket":
                with socket.socket(socket.AF_UNIX) as bound, tempfile.TemporaryDirectory() as short:
                    bound.bind(f"{short}/s")
                    os.rename(f"{short}/s", path)
            case "link":
                os.symlink(away, path)
            case "hard":
                os.link(os.fsencode(self.outside) + b"/secret", path)


# -- what is done with it ------------------------------------------------------------------------------------------


SETTLED: dict[str, Callable[[Message], None]] = {
    "ack": Message.ack,
    "nack": Message.nack,
    "fail": lambda message: message.fail("why\x1b"),
    "reject": lambda message: message.reject("why"),
    "expire": Message.expire,
    "extend": lambda message: message.extend("1h"),
}


def _settle(verb: str) -> Callable[[Queue], object]:
    def act(queue: Queue) -> None:
        with queue.subscribe(max_backlog=None) as subscription:
            for _ in range(3):
                message = subscription.receive()
                if message is None:
                    return
                _ask_all(message)
                SETTLED[verb](message)

    return act


def _ask_all(message: Message) -> None:
    """Ask a message for all that it has to say."""
    for name in dir(message):
        if not name.startswith("_"):
            with suppress(DropqError):
                getattr(message, name)
    with suppress(DropqError):
        message.size()
        message.open().close()


def _browse(queue: Queue) -> None:
    for state in ("target", "processing", "processed", "expired", "error", "working", "delayed"):
        with suppress(DropqError):
            for message in queue.browse(state):
                _ask_all(message)


def _send(queue: Queue) -> None:
    queue.send("x", properties={"long": "x" * 300}, type="t" * 200)
    queue.send("x", delay="1h")
    queue.send_many(["y", {"body": b"z", "message_id": "chosen"}])


def _job(queue: Queue) -> None:
    for name, job in (("job", Job(queue.context, "x")), ("epoch", Epoch(queue.context, "row", 2))):
        with suppress(DropqError, FileNotFoundError):  # as docs/design.md has it: the attempt of a job that is gone
            job.begin()
            attempt = job.attempt("part")
            attempt.write_all(["4.1140429201295000-0000000001.B"], [body(name)])
            job.commit([attempt.finish()])
        with suppress(DropqError):
            job.abort()


def _stream(queue: Queue) -> None:
    with queue.subscribe(max_backlog=None, lease_period="1h", detached=True) as subscription:
        journal = Journal(queue.context, "s", subscription)
        for number in (1, 2):
            with suppress(DropqError):
                journal.next_batch(number, 3)
                journal.messages(number)
        journal.renew()
        journal.settle(1)
        journal.close()


def _find(queue: Queue) -> None:
    for id in ("4.x.B", "order", CLAIM, f"{CLAIM},0,1~x", "\udcff", "a\0b", f"{ABOVE}/secret", f"{CLAIM},0,1~{ABOVE}"):
        with suppress(DropqError):
            _ask_all(queue.find(id))
        with suppress(DropqError):
            queue.claimed(id).extend("1h")
        queue.ack(id)


def _everything(queue: Queue) -> None:
    queue.sweep(foreign_older_than=0, unleased_older_than=0, jobs_older_than=0)


def _pause(queue: Queue) -> None:
    queue.pause()
    assert queue.paused
    queue.resume()


def _pause_all(queue: Queue) -> None:
    queue.root.pause()
    queue.root.resume()


#: What is done in the library, by name; each gets a queue that it opens itself.
VERBS: dict[str, Callable[[Queue], object]] = {
    **{verb: _settle(verb) for verb in SETTLED},
    "browse": _browse,
    "counts": lambda queue: queue.counts(),
    "stats": lambda queue: queue.stats(),
    "sweep": lambda queue: queue.sweep(),
    "sweep everything": _everything,
    "sweep the root": lambda queue: queue.root.sweep(jobs_older_than=0),
    "fsck": lambda queue: queue.fsck(),
    "fsck --repair": lambda queue: queue.fsck(repair=True),
    "fsck of the root": lambda queue: fsck_root(queue.root.context),
    "fsck --repair of the root": lambda queue: fsck_root(queue.root.context, repair=True),
    "health": lambda queue: health(queue, max_age=1, max_count=1, max_error=1),
    "health of the root": lambda queue: list(health_root(queue.root.context, Limits())),
    "requeue": lambda queue: [queue.requeue(state=state) for state in bulk.REQUEUED],
    "move": lambda queue: queue.move(queue.root.queue("other")),
    "send": _send,
    "job": _job,
    "stream": _stream,
    "find": _find,
    "pause": _pause,
    "pause of the root": _pause_all,
    "queues": lambda queue: queue.root.queues(),
    "delete": lambda queue: queue.root.delete_queue("other"),
    "create": lambda queue: queue.root.create_queue("new", history=False),
}
#: What removes messages for good; it comes last.
REMOVERS: dict[str, Callable[[Queue], object]] = {
    "purge": lambda queue: [queue.purge(state=state) for state in ("target", "error", "processing")],
    "prune": lambda queue: queue.prune(state="processed", keep_count=0),
    "delete by force": lambda queue: queue.root.delete_queue("q", force=True),
}
#: What is done on the command line; `ID` stands for a message that is there, where there is one.
COMMANDS = (
    "ls", "health", "browse q", "browse q --state error", "browse q --state processing", "browse q --state working",
    "show q ID", "show q ID --json", "cat q ID", "cat q ID --json", "tail q --state error", "fsck",
    "fsck --repair --yes", "fsck q --repair --yes --json", "sweep",
    "sweep q --jobs-older-than 0 --foreign-older-than 0", "receive q -n 3",
    "receive q --json", "ack q ID", "nack q ID", "requeue q --all --yes", "requeue q ID --state processed",
    "move q other --all --yes", "config check", "config show q", "delete other --yes", "work q --until-empty -- true",
    "wait q --id ID --timeout 0", "pause q", "resume q", "init ROOT",
)  # fmt: skip


@dataclass
class Case:
    """One story: what a stranger did, what was done then, and what was wrong about it."""

    root: Path
    canary: Canary
    wrong: list[str] = field(default_factory=list)

    def library(self, name: str, verb: Callable[[Queue], object]) -> None:
        """Do something by the library; only errors of its own may come out."""
        clock = Clock()
        clock.advance(AHEAD * 86_400)
        try:
            queue = Root(self.root, clock=clock).queue("q")
            try:
                verb(queue)
            finally:
                queue.close()
        except DropqError:
            pass
        except Exception:
            self.wrong.append(f"{name} let out\n{traceback.format_exc()}")

    def command(self, line: str) -> None:
        """Do something by the command line; it may fail, but is no fault of dropq, and shows no control character."""
        words = {"ID": self._id(), "ROOT": str(self.root)}
        argv = [words.get(word, word) for word in line.split()]
        out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace", write_through=True) for _ in range(2))
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = cli.main(["--root", str(self.root), *argv])
        said, talk = (stream.buffer.getvalue() for stream in (out, err))
        shown = talk if line.startswith("cat q ID") else said + talk
        if code == output.BUG:
            self.wrong.append(f"dropq {line} is a fault of dropq: {talk.decode()}")
        if not all(char.isprintable() or char in "\n\t" for char in shown.decode()):
            self.wrong.append(f"dropq {line} shows {shown!r}")

    def _id(self) -> str:
        for state in ("error", "target", "processing", "processed"):
            folder = self.root / "q" / state
            for name in sorted(os.listdir(folder)) if folder.is_dir() else ():
                if not name.startswith(("-", ".")):
                    return str(output.escape(name))
        return "none"


def play(case: Case, stranger: Stranger, verbs: Sequence[str], config: Deed | None, last: str) -> None:
    """Do the verbs after the deeds, and see that nothing is lost and nothing outside was touched."""
    previous = signal.signal(signal.SIGALRM, _hangs)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE, 1)
    try:
        with watch().watching(case.root, case.canary.folder) as wrong, contextlib.redirect_stderr(io.StringIO()):
            for name in verbs:
                _do(case, name)
            if config is None:  # one that was written by a stranger may ask for no history
                _account(case, stranger, swept=any("sweep" in name for name in verbs))
            case.library(last, REMOVERS[last])
    except Hangs:
        case.wrong.append(f"hangs for {PATIENCE} s\n{traceback.format_exc()}")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    case.wrong += wrong
    if changed := case.canary.changed():
        case.wrong.append(f"outside the root was changed: {changed}")


def _do(case: Case, name: str) -> None:
    if name in VERBS:
        case.library(name, VERBS[name])
    else:
        case.command(name)


class Hangs(BaseException):
    """Raised in what takes too long; nothing that handles errors handles it."""


def _hangs(*_: object) -> None:
    raise Hangs


def _account(case: Case, stranger: Stranger, *, swept: bool) -> None:
    """Hold the root against what the stranger put there; what dropq sent itself is none of it.

    A sweep by a clock that is ahead forgets which jobs were sent: what is run again is then sent again.
    """
    was, watch().on = watch().on, False
    try:
        found = look(case.root)
        aside = {path.read_bytes() for path in map(Path, found.beside)}
        hidden = {file.read_bytes() for file in case.root.rglob(".*") if stat.S_ISREG(file.lstat().st_mode)}
        gone = {name for name in stranger.sent if body(name) in aside | hidden}
        found.damaged.clear()  # what the verbs sent has bodies of another kind
        account = judge(found, must=set(stranger.sent) - gone - set(stranger.staged), may=[*gone, "job", "epoch"])
    finally:
        watch().on = was
    account.wrong.clear()
    if swept:
        account.doubled = [name for name in account.doubled if name not in ("job", "epoch")]
    if not account.good:
        case.wrong.append(f"{account}")


def stories(folder: Path, examples: int, number: int) -> Row:
    """Let hypothesis tell so many stories; return what came of them."""
    row = Row("a root written by hand")
    (folder / "outside").mkdir()
    canary = Canary(folder / "outside")
    templates = {base: _template(folder / f"template{at}", incoming=at > 0) for at, base in enumerate(QUEUES)}

    @seed(number)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
        phases=[Phase.explicit, Phase.generate],
    )
    @given(
        base=st.sampled_from(QUEUES),
        deeds=st.lists(in_queue, min_size=1, max_size=8),
        above=st.lists(in_root, max_size=2),
        config=configs,
        verbs=st.lists(st.sampled_from([*VERBS, *COMMANDS]), min_size=1, max_size=6),
        last=st.sampled_from([*REMOVERS]),
    )
    def story(
        base: str, deeds: list[Deed], above: list[Deed], config: Deed | None, verbs: list[str], last: str
    ) -> None:
        root = folder / "root"
        shutil.copytree(templates[base], root)
        try:
            stranger = Stranger(root, canary.folder, base)
            stranger.do(deeds, [*above, *([config] if config else [])])
            case = Case(root, canary)
            play(case, stranger, verbs, config, last)
            row.cases += 1
            assert not case.wrong, "\n".join(case.wrong)
        finally:
            shutil.rmtree(root, ignore_errors=True)

    try:
        story()
    except AssertionError as error:
        notes = "\n".join(getattr(error, "__notes__", ()))
        row.wrong.append(f"{error}\n{notes}")
    except ExceptionGroup as group:
        row.wrong += [f"{error}\n" + "\n".join(getattr(error, "__notes__", ())) for error in group.exceptions]
    return row


def _template(path: Path, *, incoming: bool) -> Path:
    root = Root.create(path)
    for name in ("q", "other"):
        root.create_queue(name, dropboxmq=incoming, durability="none")
    return path


# -- plain cases -----------------------------------------------------------------------------------------------------


#: What is done with a body by a Python of its own, which has a queue and an id; what it takes for it is measured.
WAYS = {
    "cat": "dropq.cli.main.main(['--root', sys.argv[1], 'cat', 'q', 'body'])",
    "open": "file = queue.find('body').open(); all(iter(lambda: file.read(65536), b''))",
    "receive": "message = queue.receive(); message.size(); message.nack()",
    "send": "queue.send_file(queue.find('body').path)",
}
#: Bytes of memory that a body may cost, however long it is.
BODY_LIMIT = 64 << 20


def big_bodies(folder: Path, size: int, ways: Iterable[str] = tuple(WAYS)) -> Row:
    """Stream a body of so many bytes, all of them a hole, by each way that need not hold it; tell its memory."""
    row = Row("a body that fits no memory")
    root = Root.create(folder / "big")
    queue, away = root.create_queue("q"), Root.create(folder / "away").create_queue("q")
    target = Path(queue.layout.target)
    for way in ways:
        peaks = []
        for length in (1, min(size, 256 << 20) if way == "send" else size):  # what is sent is copied, holes and all
            for old in target.iterdir():
                old.unlink()
            with open(target / "body", "wb") as file:
                file.truncate(length)
            os.utime(target / "body", (1, 1))  # it has settled
            peaks.append(_peak(WAYS[way], str(root.path)))
        row.cases += 1
        print(f"{way}: {peaks[1] - peaks[0]:,} bytes of memory for a body of {length:,}", file=sys.stderr)
        if peaks[1] - peaks[0] > BODY_LIMIT:
            row.wrong.append(f"{way} of {length:,} bytes took {peaks[1] - peaks[0]:,} bytes of memory")
    moved = queue.move(away)
    if not moved or not all(outcome.ok for outcome in moved):
        row.wrong.append(f"move to another root: {moved}")
    return row


def _peak(code: str, root: str) -> int:
    """Return the most memory that a Python of its own took for some code, in bytes."""
    before = "import dropq, dropq.cli.main, re, sys; queue = dropq.Root(sys.argv[1]).queue('q')\n"
    # Not getrusage: what it tells a child includes what its parent had when it was started.
    after = "\nprint(re.search(r'VmHWM:\\s+([0-9]+)', open('/proc/self/status').read())[1], file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", before + code + after, root],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=True,
    )  # fmt: skip
    return int(done.stderr.split()[-1]) * 1024


def many_strays(folder: Path, count: int) -> Row:
    """Receive a hundred messages among so many strays; tell what that costs beside plain listings."""
    row = Row("strays in target/", cases=count)
    queue = Root.create(folder / "strays").create_queue("q", durability="none")
    target = queue.layout.target
    for number in range(count):
        match number % 3:
            case 0:
                os.close(os.open(f"{target}/{number}.tmp", os.O_CREAT | os.O_EXCL))
            case 1:
                os.close(os.open(f"{target}/.{number}", os.O_CREAT | os.O_EXCL))
            case _:
                os.mkdir(f"{target}/{number}")
    for number in range(100):
        path = Path(target, f"m{number}")
        path.write_bytes(body(f"m{number}"))
        os.utime(path, (1, 1))  # it has settled
    begun = time.perf_counter()
    listed = len(os.listdir(target))
    listing = time.perf_counter() - begun
    begun = time.perf_counter()
    with queue:
        names = set()
        while (message := queue.receive()) is not None:
            names.add(message.id)
            message.ack()
    receiving = time.perf_counter() - begun
    print(f"100 messages among {listed:,} entries: {receiving / listing:.1f} listings", file=sys.stderr)
    if len(names) != 100:
        row.wrong.append(f"{len(names)} of 100 messages were received")
    clock = Clock()
    clock.advance(AHEAD * 86_400)
    Root(queue.root.path, clock=clock).queue("q").fsck(repair=True)
    if left := len(os.listdir(target)):
        row.wrong.append(f"fsck --repair left {left} strays")
    row.count(judge(look(queue.root.path), must=[f"m{number}" for number in range(100)]), "strays")
    return row


def replaced_folders(folder: Path) -> Row:
    """Put other folders in the place of those in use: what lay in the old ones stays there, and the new ones work."""
    row = Row("folders replaced while in use")
    for at, (name, replace) in enumerate(REPLACED.items()):
        root = Root.create(folder / f"replaced{at}")
        queue = root.create_queue("q", durability="none")
        for number in range(4):
            Path(queue.layout.target, f"m{number}").write_bytes(body(f"m{number}"))
        with suppress(DropqError), queue.subscribe(max_backlog=None) as subscription:
            held = subscription.receive_many(2)
            replace(root)
            for message in held:
                with suppress(DropqError):
                    message.ack()
            for _ in range(4):
                with suppress(DropqError):
                    subscription.receive()
        with Root(root.path).queue("q") as again:
            again.send(body("new"))
            again.sweep()
            received = set()
            while (waiting := again.receive()) is not None:
                received.add(waiting.body)
                waiting.ack()
        row.cases += 1
        if body("new") not in received:
            row.wrong.append(f"{name}: what was sent to the new folder was not received")
        there = {path.read_bytes() for path in root.path.rglob("*") if path.is_file()}
        lost = [f"m{number}" for number in range(4) if body(f"m{number}") not in there]
        row.lost += len(lost)
        row.wrong += [f"{name}: {', '.join(lost)} lost"] if lost else []
    return row


def _anew(*folders: str) -> Callable[[Root], None]:
    def replace(root: Root) -> None:
        for folder in folders:
            os.rename(root.path / "q" / folder, root.path / "q" / f"{folder.replace('/', '-')}-old")
            os.mkdir(root.path / "q" / folder)

    return replace


def _made_again(root: Root) -> None:
    os.rename(root.path / "q", root.path / "old")
    root.create_queue("q", durability="none")


REPLACED: dict[str, Callable[[Root], None]] = {
    "target": _anew("target"),
    "processing": _anew("processing"),
    "processed": _anew("processed"),
    "target and processing": _anew("target", "processing"),
    ".dropq": _anew(".dropq"),
    "consumers": _anew(".dropq/consumers"),
    "queue": _made_again,
}


def run(options: Options) -> Iterable[Row]:
    """Tell stories of strangers, and the plain cases."""
    yield stories(options.folder, 3000 if options.long else 20, options.seed)
    yield replaced_folders(options.folder)
    yield many_strays(options.folder, 100_000 if options.long else 3_000)
    yield big_bodies(options.folder, (4 << 30) if options.long else (256 << 20))
