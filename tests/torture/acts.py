"""A case is done in a child of its own, with something between it and the file system; then it is judged.

The child dies, a call is refused, or another program works in between. What becomes of it then, those say who know the
scene.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import stat
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar
from unittest import mock

from forks import DIED, forked, pool
from helpers import Clock

from dropq import DropqError, errors
from dropq.storage import system_calls
from torture.calls import Between, Call, come_between
from torture.cases import SAID, Said
from torture.crashes import Dying, Moment
from torture.faults import ERRORS, Failing
from torture.table import Options, Row, lines_of


@dataclass(frozen=True)
class Setting:
    """How queues are configured, and what their file system can do."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    #: Whether there is a rename that replaces nothing; and whether one to the name of a folder leads into the folder.
    noreplace: bool = True
    into_folders: bool = False

    @property
    def history(self) -> bool:
        return bool(self.options.get("history", True))


class Named(Protocol):
    """A case."""

    @property
    def name(self) -> str: ...


C = TypeVar("C", bound=Named)
S = TypeVar("S")
T = TypeVar("T")


@dataclass
class Meeting:
    """Lets another program work before the Nth call, whatever that is."""

    at: int
    work: Callable[[], object] = lambda: None
    calls: list[str] = field(default_factory=list)
    _busy: bool = False

    def __call__(self, call: Call) -> object:
        if not self._busy:
            if len(self.calls) == self.at:
                self._busy = True
                with suppress(DropqError):  # as that the first is in its way
                    self.work()
                self._busy = False
            self.calls.append(call.name)
        return None if call.name == "fsync" else call.do()

    def calls_made(self) -> list[str]:
        """Return the calls until now."""
        return self.calls


class Counting(Protocol):
    """What comes between a case and the file system, and remembers the calls."""

    def __call__(self, call: Call) -> object: ...

    def calls_made(self) -> list[str]:
        """Return the calls until now."""


