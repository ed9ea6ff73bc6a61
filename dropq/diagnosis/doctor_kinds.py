"""What the doctor can find: the kinds of diagnoses, what each means for dropq, and what to set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

#: How bad a diagnosis can be, the worst last. An `error` costs messages or stops a queue, a `warning` wants somebody's
#: eye, `info` is to be known, `ok` is as it should be.
LEVELS = ("ok", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of diagnosis: what was looked at, how bad it is, what it means for dropq, and what to set."""

    check: str
    level: str
    means: str
    advice: str = ""


#: Every kind of diagnosis, those of one check together.
KINDS: Mapping[str, Kind] = {
    # -- what it is
    "root": Kind("root", "ok", "it is a root of queues"),
    "no-root": Kind("root", "info", "it is no root yet", "`dropq init DIR` makes it one"),
    "closed-root": Kind(
        "root",
        "error",
        "this user can make nothing here, so nothing more could be tried",
        "run it as the user who is to send and receive, or give that user the folder",
    ),
    "untried": Kind(
        "root",
        "info",
        "what the file system can do was not tried, as this user is to send or to look alone",
        "run it as the user who receives",
    ),
    "closed-private": Kind(
        "root",
        "warning",
        "sends whose metadata does not fit a name fail, and leases go by this host's clock",
        "give the user, or a group of the user's, rwx on .dropq and .dropq/meta, and rw on .dropq/clock",
    ),
    "unusable-queue": Kind("root", "error", "the queue cannot be opened", "`dropq fsck QUEUE` looks closer"),
    "file-system": Kind("mount", "ok", "messages lie there"),
    "read-only": Kind("mount", "error", "nothing can be sent, claimed or acknowledged", "mount it read-write"),
    "object-store": Kind(
        "mount",
        "error",
        "a rename there is a copy and a delete: a message can be handed to two, or be read half-written",
        "keep the root on a disk or on NFS",
    ),
    "nfs-soft": Kind(
        "mount",
        "warning",
        "a call that timed out may have been done: a send can be told as failed, and be there",
        "mount with hard",
    ),
    # -- renames
    "rename": Kind("rename", "ok", "whoever's rename succeeds has the message: nothing is lost or handed to two"),
    "no-rename": Kind("rename", "error", "nothing can be sent or claimed", "keep the root on another file system"),
    "cross-device": Kind(
        "rename",
        "error",
        "no message can go between these folders, though they seem to lie on one file system",
        "mount the folder above them as one; on mergerfs take a create policy without `ep`, or ignorepponrename=true",
    ),
    "copying-rename": Kind(
        "rename",
        "warning",
        "a renamed file is another file: reasons in error/ and expired/ do not find theirs, and the copy may be read "
        "half-written",
        "keep the root on another file system; for FUSE try the option use_ino",
    ),
    "shared-rename": Kind(
        "rename", "error", "two consumers get the same message", "keep the root on another file system"
    ),
    "noreplace": Kind("replace", "ok", "nothing is ever replaced in processed/, error/ and expired/"),
    "no-noreplace": Kind(
        "replace",
        "info",
        "a name in processed/, error/ or expired/ is reserved by an empty file first, where a plain rename replaces: a "
        "call more, and after a crash a placeholder that fsck knows",
    ),
    "broken-noreplace": Kind(
        "replace",
        "error",
        "a message can take the place of another in processed/, error/ or expired/",
        "keep the root on another file system",
    ),
    # -- locks
    "locks": Kind("locks", "ok", "a consumer that dies is found dead by the next sweeps, and its messages come back"),
    "unserved-locks": Kind(
        "locks",
        "info",
        "if an NFS server serves this folder, its clients and this host take each other's living consumers for dead",
        "run all consumers on NFS clients, or all on this host",
    ),
    "no-locks": Kind(
        "locks", "warning", "the dead are not told from the living: only leases free messages", "set lease_period"
    ),
    "weak-locks": Kind(
        "locks",
        "error",
        "living consumers are taken for dead, and their messages are handed to others",
        "keep the root on another file system, or mount this one with locks",
    ),
    "local-locks": Kind(
        "locks",
        "warning",
        "a lock counts on the mount that it was taken on: elsewhere only leases free what the dead hold",
        "set lease_period; on NFS, mount without nolock and local_lock",
    ),
    "leased-locks": Kind(
        "locks",
        "info",
        "a lock counts on the mount that it was taken on: elsewhere leases free what the dead hold, as they run out",
        "on NFS, mount without nolock and local_lock",
    ),
    # -- durability
    "sync": Kind("sync", "ok", "a send at durability full takes two such syncs of a folder and one of a file"),
    "no-sync": Kind("sync", "error", "sends fail, unless the queue asks for no sync", 'set durability = "none"'),
    "no-folder-sync": Kind(
        "sync", "error", "sends fail, unless the queue asks to sync bodies alone", 'set durability = "file"'
    ),
    # -- what is seen when
    "listing": Kind("listing", "ok", "what this host sends it sees at once"),
    "late-listing": Kind(
        "listing",
        "warning",
        "consumers on this host see messages late, and try those that are gone",
        "on NFS mount with vers=4.2; elsewhere look for the cache of listings",
    ),
    "events": Kind("events", "ok", "a worker that waits starts as soon as a message comes"),
    "no-events": Kind(
        "events",
        "warning",
        "workers look every 0.1 s instead, and miss nothing",
        "raise fs.inotify.max_user_instances and fs.inotify.max_user_watches with sysctl",
    ),
    "clock": Kind("clock", "ok", "leases, delays and expiry go by the file server's clock"),
    "clock-offset": Kind(
        "clock",
        "info",
        "dropq goes by the file server's clock; scripts that look at their own are wrong by as much",
        "let both keep time with NTP",
    ),
    # -- names
    "names": Kind("names", "ok", "every name that dropq gives a message comes back as it was"),
    "short-names": Kind(
        "names",
        "error",
        "messages can be sent and not be claimed: a claim's name has up to 255 bytes",
        "keep the root on a file system with names of 255 bytes; eCryptfs has 143",
    ),
    "changed-names": Kind(
        "names",
        "error",
        "dropq's own names are refused, or come back as others",
        "keep the root on another file system; on CIFS mount with mapposix",
    ),
    "folding-names": Kind(
        "names",
        "warning",
        "`mv` of A.csv into a folder that has a.csv replaces it",
        "let scripts give names that differ in more than case, or keep the root on a file system that tells them apart",
    ),
    # -- room
    "space": Kind("space", "ok", "there is room for messages"),
    "no-room": Kind(
        "space",
        "error",
        "sends fail with 74, and what needs a new file was not tried; claims and acknowledgements need no space",
        "`dropq prune --keep-age 7d` makes room, where history is kept; or let the file system, or the quota, grow",
    ),
    "low-space": Kind(
        "space",
        "warning",
        "sends will fail with 74 once it is full, or has no inode left; claims and acknowledgements need no space",
        "`dropq prune --keep-age 7d` makes room, where history is kept",
    ),
    # -- who may
    "folders": Kind("folders", "ok", "this user can send, receive and settle"),
    "closed-folder": Kind(
        "folders",
        "error",
        "this user cannot take part: a message is listed, claimed and settled in these folders",
        "give the user, or a group of the user's, rwx on all folders of the queue, those in .dropq too",
    ),
    "part": Kind(
        "folders",
        "info",
        "the rest is for others to do",
        "where that is not meant so, give the user, or a group of the user's, rwx on all folders of the queue",
    ),
    "no-part": Kind(
        "folders",
        "error",
        "this user can neither send nor look nor receive",
        "give the user, or a group of the user's, rwx on all folders of the queue; docs/security.md has less for some",
    ),
    "closed-delayed": Kind(
        "folders",
        "warning",
        "sends with a delay fail",
        "make .dropq/delayed in the queue, and give the user, or a group of the user's, wx on it",
    ),
    "sticky-folder": Kind(
        "folders",
        "warning",
        "only the owner of a message, or of the folder, may take it: what another user sends stays",
        "let the folder's owner receive; or `chmod -t` on the folder, where its users need not be kept apart",
    ),
    "foreign-group": Kind(
        "folders",
        "error",
        "this user can list what others send, and not read it",
        "make the user a member of the group, and let it log in anew",
    ),
    "not-tried": Kind(
        "probe", "warning", "what it would have told is not known", "see to the error, then run it again"
    ),
}


@dataclass(frozen=True)
class Diagnosis:
    """What the doctor found: its kind, the path that it is about, and what was found there."""

    kind: str
    path: str
    found: str

    @property
    def check(self) -> str:
        """What was looked at, such as `locks`."""
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
        """What to set; empty where nothing is to be done."""
        return KINDS[self.kind].advice

    @property
    def open(self) -> bool:
        """Whether it wants somebody's eye."""
        return self.level in ("warning", "error")
