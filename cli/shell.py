"""One run of the command line: its root, how it prints, and how it asks.

Every command makes one `Shell`, from the options before and after its name.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from errno import EACCES, EBADF
from functools import cached_property
from io import BufferedReader
from itertools import chain, islice
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, TypeVar, cast

import typer

from dropq.config.load import has_dropboxmq
from dropq.errors import DropqError, LeaseLost, NoSuchMessage, NoSuchQueue, StorageError
from dropq.format.claims import split_receipt
from dropq.format.layout import RootLayout
from dropq.format.names import is_temporary
from dropq.lifecycle.queue_notes import subscription_folders

from . import output
from .output import NEGATIVE, OK, Record, unescape

if TYPE_CHECKING:
    from rich.progress import Progress

    from dropq import Diagnosis, Finding, Outcome, Queue, Root

T = TypeVar("T")

#: How many messages that are missing a command looks for in all queues.
SEARCHES = 3
#: How many messages are worth a progress bar.
BAR_FROM = 100


class UsageError(typer.TyperException):
    """Raised when a command line cannot be used; it exits with 2."""

    exit_code = output.USAGE


@dataclass(frozen=True)
class GlobalOptions:
    """The options that were given before the command's name."""

    root: str | None
    json: bool

    def __post_init__(self) -> None:
        if self.root == "":  # as a variable of a script may be
            raise typer.BadParameter("it is empty: name the directory of the root", param_hint="'--root'")


