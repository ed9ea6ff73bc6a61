"""Notes of which queues a root has, and whether they are there: a queue that is not found may be away, in deletion or
gone.

Each queue has a mark, `.dropq/queue-TOKEN`, and the root keeps a note of the mark, `.dropq/queues/queue-TOKEN`. A
queue in which no mark can be made, as it is mounted read-only or another user's, has a note of its path,
`.dropq/queues/path-DIGEST`. A queue is missing while its note is there, and neither its mark nor a queue at its path is
found below the root. Meanwhile no sidecar is removed, as names in the missing queue may refer to it.

A temporary queue has no note: it comes and goes with its requester, on the root's own disk, and is never missed.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shlex
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from itertools import chain
from typing import NamedTuple

from dropq.config.load import has_dropboxmq
from dropq.errors import Unavailable
from dropq.format import names
from dropq.format.addresses import SubscriptionName, is_address, layouts, subscription_layout, topic_layout
from dropq.format.layout import (
    INCOMING,
    SUBSCRIPTIONS,
    TOPIC_INCOMING,
    TOPIC_ROOT,
    UNLESS_ROUTED,
    VIEW_LINK,
    QueueLayout,
    RootLayout,
    removed_subscriptions,
)
from dropq.storage.failures import describe
from dropq.storage.files import Storage
from dropq.storage.reading import entries, exists, names_in, read_small

_MARK = re.compile(r"queue-[0-9a-f]{16}")
#: How the name of a mark begins.
_QUEUE = "queue-"
_NOTE = re.compile(r"(?:queue|path)-[0-9a-f]{16}")
#: The name of a queue whose deletion is not decided: the queue may come back.
UNDECIDED = re.compile(r"\.(?P<name>.+)\.deleting-(?P<since>[0-9]+)-[0-9a-f]{6}", re.DOTALL)
#: Bytes of a queue's name that the name of a folder in deletion has at most.
_CUT = 200
#: Bytes of a character in UTF-8 at most.
_CHARACTER = 4
#: The errors of a queue in which this user, or this mount, may change nothing.
_NOT_OURS = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


# -- marks and notes -----------------------------------------------------------------------------------------------


def make_known(root: RootLayout, private: str, storage: Storage) -> str:
    """Give a queue a mark, unless it has one, and write a note of it; return the mark.

    RACE: two processes at once may give it two marks: both are noted, and both are found. A crash between mark and note
    leaves a mark that the next pass notes. A queue that is deleted at this moment gets no folder back, and no note: its
    name goes before its notes, so who writes one later does not find the mark.

    Raises:
        FileNotFoundError: the queue is gone.
    """
    marks = marks_in(private)
    if not marks:
        mark = f"queue-{os.urandom(8).hex()}"
        storage.make_folder(private, parents=False)
        storage.touch(f"{private}/{mark}")
        marks = {mark}
    base = os.path.dirname(private)
    if _is_temporary(root, base):
        return min(marks)
    for mark in marks:
        if not exists(f"{root.queues}/{mark}"):
            _write_note(root, mark, base, storage)
            storage.unlink(f"{root.queues}/{_path_note(root, base)}")
            if not exists(f"{private}/{mark}"):
                storage.unlink(f"{root.queues}/{mark}")
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), base)
    return min(marks)


def note(root: RootLayout, layout: QueueLayout) -> None:
    """Make a queue known by its mark, or by its path if this user cannot give it a mark."""
    if _is_temporary(root, layout.base):
        return
    storage = Storage(base=layout.base)
    try:
        _refuse_link(layout.private)
        make_known(root, layout.private, storage)
    except FileNotFoundError:
        if _is_there(layout):
            raise
        # RACE: it was deleted after it was listed
    except OSError as error:
        if error.errno not in _NOT_OURS:
            raise
        name = _path_note(root, layout.base)
        if not exists(f"{root.queues}/{name}"):
            _write_note(root, name, layout.base, storage)


def forget(root: RootLayout, base: str, private: str, storage: Storage) -> None:
    """Remove the notes of a queue that is being deleted, whose folders were at `base`."""
    for name in _notes(root, base, private):
        storage.unlink(f"{root.queues}/{name}")


def marks_in(private: str) -> set[str]:
    """Return the marks in a queue's private folder."""
    return set(filter(_MARK.fullmatch, names_in(private)))


def is_copied(private: str, name: names.Name) -> bool:
    """Return whether the selectors of a queue have made their copies of a message: its name bears a mark of the queue.

    If a script moves the message to another queue, the mark has no meaning there. A name that an older dropq wrote has
    no queue's mark, and counts wherever the message lies.
    """
    return name.copied == names.COPIED_HERE or bool(name.copied and exists(f"{private}/{_QUEUE}{name.copied}"))


