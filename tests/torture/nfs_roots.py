"""Three roots share a queue, of which one lies on NFS: the storm of `roots`, in a guest."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from torture import roots
from torture.guest import mount
from torture.table import Row
from torture.uml import Guest, make_disk

#: Seconds of the storm, and the longest that a guest may take for it.
SECONDS, AT_MOST = 40.0, 3600


def storm(folder: Path, version: str, seed: int) -> Row:
    """Rage in a guest, whose root `b` lies behind a mount of a version of NFS."""
    disk = make_disk(folder / "disk-of-roots")
    with Guest(folder / "guest-of-roots", [disk], f"{__name__}:inside", nfs=True, version=version, seed=seed) as guest:
        (row,) = guest.result(AT_MOST)
    return Row(**row)


def inside(disk: Path, version: str, seed: int) -> list[dict[str, Any]]:
    """Run the storm; return its row."""
    folder = Path("/run/roots")
    folder.mkdir()
    row = roots.storm("Queue", folder, mount(version, "roots") / "b", seed, SECONDS)
    row.test = f"storm of three roots, one on NFS: {version}"
    return [asdict(row)]