class Shell:
    """What a command needs besides its own arguments; a `quiet` command prints errors and sums, and no progress bar."""

    def __init__(self, context: typer.Context, quiet: bool = False) -> None:
        given = cast(GlobalOptions, context.obj)
        self.json = given.json
        self.quiet = quiet
        self._root = given.root

    # -- the root and its queues --------------------------------------------------------------------------------------

    @cached_property
    def root(self) -> Root:
        """The root: the directory that was named, else the nearest around the working directory."""
        from dropq import Root

        _log_to_stderr()
        return Root(self._root or nearest_root())

    def queue(self, given: str) -> Queue:
        """Return a queue that is there, by its name as it was given."""
        return self.named(unescape(given))

    def named(self, name: str) -> Queue:
        """Return a queue that is there, by its name."""
        queue = self.root.queue(name)
        _ = queue.layout  # opened here, so that its errors are reported once
        return queue

    def warn_of_topic(self, queue: Queue) -> None:
        """Warn that a consumer takes what is published to a topic away from its subscriptions, if it has any."""
        if queue.layout.is_topic and (found := sorted(subscription_folders(self.root.layout, queue.name))):
            output.note(
                f"warning: no subscription of topic {queue.name} gets what is taken here: did you mean to receive from "
                f"{queue.name}/{found[0]}?"
            )

    def check_root(self) -> None:
        """Refuse a directory that has neither a dropq.toml nor a queue: it is hardly the root that was meant."""
        from dropq.diagnosis.health import queues

        if self.doubt and not queues(self.root.context):
            raise NoSuchQueue(f"{self.root.path} has no queues{self.doubt}")

    def report_no_queues(self) -> None:
        """Report that a root has no queues, or that none can be used; raise the doubt that it is a root."""
        from dropq.diagnosis.health import queues

        if queues(self.root.context):
            output.note(f"{self.root.path} has no queue that can be used: `dropq health` says why")
        else:
            output.note(f"{self.root.path} has no queues{self.doubt}")

    @property
    def doubt(self) -> str:
        """The doubt that this is a root, for a message; empty if it has a dropq.toml, or a DropboxMQ works there."""
        if os.path.lexists(self.root.layout.config_file) or has_dropboxmq(self.root.layout.path):
            return ""
        path = self.root.layout.path
        near = root_above(path) or _root_in(path)
        hint = f" Did you mean --root {quote(near)}?" if near else ""
        return f", and no dropq.toml: is it the right folder, is it mounted?{hint}"

    def queues(self, names: Sequence[str] | None) -> list[str]:
        """Return the names that were given, else those of all queues."""
        return [unescape(name) for name in names] if names else [queue.name for queue in self.root.queues()]

    def where(self, queue: Queue, id: str) -> str:
        """Return in which queue a message lies, which is looked for in one queue first; "" if it is in none."""
        others = (other for other in self.root.queues() if other.name != queue.name)
        for each in chain([queue], others):
            with suppress(DropqError):
                return f"message {id} lies in {each.find(id).state}/ of queue {each.name}"
        return ""

    def unless_gone(self, act: Callable[[str], T]) -> Callable[[str], T | None]:
        """Return `act`, but skip a queue that went by itself, for a command on all queues of the root.

        RACE: a temporary queue goes when its requester has its answer, an ephemeral subscription with its holder, or by
        the sweep of its topic: at any moment after it was listed.
        """

        def acting(name: str) -> T | None:
            try:
                return act(name)
            except DropqError:
                if not (is_temporary(name) or "/" in name) or self.root.queue(name).exists():
                    raise
                return None

        return acting

    # -- what was asked for ----------------------------------------------------------------------------------------

    def ids(self, given: Sequence[str] | None, *, everything: bool, chosen: bool = False) -> list[str] | None:
        """Return the messages that were named, by arguments or, for `-`, on standard input; None for all of them.

        UsageError says that neither messages nor all were given, nor `chosen` by another option; or that both were.
        """
        if given and everything:
            raise UsageError("name messages by their ids, or give --all, but not both")
        if not (given or everything or chosen):
            raise UsageError("name messages by their ids, give - to read ids from standard input, or give --all")
        return list(arguments(given)) if given else None

    def confirm(self, question: str, *, yes: bool) -> None:
        """Ask before something is destroyed or moved in bulk, unless `--yes` was given; end the command after a no."""
        if yes:
            return
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise UsageError(f"{question} There is no terminal to ask on: give --yes to do it, --dry-run to see it")
        if not typer.confirm(output.visible(question), err=True):
            output.note("nothing was done")
            raise typer.Exit(NEGATIVE)

    # -- what it prints ------------------------------------------------------------------------------------------

    def show(
        self,
        records: Iterable[Record],
        columns: Sequence[str],
        *,
        table: Sequence[str] = (),
        spare: Sequence[str] = (),
        header: bool = False,
    ) -> None:
        """Print records: as a table on a terminal, else a line each, as they come.

        Args:
            table: the columns of the table, if other than those of lines.
            spare: columns that a narrow terminal leaves out, the least important first.
            header: begin lines with the names of their columns; a table has them in any case, and JSON in each line.
        """
        if self.on_terminal:
            first = list(islice(records, output.TABLE_LIMIT + 1))
            if len(first) <= output.TABLE_LIMIT:
                output.show_table(first, table or columns, spare)
                return
            records = chain(first, records)
        if header and columns and not self.json:
            output.put("\t".join(columns))
        for record in records:
            output.put(output.line(record, columns, as_json=self.json))

    @property
    def on_terminal(self) -> bool:
        """Whether data go to a person: not as JSON, and not into a pipe."""
        return not self.json and sys.stdout.isatty()

    def line(self, record: Record, columns: Sequence[str]) -> None:
        """Print one record as a line, at once."""
        output.put(output.line(record, columns, as_json=self.json), flush=True)

    def below(self, above: str, records: Iterable[Record], columns: Sequence[str], spare: Sequence[str]) -> str:
        """Print records below the heading of a table, if there is one above; return the heading that is above now."""
        if self.on_terminal:
            return output.show_table(list(records), columns, spare, above)
        for record in records:
            self.line(record, columns)
        return ""

    def progress(
        self, items: Iterable[T], what: str, total: int | None = None, *, size: Callable[[T], int] | None = None
    ) -> Iterator[T]:
        """Yield the items; if stderr is a terminal, show the progress there, with the time left if the total is known.

        If the total counts bytes, `size` returns the bytes of an item.
        """
        if self.quiet or not sys.stderr.isatty() or (total is not None and total < BAR_FROM):
            yield from items
            return
        with self.bar(what, total, in_bytes=size is not None) as bar:
            for item in items:
                yield item
                bar.advance(bar.task_ids[0], 1 if size is None else size(item))

    def bar(self, what: str, total: int | None, *, in_bytes: bool = False) -> Progress:
        """Return a progress bar for stderr, which is a terminal, with one task."""
        from rich import progress
        from rich.console import Console

        count = progress.DownloadColumn() if in_bytes else progress.MofNCompleteColumn()
        columns = [progress.TextColumn("{task.description}"), progress.BarColumn(None), count]
        columns += [progress.TimeElapsedColumn()]
        if total is not None:
            columns += [progress.TextColumn("left"), progress.TimeRemainingColumn()]
        console = Console(stderr=True)
        # Lines for a terminal are printed above the bar; those for a pipe must not be caught.
        bar = progress.Progress(*columns, console=console, transient=True, redirect_stdout=sys.stdout.isatty())
        bar.add_task(what, total=total)
        return bar

    # -- what it does to several ---------------------------------------------------------------------------------

    def each(self, items: Iterable[T], act: Callable[[T], object], done: str = "done", *, doing: str = "") -> int:
        """Do something to each item, also after others failed; return the exit code.

        A single item that fails has the exit code of its error; of several items, 1 says that some failed. After Ctrl-C
        it reports how many are `done`, a participle. `doing` is the title of a progress bar, without which there is no
        bar.
        """
        total = len(items) if isinstance(items, Sized) else None
        codes: list[int] = []
        try:
            for item in self.progress(items, doing, total) if doing else items:
                with reporting_errors(codes):
                    act(item)
        except KeyboardInterrupt as error:
            raise KeyboardInterrupt(how_many(len(codes), total, done)) from error
        return output.verdict(codes)

    def report(self, outcomes: Iterable[Outcome], done: str, total: int | None = None, *, state: str) -> int:
        """Print what became of each message, and the sum, such as `moved=12 failed=0`, on stderr; return the exit code.

        A bulk verb acts as it yields outcomes. Ctrl-C ends it after the current message, so that the sum is true; the
        rest stays in `state`.
        """
        count = {True: 0, False: 0}

        def records() -> Iterator[Record]:
            for outcome in self.progress(outcomes, done, total):
                count[outcome.ok] += 1
                if not (self.quiet and outcome.ok):
                    yield asdict(outcome)
                if interrupted:
                    return

        with delayed_interrupt() as interrupted:
            try:
                with suppress(KeyboardInterrupt), despite_closed_stdout():
                    self.show(records(), ("id", "ok", "detail"))
            finally:  # whatever ends it, this is done
                output.note(f"{done}={count[True]} failed={count[False]}")
        if interrupted:
            raise KeyboardInterrupt(f"{how_many(count[True], total, done)}, the rest stays in {state}/")
        return NEGATIVE if count[False] else OK


