"""The threads that ask the disk for pages: few at once, none more of what hangs, and they come back by themselves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import pytest
from helpers import until

pytest.importorskip("werkzeug", reason="the extra web is not installed: pip install 'dropq[web]'")

from dropq.web import disk as disk_module
from dropq.web.disk import HANGING, OF_ONE, THREADS, WAITING, Disk
from dropq.web.guard import Refused


@pytest.fixture
def go_on() -> Iterator[threading.Event]:
    """What lets acts that hang come to their end, as the end of the test does."""
    event = threading.Event()
    yield event
    event.set()


class Asking:
    """Requests in threads of their own, and what became of them."""

    def __init__(self, disk: Disk, go_on: threading.Event) -> None:
        self.disk = disk
        self.go_on = go_on
        self.running = 0
        self.refused: list[str] = []
        self.answered = 0
        self._lock = threading.Lock()
        self.threads: list[threading.Thread] = []

    def ask(self, queue: str, seconds: float = 60.0) -> None:
        """Ask for something that hangs until it may go on."""
        self.threads.append(threading.Thread(target=self._ask, args=(queue, seconds)))
        self.threads[-1].start()

    def _ask(self, queue: str, seconds: float) -> None:
        try:
            self.disk.ask(queue, self._hang, seconds)
        except Refused as refused:
            with self._lock:
                self.refused.append(str(refused))
        else:
            with self._lock:
                self.answered += 1

    def _hang(self) -> None:
        with self._lock:
            self.running += 1
        self.go_on.wait()

    def join(self) -> None:
        for thread in self.threads:
            thread.join()


def fail() -> None:
    raise KeyError("x")


def refusal(act: Callable[[], object]) -> str:
    """What a request is told that gets no answer."""
    with pytest.raises(Refused) as refused:
        act()
    assert refused.value.status == 503
    return str(refused.value)


def test_a_request_gets_what_its_act_returns_and_raises() -> None:
    disk, variable = Disk(), ContextVar("variable", default="")
    token = variable.set("of the request")
    assert disk.ask("q", variable.get) == "of the request"
    variable.reset(token)
    for _ in range(THREADS + 1):
        with pytest.raises(KeyError):
            disk.ask("q", fail)
    assert disk.ask("q", lambda: variable.set("of the act") and 1) == 1
    assert variable.get() == "" and not disk._running


def test_few_threads_ask_and_fewer_for_one_queue(go_on: threading.Event) -> None:
    asking = Asking(Disk(), go_on)
    for _ in range(OF_ONE + 1):
        asking.ask("a")
    until(lambda: asking.running == OF_ONE and asking.disk._waiting == 1, "the threads of one queue")
    for name in "bcd":
        asking.ask(name)
    until(lambda: asking.running == THREADS and asking.disk._waiting == 2, "all threads")
    go_on.set()
    asking.join()
    assert asking.answered == OF_ONE + 4 and not asking.refused


def test_who_waits_in_vain_is_told_so_and_so_are_those_who_would_be_too_many(go_on: threading.Event) -> None:
    asking = Asking(Disk(), go_on)
    for _ in range(OF_ONE):
        asking.ask("a")
    until(lambda: asking.running == OF_ONE, "the threads of one queue")
    assert "Too many pages" in refusal(lambda: asking.disk.ask("a", fail, 0.01))
    for _ in range(WAITING):
        asking.ask("a")
    until(lambda: asking.disk._waiting == WAITING, "those who wait")
    assert "Too many pages" in refusal(lambda: asking.disk.ask("a", fail))
    go_on.set()
    asking.join()
    assert asking.answered == OF_ONE + WAITING


def test_of_a_queue_that_hangs_nothing_more_is_asked_until_it_answers(
    go_on: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_module, "PATIENCE", -1.0)  # what runs, hangs
    asking = Asking(Disk(), go_on)
    assert "Queue a has not answered" in refusal(lambda: asking.disk.ask("a", asking._hang, 0.02))
    for _ in range(10):
        assert "Queue a does not answer" in refusal(lambda: asking.disk.ask("a", asking._hang))
    assert asking.running == 1
    go_on.set()
    until(lambda: not asking.disk._running, "the act that hung")
    assert asking.disk.ask("a", lambda: 1) == 1


def test_however_many_queues_hang_the_others_go_on_until_too_many_threads_hang(
    go_on: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_module, "PATIENCE", -1.0)  # what runs, hangs
    asking = Asking(Disk(), go_on)
    for number in range(HANGING):
        refusal(lambda number=number: asking.disk.ask(f"dead{number}", asking._hang, 0.02))  # type: ignore[misc]
        if number < HANGING - 1:
            assert asking.disk.ask("well", lambda: 1) == 1
    assert "does not answer" in refusal(lambda: asking.disk.ask("well", lambda: 1))
    assert asking.running == HANGING
    go_on.set()
    until(lambda: not asking.disk._running, "the acts that hung")
    assert asking.disk.ask("well", lambda: 1) == 1


def test_without_a_thread_to_spare_a_request_is_refused_and_takes_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk()

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        for _ in range(THREADS + 1):
            refusal(lambda: disk.ask("q", fail))
    assert disk.ask("q", lambda: 1) == 1
