"""What the pages show. The root's page and a queue's show the last looks, and ask no disk; the others ask it."""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import islice
from shlex import quote
from typing import IO, Any

from dropq.api import Queue, Root
from dropq.diagnosis.overview import Viewer
from dropq.diagnosis.standing import AGE_NAMES
from dropq.diagnosis.summary import STATES, holders_of, summary_of, worst_first
from dropq.errors import DropqError, NoSuchMessage, NoSuchQueue
from dropq.events.log import ACTS, OUTCOMES
from dropq.events.reader import Event, Reader
from dropq.filters import check_chooses, compile_filter
from dropq.format.layout import ALL_STATES, UNSETTLED, WITH_REASON
from dropq.format.printable import escape, reason_text, visible
from dropq.queue.browsing import details_of, excerpt
from dropq.queue.message import Message
from dropq.storage.clock import utc
from dropq.web.arguments import SHOWN, Arguments
from dropq.web.disk import Disk
from dropq.web.guard import Refused
from dropq.web.trend import Trends

#: Bytes of a body that are shown.
BODY_SHOWN = 64 << 10
#: Characters of a reason that a list shows; the message's own page has all.
REASON_SHOWN = 1000
#: Seconds that a filter may take.
FILTERING = 1.0
#: Among how many messages of its state one is explained.
EXPLAINED = 1000
#: States of queues that call for somebody.
WRONG = STATES[: STATES.index("paused")]


@dataclass(frozen=True)
class Site:
    """What all pages share.

    Attributes:
        bodies: whether bodies are shown.
        writable: whether there are buttons.
    """

    root: Root
    viewer: Viewer
    writable: bool
    bodies: bool
    disk: Disk = field(default_factory=Disk)
    trends: Trends = field(default_factory=Trends)

    @property
    def name(self) -> str:
        """The root's name, as titles have it."""
        return os.path.basename(str(self.root.path)) or "/"

    def queue(self, name: str) -> Queue:
        """Open a queue; of one that is missing, raise NoSuchQueue."""
        queue = self.root.queue(name)
        _ = queue.layout
        return queue

    def compiled(self, filter: str) -> str | None:
        """Check a filter; return None for an empty one.

        Raises:
            InvalidFilter: it cannot be read.
            Refused: it reads bodies, which are not shown here.
        """
        if not filter:
            return None
        check_chooses(filter)
        if compile_filter(filter).reads_body and not self.bodies:
            raise Refused(400, "This page shows no bodies, and filters by none: name headers and properties.")
        return filter


@dataclass(frozen=True)
class Page:
    """A page: its template and what that shows; whether it may be asked for again by itself; its status."""

    template: str
    shown: Mapping[str, Any]
    refreshes: bool = False
    status: int = 200


def root(site: Site, args: Arguments) -> Page:
    """Show all queues, the worst first, by their last looks."""
    now = time.monotonic()
    found = worst_first(site.viewer, now)
    rows = [{**summary_of(one, now), "watched": one, "trend": site.trends.of(one.name, now)} for one in found]
    ages = [now - one.looked for one in found if one.last is not None]
    counts = Counter[str]()
    for one in found:
        counts.update(one.last.counts if one.last is not None else {})
    shown = {
        **args.said,
        "rows": rows,
        "wrong": [row for row in rows if row["state"] in WRONG],
        "counts": counts,
        "age": max(ages, default=None),
        "missing": sum(one.last is None for one in found),
        "has_begun": site.viewer.has_begun,
        "temporary": len(site.viewer.all()) - len(found),
        "problem": None if site.viewer.is_listed else str(site.viewer.problem or "it does not answer"),
        "command": "dropq top",
    }
    return Page("root.html", shown, refreshes=not args.still)


def queue(site: Site, args: Arguments) -> Page:
    """Show a queue by its last look."""
    now = time.monotonic()
    if not args.queue:
        raise Refused(400, "The address of this page names no queue.")
    seen = next((one for one in site.viewer.all() if one.name == args.queue), None)
    if seen is None:
        raise NoSuchQueue(f"no look has found a queue {args.queue}")
    look = seen.last
    went_by = [] if look is None else list(reversed(look.went_by))
    shown = {
        **args.said,
        "age": None if look is None else now - seen.looked,
        "silent": seen.silent(now),
        "look": look,
        "summary": summary_of(seen, now),
        "trend": site.trends.of(seen.name, now),
        "ages": [] if look is None else list(zip(AGE_NAMES, look.ages, strict=False)),
        "holders": [] if look is None else list(holders_of(look)),
        "failures": [event for event in went_by if event.event in OUTCOMES],
        "acts": [event for event in went_by if event.event in ACTS],
        "states": ALL_STATES,
        "is_paused": look is not None and any(note.kind == "paused" for note in look.health.notes),
        "command": command("top", [seen.name]),
    }
    return Page("queue.html", shown, refreshes=not args.still)


def messages(site: Site, args: Arguments) -> Page:
    """Show the first messages of a state, or the newest, or those that match a filter."""
    shown: dict[str, Any] = {
        **args.said,
        "states": ALL_STATES,
        "has_reasons": args.state in WITH_REASON,
        "command": _browse(args),
        **{"found": None, "rows": [], "total": 0, "error": "", "until": 0, "most": SHOWN},
    }
    try:
        filter = site.compiled(args.filter)
    except (DropqError, Refused) as error:
        return Page("messages.html", {**shown, "error": str(error)}, status=400)

    def read() -> dict[str, Any]:
        queue = site.queue(args.queue)
        until = queue.context.clock.now_ms()
        found = excerpt(queue.context, args.state, SHOWN, newest=args.newest, filter=filter, seconds=FILTERING)
        rows = [row for row in map(_row, found.messages) if row is not None]
        return {"found": found, "rows": rows, "total": found.total, "until": until, "now": utc(until)}

    return Page("messages.html", {**shown, **site.disk.ask(args.queue, read)})


