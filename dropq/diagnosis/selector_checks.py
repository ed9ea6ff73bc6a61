"""What health, fsck and `config check` find out about selectors, tokens and credits; everything here only looks."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress

from dropq.config import selectors as files
from dropq.config.selectors import Selector
from dropq.diagnosis.fsck_checks import UNDER_WAY, Entry, ExaminedQueue, entries
from dropq.diagnosis.fsck_kinds import KINDS, Finding
from dropq.errors import ConfigError, DropqError
from dropq.format.credits import Via, is_key, is_token
from dropq.format.layout import UNFINISHED, RootLayout
from dropq.lifecycle import credits
from dropq.lifecycle.context import QueueContext, RootContext
from dropq.lifecycle.open_queue import find_layout, open_queue
from dropq.policies import selectors
from dropq.policies.circles import Circles, Waypoint, words
from dropq.policies.selectors import REMOVED
from dropq.routing.credit_audit import all_credits, idle_credits
from dropq.routing.forecast import Forecast
from dropq.routing.plans import missing
from dropq.storage import reading
from dropq.storage.failures import describe

# -- config check --------------------------------------------------------------------------------------------------


def problems_of(root: RootContext, name: str) -> dict[str, list[str]]:
    """Return the problems of each file of a queue's selectors; no file of a queue that cannot be opened."""
    try:
        context = open_queue(root, name)
        found, problems = selectors.read(context)
    except (DropqError, OSError):
        return {}  # its own configuration is checked, too
    for one in found:
        path = selectors.path_of(context, one.name)
        of_file = problems.setdefault(path, [])
        if one.to is None:
            continue
        if missing := why_missing(context, one):
            of_file.append(f"{path}: to: {missing}: make it, or correct the address")
        elif circle := words(Circles().through(Waypoint(root.layout.path, context.name, context.layout), one.to)):
            of_file.append(f"{path}: to: {circle}")
    return problems


def check_file(path: str) -> list[str]:
    """Return every problem of a selector's file by itself; each names the file."""
    base = os.path.dirname(os.path.dirname(os.path.abspath(path)))
    name = files.name_of(os.path.basename(path))
    if name is None:
        return [f"{path}: this cannot name a selector: its file is NAME.toml, with letters, digits, - and _ in NAME"]
    try:
        content = reading.read_small(path)
        if content is None:
            return [f"{path}: there is no such file"]
        files.parse(name, content, path, queue=os.path.basename(base))
    except ConfigError as error:
        return str(error).split("\n")
    except OSError as error:
        return [f"{path} cannot be read: {describe(error)}"]
    return []


def is_selector_file(path: str) -> bool:
    """Return whether a path is that of a selector's file, by its folder's name."""
    return os.path.basename(os.path.dirname(os.path.abspath(path))) == "selectors"


def why_missing(context: QueueContext, selector: Selector) -> str:
    """Return an error text if the queue that a selector sends to is missing; else ""."""
    if selector.to is None or find_layout(context.root.layout.path, selector.to) is not None:
        return ""
    return missing(context.root.layout, selector.to)


# -- health --------------------------------------------------------------------------------------------------------


def unusable(forecast: Forecast) -> Iterator[str]:
    """Yield for each selector that can take nothing why that is so."""
    selectors = forecast.selectors
    on_circle = {os.path.basename(one.path): "remove a selector or a route on that way" for one in selectors.on_circle}
    ways_out = dict.fromkeys(selectors.unusable, "correct the file, or remove it") | on_circle
    yield from dict.fromkeys(f"{why}; {ways_out[file]}" for file, why in selectors.unusable.items())
    for one in selectors.in_use:
        if why := forecast.why_unreachable(one.selector.to):
            yield f"selector {one.selector.name}: {why}"


def may_have_letters(context: QueueContext) -> bool:
    """Return whether messages of a queue may become dead letters, or its own queue.toml says where these go."""
    config, of_root = context.config, context.root.config.dead_letter_queue
    named = config.dead_letter_queue not in (None, of_root)
    return named or config.exhausted == "dead-letter" or config.self_destruct or bool(selectors.names_in(context))


