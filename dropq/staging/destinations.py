"""Destinations: the queues that get parts of a committed message, known by more than their paths.

A destination may be removed, and another queue made of its name, while a part is on its way. So a destination is its
folder's inode and the random word in its `.dropq/created`, and a part is renamed through a descriptor of that folder:
what was removed takes the part along, and a new queue of its name never gets it.

The name of a part begins with the token of its destination. `.dropq/receivers/TOKEN` of the topic says which queue that
is, for a program that did not stage the part. A publisher writes this file when it first meets the destination, and
replaces a damaged file.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import resource
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from dropq.errors import DropqError
from dropq.format import names
from dropq.format.addresses import topic_layout
from dropq.format.layout import INCOMING, PRIVATE, SUBSCRIPTIONS, QueueLayout, RootLayout, removed_subscriptions
from dropq.format.staged import part_of
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.folders import new_word
from dropq.lifecycle.queue_notes import layout_in_deletion, queue_layouts, topics, why_away
from dropq.policies.lock import PolicyLock
from dropq.storage import reading
from dropq.storage.files import Storage

#: The file with a queue's word, below its folder.
CREATED = f"{PRIVATE}/created"
#: What the path of a row has in it: the folder of what goes to another file system.
TRANSFERS = f"/{PRIVATE}/transfers/"
_TOKEN = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class Identity:
    """What tells a destination from all others."""

    #: The folder that its target/ lies in, from the root.
    path: str
    inode: int
    #: The content of its `.dropq/created`; "" if that is missing, or this user may not read it: path and inode decide.
    word: str

    @classmethod
    def read(cls, value: object) -> Identity | None:
        """Return what a destination's file says; None if it is damaged, or leads out of the root."""
        if not isinstance(value, Mapping):
            return None
        path, inode, word = value.get("path"), value.get("inode"), value.get("word")
        if not (isinstance(path, str) and isinstance(inode, int) and isinstance(word, str)):
            return None
        parts = path.split("/")
        return None if "\0" in path or not all(parts) or ".." in parts or "." in parts else cls(path, inode, word)

    @classmethod
    def at(cls, folder: int, path: str) -> Identity:
        """Return the identity of the open folder at a path from the root."""
        word = (reading.read_in(folder, CREATED) or b"").decode(errors="replace").strip()
        return cls(path, os.fstat(folder).st_ino, word)

    def is_same(self, other: Identity) -> bool:
        """Return whether two identities are those of one folder, as far as this user may read its word."""
        return self.inode == other.inode and len({self.word, other.word} - {""}) < 2

    def written(self) -> bytes:
        """Return the identity as the destination's file has it."""
        return json.dumps({"path": self.path, "inode": self.inode, "word": self.word}).encode()

    @property
    def token(self) -> str:
        """What the names of its parts begin with: 16 hex digits, a digest of the rest."""
        return hashlib.sha256(self.written()).hexdigest()[:16]


#: A process keeps folders of destinations open in one of this many parts of its descriptors, however many topics and
#: threads it has; it opens others each time.
SHARE = 4


