"""Sending: working -> target | delayed, and delayed -> target; the rename is the send."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace

from dropq.errors import DropqError, NoSuchQueue
from dropq.format import names
from dropq.format.names import Name
from dropq.lifecycle import naming
from dropq.lifecycle.context import OfQueue, QueueContext
from dropq.storage import reading
from dropq.storage.failures import error_context, storage_error


class Outlet(OfQueue):
    """Sends to one queue."""

    def close(self) -> None:
        """Close open files and locks."""

    def distribute(self) -> None:
        """Distribute what waits in a topic, until a message blocks it; do nothing for any other queue."""

    def stage(self, file: str, data: bytes | memoryview, *, synced: bool = True) -> None:
        """Write a body into working/, under the name that the message will have; `synced` as for `write_new`."""
        try:
            working = self._layout.working
            sole_in = working if names.tells_time(file) else ""
            self._storage.write_new(f"{working}/{file}", data, synced=synced, sole_in=sole_in)
        except OSError as error:
            raise self.not_sent(error) from error

    def send_new(self, file: str, data: bytes | memoryview, *, not_before: int = 0) -> bool | None:
        """Write a body and send it; make it as durable as the queue's configuration asks.

        Where this publishes to a topic, return whether every receiver has the message; else None. The message is
        delivered from `not_before` on, in ms.
        """
        working = self._layout.working
        staged = f"{working}/{file}"
        try:
            self._storage.write_new(staged, data, sole_in=working)
        except OSError as error:
            raise self.not_sent(error) from error
        try:
            self._storage.rename(
                staged, f"{sent_to(self.context, not_before) if not_before else self._layout.target}/{file}"
            )
        except OSError as error:
            raise self._take_back(staged, error) from error
        if self._storage.syncs_folders:
            self.sent(not_before=not_before)
        return None

    def send(self, file: str, *, not_before: int = 0, adopted: str = "") -> bool | None:
        """Send a staged file, or the `adopted` one at a path: the rename is the send; return what `send_new` does.

        An adopted file stays where it is if it cannot be sent.
        """
        staged = adopted or f"{self._layout.working}/{file}"
        try:
            self._storage.rename(
                staged, f"{sent_to(self.context, not_before) if not_before else self._layout.target}/{file}"
            )
        except OSError as error:
            raise self._take_back(staged, error, adopted) from error
        return None

    def _take_back(self, staged: str, error: OSError, adopted: str = "") -> DropqError:
        """Remove a staged file that could not be sent, but no adopted file; return the error to raise."""
        with suppress(OSError):  # fsck finds the file if it stays
            if not adopted:
                self._storage.unlink(staged)
        return self.not_sent(error)

    def not_sent(self, error: OSError) -> DropqError:
        """Return the error for a send that failed before its rename, or at it."""
        return self.context.refused(error, "the message was not sent")

    def sent(self, *, not_before: int = 0) -> None:
        """Sync a send, if the queue's durability asks for it."""
        try:
            self._storage.sync(self._layout.delayed if not_before else self._layout.target, self._layout.working)
        except OSError as error:
            if names.is_temporary(self.context.name) and not reading.exists(self._layout.target):
                return  # RACE: its requester has the answer already, and removed the queue
            fate = "the message is visible, but a power cut may take it back: do not send it again"
            failed = storage_error(error, fate)
            failed.unsynced = True
            raise failed from error


def sent_to(context: QueueContext, not_before: int) -> str:
    """Return the folder that a message is sent to: target/, or delayed/ until its delay is over."""
    if not not_before:
        return context.layout.target
    context.storage.make_folder(context.layout.delayed)
    return context.layout.delayed


def deliver_delayed(context: QueueContext, file: str) -> bool:
    """Move a message whose delay is over into target/; return False if another process moved it first.

    A copy mark stays in its name, as a worker that gave the message back recognizes it by the mark.
    """
    name = replace(context.sidecars.parse(file), not_before=0)
    return into_target(context, f"{context.layout.delayed}/{file}", name, unique=bool(name.mark)) is not None


def into_target(context: QueueContext, source: str, name: Name, *, unique: bool = False) -> str | None:
    """Move a file into target/ under a unique name; return the name, or None if the file is gone."""
    try:
        file = move_to_wait(context, source, name, unique=unique)
    except FileNotFoundError:
        with error_context(f"the message stays where it was, {source}, unless another process moved it"):
            if not reading.exists(context.layout.target):
                raise NoSuchQueue(
                    f"queue {context.layout.home} is not there any more; {source} was not moved"
                ) from None
        return None  # RACE: another process moved it first
    except OSError as error:
        raise storage_error(error, f"the message stays where it was, {source}") from error
    with error_context("the message is in target/; do not move it again"):
        storage, folder = context.storage, os.path.dirname(source)
        if storage.syncs_folders and storage.leaves_both_names(folder):
            storage.sync(folder)
        storage.sync(context.layout.target)
    return file


def move_to_wait(context: QueueContext, source: str, name: Name, arrival: int = 0, unique: bool = False) -> str:
    """Move a file into target/, or delayed/, under a unique name; return that. `unique`: the name is already."""
    folder = sent_to(context, name.not_before)
    if not name.generated and not name.since:
        name = replace(name, since=arrival or reading.changed_ms(source))  # keeps its place in the order
    file = context.sidecars.fit(name if unique else naming.unique(name))
    try:
        context.storage.rename_guarded(source, f"{folder}/{file}")
    except FileExistsError:  # somebody copied a message with its id: both stay
        file = naming.copy_name(context, name)
        context.storage.rename_guarded(source, f"{folder}/{file}")
    return file