def copied_in(mark: str) -> str:
    """Return what the name of a message says once the selectors of a queue of this mark have made their copies."""
    return mark.removeprefix(_QUEUE)


def absences(root: RootLayout, seen: Seen) -> Iterator[tuple[str, str]]:
    """Yield the notes of missing queues, each with a sentence about it."""
    for name in sorted(set(filter(_NOTE.fullmatch, names_in(root.queues))) - seen.notes):
        path = f"{root.queues}/{name}"
        home = "a queue"
        with suppress(PermissionError):
            home = os.fsdecode(read_small(path) or b"a queue")
        yield path, f"{home} is not there: bring it back; if it is gone for good, remove {path}"


# -- away, in deletion or gone ---------------------------------------------------------------------------------------


def refuse_away(root: RootLayout, address: str, outcome: str) -> None:
    """Raise Unavailable, with the outcome, if a queue that is not found by its address may come back."""
    if why := why_away(root, address):
        raise Unavailable(f"{why}; {outcome}")


def why_away(root: RootLayout, address: str) -> str:
    """Return why a queue that is not found by its address may come back; "" if it is gone, or never was.

    It may while a deletion of it is not decided, while a link to it leads nowhere, while the root misses it, and while
    this cannot be found out. A name that no queue can have, such as a stranger's return address, is not away.
    """
    if not is_address(address):
        return ""
    try:
        if undecided := _undecided(root, address):
            return f"queue {address} is being deleted, and may come back: {undecided}"
        for layout in layouts(root.path, address):
            for path in (layout.home, layout.base, layout.target):
                if os.path.islink(path) and not os.path.exists(path):
                    there = os.readlink(path)
                    return f"queue {address} is away: {path} is a link to {there}, which is not there: bring it back"
            if os.path.exists(layout.processing) and not os.path.exists(layout.target):
                way_out = f"`dropq fsck {shlex.quote(address)} --repair` makes it"
                return f"queue {address} lacks its folder target/: {way_out}"
        if missed := _missed(root, address):
            return (
                f"queue {address} is away, as when its disk is not mounted: bring it back; if it is gone for good, "
                f"remove {missed}"
            )
    except OSError as error:
        return f"whether queue {address} is away is not known: {describe(error)}"
    return ""


def once_there(root: RootLayout) -> set[str]:
    """Return names of queues that may be away: the root has a note of the queue, or a link that leads nowhere.

    Topics and subscriptions, which lie on the root's own disk as a rule, are left out.
    """
    found = {entry.name for entry in entries(root.path) if entry.is_symlink() and not os.path.exists(entry.path)}
    with suppress(PermissionError):
        for note in filter(_NOTE.fullmatch, names_in(root.queues)):
            base = os.fsdecode(read_small(f"{root.queues}/{note}") or b"")
            if f"/{TOPIC_ROOT}/" not in base:
                found.add(os.path.basename(os.path.dirname(base) if os.path.basename(base) == INCOMING else base))
    return set(filter(names.can_name_queue, found))


def remedy(root: RootLayout, address: str) -> str:
    """Return how to bring back, or to make, a missing queue."""
    return why_away(root, address) or f"`dropq create {shlex.quote(address)}` makes it"


def _undecided(root: RootLayout, address: str) -> str:
    """Return where a queue lies whose deletion is not decided; "" if there is none."""
    topic, of_topic, folder = address.partition("/")
    home = topic_layout(root.path, topic).home
    if of_topic:
        start = f"{removed_subscriptions(home)}/{folder}.deleting-"
        return min((path for path in undecided_subscriptions(home) if path.startswith(start)), default="")
    for above, name in ((root.path, address), (home, TOPIC_INCOMING[1:])):
        for entry in names_in(above):
            found = UNDECIDED.fullmatch(entry)
            if found is not None and whole_name(layout_in_deletion(path := f"{above}/{entry}"), found["name"]) == name:
                return path
    return ""


def undecided_subscriptions(topic: str) -> list[str]:
    """Return where the subscriptions lie that were taken away from a topic's folder, and may come back."""
    removed = removed_subscriptions(topic)
    return [f"{removed}/{name}" for name in names_in(removed) if name.endswith(UNLESS_ROUTED)]


def layout_in_deletion(path: str) -> QueueLayout:
    """Return the layout of a queue that lies under the name of a deletion."""
    incoming = QueueLayout.incoming(path)
    return incoming if os.path.isdir(incoming.base) else QueueLayout.flat(path)


