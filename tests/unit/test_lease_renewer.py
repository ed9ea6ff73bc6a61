"""The thread that renews leases, as workers, claiming batches and streams run it."""

from __future__ import annotations

import logging
import threading

import pytest

from dropq.errors import StorageError
from dropq.queue.lease_renewer import LeaseRenewer


def test_a_round_that_fails_is_logged_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    rounds, again = list[int](), threading.Event()

    def renew() -> None:
        rounds.append(1)
        if len(rounds) == 1:
            raise StorageError("the file server is away")
        again.set()

    with caplog.at_level(logging.WARNING, "dropq"):
        renewer = LeaseRenewer(0.03, renew)
        assert again.wait(10)
        renewer.stop()
    assert caplog.messages == ["leases were not renewed: the file server is away"]


def test_nothing_is_renewed_once_the_renewer_is_stopped() -> None:
    begun, goes_on, ended = threading.Event(), threading.Event(), list[bool]()

    def renew() -> None:
        begun.set()
        goes_on.wait(10)
        ended.append(True)

    renewer = LeaseRenewer(0.03, renew)
    assert begun.wait(10)
    stopping = threading.Thread(target=renewer.stop)
    stopping.start()
    goes_on.set()
    stopping.join(10)
    assert ended and not renewer._thread.is_alive()
