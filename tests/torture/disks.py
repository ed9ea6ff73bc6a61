"""Every verb is called on a disk that is full, that has no inodes left, or that turned read-only; nothing is feigned.

What is said and what is left is checked as for the faults. Mounting takes root: without, these rows are not run.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torture.cases import Cases
from torture.faults import untrue
from torture.table import NotRun, Options, Row
from torture.verbs import SETTINGS, Verb

PAGE = 4096
#: Bytes of a disk that is not in memory.
IMAGE = 4 << 20
#: What the names begin with that fill folders; they are no messages.
PAD = ".x"


@dataclass(frozen=True)
class Disk:
    """A disk: how it is mounted, how it is spoiled once a scene is set, and how it is mended to look at it."""

    name: str
    options: str
    spoil: Callable[[Path], object]
    mend: Callable[[Path], object]
    system: str = "tmpfs"


def run(options: Options) -> Iterable[Row]:
    """Call every verb on each of the disks; in short, on those that refuse most, until one is refused."""
    if os.geteuid() != 0 or not shutil.which("mount"):
        raise NotRun("mounting takes root, and mount(8)")
    chance = random.Random(options.seed)
    for disk in DISKS if options.long else BARE:
        row = Row(disk.name)
        try:
            with mounted(options.folder / "disk", disk) as folder:
                cases = Cases(folder, SETTINGS[0], row, apart=options.folder)
                found = cases.verbs()
                for verb in found if options.long else chance.sample(found, len(found)):
                    _call(cases, verb, disk, folder)
                    if row.faults and not options.long:
                        break
        except NotRun as reason:
            row.not_run = str(reason)
        if not row.faults and not row.not_run:
            row.wrong.append("nothing was refused: the row proves nothing")
        yield row


@contextmanager
def mounted(folder: Path, disk: Disk) -> Iterator[Path]:
    """Mount a tmpfs, or an image with a file system.

    Raises:
        NotRun: this machine has no loop devices, or not what makes a file system.
    """
    folder.mkdir()
    source, options = "dropq-torture", disk.options
    if disk.system != "tmpfs":
        image = folder.with_suffix(".image")
        image.write_bytes(b"")
        os.truncate(image, IMAGE)
        source, options = str(image), "loop"
        _prepare([f"mkfs.{disk.system}", "-q", "-F", *disk.options.split(), source])
    try:
        _prepare(["mount", "-t", disk.system, "-o", options, source, str(folder)])
        try:
            yield folder
        finally:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
    finally:
        folder.rmdir()


def _prepare(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise NotRun(f"no {command[0]} here: apt-get install e2fsprogs mount") from None
    if done.returncode:
        raise NotRun(f"{command[0]}: {done.stderr.strip()}")


def _call(cases: Cases, verb: Verb, disk: Disk, folder: Path) -> None:
    said = cases.perform(verb)
    assert said is not None
    after, usually = cases.here(), said.raised
    try:
        said = cases.perform(verb, first=partial(disk.spoil, folder))
    finally:
        disk.mend(folder)
    assert said is not None
    cases.row.faults += said.raised != usually
    cases.row.wrong += [f"{verb}: {line}" for line in untrue(verb, said, cases, after, usually)]
    cases.judge(str(verb), after)


# -- spoiling and mending ----------------------------------------------------------------------------------------------


def fill(pages: int, folder: Path) -> None:
    """Fill a disk, but for so many pages."""
    (folder / "filler").mkdir()
    with open(folder / "filler" / "full", "wb", buffering=0) as filler:
        try:
            while True:
                filler.write(bytes(PAGE))
        except OSError:
            filler.truncate(max(filler.tell() - pages * PAGE, 0))


def _fill_folders(top: Path) -> None:
    """Fill a disk, and then each folder, so that a name more takes a block more; on tmpfs it never does."""
    fill(0, top)
    with open(top / "filler" / "rest", "wb", buffering=0) as rest, suppress(OSError):
        while True:
            rest.write(b"x" * 1024)
    for folder, _, _ in os.walk(top / "root"):
        with suppress(OSError):
            for number in itertools.count():
                os.link(top / "filler" / "full", f"{folder}/{PAD}{number}")


def _empty_folders(top: Path) -> None:
    for folder, _, files in os.walk(top / "root"):
        for file in files:
            if file.startswith(PAD):
                os.unlink(f"{folder}/{file}")
    _make_room(top)


def _use_up(inodes: int, folder: Path) -> None:
    """Use up the inodes of a disk, but for so many."""
    made: list[Path] = []
    try:
        (folder / "filler").mkdir()
        while True:
            made.append(folder / "filler" / str(len(made)))
            made[-1].touch()
    except OSError:
        for path in made[:inodes]:
            path.unlink(missing_ok=True)


def _make_room(folder: Path) -> None:
    shutil.rmtree(folder / "filler", ignore_errors=True)


def _close(folder: Path) -> None:
    """Let a root turn read-only: what is open stays open, and lies below."""
    root = str(folder / "root")
    subprocess.run(["mount", "--bind", root, root], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", root], check=True)


def _open(folder: Path) -> None:
    subprocess.run(["umount", "--lazy", str(folder / "root")], check=True)


DISKS = (
    *(Disk(f"a disk: {left} pages left", "size=3m", partial(fill, left), _make_room) for left in (0, 1, 3)),
    *(Disk(f"a disk: {left} inodes left", "nr_inodes=400", partial(_use_up, left), _make_room) for left in (0, 1, 3)),
    Disk("a disk: full folders", "-b 1024 -m 0 -N 1000", _fill_folders, _empty_folders, "ext4"),
    Disk("a disk: read-only", "size=3m", _close, _open),
)
#: Those on which most verbs are refused.
BARE = (DISKS[0], DISKS[3], *DISKS[6:])
