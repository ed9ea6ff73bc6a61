"""The hidden names under which a queue lies while it is removed: from the rename on, a send to it fails.

`.NAME.deleting-MS-RANDOM` is undecided: after a crash, a sweep of the root brings the queue back. The rename to
`.NAME.deleted-MS-RANDOM` is the decision: what has this name is to be removed.
"""

from __future__ import annotations

import os
import re

from dropq.format import names
from dropq.format.layout import QueueLayout
from dropq.lifecycle.context import QueueContext
from dropq.storage import reading

UNDECIDED = re.compile(r"\.(?P<name>.+)\.deleting-(?P<since>[0-9]+)-[0-9a-f]{6}", re.DOTALL)
DECIDED = re.compile(r"\.(?P<name>.+)\.deleted-(?P<since>[0-9]+)-[0-9a-f]{6}", re.DOTALL)


def cut(name: str) -> str:
    """Cut a queue's name, so that a file name has room for what is put around it."""
    return os.fsencode(name)[:200].decode(errors="ignore")


def note_name(context: QueueContext) -> None:
    """Write a queue's name into it if its hidden folder will have only a part of it."""
    if cut(context.name) != context.name:
        context.storage.make_folder(context.layout.private)
        context.storage.write_small(context.layout.deleting, os.fsencode(context.name))


def whole_name(layout: QueueLayout, part: str) -> str:
    """Return the name of a queue that is being deleted; its folder may have only a part of it."""
    name = os.fsdecode(reading.read_small(layout.deleting) or b"")
    return name if names.can_name_queue(name) and cut(name) == part else part
