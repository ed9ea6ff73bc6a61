"""What a request may say: each parameter is parsed to a closed type, and nothing else is let in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from werkzeug.datastructures import MultiDict

from dropq.errors import InvalidName
from dropq.events.log import ACTS, OUTCOMES
from dropq.format.addresses import check_address
from dropq.format.layout import ALL_STATES
from dropq.format.printable import unescape
from dropq.web.guard import Refused

#: Characters of a filter, and of a name or id.
FILTER_LIMIT, NAME_LIMIT = 1000, 2000
#: How many messages are listed, and how many a form may name.
SHOWN, NAMED = 100, 1000
#: What a form may ask for.
VERBS = ("requeue", "purge", "pause", "resume")

#: The parameters, with their values where these are a closed set; None stands for text.
_PARAMETERS: Mapping[str, Sequence[str] | None] = {
    "q": None,
    "id": None,
    "filter": None,
    "confirm": None,
    "until": None,
    "state": ALL_STATES,
    "event": ("", *OUTCOMES, *ACTS),
    "newest": ("1",),
    "still": ("1",),
    "to_origin": ("1",),
    "verb": VERBS,
    "which": ("ticked", "all"),
    "step": ("plan", "do"),
}


@dataclass(frozen=True)
class Arguments:
    """The parameters of a request.

    Attributes:
        queue: an address, which need not exist; "" where none was given.
        ids: file names or ids of messages.
        until: milliseconds since 1970, of the plan that is carried out; 0 where none was given.
    """

    queue: str = ""
    ids: tuple[str, ...] = ()
    filter: str = ""
    state: str = ""
    event: str = ""
    newest: bool = False
    still: bool = False
    verb: str = ""
    which: str = ""
    step: str = ""
    until: int = 0
    to_origin: bool = False
    confirm: str = ""

    @property
    def said(self) -> dict[str, Any]:
        """The parameters, by the names that they have in templates."""
        return {"q": self.queue, **vars(self)}

    @property
    def id(self) -> str:
        """The one message that is meant."""
        if len(self.ids) != 1:
            raise Refused(400, "Name one message.")
        return self.ids[0]


def parse(given: MultiDict[str, str], allowed: Sequence[str]) -> Arguments:
    """Parse the parameters that a page takes.

    Raises:
        Refused: one is unknown, is repeated or has a value that it cannot have. What it was is not said.
    """
    for name, values in given.lists():
        closed = _PARAMETERS.get(name)
        if name not in allowed or (len(values) > 1 and name != "id"):
            raise Refused(400, "The address of this page has a parameter that it cannot have.")
        if closed is not None and values[0] not in closed:
            raise Refused(400, f"The parameter {name} has a value that it cannot have.")
    queue, until = _text(given, "q"), given.get("until", "0")
    if queue:
        try:
            check_address(queue)
        except InvalidName as error:
            raise Refused(400, "The parameter q is no address of a queue.") from error
    if not (until.isascii() and until.isdecimal() and len(until) <= 15):
        raise Refused(400, "The parameter until has a value that it cannot have.")
    ids = tuple(dict.fromkeys(map(unescape, given.getlist("id"))))
    if len(ids) > NAMED or any(len(id) > NAME_LIMIT for id in ids):
        raise Refused(400, f"At most {NAMED} messages can be named at once.")
    return Arguments(
        queue=queue,
        ids=ids,
        filter=_text(given, "filter", FILTER_LIMIT, is_name=False).strip(),
        state=given.get("state", "" if "verb" in allowed else "target"),  # a form has to say it
        event=given.get("event", ""),
        newest="newest" in given,
        still="still" in given,
        verb=given.get("verb", ""),
        which=given.get("which", ""),
        step=given.get("step", ""),
        until=int(until),
        to_origin="to_origin" in given,
        confirm=_text(given, "confirm").strip(),
    )


def _text(given: MultiDict[str, str], name: str, limit: int = NAME_LIMIT, *, is_name: bool = True) -> str:
    text = given.get(name, "")
    if len(text) > limit:
        raise Refused(400, f"The parameter {name} is longer than {limit} characters.")
    return unescape(text) if is_name else text