def _row(message: Message) -> dict[str, Any] | None:
    """Return what a list shows of a message; None if it moved on since the listing."""
    try:
        return {
            "file": message.file,
            "id": message.id,
            "timestamp": message.timestamp,
            "bytes": message.size(),
            "tries": message.delivery_count,
            "type": message.type,
            "owner": message.owner,
            "reason": reason_text(message.reason)[:REASON_SHOWN],
            "origin": message.origin,
        }
    except DropqError:
        return None


def _browse(args: Arguments) -> str:
    options = [f"-n {SHOWN}", *([f"--state {args.state}"] if args.state != "target" else [])]
    options += [f"--filter {quoted(args.filter)}"] if args.filter else []
    return command("tail" if args.newest else "browse", [args.queue], *options)


def command(verb: str, names: Sequence[str], *options: str) -> str:
    """Write a command line as a shell takes it; behind `--`, no name is taken for an option."""
    words = [quoted(name) for name in names]
    ends = ["--", *words] if any(name.startswith("-") for name in names) else []
    return " ".join(["dropq", verb, *([] if ends else words), *options, *ends])


def quoted(text: str) -> str:
    """Quote a text for a shell, and let dropq get its odd bytes."""
    return quote(escape(text))


def message(site: Site, args: Arguments) -> Page:
    """Show a message, what went by of it, and the beginning of its body."""

    def read() -> dict[str, Any]:
        queue = site.queue(args.queue)
        try:
            first, *others = queue.find_all(args.id, [args.state])
        except NoSuchMessage as error:
            return {"gone": str(error), "elsewhere": _elsewhere(queue, args.id)}
        reader = Reader(queue.layout.log)
        try:
            history = list(deque(reader.events(id=first.id), SHOWN))
            begins = reader.begins()
        except OSError:
            history, begins = [], None
        return {
            "details": details_of(first),
            "others": len(others),
            "history": history,
            "begins": begins,
            "why": _why(queue, first),
            "body": _body(first) if site.bodies else None,
            "file": first.file,
            "until": queue.context.clock.now_ms(),
            "now": utc(queue.context.clock.now_ms()),
        }

    found = site.disk.ask(args.queue, read)
    shown = {
        **args.said,
        "id": args.id,
        "command": command("show", [args.queue, args.id]),
        "body_limit": BODY_SHOWN,
        **found,
    }
    if "gone" in found:
        return Page("gone.html", shown, status=404)
    return Page("message.html", shown)


def _elsewhere(queue: Queue, id: str) -> str | None:
    try:
        return queue.find(id).state
    except NoSuchMessage:
        return None


def _why(queue: Queue, message: Message) -> Any:
    """Explain why a message is not delivered, if it is among the first; None if it is settled or far behind."""
    if message.state not in UNSETTLED:
        return None
    first = islice(queue.explain(message.state), EXPLAINED)
    return next((each for each in first if each.message.file == message.file), None)


def _body(message: Message) -> dict[str, Any]:
    try:
        with message.open() as file:
            data = file.read(BODY_SHOWN + 1)
    except DropqError as error:
        return {"text": "", "is_cut": False, "error": str(error)}
    return {"text": visible(os.fsdecode(data[:BODY_SHOWN])), "is_cut": len(data) > BODY_SHOWN, "error": ""}


def body(site: Site, args: Arguments) -> tuple[IO[bytes], int, str]:
    """Open a body; return it with its length, and the name that a browser may save it by."""

    def read() -> tuple[IO[bytes], int, str]:
        (found, *_) = site.queue(args.queue).find_all(args.id, [args.state])
        file = found.open()
        return file, os.fstat(file.fileno()).st_size, found.filename or f"{found.id}.body"

    return site.disk.ask(args.queue, read)


def log(site: Site, args: Arguments) -> Page:
    """Show what went by: of a message all, else the last lines of a day."""

    def read() -> dict[str, Any]:
        queue = site.queue(args.queue)
        reader, now = Reader(queue.layout.log), utc(queue.context.clock.now_ms())
        if args.ids:
            events: Iterator[Event] = reader.events(id=args.id)
        else:
            events = reader.events(since=now - timedelta(days=1), recent=None if args.event else now)
        with queue.context.error_context("nothing was changed"):
            last = deque((each for each in events if _is_shown(each, args.event)), SHOWN)
        return {"events": list(reversed(last)), "now": now, "is_off": queue.config.log == "off"}

    options = [f"--id {quoted(args.id)}"] if args.ids else ["--since 1d"]
    options += [f"--event {args.event}"] if args.event else []
    shown = {
        **args.said,
        "id": args.id if args.ids else "",
        "kinds": (*OUTCOMES, *ACTS),
        "most": SHOWN,
        "command": command("log", [args.queue], *options, f"-n {SHOWN}"),
    }
    return Page("log.html", {**shown, **site.disk.ask(args.queue, read)})


def _is_shown(event: Event, kind: str) -> bool:
    return event.event == kind if kind else event.event != "sum"


#: The pages by their names, with the parameters that they take.
PAGES: Mapping[str, tuple[Callable[[Site, Arguments], Page], tuple[str, ...]]] = {
    "": (root, ("still",)),
    "queue": (queue, ("q", "still")),
    "messages": (messages, ("q", "state", "filter", "newest")),
    "message": (message, ("q", "state", "id")),
    "log": (log, ("q", "id", "event")),
}
