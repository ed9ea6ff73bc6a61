"""A root: the directory that holds the queues, their common configuration and what their names spill."""

from __future__ import annotations

import errno
import logging
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dropq import names, storage
from dropq.config import RootConfig, load_root, toml_text, validate_options
from dropq.errors import ConfigError, DropqError, NoSuchQueue, QueueExists, StorageError
from dropq.layout import FOLDERS, KEEPER, QueueLayout, RootLayout
from dropq.message import Duration
from dropq.opening import group_number
from dropq.queue import Queue
from dropq.sidecars import collect, forget, make_known
from dropq.storage import Clock, ServerClock, Storage, storage_error, telling

if TYPE_CHECKING:
    from dropq.sweep import SweepReport

log = logging.getLogger("dropq")

#: Milliseconds after which a delete that was not decided is taken for one that died.
UNDECIDED_LIMIT = 60_000

_UNDECIDED = re.compile(r"\.(?P<name>.+)\.deleting-(?P<since>[0-9]+)-[0-9a-f]{6}", re.DOTALL)

#: What is told where a pause, or its end, met an error.
PAUSING = "whether the queues are paused, `dropq ls` tells"
#: States whose messages keep a queue from being deleted.
UNSETTLED = ("working", "target", "processing", "delayed")


class Root:
    """A directory that holds queues.

    Args:
        path: the directory.
        clock: what tells the time; None asks the file server's clock.

    Raises:
        NoSuchQueue: there is no such directory.
        StorageError: it cannot be opened.
        ConfigError: its dropq.toml cannot be used, or was written by a newer dropq.
    """

    def __init__(self, path: str | os.PathLike[str], *, clock: Clock | None = None) -> None:
        self.layout = RootLayout(os.path.abspath(os.fspath(path)))
        with telling("the root cannot be opened"):
            if not storage.is_folder(self.layout.path):
                raise NoSuchQueue(f"no root at {self.layout.path}: `dropq init {self.layout.path}` makes one")
        storage.refuse_links((self.layout.private, self.layout.meta, self.layout.queues))
        self.clock: Clock = clock or ServerClock(self.layout.clock)
        self.ids = names.IdSource(self.clock.now_ms)
        with telling("the root cannot be opened"):
            storage.ask_server(self.layout.path)  # on NFS another host may have written its dropq.toml just now
        self.config: RootConfig = load_root(self.layout.config_file)

    def __repr__(self) -> str:
        return f"<Root {self.layout.path}>"

    @classmethod
    def create(cls, path: str | os.PathLike[str], *, dropboxmq: bool = False, clock: Clock | None = None) -> Root:
        """Make a directory a root; what is there already stays as it is.

        Args:
            path: the directory, made where it is missing.
            dropboxmq: also make what a running DropboxMQ 1.2 needs to share the root.
            clock: as for the constructor.

        Raises:
            StorageError: it cannot be made.
            ConfigError: it is a root already, and one that DropboxMQ cannot share.
        """
        layout = RootLayout(os.path.abspath(os.fspath(path)))
        style = 'reply_to_style = "typed"\n' if dropboxmq else ""
        storage.refuse_links((layout.private, layout.meta, layout.queues))
        try:
            Storage().make_folder(layout.path)
            store = _private_store(layout.path)
            for folder in (layout.meta, *(layout.dropboxmq if dropboxmq else ())):
                store.make_folder(folder)
            store.touch(layout.clock)
            storage.ask_server(layout.path)
            if not storage.exists(layout.config_file):
                store.write_small(layout.config_file, f"format = 1\n{style}".encode())
        except OSError as error:
            raise storage_error(error, "the root was not made") from error
        root = cls(layout.path, clock=clock)
        if dropboxmq and root.config.reply_to_style != "typed":
            raise ConfigError(f'{layout.config_file}: reply_to_style: DropboxMQ needs reply_to_style = "typed"')
        return root

    @property
    def path(self) -> Path:
        """The directory."""
        return Path(self.layout.path)

    def queue(self, name: str) -> Queue:
        """Return a queue by its name, whether it is there or not: its first use tells."""
        return Queue(self, name)

    def queues(self) -> list[Queue]:
        """Return the queues that are there, by name."""
        found = []
        with telling("nothing was changed"):
            there = [entry.name for entry in storage.entries(self.layout.path)]
        for name in there:
            if name.startswith("."):
                continue
            try:
                queue = Queue(self, name)
            except DropqError:
                continue  # a folder whose name no queue can have
            if queue.exists():
                found.append(queue)
        return sorted(found, key=lambda queue: queue.name)

    def create_queue(self, name: str, *, dropboxmq: bool = False, **options: Any) -> Queue:
        """Make a queue; it appears whole, by one rename.

        Args:
            name: the queue's name.
            dropboxmq: lay it out as DropboxMQ 1.2 does, with its folders in `incoming/`.
            options: keys of queue.toml, which are written there.

        Raises:
            QueueExists: there is something of that name already.
            InvalidName, ConfigError: the name, or an option, cannot be used; nothing was made.
        """
        queue = Queue(self, name)
        home = f"{self.layout.path}/{name}"
        where, root_file = f"options of queue {name}", self.layout.config_file
        config = validate_options(options, where, root=self.config, root_file=root_file)
        group = group_number(config.group)
        store = Storage(config.durability, file_mode=config.file_mode, dir_mode=config.dir_mode, group=group)
        hidden = f"{self.layout.path}/.{_cut(name)}.creating-{os.urandom(6).hex()}"
        layout = (QueueLayout.incoming if dropboxmq else QueueLayout.flat)(hidden)
        try:
            folders = layout.first_folders
            for folder in folders:
                store.make_folder(folder, parents=False, passing=True)  # synced below, each parent once
            store.touch(layout.created)  # its modification time is when the queue was made
            if options:
                store.write_small(layout.config_file, toml_text(options).encode())
            store.sync(*dict.fromkeys(os.path.dirname(folder) for folder in folders[1:]))
            store.move_folder(hidden, home)
        except OSError as error:
            with suppress(OSError):  # what cannot be taken away now, fsck finds
                store.remove_tree(hidden)
            if isinstance(error, FileExistsError):
                raise QueueExists(f"queue {name!r} is there already: {home}") from error
            raise storage_error(error, f"queue {name!r} was not made") from error
        with telling(f"queue {name!r} is made, but a power cut may take it back"):
            store.sync(self.layout.path)
        with suppress(OSError):  # a queue that cannot be noted now, the next sweep of the root notes
            make_known(self.layout.queues, _moved(layout, home).private, store)
        return queue

    def delete_queue(self, name: str, *, force: bool = False) -> None:
        """Remove a queue with its history; one that has messages to work on is refused.

        The queue is renamed away first, so a send that is half-way fails rather than vanish.

        Args:
            name: the queue's name.
            force: remove it with all that waits and is worked on.

        Raises:
            NoSuchQueue: there is no such queue.
            StorageError: messages wait in it, or it cannot be removed; it stays as it was.
        """
        from dropq import staging

        queue = self.queue(name)
        layout = queue.layout
        if not force:
            with queue.life.telling("nothing was removed"):
                staging.sweep(queue.life)  # what was committed and is not sent yet waits to be worked on
            self._refuse_unsettled(name, queue.counts())
        mark = f"{self.clock.now_ms()}-{os.urandom(3).hex()}"
        hidden = f"{self.layout.path}/.{_cut(name)}"
        away = f"{hidden}.deleted-{mark}"
        store = queue.life.storage
        try:
            if force:
                store.rename_folder(layout.home, away)
            else:
                undecided = f"{hidden}.deleting-{mark}"
                if _cut(name) != name:
                    store.make_folder(layout.private)
                    store.write_small(layout.deleting, os.fsencode(name))  # what the folder cannot be called
                store.rename_folder(layout.home, undecided)
                self._restore_if_unsettled(name, _moved(layout, undecided), layout.home, store)
                store.rename_folder(undecided, away)
            gone = _moved(layout, away)
            forget(self.layout.queues, layout.base, gone.private, store)
            for folder in (gone.target, gone.delayed):
                store.drain(folder)
            store.remove_tree(os.path.realpath(away))  # where the queue is a link, what it leads to goes first
            store.remove_tree(away)
        except OSError as error:
            raise storage_error(error, f"queue {name!r} is not wholly removed: what is left is in {away}") from error

    def _refuse_unsettled(self, name: str, counts: dict[str, int]) -> None:
        waiting = {state: counts[state] for state in UNSETTLED if counts.get(state)}
        if waiting:
            listed = ", ".join(f"{count} in {state}" for state, count in waiting.items())
            raise StorageError(
                f"queue {name!r} has messages to work on ({listed}): drain it, or force it; nothing was removed",
                path=f"{self.layout.path}/{name}",
                errno=errno.ENOTEMPTY,
            )

    def _restore_if_unsettled(self, name: str, gone: QueueLayout, home: str, store: Storage) -> None:
        """RACE: a send that returned before the rename is not lost: the queue comes back."""
        from dropq import staging

        try:
            for folder in (gone.target, gone.delayed, gone.processing):
                store.unlink(f"{folder}/{KEEPER}")
                store.remove_folder(folder)  # from here on whatever was half-way into it fails
            if staging.is_committed(gone.working):
                raise OSError(errno.ENOTEMPTY, "a job was committed", gone.working)
        except OSError:
            for folder in (gone.target, gone.processing):
                store.make_folder(folder)
            store.move_folder(gone.home, home)
            staging.sweep(self.queue(name).life)
            self._refuse_unsettled(name, self.queue(name).counts())
            raise StorageError(
                f"queue {name!r} holds what is no message in target/ or processing/: `dropq fsck {name} --repair` sets "
                "it aside, or force it; nothing was removed",
                path=home,
                errno=errno.ENOTEMPTY,
            ) from None

    def sweep(
        self,
        *,
        foreign_older_than: Duration | None = None,
        unleased_older_than: Duration | None = None,
        jobs_older_than: Duration | None = None,
    ) -> SweepReport:
        """Sweep every queue, then collect the metadata files that no name refers to any more.

        Args:
            foreign_older_than, unleased_older_than, jobs_older_than: as for `Queue.sweep`.

        Raises:
            ConfigError, StorageError: of the first queue that cannot be swept, once all others are.
        """
        from dropq.sweep import SweepReport

        report = SweepReport()
        errors: list[DropqError] = []
        for queue in self.queues():
            try:
                report.add(
                    queue.sweep(
                        foreign_older_than=foreign_older_than,
                        unleased_older_than=unleased_older_than,
                        jobs_older_than=jobs_older_than,
                    )
                )
            except DropqError as error:  # the other queues are swept all the same
                log.error("queue %s was not swept: %s", queue.name, error)
                errors.append(error)
        if errors:
            raise errors[0]
        report.add(self.tidy())
        return report

    def tidy(self) -> SweepReport:
        """Do what a sweep does beside the queues: undo deletes that were cut short, collect metadata files.

        Raises:
            StorageError: the file system refuses; the next sweep goes on.
        """
        from dropq.sweep import SweepReport

        with telling("the queues are swept; the next sweep goes on with what is the root's"):
            self._undo_cut_short_deletes()
            return SweepReport(sidecars=sum(collect(self.layout.path, self.layout.meta, Storage(), self.clock)))

    def _undo_cut_short_deletes(self) -> None:
        """Bring back queues whose delete died before it was decided: a send may have returned just before."""
        for entry in list(storage.entries(self.layout.path)):
            found = _UNDECIDED.fullmatch(entry.name)
            if found is None or self.clock.now_ms() - int(found["since"]) < UNDECIDED_LIMIT or entry.is_symlink():
                continue
            store = _private_store(entry.path)
            layouts = QueueLayout.flat(entry.path), QueueLayout.incoming(entry.path)
            layout = layouts[os.path.isdir(layouts[1].base)]
            try:
                for folder in FOLDERS:
                    store.make_folder(layout.folder(folder))
                name = _whole_name(layout, found["name"])
                store.move_folder(entry.path, f"{self.layout.path}/{name}")
            except OSError as error:
                why = storage.told(error)
                log.warning("%s: a delete was cut short, and it cannot be undone: %s", entry.path, why)
            else:
                log.warning("queue %s: its delete was cut short, and is undone", name)

    def pause(self) -> None:
        """Make the consumers of every queue see an empty queue, until `resume`."""
        with telling(PAUSING):
            Storage().touch(self.layout.read_lock)

    def resume(self) -> None:
        """Let the consumers of every queue see their queues again."""
        with telling(PAUSING):
            Storage().unlink(self.layout.read_lock)


def _moved(layout: QueueLayout, home: str) -> QueueLayout:
    return QueueLayout(home, layout.base.replace(layout.home, home, 1))


def _cut(name: str) -> str:
    """Cut a queue's name to what leaves room in a file name for what is put around it."""
    return os.fsencode(name)[:200].decode(errors="ignore")


def _whole_name(layout: QueueLayout, cut: str) -> str:
    """Return the name of a queue that is being deleted, where its folder is called by a part of that."""
    name = os.fsdecode(storage.read_small(layout.deleting) or b"")
    return name if names.can_name_queue(name) and _cut(name) == cut else cut


def _private_store(root: str) -> Storage:
    """Return what makes a root's private files: whoever may write in the root may write in them."""
    mode = os.stat(root).st_mode & 0o2775
    return Storage(file_mode=mode & 0o664, dir_mode=mode, lenient=True)
