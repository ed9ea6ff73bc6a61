"""What the filter of a queue keeps from every consumer, and when `filter_rest = "error"` has it put aside."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from functools import cached_property

from dropq.config.load import load_queue, load_root
from dropq.errors import ConfigError, Unavailable
from dropq.format.message_file import MessageFile
from dropq.format.names import may_be_marked
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.decision import Decision
from dropq.policies.matching import REMEMBERED, deciding, matcher
from dropq.storage import reading

#: The reason of what was put aside.
FILTERED = "filtered"
#: Milliseconds after which a message is looked at again that could not be read, or was too long, when it was due.
AGAIN = 60_000
#: What is said of a message whose filter sees only NULLs.
_UNREAD = "the queue's filter does not match it, as its body cannot be read, or is too long or deep: it stays"
#: Seconds for which it is known when the configuration was changed, where nothing is put aside.
CONFIG_AGE = 1.0


class FilterRest:
    """Decides about what a queue's own filter does not match; Unavailable if it needs an extra that is missing."""

    def __init__(self, context: QueueContext) -> None:
        config = context.config
        self._context = context
        self._patience = round(config.unroutable_after * 1000)
        self._matches = None if config.filter is None else matcher(context, config.filter)
        #: Tests whether consumers get a waiting message; None where the queue has no filter.
        self.matches = None if self._matches is None else self._is_let_in if context.is_fed else self._passes
        #: Whether the rest goes to error/.
        self.is_put_aside = _is_put_aside(context)
        #: Whether it would, but the filter chooses what comes in, as that of a subscription or a view does.
        self.is_idle = config.filter is not None and config.filter_rest == "error" and not self.is_put_aside
        #: When a message is looked at again, in ms since 1970; another file may come under a foreign name.
        self._again: dict[tuple[str, int], int] = {}
        self._changed = 0
        self._is_same = False
        self._read_until = 0.0

    def decide(self, file: MessageFile) -> Decision:
        """Return whether a waiting message matches; if not, and it is put aside, `until` says from when on.

        It waits for `unroutable_after` since it came, and since the configuration was changed: a wrong filter can be
        corrected in that time. What cannot be read, or is longer than filters read, is not put aside.
        """
        if self.matches is None or self.matches(file):
            return Decision(True, "ready")
        text = "it does not match the queue's filter: no consumer gets it"
        if not self.is_put_aside:
            return Decision(False, "filter", text if self.keeps_out(file) else _UNREAD)
        if time.monotonic() >= self._read_until:
            self._read_configuration()
        due = max(self._came(file), self._changed) + self._patience
        if due <= self._context.clock.now_ms() and not self.keeps_out(file):
            return Decision(False, "filter", _UNREAD)
        return Decision(False, "filter", f"{text}, and the first that meets it then puts it aside in error/", until=due)

    def keeps_out(self, file: MessageFile) -> bool:
        """Return whether the filter does not match; False of a body that cannot be read, or is too long or deep."""
        return self._matches is not None and self._decide(file) is False

    @cached_property
    def _decide(self) -> Callable[[MessageFile], bool | None]:
        return deciding(self._context.config.filter or "", self._context, "target", self._context)

    def is_due(self, file: MessageFile) -> bool:
        """Return whether a consumer is to put a message aside now; the configuration is read once more before.

        One look at a message that is not due yet tells when the next one is worth it.
        """
        key, now = (file.filename, file.arrival), self._context.clock.now_ms()
        if self._again.get(key, 0) > now:
            return False
        until = self.decide(file).until
        if not 0 < until <= now:
            if len(self._again) >= REMEMBERED:
                self._again.clear()
            self._again[key] = until or now + AGAIN
            return False
        self._read_configuration()
        # RACE: a second file may have taken the name since.
        return self._is_same and max(self._came(file), self._changed) + self._patience <= now

    def is_intruder(self, file: MessageFile) -> bool:
        """Return whether a waiting message was put into a subscription or a view past its topic, against the filter.

        What dropq wrote a mark into, or what was sent before the configuration was changed, or less than
        `unroutable_after` later, may have been published, and let in by another filter.
        """
        if may_be_marked(file.filename) or file.delivery_count or not self.keeps_out(file):
            return False
        if time.monotonic() >= self._read_until:
            self._read_configuration()
        came = self._came(file)
        return self._is_same and min(came, file.name.timestamp or came) >= self._changed + self._patience

    def _passes(self, file: MessageFile) -> bool:
        """Return whether a message matches, or is left of a bundle, which matched as a whole."""
        return file.is_part or (self._matches is not None and self._matches(file))

    def _is_let_in(self, file: MessageFile) -> bool:
        """Return whether a message is in a subscription or a view by right, as its filter acts on entry."""
        return (self._matches is not None and self._matches(file)) or not self.is_intruder(file)

    def _came(self, file: MessageFile) -> int:
        return reading.changed_ms(f"{self._context.layout.target}/{file.filename}", gone=0)

    def _read_configuration(self) -> None:
        """Look when the configuration was changed, and whether it says what it said when the queue was opened."""
        layout, root = self._context.layout, self._context.root.layout
        files = [layout.config_file, root.config_file]
        if layout.is_subscription:
            files.append(f"{layout.topic}/queue.toml")  # it has the defaults
        self._changed = max(reading.changed_ms(path, gone=0) for path in (*files, *map(os.path.realpath, files)))
        try:
            said = load_queue(self._context.name, load_root(root.config_file), root.config_file, layout)
            self._is_same = said == self._context.config
        except ConfigError:  # somebody is about to change it
            self._is_same = False
        self._read_until = time.monotonic() + CONFIG_AGE


def found_aside(context: QueueContext, file: MessageFile) -> Mapping[str, object] | None:
    """Return the reason of a message that lies in error/ without one; None if its queue's filter matches it."""
    try:
        if not _is_put_aside(context) or matcher(context, context.config.filter or "", "error")(file):
            return None
    except Unavailable:
        return None  # this host lacks what the filter needs
    return {"reason": FILTERED, "detail": f"it does not match filter = {context.config.filter!r}"}


def _is_put_aside(context: QueueContext) -> bool:
    return context.config.filter is not None and context.config.filter_rest == "error" and not context.is_fed
