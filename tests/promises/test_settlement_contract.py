"""The contract of settlement: whatever settles a message does the same, and changes nothing where the claim is gone."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from helpers import FRESH, drop, make_queue, reopened, take, where

from dropq import LeaseLost, Queue, Root
from dropq.format.claims import Claim
from dropq.lifecycle.processing import claims_in
from dropq.lifecycle.settlement import Claims, Settlement
from dropq.policies.barrier import Shares

#: Each verb, as a call of it.
VERBS: dict[str, Callable[[Settlement, Claim], object]] = {
    "archive": lambda settlement, claim: settlement.archive(claim),
    "give_back": lambda settlement, claim: settlement.give_back(claim, delay=0),
    "set_aside": lambda settlement, claim: settlement.set_aside(claim, "error", "rejected", {"detail": "it is bad"}),
    "extend": lambda settlement, claim: settlement.extend(claim, claim.deadline + 60_000),
    "release": lambda settlement, claim: settlement.release(claim, counted=False),
}


class Contract:
    """The tests; each implementation says how a message is held, and how what was given back waits."""

    config: ClassVar[dict[str, Any]] = {}
    #: What a holder that gives the message back leaves to others.
    left = b"1\n2\n"

    @pytest.fixture
    def queue(self, tmp_path: Path) -> Queue:
        return make_queue(tmp_path, timing=FRESH, redelivery_attempts=0, **self.config)

    def held(self, queue: Queue) -> tuple[Settlement, Claim]:
        raise NotImplementedError

    def waiting(self, queue: Queue) -> tuple[bytes, int]:
        """Return the body of the message that waits, and how often it was delivered."""
        (message,) = queue.browse("target")
        return message.body, message.delivery_count

    def test_an_archived_message_is_in_the_history(self, queue: Queue) -> None:
        settlement, claim = self.held(queue)
        assert settlement.archive(claim).state == "processed"
        assert where(queue) == {"processed": [b"1\n2\n"]}

    def test_a_message_that_is_given_back_waits_and_its_delivery_counts(self, queue: Queue) -> None:
        settlement, claim = self.held(queue)
        assert settlement.give_back(claim, cancel=True).state == "target"
        assert self.waiting(queue) == (self.left, 1)

    def test_a_message_that_is_given_back_for_later_is_delayed(self, queue: Queue) -> None:
        settlement, claim = self.held(queue)
        assert settlement.give_back(claim, delay=60).state == "delayed"

    def test_a_message_that_failed_for_the_last_time_is_set_aside(self, queue: Queue) -> None:
        settlement, claim = self.held(queue)
        assert settlement.give_back(claim, failure={"detail": "it broke"}).state == "error"
        (message,) = queue.browse("error")
        assert message.reason is not None
        assert (message.body, message.reason["reason"], message.reason["detail"]) == (self.left, "failed", "it broke")

    def test_a_message_that_is_released_uncounted_is_as_it_was(self, queue: Queue) -> None:
        settlement, claim = self.held(queue)
        assert settlement.release(claim, counted=False).state == "target"
        assert self.waiting(queue) == (self.left, 0)

    def test_a_message_that_is_set_aside_keeps_why(self, queue: Queue) -> None:
        settlement, claim = self.held(queue)
        assert settlement.set_aside(claim, "error", "rejected", {"detail": "it is bad"}).state == "error"
        (message,) = queue.browse("error")
        assert message.reason is not None
        assert (message.body, message.reason["reason"], message.reason["detail"]) == (
            self.left,
            "rejected",
            "it is bad",
        )

    def test_a_claim_that_is_extended_settles_its_message(self, queue: Queue) -> None:
        settlement, claim = self.held(queue)
        deadline = claim.deadline + 60_000
        assert settlement.extend(claim, deadline) is claim
        assert claim.deadline == deadline and os.path.exists(claim.path)
        assert settlement.archive(claim).state == "processed"

    @pytest.mark.parametrize("verb", VERBS)
    def test_a_claim_that_is_gone_settles_nothing(self, queue: Queue, verb: str) -> None:
        settlement, claim = self.held(queue)
        os.unlink(claim.path)
        before = where(queue)
        with pytest.raises(LeaseLost):
            VERBS[verb](settlement, claim)
        assert where(queue) == before

    @pytest.mark.parametrize("verb", VERBS)
    def test_a_message_that_is_settled_is_not_settled_again(self, queue: Queue, verb: str) -> None:
        settlement, claim = self.held(queue)
        settlement.archive(claim)
        with pytest.raises(LeaseLost):
            VERBS[verb](settlement, claim)
        assert where(queue) == {"processed": [b"1\n2\n"]}


class TestClaims(Contract):
    def held(self, queue: Queue) -> tuple[Settlement, Claim]:
        queue.send(b"1\n2\n")
        message = take(queue)
        assert message._claim is not None
        return message._settlement, message._claim


class TestClaimsByReceipt(Contract):
    def held(self, queue: Queue) -> tuple[Settlement, Claim]:
        queue.send(b"1\n2\n")
        receipt = take(queue).receipt
        assert receipt is not None
        message = reopened(queue).claimed(receipt)
        assert message._claim is not None
        return message._settlement, message._claim


class TestClaimsByHand(Contract):
    def held(self, queue: Queue) -> tuple[Settlement, Claim]:
        drop(queue, "report.txt", b"1\n2\n")
        os.rename(f"{queue.layout.target}/report.txt", f"{queue.layout.processing}/mine~report.txt")
        (claim,) = claims_in(queue.context, foreign=True)
        return Claims(queue.context), claim


class TestClaimsOfWhatIsPublished(Contract):
    @pytest.fixture
    def queue(self, tmp_path: Path) -> Queue:
        topic = Root.create(tmp_path).create_topic("news", durability="none", redelivery_attempts=0, redelivery_delay=0)
        return topic.queue

    def held(self, queue: Queue) -> tuple[Settlement, Claim]:
        drop(queue, "report.txt", b"1\n2\n")
        claims = Claims(queue.context)
        claim = claims.claim(queue.context.sidecars.file("report.txt"), "distributor-abcdef0123-0", 0)
        assert claim is not None
        return claims, claim


class TestShares(Contract):
    config: ClassVar[dict[str, Any]] = {"barrier_expression": "JMSType = 'sync'"}

    def held(self, queue: Queue) -> tuple[Settlement, Claim]:
        queue.send(b"1\n2\n", type="sync")
        message = take(queue)
        assert message._claim is not None and isinstance(message._settlement, Shares)
        self.shares = message._settlement
        return message._settlement, message._claim

    def waiting(self, queue: Queue) -> tuple[bytes, int]:
        """Return what the subscription takes again: its share waits in the barrier's folder."""
        (share,) = self.shares.claims()
        return Path(share.path).read_bytes(), queue.context.sidecars.parse(share.own_name).delivery_count


class TestBundlesOfWhichNothingIsSettled(Contract):
    def held(self, queue: Queue) -> tuple[Settlement, Claim]:
        queue.send(b"1\n2\n")
        message = take(queue)
        message.records()
        assert message._claim is not None and message._records is not None
        return message._records, message._claim


class TestBundlesOfWhichARecordIsSettled(Contract):
    left = b"2\n"

    def held(self, queue: Queue) -> tuple[Settlement, Claim]:
        queue.send(b"1\n2\n")
        message = take(queue)
        next(message.records()).ack()
        assert message._claim is not None and message._records is not None
        return message._records, message._claim