class DestinationFolder:
    """A destination, whose folder is kept open, or is opened, and compared, each time that a file is moved into it."""

    def __init__(self, root: str, path: str) -> None:
        #: The folder that its target/ lies in.
        self.path = f"{root}/{path}"
        self._folder: int | None = None
        folder = os.open(self.path, _FOLDER)
        try:
            self.identity = Identity.at(folder, path)
            self.device = os.fstat(folder).st_dev
        except BaseException:
            os.close(folder)
            raise
        self.token = self.identity.token
        # The number is the lowest that was free: so many descriptors of the process are used.
        if folder < resource.getrlimit(resource.RLIMIT_NOFILE)[0] // SHARE:
            self._folder = folder
        else:
            os.close(folder)

    def __del__(self) -> None:
        # What uses the descriptor refers to the destination, so that no other folder gets its number meanwhile.
        if (folder := getattr(self, "_folder", None)) is not None:
            os.close(folder)

    @property
    def is_open(self) -> bool:
        """Whether its folder is kept open."""
        return self._folder is not None

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """Yield the descriptor of its folder; FileNotFoundError if that is missing, or another is in its place."""
        if self._folder is not None:
            yield self._folder
            return
        folder = os.open(self.path, _FOLDER)
        try:
            if not Identity.at(folder, self.identity.path).is_same(self.identity):
                raise FileNotFoundError(errno.ENOENT, "another folder is in its place", self.path)
            yield folder
        finally:
            os.close(folder)

    def is_there(self, root: str) -> bool:
        """Return whether its path still leads to its folder."""
        try:
            if self._folder is None:  # nothing keeps another folder from having its inode
                with self._opened():
                    return True
            return os.stat(f"{root}/{self.identity.path}").st_ino == self.identity.inode
        except OSError:
            return False

    def take(self, source: str, name: str, storage: Storage) -> bool:
        """Rename a part into target/; return False if the file system has no rename that replaces nothing.

        FileExistsError says that the name is taken, FileNotFoundError that the part or target/ is gone.
        """
        with self._opened() as folder:
            return storage.rename_exclusive(source, f"target/{name}", folder)

    def take_as(self, source: str, name: str, storage: Storage) -> None:
        """Rename a part into target/, to a name that is unique by construction; FileNotFoundError if either is gone."""
        with self._opened() as folder:
            storage.rename_in(source, folder, f"target/{name}")

    def sync(self, storage: Storage) -> None:
        """Make the files that came to target/ durable."""
        with self._opened() as folder:
            storage.sync_in(folder, "target")


def take_each(
    destinations: Sequence[DestinationFolder], at: int, parts: Sequence[str], name: str, storage: Storage
) -> list[str]:
    """Do what `DestinationFolder.take` does with a part for each open destination; return the parts that stay."""
    folders = [(part, destination._folder) for part, destination in zip(parts, destinations, strict=True)]
    here = [(part, folder) for part, folder in folders if folder is not None]
    left = [part for part, folder in folders if folder is None]
    files, into = [part for part, _ in here], [folder for _, folder in here]
    return left + storage.rename_each_exclusive(at, files, into, f"target/{name}")


_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def give_word(queue: QueueContext) -> None:
    """Give a queue a random word, unless it has one, by which it is known again after its root was copied.

    The file keeps its time: that is when the queue was made. If this user may not do it, the next who may does.
    """
    layout, store = queue.layout, queue.storage
    with suppress(OSError, DropqError):
        if reading.read_small(layout.created):
            return
        with PolicyLock(queue).acquire(lambda: None) as alone:
            if alone and not reading.read_small(layout.created):  # RACE: another process may have done it
                made = reading.written_ms(layout.created) * 1_000_000 if reading.exists(layout.created) else 0
                draft = f".created.{os.urandom(6).hex()}.tmp"
                store.write_all(layout.private, [draft], [new_word()], times=(made, made))
                store.replace(f"{layout.private}/{draft}", layout.created)
                store.sync(layout.private)


# -- which destination a token is --------------------------------------------------------------------------------------


def make_known(layout: QueueLayout, destination: DestinationFolder, storage: Storage) -> None:
    """Write the file of a destination, unless it is there: before the first part for it is staged."""
    path, content = f"{layout.receivers}/{destination.token}", destination.identity.written()
    if reading.read_small(path) == content:
        storage.sync(layout.receivers)  # another publisher may have written it just now
    else:
        if not reading.exists(layout.receivers):  # its modes may have been set since
            storage.make_folder_like(layout.receivers, layout.private)
        storage.write_small(path, content)


def is_known(layout: QueueLayout, destination: DestinationFolder) -> bool:
    return reading.exists(f"{layout.receivers}/{destination.token}")