# -- fsck ----------------------------------------------------------------------------------------------------------


def examine_selectors(queue: ExaminedQueue) -> Iterator[Finding]:
    """Find what is wrong with the selectors of a queue and the credits that they spent, and other files beside them."""
    folder = queue.layout.selectors
    if os.path.lexists(folder) and not os.path.isdir(folder):
        yield Finding("not-a-folder", folder, "something else lies where the folder of selectors belongs: move it away")
    elif os.path.isdir(folder) and not os.access(folder, os.R_OK | os.X_OK):
        yield Finding("unreadable-folder", folder, KINDS["unreadable-folder"].says)
    else:
        with suppress(DropqError):  # what keeps the queue from being opened is found elsewhere
            context = open_queue(queue.context.root, queue.context.name)
            for path, problems in sorted(selectors.read(context)[1].items()):
                yield Finding("broken-selector", path, f"{KINDS['broken-selector'].says}: {'; '.join(problems)}")
            yield from _lost_credits(context, queue.now)
        yield from _in_selectors(queue)
    known = set(_tokens(queue))
    for entry in queue.entries(queue.layout.credits):
        yield from _folder_of_credits(queue, entry, known)


def _lost_credits(context: QueueContext, now: int) -> Iterator[Finding]:
    """Find damaged credits, and credits without a message; a message of the last hour may be on its way."""
    try:
        idle = set(idle_credits(context))
        damaged = {via for via, said in all_credits(context.layout) if said is None}
    except OSError:
        return  # a link among them, or a closed folder, is a finding of its own, and makes every audit void
    for token in sorted({via.token for via in idle}):
        for entry in entries(f"{context.layout.credits}/{token}", now):
            via = Via(token, entry.name)
            if via in idle and entry.age >= UNDER_WAY:
                yield entry.finding("damaged-credit" if via in damaged else "lost-credit")


def _in_selectors(queue: ExaminedQueue) -> Iterator[Finding]:
    for entry in queue.entries(queue.layout.selectors):
        if entry.name.startswith(".") and entry.name.endswith(REMOVED):
            yield entry.finding_at_rest("unfinished-removal")
        elif not UNFINISHED.fullmatch(entry.name) and (
            files.name_of(entry.name) is None or not stat.S_ISREG(entry.status.st_mode)
        ):
            yield entry.finding("not-a-selector")
        elif reading.is_reservation(entry.status):
            yield entry.finding_at_rest("placeholder")


def _tokens(queue: ExaminedQueue) -> Iterator[str]:
    """Yield the tokens in the files of a queue's selectors, also of those that are being removed."""
    for entry in queue.entries(queue.layout.selectors):
        with suppress(OSError):
            yield files.token_in(reading.read_small(entry.path) or b"")


def _folder_of_credits(queue: ExaminedQueue, entry: Entry, known: set[str]) -> Iterator[Finding]:
    if UNFINISHED.fullmatch(entry.name):
        return
    if not is_token(entry.name) or not stat.S_ISDIR(entry.status.st_mode):
        yield entry.finding_at_rest("not-a-credit")
        return
    spent = False
    for credit in queue.entries(entry.path):
        if is_key(credit.name) and stat.S_ISREG(credit.status.st_mode):
            spent = True
        elif UNFINISHED.fullmatch(credit.name):
            yield credit.finding_at_rest("temporary")
        elif credit.name != selectors.LAST:
            yield credit.finding_at_rest("not-a-credit")
    owner = credits.queue_of(queue.context.root.layout, entry.name)
    if spent and (owner is None or owner[0] != queue.context.name):
        yield entry.finding("unknown-token")
    elif spent and entry.name not in known:
        yield entry.finding("left-credits")


def examine_tokens(root: RootLayout, now: int) -> Iterator[Finding]:
    """Find what is wrong with the files that say which selector has which token."""
    for entry in entries(root.tokens, now):
        if not is_token(entry.name) or not stat.S_ISREG(entry.status.st_mode):
            yield entry.finding_at_rest("not-a-token")
        elif os.access(entry.path, os.R_OK) and credits.queue_of(root, entry.name) is None:
            yield entry.finding_at_rest("damaged-token")
