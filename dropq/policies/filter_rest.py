"""What the filter of a queue keeps from every consumer, and when `filter_rest = "error"` has it put aside."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from dropq.config.load import load_queue, load_root
from dropq.errors import ConfigError, Unavailable
from dropq.format.message_file import MessageFile
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.decision import Decision
from dropq.policies.matching import belonging, deciding, matcher
from dropq.storage import reading

#: The reason of what was put aside.
FILTERED = "filtered"
#: Seconds after which a message is looked at again that could not be read, or was too long, when it was due.
AGAIN = 60.0
#: How many such messages are remembered.
REMEMBERED = 10_000


class FilterRest:
    """Decides about what a queue's own filter does not match.

    Attributes:
        matches: tests a waiting message by the filter; None where the queue has none.
        is_put_aside: whether the rest goes to error/.
        is_idle: whether it would, but the filter chooses what comes in, as that of a subscription or a view does.

    Raises:
        Unavailable: the filter needs an extra that is not installed.
    """

    def __init__(self, context: QueueContext) -> None:
        config = context.config
        self._context = context
        self._patience = round(config.unroutable_after * 1000)
        self.matches = belonging(context)
        asked = self.matches is not None and config.filter_rest == "error"
        self.is_idle = asked and (context.layout.is_subscription or config.underlying_topic is not None)
        self.is_put_aside = asked and not self.is_idle
        self._again: dict[tuple[str, int], float] = {}
        self._decide = deciding(config.filter or "", context, "target", context) if self.is_put_aside else None

    def decide(self, file: MessageFile) -> Decision:
        """Return whether a waiting message matches; if not, and it is put aside, `until` says from when on.

        It waits for `unroutable_after` since it came, and since the configuration was changed: a wrong filter can be
        corrected in that time. What cannot be read, or is longer than filters read, is not put aside.
        """
        if self.matches is None or self.matches(file):
            return Decision(True, "ready")
        text = "it does not match the queue's filter: no consumer gets it"
        if self._decide is None:
            return Decision(False, "filter", text)
        layout, root = self._context.layout, self._context.root.layout
        linked = map(os.path.realpath, (layout.config_file, root.config_file))
        files = f"{layout.target}/{file.filename}", layout.config_file, root.config_file, *linked
        due = max(reading.changed_ms(path, gone=0) for path in files) + self._patience
        if due <= self._context.clock.now_ms() and self._decide(file) is not False:
            return Decision(False, "filter", f"{text}; it stays, as its body cannot be read, or is too long or deep")
        return Decision(False, "filter", f"{text}, and the first that meets it then puts it aside in error/", until=due)

    def is_due(self, file: MessageFile) -> bool:
        """Return whether a consumer is to put a message aside; the configuration is read once more before."""
        key = file.filename, file.arrival  # another file may come under a foreign name
        if self._again.get(key, 0.0) > time.monotonic():
            return False
        until = self.decide(file).until
        if not until:
            if len(self._again) >= REMEMBERED:
                self._again.clear()
            self._again[key] = time.monotonic() + AGAIN
        if not 0 < until <= self._context.clock.now_ms():
            return False
        layout, root = self._context.layout, self._context.root.layout
        try:
            now = load_queue(self._context.name, load_root(root.config_file), root.config_file, layout)
        except ConfigError:  # somebody is about to change it
            return False
        return now == self._context.config


def found_aside(context: QueueContext, file: MessageFile) -> Mapping[str, object] | None:
    """Return the reason of a message that lies in error/ without one; None if its queue's filter matches it."""
    try:
        if context.config.filter is None or matcher(context, context.config.filter, "error")(file):
            return None
    except Unavailable:
        return None  # this host lacks what the filter needs
    return {"reason": FILTERED, "detail": f"it does not match filter = {context.config.filter!r}"}
