"""The claims that are open in a session, which a setting of the session tells the tasks of its jobs.

By them a job is named after what was claimed, and a job that was sent before is known that would let a claim be
acknowledged of which nothing was sent.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from dropq.lifecycle.context import QueueContext
from dropq.queue.message import Message

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger("dropq")

#: The setting; Spark hands all settings of a session to the tasks of its jobs, also those of other threads.
SETTING = "spark.dropq.claims"
#: How the id of a claim begins that has no message.
_EMPTY = "none-"

_open: dict[SparkSession, list[str]] = defaultdict(list)
_changing = threading.Lock()


class OpenClaims(NamedTuple):
    """The claims that are open where a task's job runs."""

    #: What `{claim}` stands for: the same whenever the same messages are claimed.
    id: str
    #: Tells these blocks of `claim` from all others.
    blocks: str
    #: Whether anything was claimed.
    has_messages: bool

    @classmethod
    def of(cls, setting: str | None) -> OpenClaims | None:
        """Return what the setting says; None if no claim is open."""
        if not setting:
            return None
        ids, blocks = zip(*(entry.split(".") for entry in sorted(setting.split())), strict=True)
        return cls("-".join(ids), "-".join(blocks), not all(each.startswith(_EMPTY) for each in ids))


@contextmanager
def opened(spark: SparkSession, claim: str) -> Iterator[None]:
    """Let the jobs of a session know of a claim while the block runs."""
    entry = f"{claim}.{secrets.token_hex(4)}"
    with _changing:
        _open[spark].append(entry)
        spark.conf.set(SETTING, " ".join(_open[spark]))
    try:
        yield
    finally:
        with _changing:
            _open[spark].remove(entry)
            rest = " ".join(_open[spark])
            if not rest:
                del _open[spark]
            try:
                spark.conf.set(SETTING, rest)
            except Exception as error:  # each kind of session has an error of its own
                log.info("the session has ended, and no job of it asks which claims are open: %s", error)


def claim_id(context: QueueContext, messages: Iterable[Message]) -> str:
    """Return the id of a claim: the same whenever the same messages are claimed, also after a crash.

    Messages that were requeued or replayed make another claim, as they are to be handled again; so does a next file of
    the same name.
    """
    identities = sorted(_identity_of(context, message) for message in messages)
    if not identities:
        return f"{_EMPTY}{secrets.token_hex(8)}"
    return hashlib.sha256(json.dumps(identities).encode()).hexdigest()[:20]


def _identity_of(context: QueueContext, message: Message) -> list[str | int]:
    claim = message._claim
    assert claim is not None  # it was claimed just now
    name = context.sidecars.parse(claim.own_name)
    if name.generated and not name.first:
        return [name.id, name.since]
    try:
        size, written = claim.body or context.settling.version(claim.path)
    except FileNotFoundError:
        size = written = 0  # RACE: it was taken back, and the end of the block says so
    return [name.id, message._distinction, name.record, size, written]
