"""What a message costs on the plain path: the system calls of a raw loop, and no more."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PLAIN_LOOP = """
import os, sys
from pathlib import Path
root, count, kind = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
body = b"x" * 1024
if kind == "raw":
    for folder in ("working", "target", "processing", "processed"):
        (root / folder).mkdir(parents=True)
    os.chdir(root)
    for number in range(count):
        fd = os.open(f"working/{number}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o664)
        os.write(fd, body)
        os.close(fd)
        os.rename(f"working/{number}", f"target/{number}")
    for number in sorted(os.listdir("target")):
        os.rename(f"target/{number}", f"processing/{number}")
        fd = os.open(f"processing/{number}", os.O_RDONLY)
        while os.read(fd, 65536):
            pass
        os.close(fd)
        os.rename(f"processing/{number}", f"processed/{number}")
else:
    import time
    time.monotonic = lambda: 1000.0  # what is done each second is not done for a message
    from dropq import Root
    queue = Root.create(root).create_queue("q", durability="none")
    for number in range(count):
        queue.send(body)
    with queue.subscribe() as subscription:
        while (message := subscription.receive()) is not None:
            assert message.body == body
            message.ack()
"""


@pytest.mark.host
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_the_plain_path_makes_no_system_call_that_the_raw_loop_does_not_make(tmp_path: Path) -> None:
    few, many = 100, 600
    raw = _calls_per_message(tmp_path / "raw", "raw", few, many)
    ours = _calls_per_message(tmp_path / "ours", "dropq", few, many)
    assert raw["rename"] > 2
    # What a listing costs is shared by many messages; a call per message would show as 1.0.
    more = {name: count for name, count in ours.items() if count > raw.get(name, 0) + 0.25}
    assert not more, f"per message, raw loop: {raw}, dropq: {ours}"


def _calls_per_message(folder: Path, kind: str, few: int, many: int) -> dict[str, float]:
    counts = [_count_calls(folder.with_suffix(f".{n}"), kind, n) for n in (few, many)]
    grown = {name: (counts[1][name] - counts[0].get(name, 0)) / (many - few) for name in counts[1]}
    renames = grown.pop("rename", 0) + grown.pop("renameat", 0) + grown.pop("renameat2", 0)
    return {"rename": renames, **{name: count for name, count in grown.items() if count > 0.01}}


def _count_calls(root: Path, kind: str, count: int) -> dict[str, int]:
    table = root.with_suffix(f".{kind}.{count}.strace")
    command = ["strace", "-f", "-c", "-o", str(table), sys.executable, "-c", PLAIN_LOOP, str(root), str(count), kind]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and "ptrace" in done.stderr:
        pytest.skip("strace may not trace here")
    assert done.returncode == 0, done.stderr
    counts = {}
    for line in table.read_text().splitlines()[2:]:
        columns = line.split()
        if len(columns) >= 5 and columns[3].isdigit() and columns[-1] != "total":
            counts[columns[-1]] = int(columns[3])
    return counts
