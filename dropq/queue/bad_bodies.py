"""Which messages of a batch have bad bodies: a small file for each, written by the process that read the body.

Invariant: a note moves nothing. The message stays claimed until its batch is settled; then it is rejected with the
reason in the note, and the other messages are acknowledged. So a process that reads the batch again, after a crash,
finds the same messages and leaves out the same bodies.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from dropq.errors import LeaseLost
from dropq.lifecycle.context import QueueContext
from dropq.queue.message import Message
from dropq.storage import reading


@dataclass
class BadBodyNotes:
    """The notes of one run on one batch, in a folder of its own, as another run may read bodies in another way."""

    context: QueueContext
    folder: str

    def begin(self) -> None:
        """Make the folder, before any process reads the batch."""
        with self.context.error_context("no body was read"):
            self.context.storage.make_folder(self.folder)

    def add(self, key: str, reason: str) -> None:
        """Note that the message of a batch key is to be rejected; at durability `full` this survives a power cut.

        RACE: two tries of a task may note the same message; they write the same.

        Raises:
            DropqError: the batch was settled, or another run reads it: nobody needs what this process reads.
        """
        with self.context.error_context("a bad body was found, and its message stays claimed"):
            self.context.storage.write_small(f"{self.folder}/{key}", json.dumps({"reason": reason}).encode())

    def keys(self) -> set[str]:
        """Return the keys of the messages that are to be rejected."""
        with self.context.error_context("no message of the batch was settled"):
            return {name for name in reading.names_in(self.folder) if not name.startswith(".")}  # those are drafts

    def reasons(self) -> dict[str, str]:
        """Return why messages are to be rejected, by their keys."""
        return {key: _reason(f"{self.folder}/{key}") for key in self.keys()}

    def drop(self) -> None:
        """Forget all notes, when every message of the batch is settled."""
        self.context.storage.remove_tree(self.folder)


def reject_bad(messages: Mapping[str, Message], reasons: Mapping[str, str]) -> list[Message]:
    """Reject those messages for which there is a reason; return them, without those whose claims were gone."""
    rejected = []
    for key in messages.keys() & reasons.keys():
        with suppress(LeaseLost):  # RACE: somebody settled it by its receipt, or its lease ran out
            if messages[key].held:
                messages[key].reject(reasons[key])
                rejected.append(messages[key])
    return rejected


def _reason(path: str) -> str:
    try:
        return str(reading.parse_json(reading.read_small(path) or b"", any_text=True)["reason"])  # type: ignore[index]
    except (ValueError, TypeError, KeyError):
        return "the body cannot be read"  # somebody damaged the note; that it is there is what counts
