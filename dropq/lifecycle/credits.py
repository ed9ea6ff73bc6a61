"""Credits: a selector spends one for each message that it moves on, and has it again when the message is settled.

A spent credit is a file of the queue that the message left, made before the move. Who settles the message renames it
first, and then removes this file, and those of the credits under which it had come before; where parts were made of the
message, the credits go before it is archived. `free` gives back the credits of a message that was settled, `unspend`
removes one whose message was not moved, or is gone. An audit removes what a crash leaves.

Names, token files and credits are data from strangers: a queue in them counts only as an address in this root. Folders
are opened without links, and only a regular file is removed that holds the id of the message that was settled.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

from dropq.format import names
from dropq.format.addresses import is_address, layouts
from dropq.format.credits import Credit, Via, is_key, is_token, via_of
from dropq.format.layout import PRIVATE, QueueLayout, RootLayout
from dropq.lifecycle.context import QueueContext
from dropq.storage import reading
from dropq.storage.failures import describe
from dropq.storage.files import Storage

log = logging.getLogger("dropq")

#: The most bytes of a credit's file.
_LIMIT = 4096


def spend(context: QueueContext, via: Via, credit: Credit) -> None:
    """Make the file of a credit; call it under the policy lock of the queue."""
    folder = f"{context.layout.credits}/{via.token}"
    try:
        context.storage.write_new(f"{folder}/{via.key}", credit.written, synced=False, sole_in=folder)
    except FileNotFoundError:
        context.storage.make_folder(folder)
        context.storage.write_new(f"{folder}/{via.key}", credit.written, synced=False, sole_in=folder)


def unspend(context: QueueContext, via: Via) -> None:
    """Remove the file of a credit of the queue, whatever it says."""
    context.storage.unlink(f"{context.layout.credits}/{via.token}/{via.key}")


def spent(layout: QueueLayout, token: str) -> list[str]:
    """Return the keys of the credits that a selector of a queue has spent."""
    return list(filter(is_key, reading.names_in(f"{layout.credits}/{token}")))


def below(context: QueueContext, file: str) -> tuple[Via, ...]:
    """Return the credits under which a message has come to a queue, the latest first; OSError if one cannot be read.

    A credit that leads elsewhere counts for nothing: the message was renamed by hand since, with its name.
    """
    via = via_of(file)
    said = None if via is None else find(context.root.layout, via)
    if via is None or said is None or not led_here(context, said, file):
        return ()
    return (via, *said.below)


def led_here(context: QueueContext, said: Credit, file: str) -> bool:
    """Return whether a credit was spent on a message, and led it to this queue, by whichever of its addresses."""
    if not names.bears(said.id)(file):
        return False
    if said.to == context.name:
        return True
    layout = layout_of(context.root.layout, said.to)
    try:
        return layout is not None and os.path.samefile(layout.base, context.layout.base)
    except FileNotFoundError:
        return False  # RACE: that queue has just gone


def find(root: RootLayout, via: Via) -> Credit | None:
    """Return the content of a credit's file; None if the file is missing, or cannot be used."""
    with _opened(root, via) as folder:
        return None if folder is None else read_in(folder, via.key)


def free(context: QueueContext, file: str) -> None:
    """Free the credits under which a settled message came; an audit removes those that cannot be removed now."""
    if (via := via_of(file)) is not None:
        free_under(context, via, file)


def free_under(context: QueueContext, via: Via, file: str) -> None:
    """Remove a credit of a message, and those below it; arguments as of `free`."""
    try:
        for under in _remove(context, via, file):
            _remove(context, under, file)
    except OSError as error:
        log.info("a credit of %s is free only after an audit: %s", file, describe(error))


def _remove(context: QueueContext, via: Via, file: str) -> tuple[Via, ...]:
    """Remove the credit of a settled message; return those below it. Nothing is removed that is another message's."""
    with _opened(context.root.layout, via) as folder:
        said = None if folder is None else read_in(folder, via.key)
        if folder is None or said is None or not names.bears(said.id)(file):
            return ()
        context.storage.unlink(via.key, folder)
        return said.below


def queue_of(root: RootLayout, token: str) -> tuple[str, str] | None:
    """Return the address of a token's queue, and the name of its selector; None for a token that nobody has."""
    said: object = None
    with suppress(ValueError):  # it is damaged
        said = _parsed(reading.read_small(f"{root.tokens}/{token}", _LIMIT)) if is_token(token) else None
    queue, selector = (said.get("queue"), said.get("selector")) if isinstance(said, dict) else (None, None)
    return (queue, selector) if isinstance(queue, str) and isinstance(selector, str) else None


def layout_of(root: RootLayout, address: str) -> QueueLayout | None:
    """Return the layout of the queue that a stranger's file names; None if this root has no such queue."""
    if not is_address(address):
        return None
    return next((layout for layout in layouts(root.path, address) if os.path.isdir(layout.target)), None)


def _opened(root: RootLayout, via: Via) -> AbstractContextManager[int | None]:
    known = queue_of(root, via.token)
    return opened(None if known is None else layout_of(root, known[0]), via.token)


@contextmanager
def opened(layout: QueueLayout | None, token: str) -> Iterator[int | None]:
    """Open, for a block, the folder of the credits that a selector has spent; yield None if it is missing."""
    folder = None if layout is None or not token else reading.find_below(layout.base, PRIVATE, "credits", token)
    try:
        yield folder
    finally:
        if folder is not None:
            os.close(folder)


def read_in(folder: int, key: str) -> Credit | None:
    """Return the content of a credit's file in an open folder; None if it is missing, or cannot be used.

    If it raises OSError, it cannot be read now, and a message may still need it.
    """
    return Credit.read(_parsed(reading.read_in(folder, key, _LIMIT, strict=True)))


def _parsed(content: bytes | None) -> object:
    try:
        return None if content is None else reading.parse_json(content, any_text=True)  # an id may have any
    except ValueError:
        return None


def reserve(root: RootLayout, token: str, queue: str, selector: str, storage: Storage) -> bool:
    """Give a token to a selector, for good; return False if it is another's."""
    if not reading.exists(root.tokens):
        storage.make_folder_like(root.tokens, root.private)
    try:
        storage.write_new(f"{root.tokens}/{token}", json.dumps({"queue": queue, "selector": selector}).encode())
    except FileExistsError:
        return queue_of(root, token) == (queue, selector)
    storage.sync(root.tokens)
    return True
