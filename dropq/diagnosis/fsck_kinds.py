"""What fsck can find: the kinds of findings, how bad each is, what it means, and what repair does about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of finding: how bad it is, one sentence about it, and what repair does: "", "make" or "set aside"."""

    level: str
    says: str
    repair: str = ""


#: Every kind of finding. Levels: `error` keeps a queue from working, `warning` wants somebody's eye, `info` does not.
KINDS: Mapping[str, Kind] = {
    "configuration": Kind("error", "the configuration cannot be used: what it says is to be mended by hand"),
    "missing-folder": Kind("error", "a folder of the queue is missing", "make"),
    "not-a-folder": Kind(
        "error",
        "something else lies where a folder of the queue should be: move it away, then `dropq fsck QUEUE --repair`",
    ),
    "linked-folder": Kind(
        "error",
        "a private folder is a symbolic link, which is not followed: look where it leads, as delayed messages may lie "
        "there, then remove it by hand",
    ),
    "unreadable-folder": Kind(
        "error", "this user may not list a folder of the queue: what lies in it was not looked at"
    ),
    "unwritable-folder": Kind("info", "this user may look, but not change"),
    "two-filesystems": Kind("error", "the folders lie on two file systems, between which no rename is atomic"),
    "symlink": Kind("warning", "a symbolic link is never a message", "set aside"),
    "directory": Kind("warning", "a directory is never a message", "set aside"),
    "special-file": Kind("warning", "a fifo, socket or device is never a message", "set aside"),
    "hidden": Kind("warning", "a name that begins with a dot is never a message", "set aside"),
    "ignored": Kind("warning", "a name that the queue's `ignore` matches is never a message", "set aside"),
    "placeholder": Kind("warning", "a name was reserved for a move that did not come to its end", "set aside"),
    "under-way": Kind("info", "this changed lately and may be in the middle of something"),
    "unreadable": Kind("warning", "this user may not read the message, and who takes it may not either"),
    "bad-name": Kind("info", "a part of the name cannot be read, and the message is delivered without it"),
    "unclaimable-name": Kind(
        "warning",
        "this file system has no room for the name of a claim on the message, so consumers pass it over: `mv` it, "
        "within its folder, to a name",
    ),
    "foreign-claim": Kind(
        "info",
        "a script or a DropboxMQ client holds the message, and nothing frees it by itself: if it is dead, "
        "`dropq sweep QUEUE --foreign-older-than 2h` does",
    ),
    "old-foreign-claim": Kind(
        "warning", "a script's claim is over a day old: `dropq sweep QUEUE --foreign-older-than 2h` frees it"
    ),
    "unknown-holder": Kind(
        "warning",
        "a claim without lease has no known holder: `dropq sweep QUEUE --unleased-older-than 2h` frees it",
    ),
    "dead-holder": Kind("warning", "the consumer that holds the message is dead: `dropq sweep QUEUE` returns it"),
    "several-links": Kind("warning", "one file lies under several names, and is delivered once for each"),
    "undated-delay": Kind("info", "a delayed message does not say until when: `dropq sweep QUEUE` delivers it"),
    "missing-sidecar": Kind(
        "warning", "metadata that the name refers to is missing: put it back from a copy, else it is delivered without"
    ),
    "unreadable-sidecar": Kind("warning", "this user may not read metadata that names refer to"),
    "damaged-sidecar": Kind("warning", "metadata that names refer to cannot be read; it may be mended by hand"),
    "unreferenced-sidecar": Kind(
        "info", "no name refers to this metadata any more: `dropq sweep` clears it, run twice, over an hour apart"
    ),
    "absent-queue": Kind("warning", "a queue that this root knows is not there: no metadata is collected meanwhile"),
    "abandoned-send": Kind("warning", "this has lain in working/ for over a day and was never sent", "set aside"),
    "abandoned-job": Kind(
        "warning", "a job was idle for over a day: `dropq sweep QUEUE --jobs-older-than 1d` drops it"
    ),
    "unfinished-job": Kind(
        "warning", "a job was committed, or dropped, and not cleared away: `dropq sweep QUEUE` finishes it"
    ),
    "orphan-reason": Kind("info", "a reason is about no file that is there: `dropq sweep QUEUE` clears it after a day"),
    "damaged-reason": Kind("warning", "a reason cannot be read; the message is as good without", "set aside"),
    "leftover": Kind("info", "a consumer that died left this: `dropq sweep QUEUE` clears it after a day"),
    "temporary": Kind("warning", "writing a small file of dropq's own did not come to its end", "set aside"),
    "world-writable": Kind("warning", "everybody on this host may change it: `chmod o-w` it"),
    "half-made-queue": Kind("warning", "making a queue did not come to its end", "set aside"),
    "half-deleted-queue": Kind("warning", "a queue was deleted and is not wholly gone", "set aside"),
    "deleted-queue": Kind(
        "info",
        "a DropboxMQ deleted this queue and kept it: nobody looks at it; remove it when its content is not needed",
    ),
    "not-a-queue": Kind("info", "a folder that is no queue"),
}


@dataclass(frozen=True)
class Finding:
    """Something that does not belong: its kind, its path, what is to be said of it, and whether it was repaired."""

    kind: str
    path: str
    detail: str
    repaired: bool = False
    inode: int = field(default=0, repr=False, compare=False)

    @property
    def level(self) -> str:
        """How bad it is: `error`, `warning` or `info`."""
        return KINDS[self.kind].level

    @property
    def open(self) -> bool:
        """Whether it is above info, and not repaired."""
        return self.level != "info" and not self.repaired