def cut(name: str) -> str:
    """Cut a queue's name, so that a file name has room for what is put around it."""
    return os.fsencode(name)[:_CUT].decode(errors="ignore")


def whole_name(layout: QueueLayout, part: str) -> str:
    """Return the name of a queue that is being deleted; its folder may have only a part of it."""
    if len(os.fsencode(part)) <= _CUT - _CHARACTER:
        return part  # nothing was cut off
    name = os.fsdecode(read_small(layout.deleting) or b"")
    return name if names.can_name_queue(name) and cut(name) == part else part


def _missed(root: RootLayout, address: str) -> str:
    """Return the note of a missing queue that the root knows by its address; "" if there is none.

    It is not missed if it is found elsewhere, or its deletion was decided, though not all of it is removed.
    """
    bases = [layout.base for layout in layouts(root.path, address)]
    ends = tuple(f"/{os.path.relpath(base, root.path)}" for base in bases)
    notes = set[str]()
    for name in filter(_NOTE.fullmatch, names_in(root.queues)):
        noted = os.fsdecode(read_small(f"{root.queues}/{name}") or b"")
        is_here = noted.startswith(f"{root.path}/")  # else the root was moved since
        if noted in bases if is_here else noted.endswith(ends):
            notes.add(name)
    if not notes:
        return ""
    present = (_notes(root, layout.base, layout.private) for layout in queue_layouts(root))
    missed = notes.difference(_marks_of_deleted(root, address), *present)
    # RACE: a deletion that ended since the notes were listed removed them before its folder
    return min(filter(exists, (f"{root.queues}/{name}" for name in missed)), default="")


def _marks_of_deleted(root: RootLayout, address: str) -> Iterator[str]:
    """Yield the marks of the queues that lay beside a queue's folder, and were deleted, but are not wholly removed."""
    folders = (layout.base if layout.is_topic else layout.home for layout in layouts(root.path, address))
    for entry in chain.from_iterable(map(entries, set(map(os.path.dirname, folders)))):
        if ".deleted-" in entry.name:
            for layout in (QueueLayout.flat(entry.path), QueueLayout.incoming(entry.path)):
                yield from marks_in(layout.private)


def _write_note(root: RootLayout, name: str, base: str, storage: Storage) -> None:
    storage.make_folder_like(root.queues, root.private)
    storage.write_small(f"{root.queues}/{name}", os.fsencode(base))


def _is_temporary(root: RootLayout, base: str) -> bool:
    return names.is_temporary(os.path.relpath(base, root.path).partition("/")[0])


def _notes(root: RootLayout, base: str, private: str) -> set[str]:
    return {_path_note(root, base), *marks_in(private)}


def _path_note(root: RootLayout, base: str) -> str:
    """Return the name of the note of a queue without a mark; it is the same after the root was moved."""
    return f"path-{hashlib.sha256(os.fsencode(os.path.relpath(base, root.path))).hexdigest()[:16]}"


# -- scanning all names -------------------------------------------------------------------------------------------


class Seen(NamedTuple):
    """The sidecars that file names below a root refer to, and the notes whose queues are there."""

    references: frozenset[str]
    notes: frozenset[str]


def scan(root: str) -> Seen:
    """Do what `scanning` does, at once."""
    steps = scanning(RootLayout(root))
    while True:
        try:
            next(steps)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]


def scanning(root: RootLayout) -> Generator[int, None, Seen]:
    """Read all file names below a root, also behind its queues' symbolic links, and yield 0 for each name."""
    layouts = list(queue_layouts(root))
    for layout in layouts:
        _refuse_link(layout.private)
        _refuse_link(layout.delayed)
    own = [_notes(root, layout.base, layout.private) for layout in layouts]
    references, notes = set[str](), set[str]().union(*own)
    for file in _names_below(root, layouts):
        yield 0
        if token := names.sidecar_of(file):
            references.add(token)
        elif _MARK.fullmatch(file):
            notes.add(file)
    for layout, its_notes in zip(layouts, own, strict=True):
        if not _is_there(layout):  # it went during the scan
            notes -= its_notes
    return Seen(frozenset(references), frozenset(notes))


def queue_layouts(root: RootLayout) -> Iterator[QueueLayout]:
    """Yield the layouts of a root's queues, topics and subscriptions; OSError if it may have missed one."""
    seen = set[str]()
    for address in addresses(root, _refuse_closed):
        for layout in layouts(root.path, address):
            if layout.base in seen:
                continue  # a topic that has the name of a queue
            seen.add(layout.base)
            if os.path.islink(layout.base):
                os.stat(layout.base)
            if _is_there(layout):
                yield layout


#: Hears of a topic that this user may not look into: its address, and the error.
Closed = Callable[[str, OSError], object]


