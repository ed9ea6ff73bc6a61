"""Moves to another root die at any call: beside a clone of that root at its path, and before a backup is brought back.

The folders are read by plain system calls. In the end each message is in one place, and was sent there once.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from forks import DIED, forked
from helpers import FRESH, Clock, other_file_system, timed

from dropq import Queue, Root
from dropq.carrier import lists
from dropq.storage import mounts
from torture.calls import come_between
from torture.crashes import Dying, Moment
from torture.table import NotRun, Options, Row

#: What is moved before the clone, or the backup, is made; what the mover moves that dies; and what comes later.
BEFORE, MOVED, LATER = "before", ("first", "second", "third"), "later"
#: Messages of a list, so that the mover writes two.
IN_A_LIST = 2
#: In the short form, the mover dies at one of so many calls.
STEP = 9


@dataclass(frozen=True)
class Scene:
    """Two roots on two file systems, with a queue each."""

    here: Path
    there: Path

    @property
    def source(self) -> Queue:
        """The queue that gives, as a new process opens it."""
        return timed(Root(self.here, clock=Clock()), FRESH).queue("q")

    @property
    def target(self) -> Queue:
        """The queue that gets, as a new process opens it."""
        return timed(Root(self.there, clock=Clock()), FRESH).queue("q")

    def send(self, *names: str) -> None:
        """Send messages that say their names."""
        for name in names:
            self.source.send(name)

    def move(self) -> None:
        """Move all that waits."""
        self.source.move(self.target)


def run(options: Options) -> Iterable[Row]:
    """Return a row for a mover that dies alone, one for a clone beside it, and one for a backup after it."""
    folder = other_file_system(options.folder)
    if folder is None:
        raise NotRun("there is no second file system: mount a tmpfs on /dev/shm")
    with tempfile.TemporaryDirectory(dir=folder) as elsewhere, mock.patch.object(lists, "LIST_LENGTH", IN_A_LIST):
        step = 1 if options.long else STEP
        return [_alone(options.folder, Path(elsewhere), step), *_with_copies(options.folder, Path(elsewhere), step)]


def _with_copies(folder: Path, elsewhere: Path, step: int) -> Iterator[Row]:
    yield _beside_a_clone(folder, elsewhere, step)
    yield _before_a_backup(folder, elsewhere, step)


# -- cases -------------------------------------------------------------------------------------------------------------


def _alone(folder: Path, elsewhere: Path, step: int) -> Row:
    """Let a mover die at each call; a sweep by hand goes on."""
    row = Row("a mover dies")
    for scene, where in _dying(folder, elsewhere, step, row, lambda scene: None):
        with _on("one"):
            scene.source.sweep()
            scene.move()
        _judge(row, where, [scene.there], scene.here)
    return row


def _beside_a_clone(folder: Path, elsewhere: Path, step: int) -> Row:
    """Let a mover die at each call; where another host has a clone at the path, that host sweeps and moves, too."""
    row = Row("a clone of the other root")
    clone = elsewhere / "clone"

    def copy(scene: Scene) -> None:
        shutil.rmtree(clone, ignore_errors=True)
        shutil.copytree(scene.there, clone, symlinks=True)

    for scene, where in _dying(folder, elsewhere, step, row, copy):
        with _on("two"):
            _swap(scene.there, clone)
            scene.source.sweep()
            scene.source.route()
            scene.send(LATER)
            scene.move()
            scene.source.sweep()
            _swap(scene.there, clone)
        with _on("one"):
            scene.source.sweep()
        _judge(row, where, [scene.there, clone], scene.here, LATER, copied=True)
    return row


def _before_a_backup(folder: Path, elsewhere: Path, step: int) -> Row:
    """Let a mover die at each call, and bring back a backup of that moment once all has arrived."""
    row = Row("a giver restored from a backup")
    backup = folder / "backup"
    for scene, where in _dying(folder, elsewhere, step, row, lambda scene: None):
        with _on("one"):
            shutil.rmtree(backup, ignore_errors=True)
            shutil.copytree(scene.here, backup, symlinks=True)
            scene.source.sweep()
            scene.move()
            if (message := scene.target.receive()) is not None:
                message.ack()
            _swap(scene.here, backup)
            had = _sent(scene.there)
            scene.send(LATER)
            scene.move()
            scene.source.sweep()
            if _sent(scene.there) - had - Counter([LATER]):
                row.wrong.append(f"{where}: the backup sent again")
            if LATER in _given(scene.here):
                row.wrong.append(f"{where}: what came later is stranded")
            _end_rows(scene, row, where)
            scene.move()
        _judge(row, where, [scene.there], scene.here, LATER)
    return row


def _dying(
    folder: Path, elsewhere: Path, step: int, row: Row, before: Callable[[Scene], object]
) -> Iterator[tuple[Scene, str]]:
    """Yield a scene for each call at which a mover of host one died, and which call that was; the last one ended."""
    calls, status = 0, DIED
    while status == DIED:
        scene = _build(folder, elsewhere)
        before(scene)
        status = forked(lambda scene=scene, calls=calls: _die(scene, calls))  # type: ignore[misc]
        row.cases += 1
        row.kills += status == DIED
        if status not in (0, DIED):
            row.wrong.append(f"call {calls}: the mover ended with {status}")
        yield scene, f"call {calls}"
        calls += step


def _build(folder: Path, elsewhere: Path) -> Scene:
    scene = Scene(folder / "here", elsewhere / "there")
    for path in (scene.here, scene.there):
        shutil.rmtree(path, ignore_errors=True)
        Root.create(path).create_queue("q", durability="none", redelivery_delay=0)
    with _on("one"):
        scene.send(BEFORE)
        scene.move()
        scene.send(*MOVED)
    return scene


def _die(scene: Scene, calls: int) -> None:
    with _on("one"):
        come_between(Dying(Moment(calls)))
        scene.move()


def _on(host: str) -> mock._patch[mock.MagicMock]:
    """Let this process be on a host."""
    return mock.patch.object(mounts, "host", return_value=host)


def _swap(one: Path, other: Path) -> None:
    aside = one.with_name("aside")
    for source, to in ((one, aside), (other, one), (aside, other)):
        shutil.move(source, to)


def _end_rows(scene: Scene, row: Row, where: str) -> None:
    """Do what the refusal says: remove what the other queue has, move the rest back, end the row."""
    older = [reason.message for reason in scene.source.health().reasons if reason.kind == "older-state"]
    home, had = scene.here / "q", _sent(scene.there)
    for folder in list(home.glob(".dropq/transfers/????????????????")):
        if not older or "older-state" not in _read(folder / "refused.json"):
            continue
        if not any(f"row {folder.name} is " in text for text in older):
            row.wrong.append(f"{where}: health does not say that {folder.name} is behind")
        for path in (*home.glob("target/*"), *folder.glob("target/*")):
            if had[path.read_text()]:
                path.unlink()
            else:
                path.rename(home / "target" / path.name)
        folder.rename(folder.with_name(f"{folder.name}.ended"))


# -- what is counted ---------------------------------------------------------------------------------------------------


def _judge(row: Row, where: str, theirs: list[Path], here: Path, *more: str, copied: bool = False) -> None:
    """See that each message was sent once, and nothing is left here."""
    for root in theirs:
        Root(root).queue("q").sweep()
    wanted = Counter([BEFORE, *MOVED, *more])
    sent = sum(map(_sent, theirs), Counter[str]())
    if copied:
        sent -= Counter([BEFORE])  # the clone has its own
    row.lost += (wanted - sent - _held(here)).total()
    row.doubled += (sent + _held(here) - wanted).total()
    if left := _held(here):
        row.wrong.append(f"{where}: {dict(left)} is still here")


def _sent(root: Path) -> Counter[str]:
    return Counter(_read(path) for state in ("target", "processed") for path in (root / "q" / state).iterdir())


def _given(root: Path) -> Counter[str]:
    return Counter(_read(path) for path in (root / "q").glob(".dropq/transfers/*/target/*"))


def _held(root: Path) -> Counter[str]:
    return _given(root) + Counter(_read(path) for path in (root / "q" / "target").iterdir())


def _read(path: Path) -> str:
    return path.read_text() if os.path.exists(path) else ""
