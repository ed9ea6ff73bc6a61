"""A message file's name is read once, and a claim is what it says of who has the message."""

from __future__ import annotations

import pytest

from dropq.format import claims, message_file, names
from dropq.format.claims import Claim, claim_owner, claim_start, is_owner, subscription_of
from dropq.format.message_file import MessageFile
from dropq.format.names import Name

OWN_NAME = "4.1763770000000000-0123456789.B...Qanswers..JMSXDeliveryCountI=2&nI=x"
CLAIMED = f"host-0123456789-1f,0,3~{OWN_NAME}"


def test_a_name_is_split_and_parsed_once_whatever_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def split_claim(filename: str, folder: str) -> tuple[Claim | None, str]:
        calls.append("split")
        return claims.split_claim(filename, folder)

    def parse(own_name: str, *, typed_replies: bool, problems: list[str]) -> Name:
        calls.append("parse")
        return names.parse(own_name, typed_replies=typed_replies, problems=problems)

    monkeypatch.setattr(message_file, "split_claim", split_claim)
    monkeypatch.setattr(message_file, "parse", parse)
    file = MessageFile(CLAIMED, folder="/q/processing")
    assert calls == []
    for _ in range(2):
        assert file.claim is not None and file.claim.path == f"/q/processing/{CLAIMED}"
        assert file.own_name == file.claim.own_name == OWN_NAME
        assert file.name.id == "1763770000000000-0123456789"
        assert file.delivery_count == 3
        assert len(file.problems) == 1
    assert calls == ["split", "parse"]


@pytest.mark.parametrize(("typed", "reply_to"), [(False, "Qanswers"), (True, "answers")])
def test_a_reply_is_read_as_its_root_writes_it(typed: bool, reply_to: str) -> None:
    assert MessageFile(OWN_NAME, typed_replies=typed).name.reply_to == reply_to


def test_a_file_that_nobody_claimed_has_no_claim_and_the_deliveries_of_its_name() -> None:
    file = MessageFile(OWN_NAME)
    assert (file.claim, file.own_name, file.delivery_count) == (None, OWN_NAME, 2)


def test_a_claim_that_was_renewed_is_followed_by_its_owner() -> None:
    claim = Claim("host-0123456789-1", 5, 1, "report.csv", "/q/processing")
    claim.follow(Claim("host-0123456789-1", 9, 1, "report.csv", "/q/processing"))
    assert claim.deadline == 9
    assert claim.path == "/q/processing/host-0123456789-1,9,1~report.csv"
    assert claim.filename.startswith(claim_start(claim.owner))


def test_a_scripts_claim_keeps_the_name_that_it_was_seen_by() -> None:
    claim = Claim.foreign("mine~report.csv", "/q/processing", 1)
    assert (claim.owner, claim.own_name, claim.filename) == ("", "mine~report.csv", "mine~report.csv")
    assert claim.exact and not claim.ours
    assert Claim.foreign("mine~4.x.B", "/q/processing", 1).owner == "mine"


def test_an_owner_is_known_by_its_form() -> None:
    owner = claim_owner("host-0123456789", 31)
    assert is_owner(owner) and subscription_of(owner) == "host-0123456789"
    assert not any(map(is_owner, ("", "host", "host-0123456789", f"{owner},0,1~x", ".gone-1")))
