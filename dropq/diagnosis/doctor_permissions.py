"""What this user may do in a root and its queues: which of the roles `send`, `look` and `receive` it can take."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import stat
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from itertools import pairwise

from dropq.config.selectors import TO_REQUESTERS, Selector
from dropq.diagnosis import selector_checks
from dropq.diagnosis.doctor_checks import Probe, refusal
from dropq.format.layout import DOCTOR_PREFIX, FOLDERS, PRIVATE, QueueLayout
from dropq.lifecycle.context import QueueContext, RootContext
from dropq.lifecycle.open_queue import find_layout
from dropq.policies import routes, selectors
from dropq.storage import reading
from dropq.storage.files import Storage

log = logging.getLogger("dropq")

_ROLES = ("send", "look", "receive")
_NOT_MADE = "may not make a file in it"

#: Why something may not be done in a folder, by the folder's path.
Refusals = Mapping[str, str]


def root_folders(probe: Probe, root: RootContext, roles: Set[str]) -> None:
    """Report what is closed to this user outside of the queues, as far as its roles in any queue need it."""
    if probe.closed:
        kind = "closed-root" if "receive" in roles or not roles else "untried"
        probe.report(kind, f"{_user()} can make no folder here: {probe.closed}")
    layout = root.layout
    if probe.path == layout.path and not probe.stopped and reading.exists(layout.private):
        needed = [_nearest(path) for role, path in (("send", layout.meta), ("receive", layout.clock)) if role in roles]
        closed = [path for path in needed if not os.access(path, os.W_OK)]
        if closed:
            probe.report("closed-private", f"{_user()} may not write {' and '.join(closed)}", closed[0])


def folders(probe: Probe, context: QueueContext, roles: set[str]) -> None:
    """Report this user's roles in a queue, add them to `roles`; try a rename from each folder to the next."""
    if probe.stopped:
        return
    layout, store = context.layout, context.storage
    hidden = f"{PRIVATE}-{DOCTOR_PREFIX}{secrets.token_hex(6)}"
    needed = [*map(layout.folder, (*FOLDERS, "delayed")), layout.private]
    needed = [folder for folder in needed if reading.exists(folder)]
    tried = [folder for folder in needed if folder != layout.target]
    looked_up = [folder for folder in _consumers_folders(layout) if folder not in needed]
    before = len(probe.found)
    try:
        listed = [*needed, *(folder for folder in looked_up if folder != layout.base)]
        unlisted = {folder: why for folder in listed if (why := _unlisted(folder, hidden))}
        unwritten = {
            folder: why for folder in (*needed, *looked_up) if (why := _unwritten(store, folder, hidden, tried=tried))
        }
        own = _roles(layout, unlisted, unwritten)
        if "receive" not in own:
            _report_roles(probe, context, own, unlisted, unwritten)
        writable = [folder for folder in needed if folder not in unwritten]
        _try_renames(probe, store, writable, hidden, tried=tried)
        if "receive" in own:
            _report_sticky_folders(probe, writable)
            if context.config.log != "off" and reading.exists(layout.log) and not os.access(layout.log, os.W_OK):
                probe.report("closed-log", f"{_user()} may not write {layout.log}", layout.log)
            _report_routes(probe, context)
            _report_selectors(probe, context)
        if "look" in own:
            _report_unreadable_bodies(probe, context)
        roles |= own | ({"receive"} if _is_consumer(layout, unwritten) else set())
    finally:
        for folder in tried:
            _remove(store, f"{folder}/{hidden}")
    if len(probe.found) == before:
        text = f"{_user()} may list, create and rename in all {len(needed)} folders of {context.name}"
        probe.report("folders", text, layout.base)


def _consumers_folders(layout: QueueLayout) -> list[str]:
    """Return the folders of consumers' private files, or the folders in which those are made when needed.

    Nothing is tried in them: a file there would count as a sign of life, or as a body.
    """
    private = (layout.consumers, layout.named, layout.held, *layout.reason_folders, layout.delayed)
    private += (layout.staged, layout.reassembly)
    return list(dict.fromkeys(map(_nearest, private)))


def _nearest(path: str) -> str:
    """Return a path, or the nearest folder above it that exists."""
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return path


def _user() -> str:
    return f"user {reading.user_name(os.geteuid())}"


# -- the roles -------------------------------------------------------------------------------------------------------


def _roles(layout: QueueLayout, unlisted: Refusals, unwritten: Refusals) -> set[str]:
    """Return the roles that this user can take in a queue; a receiver lists and writes all folders."""
    may_send = unwritten.keys().isdisjoint((layout.working, layout.target))
    may = {"send": may_send, "look": not unlisted, "receive": not unlisted and not unwritten}
    return {role for role in _ROLES if may[role]}


def _is_consumer(layout: QueueLayout, unwritten: Refusals) -> bool:
    """Return whether this user may write where only consumers do, and so is to receive."""
    return not {layout.processing, layout.processed, layout.expired, layout.error} <= unwritten.keys()


def _report_roles(probe: Probe, context: QueueContext, own: Set[str], unlisted: Refusals, unwritten: Refusals) -> None:
    layout = context.layout
    if _is_consumer(layout, unwritten):
        for folder, why in {**unwritten, **unlisted}.items():
            probe.report("closed-folder", f"{_user()} {why}", folder)
        return
    if not own:
        closed = "; ".join(f"{os.path.basename(folder)}/: {why}" for folder, why in unwritten.items())
        probe.report("no-part", f"{_user()} can take no part in {context.name}: {closed}", layout.base)
        return
    may = " and ".join(role for role in _ROLES if role in own)
    may_not = " or ".join(role for role in _ROLES if role not in own)
    probe.report("part", f"{_user()} may {may} in {context.name}, not {may_not}", layout.base)
    delayed = _nearest(layout.delayed)
    if "send" in own and not os.access(delayed, os.W_OK | os.X_OK):
        missing = "" if delayed == layout.delayed else f"{layout.delayed} is missing: "
        probe.report("closed-delayed", f"{missing}{_user()} may not write in {delayed}", delayed)


