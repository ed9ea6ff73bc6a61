"""What fsck can find: the kinds of findings, how bad each is, what it means, and what repair does about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of finding: how bad it is, a sentence about it, and what repair does: "", "make" or "set aside"."""

    level: str
    says: str
    repair: str = ""


_error, _warning, _info = (partial(Kind, level) for level in ("error", "warning", "info"))

#: Every kind of finding. Levels: an `error` keeps a queue from working, a `warning` wants attention, `info` does not.
#: In a command, QUEUE stands for the name of the queue.
KINDS: Mapping[str, Kind] = {
    "configuration": _error("the configuration cannot be used: correct the file"),
    "missing-folder": _error("a folder of the queue is missing", "make"),
    "not-a-folder": _error(
        "something else lies where a folder of the queue belongs: move it away, then `dropq fsck QUEUE --repair`"
    ),
    "linked-folder": _error(
        "a private folder is a symbolic link, and dropq does not follow it: look where it leads, as delayed messages "
        "may lie there, then remove it"
    ),
    "unreadable-folder": _error(
        "this user may not list a folder of the queue, so its content was not checked: run fsck as its owner"
    ),
    "two-filesystems": _error(
        "the queue's folders lie on two file systems, and no rename leads across: move them onto one"
    ),
    "symlink": _warning("a symbolic link is never a message", "set aside"),
    "directory": _warning("a directory is never a message", "set aside"),
    "special-file": _warning("a fifo, socket or device is never a message", "set aside"),
    "hidden": _warning("a file whose name begins with a dot is never a message", "set aside"),
    "ignored": _warning("a file whose name matches the queue's `ignore` is never a message", "set aside"),
    "placeholder": _warning("an empty file reserves a name for a move that did not finish", "set aside"),
    "under-way": _info("this changed {aged} ago, and somebody may be at work on it"),
    "unreadable": _warning("this user may not read the message: give its consumers the right to read it"),
    "bad-name": _info("dropq cannot read a part of the name, and delivers the message without it"),
    "unclaimable-name": _warning(
        "this file system has no room for the name of a claim on the message, so consumers pass it over: `mv` it, "
        "within its folder, to a name"
    ),
    "foreign-claim": _warning(
        "a script or a DropboxMQ client has held the message for over a day: if it is dead, "
        "`dropq sweep QUEUE --foreign-older-than 2h` returns the message"
    ),
    "unknown-holder": _warning(
        "a claim has neither a lease nor a known holder: `dropq sweep QUEUE --unleased-older-than 2h` returns the "
        "message"
    ),
    "dead-holder": _warning("the consumer that holds the message is dead: `dropq sweep QUEUE` returns the message"),
    "several-links": _warning(
        "one file has several names, and is delivered once for each: remove the names that are too many"
    ),
    "written-after-ack": _info(
        "somebody wrote to the message after it was acknowledged, so its consumer may have read a part: compare, and "
        "send the rest again; a settle_time longer than its writer's pauses prevents this. A copy of the root that was "
        "made without the times of the files (`cp` without `-p`) looks the same"
    ),
    "missing-sidecar": _warning(
        "the metadata file that the name refers to is missing, and the message is delivered without it: put it back "
        "from a copy"
    ),
    "unreadable-sidecar": _warning("this user may not read the metadata file: give its consumers the right"),
    "damaged-sidecar": _warning("the metadata file is damaged: correct it by hand, or put it back from a copy"),
    "unreferenced-sidecar": _info(
        "no name refers to this metadata file: `dropq sweep` removes it when it runs twice, over an hour apart"
    ),
    "absent-queue": _warning("a queue of this root is not there: no metadata is collected meanwhile"),
    "absent-letters": _warning(
        "the dead-letter queue that this file names is not there: messages that should go there go to error/ of their "
        "own queues"
    ),
    "abandoned-send": _warning("this was put into working/ over a day ago, and never sent", "set aside"),
    "abandoned-job": _warning("a job has been idle for over a day: `dropq sweep QUEUE --jobs-older-than 1d` drops it"),
    "unfinished-job": _warning(
        "a job was committed, or dropped, and is not cleared away: `dropq sweep QUEUE` finishes it"
    ),
    "orphan-reason": _info("the message of a reason is gone: `dropq sweep QUEUE` clears the reason after a day"),
    "damaged-reason": _warning("a reason is damaged; its message needs none", "set aside"),
    "leftover": _info("a consumer that died left this: `dropq sweep QUEUE` clears it after a day"),
    "temporary": _warning("dropq was killed while it wrote this small file", "set aside"),
    "world-writable": _warning("everybody on this host may change it: `chmod o-w` it"),
    "half-made-queue": _warning("somebody began to make a queue, and did not finish", "set aside"),
    "half-deleted-queue": _warning("a queue was deleted, and something is left of it", "set aside"),
    "unfinished-deletion": _warning(
        "who deleted or requested this queue died meanwhile: `dropq sweep` gives it its name back, with all that is in "
        "it, or removes what is left where the deletion was decided"
    ),
    "left-queue": _warning("the requester of this temporary queue is dead: `dropq sweep` removes the queue"),
    "deleted-queue": _info(
        "a DropboxMQ deleted this queue, topic or subscription, or it destroyed itself, and its content is kept: "
        "remove it when nobody needs that"
    ),
    "unfinished-commit": _warning(
        "a message is committed, and not all of its parts have arrived: `dropq sweep QUEUE` moves them, or logs why it "
        "cannot"
    ),
    "unfinished-join": _warning(
        "`dropq requeue --whole` took these parts of a bundle, and did not finish: `dropq sweep QUEUE` goes on, or "
        "moves them back"
    ),
    "not-staged": _warning("this lies among what is staged, and belongs to no commit: no sweep moves it", "set aside"),
    "unfinished-move": _warning(
        "messages have been on the way to another file system for over a day: `dropq sweep QUEUE` carries them, or "
        "says why it cannot"
    ),
    "older-state": _warning(
        "another queue has more of what this one moved there than this one knows: this one came from a backup, or is a "
        "copy, and gives nothing"
    ),
    "damaged-transfer": _warning(
        "it cannot be read, so nobody carries what lies here: put the file back from a copy, or move "
        "the messages in it to the target/ of a queue"
    ),
    "damaged-list": _warning(
        "the last list of what another queue moved here cannot be read, so that queue may move messages here again if "
        "it comes from a backup: give this user the right to read it; remove what is no list"
    ),
    "not-a-subscription": _warning(
        "a folder among the subscriptions is none, as its name is not SUBSCRIPTION.CLIENT: dropq passes it over, and a "
        "DropboxMQ that publishes fills it; move it away"
    ),
    "half-made-subscription": _warning(
        "a subscription is not whole, gets nothing, and makes a DropboxMQ's publishes fail; make its folders, or move "
        "it away"
    ),
    "broken-view-link": _warning(
        "a link among the subscriptions leads to no queue: remove it, unless its queue comes back"
    ),
    "broken-selector": _warning("a selector cannot be used, and takes nothing: correct its file"),
    "not-a-selector": _info("this is no selector: the file of one is NAME.toml, with letters, digits, - and _ in NAME"),
    "unfinished-removal": _warning(
        "a selector was removed, and what it moved has not all returned: `dropq sweep QUEUE` goes on"
    ),
    "lost-credit": _warning(
        "the message is gone that a selector spent this credit on: `dropq sweep QUEUE` frees the credit"
    ),
    "damaged-credit": _warning("the file of a credit is damaged: `dropq sweep QUEUE` removes it"),
    "unknown-token": _warning(
        "the root's file of this token is missing or damaged, or names another queue, so no ack frees these credits: "
        "`dropq sweep QUEUE` frees each once its message is settled"
    ),
    "left-credits": _info("no selector has the token of these credits: each goes when its message is settled"),
    "not-a-credit": _warning("this lies among the credits of selectors, and is none", "set aside"),
    "damaged-token": _warning(
        "the file does not say which selector has this token: a router gives that selector another", "set aside"
    ),
    "not-a-token": _warning("this lies among the tokens of selectors, and is none", "set aside"),
    "not-a-queue": _info("this folder is no queue"),
}


@dataclass(frozen=True)
class Finding:
    """Something that does not belong: its kind, its path, a sentence about it, and whether it was repaired."""

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