class Acts(ABC, Generic[C, S]):
    """The cases of one setting.

    Args:
        folder: where each case makes its root.
        setting: the setting.
        row: what counts them.
    """

    #: What each call may be refused with, and what a rename may be answered with that was done.
    errors: Mapping[str, tuple[int, ...]] = ERRORS
    late: tuple[int, ...] = ()

    def __init__(self, folder: Path, setting: Setting, row: Row) -> None:
        self.row = row
        self._folder = folder
        self._mount = setting
        self._clock = Clock()

    @abstractmethod
    def enter(self, case: C) -> S:
        """Return the scene of a case, as it is before the case."""

    @abstractmethod
    def act(self, case: C, scene: S) -> object:
        """Do what a case does."""

    @abstractmethod
    def judge(self, case: C, where: str, said: Said | None = None, *, read_only: bool = False) -> None:
        """Let others go on, then note what is wrong.

        Args:
            case: the case.
            where: what something wrong is told with.
            said: what became of the case; None where its process died.
            read_only: whether the case could change nothing more after a fault.
        """

    @contextmanager
    def mounted(self) -> Iterator[None]:
        """Be where the file system does what it can in the setting."""
        with mounted(self._mount):
            yield

    def crash(self, case: C, choose: Callable[[list[Moment]], Iterable[Moment]] = list) -> None:
        """Let it die at every moment, or at some."""
        said = self.undisturbed(case, Dying(None))
        self.judge(case, f"{case.name}, done", said)
        moments = [Moment(number) for number in range(len(said.calls))]
        moments += [Moment(number, midway=True) for number, name in enumerate(said.calls) if name == "write"]
        for moment in choose(moments):
            if self.perform(case, partial(_always, Dying(moment))) is None:
                self.row.kills += 1
                self.judge(case, f"{case.name}, dead {moment} of {len(said.calls)}")

    def refuse(self, case: C, choose: Callable[[list[Failing]], Iterable[Failing]] = list) -> None:
        """Refuse every call, or some: each with every error that it may meet, once or from then on."""
        said = self.undisturbed(case, Failing())
        found = [
            Failing(number, error, lasts, late)
            for number, name in enumerate(said.calls, 1)
            for error in self.errors.get(name, (errno.EIO, errno.EACCES))
            for lasts in (False, True)
            for late in ((False, True) if name == "rename" and error in self.late else (False,))
        ]
        for failing in choose(found):
            where = f"{case.name}: {errno.errorcode[failing.error]}{' from then on' * failing.lasts}"
            where += ", too late" * failing.late
            what = self.perform(case, partial(_always, failing), failing.calls_made)
            assert what is not None
            self.row.faults += 1
            name = what.calls[failing.at - 1] if failing.at <= len(what.calls) else "none"
            what = replace(what, unread=name == "read")
            where = f"{where} at call {failing.at} of {len(said.calls)}, {name}"
            if what.raised and not hasattr(errors, what.raised):
                self.row.wrong.append(f"{where}: raises {what.raised}: {what.words}")
            self.judge(case, where, what, read_only=failing.lasts and failing.error == errno.EROFS)

    # -- performing ----------------------------------------------------------------------------------------------

    def undisturbed(self, case: C, between: Counting) -> Said:
        """Do what a case does, with nothing in its way; return what became of it, and the calls."""
        said = self.perform(case, partial(_always, between), between.calls_made)
        assert said is not None and not said.raised, (case.name, said)
        return said

    def perform(self, case: C, between: Callable[[S], Between], calls: Callable[[], list[str]] = list) -> Said | None:
        """Do what a case does, in a child of its own; return what became of it, None if the child died of it."""
        shutil.rmtree(self._folder / "root", ignore_errors=True)
        self._clock.ms = Clock().ms
        sys.stdout.flush()
        status = forked(lambda: self._in_the_child(case, between, calls))
        if status == DIED:
            return None
        if status != SAID:
            raise RuntimeError(f"{case.name}: the process ended with {status}")
        calls_made = json.loads((self._folder / "said").read_text())
        self._clock.ms = calls_made.pop("clock")
        return Said(**calls_made)

    def _in_the_child(self, case: C, between: Callable[[S], Between], calls: Callable[[], list[str]]) -> None:
        logging.disable()
        with self.mounted():
            scene = self.enter(case)
            come_between(between(scene), noreplace=self._mount.noreplace)
            raised = words = ""
            try:
                self.act(case, scene)
            except (DropqError, OSError) as error:
                words = "; ".join([str(error), *getattr(error, "__notes__", ())])
                kinds = [kind.__name__ for kind in type(error).__mro__]
                raised = next((kind for kind in kinds if hasattr(errors, kind)), kinds[0])
            calls_made = {"calls": calls(), "raised": raised, "words": words, "clock": self._clock.ms}
            (self._folder / "said").write_text(json.dumps(calls_made))
        os._exit(SAID)


def _always(between: Between, scene: object) -> Between:
    return between


@contextmanager
def mounted(setting: Setting) -> Iterator[None]:
    """Let renames do what a setting's file system can, and let no sync take time."""
    real = os.rename

    def refused(source: str, destination: str, *_: int) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), source)

    def rename(source: Any, destination: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        """Move into a folder of the name; replace nothing."""
        with suppress(FileNotFoundError):
            found = os.stat(destination, dir_fd=dst_dir_fd)
            if os.path.samestat(os.stat(source, dir_fd=src_dir_fd), found):
                return  # the kernel does nothing then, and does not ask the file system
            if stat.S_ISDIR(found.st_mode):
                destination = f"{destination}/{os.path.basename(source)}"
            else:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), source, None, destination)
        real(source, destination, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    with (
        mock.patch.object(os, "fsync", return_value=None),
        mock.patch.object(system_calls, "sync_whole", return_value=None),
    ):
        if setting.noreplace:
            yield
            return
        kind = rename if setting.into_folders else real
        with mock.patch.object(system_calls, "rename_noreplace", refused), mock.patch.object(os, "rename", kind):
            yield


def of_each(settings: Sequence[T], options: Options, rows: Callable[[Options, T], list[Row]]) -> list[Row]:
    """Return the rows of each setting, each found in a process and a folder of its own; print them as they come.

    All settings may take hours: what was found is not lost if the run is.
    """
    found: list[Row] = []
    with pool() as processes:
        for of_one in processes.map(rows, *zip(*options.apart(settings), strict=True)):
            print(*lines_of(options.folder.name, of_one, ""), sep="\n", file=sys.stderr, flush=True)
            found += of_one
    return found
