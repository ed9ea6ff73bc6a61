"""The public verbs, found by looking; and the scene in which each of them is called.

A verb is a public function or method of what `dropq` offers its users. Nobody lists them: what is called with what is
told by the names of the arguments. Each verb is called with what it needs, and once more for every value that an
argument may have besides.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any
from unittest import mock

from forks import DIED, forked
from helpers import FRESH, Clock, timed

import dropq
from dropq import Message, Queue, Root, Subscription
from dropq.diagnosis import fsck
from dropq.lifecycle.context import QueueContext
from dropq.queue import stream_journal
from dropq.queue.stream_journal import Journal
from dropq.staging import jobs
from dropq.staging.jobs import Attempt, Epoch, Job, StagedAttempt
from dropq.upkeep import bulk
from dropq.upkeep.bulk import Outcome, Selection
from torture.account import body

#: Where public verbs are found, besides what `dropq` itself exports.
MODULES: tuple[ModuleType, ...] = (bulk, jobs, stream_journal, fsck)
#: Public by name, but no verbs: what dropq's own modules use among themselves.
INNER = {
    "Typed", "SweepReport", "Stop", "Selection",  # they hold what was found, or is to be said
    "Health", "Diagnosis", "Finding", "Graph", "Node", "Edge",  # these, too
    "Message.link",  # of a worker, for its own private folder
    "Topic",  # tests/torture/topic_cases.py has a scene for it, in which a message is in many places
    "TransferJob",  # a carrier's: tests/promises/test_carrier.py lets it die
    "Queue.replay", "replay",  # what it sends is in the archive, too: tests/promises/test_replay.py lets it die
    "RecordWriter", "Queue.record_writer",  # tests/promises/test_record_writer.py lets it die
    "Record", "Message.records", "Subscription.records",  # tests/torture/record_cases.py has scenes for them
    "Root.doctor", "Queue.doctor",  # they try the file system in a folder of their own: tests/promises/test_doctor.py
    "finish", "roll_forward", "idle_ms", "job_folders", "is_job_name",
    "batch_key", "lapsed_claim", "runs", "check_semantics", "is_committed", "has_manifest", "select", "each",
    "sweep",  # of staging: a part of Queue.sweep
}  # fmt: skip
#: Seconds for which short leases and delays of a scene last, and by which its clock goes on before a verb is called.
SHORT, AFTER = 5, 10
KEPT = ("processed", "expired", "error")
#: Verbs of the short form; where they die, those that change something.
FEW = 12


@dataclass
class Scene:
    """A root in which something lies everywhere, and what a verb may be called on."""

    folder: Path
    root: Root
    queue: Queue
    other: Queue
    far: Queue
    subscription: Subscription
    message: Message
    job: Job
    epoch: Epoch
    attempt: Attempt
    journal: Journal | None
    staged: Mapping[type, list[StagedAttempt]]
    #: Lives, but has let a lease run out.
    late: Subscription

    def on(self, host: type) -> object:
        """Return what a method of a class is called on.

        Raises:
            LookupError: there is none in the scene.
        """
        for field in dataclasses.fields(self):
            if type(found := getattr(self, field.name)) is host:
                return found
        raise LookupError(f"there is no {host.__name__} in the scene: give it one")


@dataclass(frozen=True)
class Setting:
    """How a scene's queue is configured, and what its file system can do."""

    name: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    noreplace: bool = True
    #: Whether the message that is held is a foreign file whose name is taken where it may go.
    foreign: bool = False

    @property
    def settles(self) -> bool:
        """Whether what is received is still to be settled."""
        return self.options.get("semantics") != "at-most-once"


SETTINGS = (
    Setting("plain"),
    Setting("foreign names, no rename that replaces nothing", noreplace=False, foreign=True),
    Setting("no history, retries", {"history": False, "redelivery_attempts": 3, "redelivery_delay": "1h"}),
    Setting("at most once", {"semantics": "at-most-once", "redelivery_delay": 0}, foreign=True),
    Setting("at most once, no history", {"semantics": "at-most-once", "history": False, "redelivery_delay": 0}),
    Setting(
        "limits, a filter, modes",
        {"max_deliveries": 1, "max_cancels": 1, "exhausted": "expired", "max_unprocessed": 100, "file_mode": "0640"}
        | {"filter": "JMSPriority <> 8", "filter_rest": "error", "unroutable_after": 0},
    ),
)

LONG = {"text": "x" * 300}
CSV = "report.csv"
ROUTED = "routed.csv"
#: The queue's normal selector, which takes none of its messages.
SELECTOR = "spare"