def report_open(found: Iterable[Diagnosis | Finding], code: int = OK) -> int:
    """Report how many findings want attention; return the exit code: `code` where the search itself failed in part."""
    count = sum(finding.open for finding in found)
    if count:
        output.note(f"open={count}")
    elif code == OK:
        output.note("nothing wants attention")
    return code or (NEGATIVE if count else OK)


def in_states(counts: Mapping[str, int]) -> str:
    """Write how many messages are in which state."""
    return ", ".join(f"{count} in {state}" for state, count in counts.items() if count) or "no messages"


def how_many(count: int, total: int | None, done: str) -> str:
    """Write how many were done and, where it is known, of how many."""
    return f"{count} {done.replace('_', ' ')}" if total is None else f"{count} of {total} {done.replace('_', ' ')}"


def telling_where(shell: Shell, queue: Queue, act: Callable[[str], object]) -> Callable[[str], None]:
    """Return `act` on an id or receipt, whose error about a message that is not there says where the message lies.

    This looks through all queues of the root, so it does so for the first of many errors only.
    """
    searches = iter(range(SEARCHES))

    def acting(named: str) -> None:
        try:
            act(named)
        except (LeaseLost, NoSuchMessage) as error:
            id = queue.context.sidecars.file(split_receipt(named)[0]).name.id
            if named and next(searches, None) is not None and (where := shell.where(queue, id)):
                error.add_note(where)
            raise

    return acting


def arguments(given: Iterable[str], *, column: int = 0) -> Iterator[str]:
    """Yield ids or receipts as they were given, unescaped; a `-` stands for the lines of standard input.

    It takes a column of each line, else the last: so other commands' output can be piped in.
    """
    for text in given:
        if text != "-":
            yield unescape(text)
            continue
        for raw in stdin():
            fields = os.fsdecode(raw).rstrip("\r\n").split("\t")
            if fields[0]:
                yield unescape(fields[min(column, len(fields) - 1)])


def single(given: str) -> str:
    """Return the id or receipt that was given, or the only one on standard input for `-`."""
    named = list(arguments([given]))
    if len(named) != 1:
        raise UsageError(f"give one message: standard input has {len(named)}")
    return named[0]