def pass_over(address: str, error: OSError) -> None:
    """Leave out a topic that this user may not look into: anybody may make one in the root."""


def _refuse_closed(address: str, error: OSError) -> None:
    raise error


def addresses(root: RootLayout, closed: Closed = pass_over) -> Iterator[str]:
    """Yield possible addresses of queues, topics and subscriptions; call `closed` for topics that cannot be read."""
    for entry in entries(root.path):
        if names.can_name_queue(entry.name):
            yield entry.name
    for topic in topics(root, closed=closed):
        yield topic
        try:
            yield from [f"{topic}/{folder}" for folder in subscription_folders(root, topic)]
        except OSError as error:
            closed(topic, error)


def topics(root: RootLayout, own: str = "", closed: Closed = pass_over) -> Iterator[str]:
    """Yield the topics of a root, and the folders above topics, which may have subscriptions.

    With `own`, yield only this topic and those below it, without a look at others; `closed` is as for `addresses`.
    """
    if own:
        yield own
    folders = [(topic_layout(root.path, own).home, own) if own else (f"{root.path}/{TOPIC_ROOT}", "")]
    seen = set[str]()
    while folders:
        folder, above = folders.pop()
        if (real := os.path.realpath(folder)) in seen:
            continue  # a link leads back to a folder above it
        seen.add(real)
        try:
            found = [entry for entry in entries(folder) if "." not in entry.name and names.can_name_queue(entry.name)]
        except OSError as error:
            closed(above or TOPIC_ROOT, error)
            continue
        for entry in found:
            topic = f"{above}.{entry.name}" if above else entry.name
            try:
                is_one = entry.is_dir()
            except OSError as error:  # a link to itself, or into a folder that this user may not enter
                closed(topic, error)
                continue
            if is_one:
                yield topic
                folders.append((entry.path, topic))


def subscription_folders(root: RootLayout, topic: str) -> Iterator[str]:
    """Yield the names of the folders of a topic's subscriptions; leave out links, which belong to views."""
    layout, shared = topic_layout(root.path, topic), is_shared(root)  # only where a DropboxMQ works some are hidden
    for folder in _subscription_folders(root, topic):
        if not shared or not exists(subscription_layout(layout, folder).removed):
            yield folder


def is_shared(root: RootLayout) -> bool:
    return has_dropboxmq(root.path)


def hidden_subscriptions(root: RootLayout, topic: str) -> Iterator[str]:
    """Yield the folders of a topic's removed subscriptions, which wait for a DropboxMQ that writes to them."""
    layout = topic_layout(root.path, topic)
    for folder in _subscription_folders(root, topic):
        if exists(subscription_layout(layout, folder).removed):
            yield folder


def _subscription_folders(root: RootLayout, topic: str) -> Iterator[str]:
    for entry in entries(f"{topic_layout(root.path, topic).home}/{SUBSCRIPTIONS}"):
        if SubscriptionName.of(entry.name) is not None and entry.is_dir(follow_symlinks=False):
            yield entry.name


def linked_queue(root: RootLayout, link: str) -> str | None:
    """Return the queue that somebody linked among the subscriptions of a topic, which gets what is published there.

    The link of a view does not count: it is for a DropboxMQ, and the view's own topics decide what it gets.
    """
    if link.endswith(VIEW_LINK):
        return None
    base = os.path.realpath(link)
    home = os.path.dirname(base) if os.path.basename(base) == INCOMING else base
    return os.path.basename(home) if os.path.dirname(home) == os.path.realpath(root.path) else None


def _names_below(root: RootLayout, layouts: list[QueueLayout]) -> Iterator[str]:
    paths = [path for layout in layouts for path in (layout.home, layout.base, *layout.folders.values())]
    links = [path for path in dict.fromkeys(paths) if os.path.islink(path)]
    folders = [root.path, *links]
    for link in links:
        os.stat(link)  # raises if it leads nowhere: names behind it may refer to any sidecar
    while folders:
        for entry in entries(folders.pop()):
            yield entry.name  # also of folders: a staged folder bears the name of its message
            if entry.is_dir(follow_symlinks=False) and entry.path != root.queues:
                folders.append(entry.path)
    for link in links:
        os.stat(link)  # again: what went away meanwhile was not looked at


def _is_there(layout: QueueLayout) -> bool:
    leads_nowhere = os.path.islink(layout.target) and not os.path.exists(layout.target)
    return leads_nowhere or exists(f"{layout.target}/.")


def _refuse_link(private: str) -> None:
    """Raise OSError for a private folder that is a link: dropq follows none, and names behind it may be references."""
    if os.path.islink(private):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), private)
