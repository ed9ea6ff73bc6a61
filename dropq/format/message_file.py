"""A message file: what its name says, each part parsed once, when it is first needed."""

from __future__ import annotations

from dropq.format.claims import Claim, claim_id, split_claim
from dropq.format.names import Name, may_be_part, parse


class MessageFile:
    """A file that is a message, in any state.

    Args:
        arrival: when it came there, in ms since 1970, if its name has no time; else 0.
        plain: whether its name has only a priority, a generated id and a class, and no claim prefix.
        folder: its folder, for the path of its claim; "" if that is not needed.
        typed_replies: whether reply-to is written as DropboxMQ 1.2 writes it.
    """

    __slots__ = ("_claim", "_name", "_own_name", "_problems", "arrival", "filename", "folder", "plain", "typed_replies")

    def __init__(
        self, filename: str, arrival: int = 0, plain: bool = False, *, folder: str = "", typed_replies: bool = False
    ) -> None:
        self.filename = filename
        self.arrival = arrival
        self.plain = plain
        self.folder = folder
        self.typed_replies = typed_replies
        self._own_name: str | None = None
        self._name: Name | None = None

    def __repr__(self) -> str:
        return f"<MessageFile {self.filename!r}>"

    @property
    def own_name(self) -> str:
        """The file name without a claim prefix."""
        if self._own_name is None:
            self._claim, self._own_name = split_claim(self.filename, self.folder)
        return self._own_name

    @property
    def claim(self) -> Claim | None:
        """The claim that the file name begins with, or None."""
        if self._own_name is None:
            self._claim, self._own_name = split_claim(self.filename, self.folder)
        return self._claim

    @property
    def distinction(self) -> str:
        """What tells the message from all others of its id, as `Name.distinction` does."""
        return self.name.distinction(claim_id(self.claim.owner) if self.claim is not None and self.claim.ours else "")

    @property
    def name(self) -> Name:
        """What the file name says; its sidecar is not read."""
        return self._name or self._parse()

    @property
    def problems(self) -> list[str]:
        """A sentence about each part of the file name that cannot be read, and is left out."""
        if self._name is None:
            self._parse()
        return self._problems.copy()

    @property
    def delivery_count(self) -> int:
        """How often the message was delivered according to the file name, including the delivery of its claim."""
        return max(self.name.delivery_count, self.claim.number if self.claim is not None else 0)

    @property
    def is_part(self) -> bool:
        """Whether its message is a part of a bundle."""
        return may_be_part(self.filename) and (self.name.first > 0 or self.name.record > 0)

    def _parse(self) -> Name:
        problems: list[str] = []
        name = parse(self.own_name, typed_replies=self.typed_replies, problems=problems)
        self._problems, self._name = problems, name
        return name
