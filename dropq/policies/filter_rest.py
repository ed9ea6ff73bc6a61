"""What the filter of a queue keeps from every consumer, and when `filter_rest = "error"` has it put aside."""

from __future__ import annotations

from collections.abc import Mapping

from dropq.config.load import load_queue, load_root
from dropq.errors import ConfigError
from dropq.format.message_file import MessageFile
from dropq.lifecycle.context import QueueContext
from dropq.lifecycle.decision import Decision
from dropq.policies.matching import belonging, deciding, matcher
from dropq.storage import reading

#: The reason of what was put aside.
FILTERED = "filtered"
#: What must be in the configuration as it was when the queue was opened, or nothing is put aside.
_KEYS = ("filter", "filter_rest", "message_type", "underlying_topic", "unroutable_after")


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
        files = f"{layout.target}/{file.filename}", layout.config_file, root.config_file
        due = max(reading.changed_ms(path, gone=0) for path in files) + self._patience
        if due <= self._context.clock.now_ms() and self._decide(file) is not False:
            return Decision(False, "filter", f"{text}; it stays, as its body cannot be read, or is too long or deep")
        return Decision(False, "filter", f"{text}, and the first that meets it then puts it aside in error/", until=due)

    def is_due(self, file: MessageFile) -> bool:
        """Return whether a consumer is to put a message aside; the configuration is read once more before."""
        until = self.decide(file).until
        if not 0 < until <= self._context.clock.now_ms():
            return False
        layout, root = self._context.layout, self._context.root.layout
        try:
            now = load_queue(self._context.name, load_root(root.config_file), root.config_file, layout)
        except ConfigError:  # somebody is about to change it
            return False
        return all(getattr(now, key) == getattr(self._context.config, key) for key in _KEYS)


def found_aside(context: QueueContext, file: MessageFile) -> Mapping[str, object] | None:
    """Return the reason of a message that lies in error/ without one; None if its queue's filter matches it."""
    if context.config.filter is None or matcher(context, context.config.filter, "error")(file):
        return None
    return {"reason": FILTERED, "detail": f"it does not match filter = {context.config.filter!r}"}