def build(folder: Path, setting: Setting, clock: Clock) -> Scene:
    """Make a scene in an empty folder; a body tells what it is, and what is called `job#...` is sent as one."""
    root = timed(Root.create(folder, clock=clock), FRESH)
    queue = root.create_queue("q", **{"lease_period": "1h", **setting.options})
    other, spare = root.create_queue("other"), root.create_queue("spare")
    far = Root.create(folder / "far", clock=clock).create_queue("away")
    (folder / "source").write_bytes(body("source", 100_000))
    _keep(queue, KEPT if setting.settles else KEPT[:1])
    _keep(spare, KEPT[:1], "spare ")
    subscription = queue.subscribe(max_backlog=4)
    message = _hold(queue, "held", by=subscription, foreign=setting.foreign)
    late = queue.subscribe(lease_period=SHORT)
    _hold(queue, "lease ran out", by=late)
    reader = _journal(queue) if setting.settles else None
    _leave_behind(queue)
    _route(queue)
    queue.add_selector(SELECTOR, to="other", filter="nobody = 'here'")
    queue.add_selector("overflow", to="other", role="overflow")
    for number in range(3):
        queue.send(body(f"waits {number}", 3000), priority=8 - number, properties=LONG)
    _drop(queue, "ä" * 110 + ".csv", "waits, foreign")
    queue.send(body("was delayed"), delay=SHORT)
    queue.send(body("delayed"), delay="1d")
    queue.send(body("expires"), expires_in=SHORT)
    clock.advance(AFTER)  # nobody receives any more, or would sweep what is to be found
    job, epoch = Job(queue.context, "new"), Epoch(queue.context, "row", 1)
    staged = {type(one): _staged(one) for one in (job, epoch)}
    attempt = job.attempt("open")
    return Scene(folder, root, queue, other, far, subscription, message, job, epoch, attempt, reader, staged, late)


def _route(queue: Queue) -> None:
    """Let two messages wait for a route whose folder has the name of one of them."""
    routing = Path(queue.layout.routing)
    (routing / "away").mkdir()
    (routing / "away.in-use").touch()
    Path(queue.layout.routes_file).write_text(f"away.selector=JMSPriority = 3 OR JMSMessageID = 'ID:{ROUTED}'\n")
    queue.send(body("goes to a route"), priority=3)
    (routing / "away" / ROUTED).write_bytes(body("went to a route"))
    _drop(queue, ROUTED, "goes to a route, foreign")


def _keep(queue: Queue, states: Sequence[str], prefix: str = "") -> None:
    """Let a message come to rest in each state: a long one, and a foreign one of a name that is to come again."""
    for state in states:
        for name, foreign in ((f"{prefix}{state}", False), (f"{prefix}{state}, foreign", True)):
            message = _hold(queue, name, foreign=foreign)
            settle: dict[str, Callable[[], None]] = {"processed": message.ack, "expired": message.expire}
            settle.get(state, partial(message.reject, "r"))()


def _hold(queue: Queue, name: str, *, by: Queue | Subscription | None = None, foreign: bool = False) -> Message:
    """Send a message and take it, by the queue itself or by a subscription."""
    if foreign:
        _drop(queue, CSV, name)
    else:
        queue.send(body(name), priority=9, properties=LONG)
    message = (by or queue).receive()
    assert message is not None
    return message


def _drop(queue: Queue, file: str, name: str) -> None:
    """Send a message as a script does."""
    draft = Path(queue.layout.working, file)
    draft.write_bytes(body(name))
    draft.rename(Path(queue.layout.target, file))


def _leave_behind(queue: Queue) -> None:
    """Let a process die that held a message, and had committed a job of which nothing was sent yet."""

    def die() -> None:
        _hold(queue, "held by the dead")
        committed = Job(queue.context, "committed")
        committed.commit(_staged(committed))

    with mock.patch.object(jobs, "finish", side_effect=lambda *_, **__: os._exit(DIED)):
        assert forked(die) == DIED


def _staged(job: Job) -> list[StagedAttempt]:
    """Stage two messages of a job in an attempt each."""
    job.begin()
    found = []
    for number in range(2):
        attempt = job.attempt(f"part {number}")
        attempt.write_all([f"4.{type(job).__name__}-{number}.B"], [body(f"{job.id}#{number}")])
        found.append(attempt.finish())
    return found


def _journal(queue: Queue) -> Journal:
    """Let a stream hold a batch, and offer it more."""
    for number in range(2):
        queue.send(body(f"of the stream {number}"), priority=9)
    reader = Journal(queue.context, "stream", queue.subscribe(detached=True, max_backlog=None, lease_period="1h"))
    reader.next_batch(1, 2)
    return reader


# -- what a verb is called with ----------------------------------------------------------------------------------------