@contextmanager
def reporting_errors(codes: list[int]) -> Iterator[None]:
    """Report an error of the block instead of raising it; add the exit code."""
    try:
        yield
    except output.Unwritten:
        raise
    except (DropqError, OSError) as error:
        output.complain(error)
        codes.append(output.exit_code(error))
    else:
        codes.append(OK)


@contextmanager
def handling(numbers: Iterable[int], handler: Callable[[int, Callable[[], None]], None]) -> Iterator[None]:
    """Call a handler for signals in the block, with their number and a function that restores the handlers before it.

    What a parent has the command ignore, as nohup does, stays ignored.
    """
    before = {number: signal.getsignal(number) for number in numbers}
    taken = {number: each for number, each in before.items() if each not in (signal.SIG_IGN, None)}

    def restore() -> None:
        for number, each in taken.items():
            signal.signal(number, each)

    for number in taken:
        signal.signal(number, lambda number, frame: handler(number, restore))
    try:
        yield
    finally:
        restore()


@contextmanager
def delayed_interrupt() -> Iterator[list[int]]:
    """Delay Ctrl-C to the end of the block; yield a list that is not empty once one came. A second is not delayed."""
    came: list[int] = []

    def note(number: int, restore: Callable[[], None]) -> None:
        if came:
            raise KeyboardInterrupt
        came.append(number)

    with handling((signal.SIGINT,), note):
        yield came


@contextmanager
def despite_closed_stdout() -> Iterator[None]:
    """Let the block finish although stdout is closed: a command that changes messages does not stop half-way."""
    before = signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    try:
        yield
    finally:
        output.flush()
        signal.signal(signal.SIGPIPE, before)


def stdin() -> BufferedReader:
    """Return standard input, as bytes; StorageError if it was closed before dropq began."""
    if sys.__stdin__ is None:
        raise StorageError(
            "standard input is closed: nothing was read, and nothing was done; give </dev/null for an empty input",
            errno=EBADF,
        )
    return cast(BufferedReader, sys.stdin.buffer)


def nearest_root() -> str:
    """Return the nearest directory, from the working directory up, that is a root."""
    here = working_directory()
    if found := root_above(here):
        return found
    look_into(here)
    near = _root_in(here)
    hint = f": did you mean --root {quote(near)}?" if near else ""
    raise NoSuchQueue(
        f"no root: neither {here} nor a directory above it has a dropq.toml; give --root DIR or set DROPQ_ROOT, "
        f"or make one with `dropq init DIR`{hint}"
    )


def working_directory() -> str:
    """Return the working directory; NoSuchQueue if it was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise NoSuchQueue("the working directory was removed: change to another one, or give --root DIR") from None


def root_above(folder: str) -> str:
    """Return the nearest root, from a folder up; "" if there is none."""
    while not os.path.exists(RootLayout(folder).config_file):
        folder, last = os.path.dirname(folder), folder
        if folder == last:
            return ""
    return folder


def look_into(path: str) -> None:
    """Check that a folder is there, and may be entered."""
    path = os.path.abspath(path)
    for folder in (*map(str, reversed(Path(path).parents)), path):
        if not os.path.isdir(folder):
            raise NoSuchQueue(f"no such folder: {path}: name a folder on that mount")
        if not os.access(folder, os.X_OK):
            raise StorageError(f"this user may not enter {folder}: run it as a user who may", path=folder, errno=EACCES)


def _root_in(folder: str) -> str:
    """Return the first root directly in a folder that is this user's own; "" if there is none."""
    with suppress(OSError), os.scandir(folder) as entries:
        return min((entry.path for entry in entries if _is_own_root(entry.path)), default="")
    return ""


def _is_own_root(folder: str) -> bool:
    """Return whether a folder is a root of this user: in /tmp lie those of others."""
    with suppress(OSError):
        return os.stat(folder).st_uid == os.geteuid() and os.path.exists(RootLayout(folder).config_file)
    return False


def _log_to_stderr() -> None:
    """Print the library's warnings on stderr, as all notes."""

    class Talk(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = record.getMessage().replace("\n", "\n    ")  # a newline in a name begins no line of its own
            output.note(f"{record.levelname.lower()}: {text}")

    log = logging.getLogger("dropq")
    if not log.handlers:
        log.addHandler(Talk())
