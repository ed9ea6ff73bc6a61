"""What the doctor can find: each kind of diagnosis, what it means for dropq, and what to do."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

#: How bad a diagnosis can be, the worst last. An `error` costs messages or stops a queue, a `warning` wants attention,
#: `info` is good to know, `ok` is as it should be.
LEVELS = ("ok", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of diagnosis: how bad it is, what it means for dropq, what to do, and what was checked.

    In the advice, `{path}` stands for the path of a diagnosis, `{in_use}` for the switch of the route at that path, and
    `{queue}` for the address of the queue.
    """

    level: str
    means: str
    advice: str = ""
    check: str = ""


_ok, _info, _warning, _error = (partial(Kind, level) for level in LEVELS)
_ELSEWHERE = "keep the root on another file system"
_GIVE_ALL = "give this user, or a group of this user, rwx on all folders of the queue, also on those in .dropq"

#: Every kind of diagnosis, by what is checked: how bad it is, what it means, and what to do.
_BY_CHECK: Mapping[str, Mapping[str, Kind]] = {
    "root": {
        "root": _ok("it is a root of queues"),
        "no-root": _info("it is not a root yet", "run `dropq init {path}` to make it a root"),
        "closed-root": _error(
            "nothing more could be tried",
            "run the doctor as the user who will send and receive, or give this user rwx on the folder",
        ),
        "untried": _info("the file system was not tried", "run the doctor as the user who receives, too"),
        "closed-private": _warning(
            "sends whose metadata does not fit a name fail, and leases follow this host's clock",
            "give this user, or a group of this user, rwx on .dropq and .dropq/meta, and rw on .dropq/clock",
        ),
        "unusable-queue": _error("the queue cannot be opened", "run `dropq fsck {queue}` to find out why"),
    },
    "dropboxmq": {
        "bare-replies": _warning(
            "answers to return addresses that one wrote, and the other reads, go astray",
            'write reply_to_style = "typed" there, or leave it out',
        ),
        "flat-queue": _info("a DropboxMQ does not see them: its queues have their folders in incoming/"),
    },
    "topics": {
        "two-of-a-name": _warning("the name means the queue, and nobody reaches the topic", "rename one of the two"),
        "far-receiver": _error(
            "no rename leads there: what is published to the topic waits for it, and so do all other receivers",
            "move it to the topic's file system, or remove it",
        ),
        "missing-view-link": _warning(
            "what a DropboxMQ publishes does not reach the view", "make the link by `ln -s`, or create the view again"
        ),
        "no-topic": _warning(
            "nothing comes to the view, and sends to it fail",
            "make the topic by `dropq topic create`, or correct underlying_topic and default_publish_target",
        ),
    },
    "mount": {
        "file-system": _ok("messages lie there"),
        "read-only": _error("nothing can be sent, claimed or acknowledged", "mount it read-write"),
        "object-store": _error(
            "a rename there copies and deletes: two consumers can get one message, or one reads half of it",
            "keep the root on a disk or on NFS",
        ),
        "nfs-soft": _warning(
            "a send that timed out may have been done: it fails, and the message is there", "mount with hard"
        ),
        "late-writes": _info(
            "another host may keep back what it wrote for half a minute: a file that it writes straight into target/ "
            "could be taken half-written",
            'set settle_time = "1m" for queues that get such files, or let them be written in working/ and moved',
        ),
    },
    "rename": {
        "rename": _ok("the consumer whose rename succeeds has the message, and no other has it"),
        "no-rename": _error("nothing can be sent or claimed", _ELSEWHERE),
        "cross-device": _error(
            "no message can move between these folders, though they seem to lie on one file system",
            "mount the folder above them as one; on mergerfs use a create policy without `ep`, or "
            "ignorepponrename=true",
        ),
        "copying-rename": _warning(
            "a rename copies: the copy may be read half-written, and failed messages lose their reasons",
            f"{_ELSEWHERE}; for FUSE try the option use_ino",
        ),
        "shared-rename": _error("two consumers get the same message", _ELSEWHERE),
    },
    "replace": {
        "noreplace": _ok("no message in processed/, error/ or expired/ is ever replaced"),
        "no-noreplace": _info(
            "an empty file reserves a name in processed/, error/ or expired/ first; fsck knows those that a crash "
            "leaves"
        ),
        "broken-noreplace": _error("a message can replace another in processed/, error/ or expired/", _ELSEWHERE),
    },
    "locks": {
        "locks": _ok("sweeps find a dead consumer, and return its messages"),
        "unserved-locks": _info(
            "if an NFS server serves this folder, its clients and this host take each other's living consumers for "
            "dead",
            "run all consumers on NFS clients, or all on this host",
        ),
        "no-locks": _warning("only leases return the messages of dead consumers", "set lease_period for each queue"),
        "weak-locks": _error(
            "living consumers count as dead, and others get their messages",
            f"{_ELSEWHERE}, or mount this one with locks",
        ),
        "local-locks": _warning(
            "consumers behind another mount do not see these locks: only leases return what the dead hold",
            "set lease_period for each queue; on NFS mount without nolock and local_lock",
        ),
        "leased-locks": _info(
            "consumers behind another mount do not see these locks: leases return what the dead hold, when they run "
            "out",
            "on NFS mount without nolock and local_lock",
        ),
    },
    "sync": {
        "sync": _ok("a send at durability full waits about as long"),
        "no-sync": _error("sends fail, unless a queue asks for no sync", 'set durability = "none"'),
        "no-folder-sync": _error("sends fail, unless a queue asks to sync bodies only", 'set durability = "file"'),
    },
    "listing": {
        "listing": _ok("consumers see at once what this host sends"),
        "late-listing": _warning(
            "consumers on this host see messages late, and try to take messages that are gone",
            "on NFS mount with vers=4.2; elsewhere turn off the cache of listings",
        ),
    },
    "events": {
        "events": _ok("a waiting worker starts as soon as a message comes"),
        "no-events": _warning(
            "waiting workers list the folder every 0.1 s instead, and miss nothing",
            "raise fs.inotify.max_user_instances and fs.inotify.max_user_watches with sysctl",
        ),
    },
    "clock": {
        "clock": _ok("leases, delays and expiry follow the file server's clock"),
        "clock-offset": _info(
            "dropq follows the file server's clock; scripts that read this host's clock are wrong by as much",
            "run NTP on both",
        ),
    },
    "names": {
        "names": _ok("every name that dropq gives comes back as it was"),
        "short-names": _error(
            "messages can be sent that nobody can claim: the name of a claim has up to 255 bytes",
            "keep the root on a file system with names of 255 bytes (eCryptfs has 143)",
        ),
        "changed-names": _error("dropq cannot use its own names", f"{_ELSEWHERE}; on CIFS mount with mapposix"),
        "folding-names": _warning(
            "`mv` of A.csv into a folder that has a.csv replaces a.csv",
            f"let scripts give names that differ in more than case, or {_ELSEWHERE}",
        ),
    },
    "space": {
        "space": _ok("there is room for messages"),
        "no-room": _error(
            "sends fail with 74, and what needs a new file was not tried; claims and acknowledgements need no room",
            "run `dropq prune --keep-age 7d` to remove history, or enlarge the file system or the quota",
        ),
        "low-space": _warning(
            "sends will fail with 74 when it is full; claims and acknowledgements need no room",
            "run `dropq prune --keep-age 7d` to remove history, or enlarge the file system",
        ),
    },
    "folders": {
        "folders": _ok("this user can send, receive and settle"),
        "closed-folder": _error("this user cannot receive: a consumer lists and writes this folder", _GIVE_ALL),
        "part": _info("other users have to do the rest", f"if this user is to do more, {_GIVE_ALL}"),
        "no-part": _error(
            "this user can neither send nor look nor receive",
            f"{_GIVE_ALL}; docs/security.md says what less is enough to send or to look",
        ),
        "closed-delayed": _warning(
            "sends with a delay fail",
            "make .dropq/delayed in the queue, and give this user, or a group of this user, wx on it",
        ),
        "closed-log": _warning(
            "what consumers of this user do with messages is in no log, and in no rate of `dropq top`",
            'give this user, or a group of this user, rwx on it; or set log = "off"',
        ),
        "sticky-folder": _warning(
            "only the owner of a message, or of the folder, may take it: what another user sends stays",
            "let the folder's owner receive; or run `chmod -t {path}`, if its users may touch each other's messages",
        ),
        "foreign-group": _error(
            "this user can list what others send, but not read it",
            "make this user a member of the group, and log in again",
        ),
        "unusable-route": _warning(
            "the route takes nothing: the next route, or a consumer, gets its messages",
            "correct it, or remove {in_use}",
        ),
        "wide-bounce": _warning(
            "senders choose the queue, and this user may write into more queues than they may",
            "name in `to` only queues into which every sender may send, or route as a user who may write there alone",
        ),
        "unusable-selector": _warning(
            "the selector takes nothing, at least by routers of this user: its messages wait, or a consumer gets them",
            "correct its file, which `dropq config check` examines, or give this user rwx on the folder",
        ),
    },
    "peers": {
        "peer": _ok("a bridge can take from it what consumers here want"),
        "peer-away": _warning(
            "what it owns waits there, and nothing moves between the two",
            "mount it at that path, or look to its server",
        ),
        "peer-differs": _error("nothing moves between the two roots", "let both say the same, and name each other"),
        "peer-unsynced": _warning(
            "a power cut there may lose or double what was on its way", 'set durability = "full" in both; mount by NFS'
        ),
    },
    "probe": {"not-tried": _warning("the check did not finish", "remove the cause, then run the doctor again")},
}
KINDS = {name: replace(kind, check=check) for check, kinds in _BY_CHECK.items() for name, kind in kinds.items()}


@dataclass(frozen=True)
class Diagnosis:
    """What the doctor found: its kind, the path and the queue that it is about, and what was found there."""

    kind: str
    path: str
    found: str
    queue: str = ""

    @property
    def check(self) -> str:
        """What was checked, such as `locks`."""
        return KINDS[self.kind].check

    @property
    def level(self) -> str:
        """How bad it is: one of `LEVELS`."""
        return KINDS[self.kind].level

    @property
    def means(self) -> str:
        """What it means for dropq."""
        return KINDS[self.kind].means

    @property
    def advice(self) -> str:
        """What to do; empty where there is nothing to do."""
        path, in_use, queue = (shlex.quote(text) for text in (self.path, f"{self.path}.in-use", self.queue))
        return KINDS[self.kind].advice.format(path=path, in_use=in_use, queue=queue)

    @property
    def open(self) -> bool:
        """Whether it wants attention."""
        return self.level in ("warning", "error")