#: What an argument may be, by its name, after its verb's where that matters. The first is what it is where it must be.
VALUES: Mapping[str, Callable[[Scene], Sequence[Any]]] = {
    "attempts": lambda scene: [scene.staged[Job]],
    "Epoch.commit.attempts": lambda scene: [scene.staged[Epoch]],
    "batch": lambda scene: [2],
    "Journal.messages.batch": lambda scene: [1],
    "bodies": lambda scene: [[body("new#9")]],
    "body": lambda scene: [body("new", 3000)],
    "counted": lambda scene: [False],
    "whole": lambda scene: [True],
    "defer": lambda scene: [True],
    "delay": lambda scene: ["1h"],
    "dropboxmq": lambda scene: [True],
    "ephemeral_older_than": lambda scene: ["1ms"],
    "file": lambda scene: ["4.new.B"],
    "files": lambda scene: [["4.new.B"]],
    "folder": lambda scene: [f"{scene.queue.layout.working}/.job-committed"],
    "force": lambda scene: [True],
    "foreign_older_than": lambda scene: ["1ms"],
    "goal": lambda scene: [scene.other, scene.far],
    "handler": lambda scene: [lambda message: None],
    "id": lambda scene: [scene.message.id, next(scene.queue.browse()).id],
    "jobs_older_than": lambda scene: ["1ms"],
    "keep_age": lambda scene: [0],
    "keep_count": lambda scene: [0],
    "label": lambda scene: ["more"],
    "context": lambda scene: [scene.queue.context],
    "credit": lambda scene: [2],
    "limit": lambda scene: [2],
    "message": lambda scene: [scene.message],
    "messages": lambda scene: [[body("new 1"), {"body": body("new 2"), "properties": LONG}]],
    "move": lambda scene: [True],
    "n": lambda scene: [2],
    "name": lambda scene: ["made"],
    "row": lambda scene: ["0" * 16],
    "Root.delete_queue.name": lambda scene: ["spare"],
    "Queue.remove_selector.name": lambda scene: [SELECTOR],
    "fsck.name": lambda scene: ["q"],
    "older_than": lambda scene: [0],
    "once": lambda scene: [True],
    "op": lambda scene: ["copy"],
    "overflow": lambda scene: [scene.other.name],
    "owners": lambda scene: [()],
    "path": lambda scene: [scene.folder / "source"],
    "Root.create.path": lambda scene: [scene.folder / "new root"],
    "period": lambda scene: ["2h"],
    "properties": lambda scene: [LONG],
    "queue": lambda scene: [scene.queue],
    "reason": lambda scene: ["r"],
    "receipt": lambda scene: [scene.message.receipt or scene.message.id],
    "repair": lambda scene: [True],
    "role": lambda scene: ["default"],
    "root": lambda scene: [scene.root.context],
    "Root.create_queue.selector": lambda scene: [[{"name": "on", "to": "other"}]],
    "route.root": lambda scene: [scene.root],
    "sent": lambda scene: [[]],
    "ack.subscribe": lambda scene: [scene.queue._subscribe_to_ack],
    "own": lambda scene: [scene.subscription],
    "stalled_for": lambda scene: [0],
    "state": lambda scene: ["error", "expired", "processed", "processing", "target", "delayed"],
    "which": lambda scene: [Selection((state,)) for state in VALUES["state"](scene)],
    "Queue.request.timeout": lambda scene: ["1ms"],
    "to": lambda scene: [scene.other.context, scene.far.context],
    "Queue.add_selector.to": lambda scene: [scene.other.name],
    "to_origin": lambda scene: [True],
    "unleased_older_than": lambda scene: ["1ms"],
    "until_empty": lambda scene: [True],
    "value": lambda scene: [body("new", 3000).decode()],
    "upto": lambda scene: [1],
}
#: Arguments that choose, name or describe: with them, a verb does what it does without.
NO_MATTER = {
    "client_id", "clock", "concurrency", "correlation_id", "count", "detached", "dry_run", "expires_in", "fair", "fate",
    "filter", "ids", "keep_expiration", "lease_period", "max_age", "max_backlog", "max_bytes", "max_count",
    "max_error", "message_class", "message_id", "named", "priority", "still",
    "lease", "poll", "reply_to", "states", "stop", "timeout", "type",
    "send",  # what becomes of what goes out with an ack, tests/torture/output_cases.py tells
    "records",  # what becomes of the records of a message, tests/torture/record_cases.py tells
}  # fmt: skip
#: What would not end, or not begin, without it.
ALWAYS = {"work": ("until_empty",), "add_selector": ("to",), "route": ("once",)}