# -- the folders -----------------------------------------------------------------------------------------------------


def _unlisted(folder: str, hidden: str) -> str:
    """Return why a folder may not be listed, or not be entered; "" where both may."""
    try:
        with reading.listing(folder) as entries:
            next(entries, None)
        with suppress(FileNotFoundError):
            os.lstat(f"{folder}/{hidden}")
    except OSError as error:
        return f"may not list it: {refusal(error)}"
    return ""


def _unwritten(store: Storage, folder: str, hidden: str, *, tried: Sequence[str]) -> str:
    """Return why a file may not be made in a folder, or not be removed; "" where both may.

    In a folder in which nothing is tried, only the rights are looked up.
    """
    refused = _NOT_MADE
    if folder not in tried:
        return "" if os.access(folder, os.W_OK | os.X_OK) else refused
    try:
        os.close(store.create(f"{folder}/{hidden}"))
        refused = "may not remove a file from it"
        store.unlink(f"{folder}/{hidden}")
    except OSError as error:
        return f"{refused}: {refusal(error)}"
    return ""


def _try_renames(probe: Probe, store: Storage, folders: Sequence[str], hidden: str, *, tried: Sequence[str]) -> None:
    """Rename a hidden file from each folder to the next; report where that fails.

    From and to a folder in which nothing is tried, a file is renamed that is not there: on two mounts that fails in
    another way.
    """
    pairs = [*pairwise(folder for folder in folders if folder in tried), *pairwise(folders)]
    for here, there in dict.fromkeys(pairs):
        absent = not {here, there} <= {*tried}
        name = f"{hidden}-absent" if absent else hidden
        if not absent and not reading.exists(f"{here}/{name}"):
            os.close(store.create(f"{here}/{name}"))
        try:
            store.rename(f"{here}/{name}", f"{there}/{name}")
        except OSError as error:
            if absent and isinstance(error, FileNotFoundError):
                continue
            kind = "cross-device" if error.errno == errno.EXDEV else "no-rename"
            probe.report(kind, f"a rename from {os.path.basename(here)}/ to it fails: {refusal(error)}", there)


def _report_sticky_folders(probe: Probe, folders: Iterable[str]) -> None:
    """Report the folders in which this user may rename only its own files."""
    for folder in folders:
        status = os.stat(folder)
        if status.st_mode & stat.S_ISVTX and os.geteuid() not in (0, status.st_uid):
            text = f"the folder has the sticky bit, and {_user()} is not its owner"
            probe.report("sticky-folder", text, folder)


def _report_routes(probe: Probe, context: QueueContext) -> None:
    in_use, unusable = routes.examine(context)
    closed = [route for route in in_use if not os.access(route.folder, os.W_OK | os.X_OK)]
    for name, why in {**unusable, **{route.name: f"{_user()} {_NOT_MADE}" for route in closed}}.items():
        probe.report("unusable-route", f"route {name} is in use: {why}", f"{context.layout.routing}/{name}")


def _report_selectors(probe: Probe, context: QueueContext) -> None:
    found, problems = selectors.read(context)
    for path, (first, *_) in sorted(problems.items()):
        probe.report("unusable-selector", first, path)
    for one in found:
        why = selector_checks.why_missing(context, one)
        if not why and (closed := _closed_to(context, one)):
            why = f"{_user()} may not write {closed}"
        if why:
            probe.report("unusable-selector", f"selector {one.name}: {why}", selectors.path_of(context, one.name))
        if os.geteuid() == 0 and not set(one.returns_to) <= set(TO_REQUESTERS):
            text = f"{_user()} may write everywhere, and selector {one.name} bounces to {', '.join(one.returns_to)}"
            probe.report("wide-bounce", text, selectors.path_of(context, one.name))


def _closed_to(context: QueueContext, selector: Selector) -> str:
    """Return a folder in which a router of this user must make files and may not; "" if it may in all."""
    needed = []
    if selector.to is not None and (destination := find_layout(context.root.layout.path, selector.to)) is not None:
        needed.append(destination.target)
    if selector.credit is not None:
        of_token = f"{context.layout.credits}/{selector.token}"
        needed.append(of_token if selector.token else context.root.layout.tokens)
    return next((path for path in map(_nearest, needed) if not os.access(path, os.W_OK | os.X_OK)), "")


def _report_unreadable_bodies(probe: Probe, context: QueueContext) -> None:
    """Report where only a group may read the bodies that others send, and this user is not a member."""
    status, mode = os.stat(context.layout.working), context.config.file_mode
    has_group = status.st_mode & stat.S_ISGID and status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not has_group or mode is None or mode & stat.S_IROTH or os.geteuid() == 0:
        return
    if status.st_gid not in (os.getegid(), *os.getgroups()):
        text = f"others' messages have mode {mode:04o} and group {status.st_gid}, and {_user()} is not a member of it"
        probe.report("foreign-group", text, context.layout.working)


def _remove(store: Storage, path: str) -> None:
    try:
        store.unlink(path)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.ENOTDIR, errno.EROFS):  # then no file could be made there
            log.warning("the hidden file %s could not be removed: %s", path, error.strerror or error)