def tokens(layout: QueueLayout) -> list[str]:
    return list(filter(_TOKEN.fullmatch, reading.names_in(layout.receivers)))


def identity_of(layout: QueueLayout, token: str) -> Identity | None:
    """Return which destination a token is, or raise ValueError; None if its file is gone, and so is the destination."""
    path = f"{layout.receivers}/{token}"
    reading.ask_server(layout.receivers)
    said = reading.read_small(path)
    if said is None:
        return None
    try:
        identity = Identity.read(reading.parse_json(said))
    except ValueError:
        identity = None
    if identity is None:
        raise ValueError(f"{path} is damaged, and does not say who gets it: look at the copy, then move it by hand")
    return identity


def open_destination(
    root: str, identity: Identity, words: Callable[[], Counter[str]] = Counter
) -> DestinationFolder | None:
    """Open a destination by its identity, also if it was copied to another disk; None if it is not there."""
    try:
        destination = DestinationFolder(root, identity.path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if destination.identity.is_same(identity):
        return destination
    if destination.identity.word != identity.word:
        return None
    # A folder of the root may have been copied within it; the folder of a row has a name that is never used again.
    is_it = words()[identity.word] == 1 if identity.word else TRANSFERS in identity.path
    return destination if is_it else None


def words_of(root: RootLayout) -> Counter[str]:
    """Return how many folders of a root have each word, with those that are being removed."""
    homes = {root.path, *(removed_subscriptions(topic_layout(root.path, topic).home) for topic in topics(root))}
    in_deletion = (f"{above}/{name}" for above in homes for name in reading.names_in(above) if ".deleting-" in name)
    files = {layout.created for layout in (*queue_layouts(root), *map(layout_in_deletion, in_deletion))}
    return Counter((reading.read_small(file) or b"").decode(errors="replace").strip() for file in files)


def is_being_removed(root: str, identity: Identity) -> bool:
    """Return whether a destination that is not in its place is being removed, and its folder is still there."""
    above = os.path.dirname(identity.path.removesuffix(f"/{INCOMING}"))
    folders = [f"{root}/{above}"]
    if os.path.basename(above) == SUBSCRIPTIONS:
        folders.append(removed_subscriptions(f"{root}/{os.path.dirname(above)}"))
    below = identity.path.endswith(f"/{INCOMING}") * f"/{INCOMING}"
    found = [f"{folder}/{name}{below}" for folder in folders for name in reading.names_in(folder)]
    return any(".deleting-" in path and _lies_at(path, identity) for path in found)


def is_away(root: RootLayout, identity: Identity) -> bool:
    """Return whether a queue of the root that is not in its place, such as a view, may come back."""
    name, _, below = identity.path.partition("/")
    if below not in ("", INCOMING) or reading.exists(f"{root.path}/{identity.path}/."):
        return False
    return names.can_name_queue(name) and why_away(root, name) != ""


def _lies_at(path: str, identity: Identity) -> bool:
    """Return whether a folder in deletion is a destination's, by its inode, or its word if the root was copied."""
    try:
        if os.stat(path).st_ino == identity.inode:
            return True
    except (FileNotFoundError, NotADirectoryError):
        return False
    return bool(identity.word) and (reading.read_small(f"{path}/{CREATED}") or b"").strip() == identity.word.encode()


def is_needed(root: str, layout: QueueLayout, token: str) -> bool:
    """Return whether somebody may still need the file of a destination: the destination is there, or a part for it.

    RACE: a publisher that found the destination before it was removed may still stage a part. If that publisher dies,
    and the file is gone, the part goes to error/, like each part of a destination that is gone.
    """
    try:
        identity = identity_of(layout, token)
    except ValueError:
        return True
    if identity is None:
        return False
    if open_destination(root, identity) is not None or is_being_removed(root, identity):
        return True
    files = (file for folder in reading.entries(layout.staged) for file in reading.names_in(folder.path))
    return any(found[0] == token for found in map(part_of, files) if found is not None)