@dataclass(frozen=True)
class Verb:
    """A verb as it is called once: with what it needs, and perhaps with one argument more."""

    host: type | None
    method: str
    function: Callable[..., Any]
    extra: str = ""
    #: Which of its values the argument that is varied has, and what that is in words.
    choice: int = 0
    value: str = ""

    @property
    def name(self) -> str:
        """What it is called, after its class."""
        return f"{self.host.__name__}.{self.method}" if self.host else self.method

    def __str__(self) -> str:
        return f"{self.name}({self.extra}={self.value})" if self.extra else self.name

    def call(self, scene: Scene) -> None:
        """Call it, and use what it returns to its end."""
        bound = self._arguments(scene)
        on = () if self.host is None or inspect.ismethod(self.function) else (scene.on(self.host),)
        _use(self.function(*on, **bound))

    def _arguments(self, scene: Scene) -> dict[str, Any]:
        always = ALWAYS.get(self.method, ())
        found = {}
        for name, parameter in _parameters(self.function):
            if name == self.extra:
                found[name] = _values(self, name)(scene)[self.choice]
            elif parameter.default is parameter.empty or name in always:
                found[name] = _values(self, name)(scene)[0]
        return found


def _use(result: object) -> None:
    if isinstance(result, AbstractContextManager):
        with result as entered:
            if hasattr(entered, "write"):
                content = body("new", 3000)
                entered.write(content[:10])
                entered.write(content[10:])
    elif isinstance(result, Iterator):
        for _ in result:
            pass


def _parameters(function: Callable[..., Any]) -> list[tuple[str, inspect.Parameter]]:
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    found = inspect.signature(function).parameters.items()
    return [(name, parameter) for name, parameter in found if parameter.kind in named and name != "self"]


def _values(verb: Verb, name: str) -> Callable[[Scene], Sequence[Any]]:
    found = VALUES.get(f"{verb.name}.{name}", VALUES.get(name))
    if found is None:
        raise LookupError(f"say in VALUES what `{name}` of {verb.name} is, or in NO_MATTER that it does not matter")
    return found


def verbs(scene: Scene) -> list[Verb]:
    """Return every verb, once as it is and once for each value that an argument may have besides."""
    found = []
    for host, method, function in sorted(_functions(), key=lambda one: (str(one[0]), one[1])):
        plain = Verb(host, method, function)
        if plain.name in INNER or (host is Journal and scene.journal is None):
            continue
        found.append(plain)
        for name, parameter in _parameters(function):
            if name in NO_MATTER or name in ALWAYS.get(method, ()):
                continue
            values = _values(plain, name)(scene)
            begin = 1 if parameter.default is parameter.empty else 0  # that with the first is the plain one
            for choice in range(begin, len(values)):
                found.append(Verb(host, method, function, name, choice, _in_words(values[choice])))
    return found


def _in_words(value: object) -> str:
    if isinstance(value, Selection):
        return value.where
    if isinstance(value, QueueContext | Queue):
        return f"far/{value.name}" if value.name == "away" else value.name
    return str(value)[:20] if isinstance(value, str | int) else type(value).__name__


def requeue_whole(context: QueueContext, which: Selection) -> Iterator[Outcome]:
    """Put parts together, in any state."""
    return bulk.requeue(context, which, whole=True)


def requeue_to_origin(context: QueueContext, which: Selection) -> Iterator[Outcome]:
    """Put dead letters back, from any state."""
    return bulk.requeue(context, which, to_origin=True)


def _functions() -> Iterator[tuple[type | None, str, Callable[..., Any]]]:
    """Yield the public functions, and the public methods of the public classes, that dropq's users may call."""
    public = [getattr(dropq, name) for name in dropq.__all__]
    for module in MODULES:
        own = (value for name, value in vars(module).items() if not name.startswith("_"))
        public += [value for value in own if getattr(value, "__module__", "") == module.__name__]
    public += [requeue_whole, requeue_to_origin]
    for thing in dict.fromkeys(value for value in public if callable(value)):
        if isinstance(thing, FunctionType):
            yield None, thing.__name__, thing
        elif isinstance(thing, type) and not issubclass(thing, Exception | tuple):
            yield from _methods(thing)


def _methods(host: type) -> Iterator[tuple[type, str, Callable[..., Any]]]:
    if host.__name__ in INNER:
        return
    for name in dir(host):
        value = inspect.getattr_static(host, name)
        if name.startswith("_"):
            continue
        if isinstance(value, property) and value.fget is not None:
            yield host, name, value.fget
        elif isinstance(value, FunctionType | classmethod):
            yield host, name, getattr(host, name)
    if hasattr(host, "__exit__"):
        yield host, "with", lambda self: self
