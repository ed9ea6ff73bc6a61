"""A filter with a path reads bodies, each once and only when it must; a queue's filter holds for all who receive."""

from __future__ import annotations

import errno
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from helpers import Make, base, drop, names_in, take, where

from dropq.errors import ConfigError, InvalidFilter, Unavailable
from dropq.filters import LIMIT, compile_filter, for_name
from dropq.format.message_file import MessageFile
from dropq.format.names import Name
from dropq.policies import matching
from dropq.policies.matching import Lookups, matcher
from dropq.storage import reading


def matches(text: str, body: bytes, message_type: str = "json") -> bool:
    return compile_filter(text).matches(for_name(Name("a"), body=lambda: body, message_type=message_type))


class Reads:
    """A body that counts how often it is read, and is what it is told to be."""

    def __init__(self, body: bytes | OSError) -> None:
        self.body = body
        self.count = 0

    def __call__(self) -> bytes:
        self.count += 1
        if isinstance(self.body, OSError):
            raise self.body
        return self.body


class TestABody:
    def test_is_not_read_by_a_filter_without_a_path(self) -> None:
        """A selector knows the name alone."""
        body = Reads(b'{"x": 1}')
        assert not compile_filter("x = 1 OR JMSPriority > 4").matches(for_name(Name("a"), body=body))
        assert body.count == 0

    def test_is_read_once_however_many_paths_ask(self) -> None:
        """For one message and one filter."""
        body = Reads(b'{"x": 1, "y": 2}')
        assert compile_filter("/x = 1 AND /y = 2 AND /x + /y = 3").matches(for_name(Name("a"), body=body))
        assert body.count == 1

    @pytest.mark.parametrize(
        "text", ["JMSPriority > 4 AND /x = 1", "JMSPriority = 4 OR /x = 1", "NOT (JMSPriority = 4 OR /x = 1)"]
    )
    def test_is_not_read_where_what_stands_before_decides(self, text: str) -> None:
        """So what the name tells is best written first."""
        body = Reads(b'{"x": 1}')
        compile_filter(text).matches(for_name(Name("a"), body=body))
        assert body.count == 0

    @pytest.mark.parametrize(
        "body",
        [
            b"", b"hello", b"{", b'{"x": 1', b'{"x": 1} x', b"\xff\xfe\xfa", b'{"x": NaN, "y": 1}', b'{"x": Infinity}',
            b"[" * 100_000, b'{"y":' * 100_000, b'{"x": ' + b"9" * 5000 + b"}", b"{'x': 1}", b"\0",
        ],
        ids=repr,
    )  # fmt: skip
    def test_that_is_no_json_has_only_nulls(self, body: bytes) -> None:
        """Also one that is nested too deeply, or has numbers that Python refuses."""
        assert matches("/x IS NULL AND /y IS NULL AND / IS NULL", body[:200_000])

    @pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
    def test_is_json_in_any_encoding_of_json(self, encoding: str) -> None:
        """As Python reads it."""
        assert matches("/größe = 'ü'", '{"größe": "ü"}'.encode(encoding))

    @pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES, errno.EIO, errno.ESTALE, errno.EFBIG])
    def test_that_cannot_be_read_has_only_nulls(self, number: int) -> None:
        """Whether it is gone or the system refuses."""
        body = Reads(OSError(number, os.strerror(number)))
        assert compile_filter("/x IS NULL AND /y IS NULL").matches(for_name(Name("a"), body=body))
        assert body.count == 1

    def test_that_nobody_gives_has_only_nulls(self) -> None:
        """As where only a name is known."""
        assert compile_filter("/x IS NULL AND / IS NULL").matches(for_name(Name("a")))

    def test_that_is_longer_than_the_limit_has_only_nulls(self) -> None:
        """Whoever gives it."""
        body = b'{"x": 1, "y": "' + b"a" * LIMIT + b'"}'
        assert matches("/x IS NULL", body)
        assert matches("/x = 1", b'{"x": 1, "y": "' + b"a" * (LIMIT - 17) + b'"}')

    def test_of_type_text_is_one_string(self) -> None:
        """Which the path / names; it has no fields, and is NULL when it is no UTF-8."""
        assert matches("/ LIKE 'order [0-9]+' AND /x IS NULL", b'{"x": "order 12"}', "text")
        assert matches("/ IS NULL", b"\xff", "text")

    def test_of_type_binary_is_never_looked_into(self) -> None:
        """It is there, and that is all."""
        body = Reads(b'{"x": 1}')
        lookup = for_name(Name("a"), body=body, message_type="binary")
        assert compile_filter("/x IS NULL AND / IS NOT NULL").matches(lookup)
        assert body.count == 0


def bodies_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files whose bodies filters read from now on."""
    read: list[str] = []
    real = reading.read_body

    def recorded(path: str, limit: int | None = None) -> bytes:
        read.append(os.path.basename(path))
        return real(path, limit)

    monkeypatch.setattr(reading, "read_body", recorded)
    return read


class TestListedFiles:
    def test_are_each_read_once_however_often_they_are_listed(
        self, make: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A body does not change, so an answer holds as long as the file is there."""
        queue = make()
        drop(queue, "a.json", b'{"x": 1}')
        drop(queue, "b.json", b'{"x": 2}')
        read = bodies_read(monkeypatch)
        with queue.subscribe(filter="/x = 3") as subscription:
            for _ in range(5):
                assert subscription.receive() is None
        assert sorted(read) == ["a.json", "b.json"]

    def test_are_not_opened_for_a_filter_without_a_path(self, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nobody needs to be allowed to read them."""
        queue = make()
        queue.send("{}", priority=6)
        read = bodies_read(monkeypatch)
        assert [message.priority for message in queue.browse(filter="JMSPriority > 5")] == [6]
        with queue.subscribe(filter="JMSPriority > 5") as subscription:
            message = subscription.receive()
            assert message is not None and not read

    def test_that_somebody_claimed_meanwhile_are_asked_again_when_they_come_back(self, make: Make) -> None:
        """What is gone has only NULLs for now, and that is not remembered."""
        queue = make()
        test, target = matcher(queue.context, "/x = 1"), base(queue) / "target"
        assert not test(MessageFile("a.json", 5))
        (target / "a.json").write_text('{"x": 1}')
        assert test(MessageFile("a.json", 5))
        (target / "a.json").unlink()
        assert test(MessageFile("a.json", 5))

    def test_whose_sidecars_are_missing_are_asked_again(self, make: Make) -> None:
        """What stands there may be read the next time."""
        queue = make()
        queue.send('{"x": 1}', properties={"long": "a" * 200})
        [sidecar] = (Path(queue.root.path) / ".dropq" / "meta").glob("*.json")
        hidden = sidecar.rename(sidecar.with_suffix(".away"))
        with queue.subscribe(filter="/x = 1 AND long IS NOT NULL") as subscription:
            assert subscription.receive() is None
            hidden.rename(sidecar)
            assert subscription.receive() is not None

    def test_that_come_under_the_name_of_one_that_went_are_asked_anew(self, make: Make) -> None:
        """A script may use a name twice; then the second file came at another time."""
        queue = make()
        test, target = matcher(queue.context, "/x = 1"), base(queue) / "target"
        (target / "a.json").write_text('{"x": 1}')
        assert test(MessageFile("a.json", 5))
        (target / "a.json").write_text('{"x": 2}')
        assert not test(MessageFile("a.json", 6))

    def test_that_nobody_asks_for_any_more_are_forgotten(self, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        """What is kept does not grow with what passes through a queue, and what is asked for again stays."""
        monkeypatch.setattr(matching, "REMEMBERED", 3)
        read = bodies_read(monkeypatch)
        queue = make()
        test, target = matcher(queue.context, "/x = 1"), base(queue) / "target"
        for number in range(8):
            (target / f"{number}").write_text('{"x": 1}')
            assert test(MessageFile(str(number))) and test(MessageFile("0"))
        assert read == list("01234567")
        assert test(MessageFile("1"))
        assert read == list("012345671")

    def test_that_are_too_long_are_not_read_and_warned_of_once(
        self, make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """They have only NULLs, and stay that way."""
        monkeypatch.setattr("dropq.filters.LIMIT", 100_000)
        queue = make()
        drop(queue, "long.json", b'{"x": 1, "y": "' + b"a" * 100_000 + b'"}')
        with caplog.at_level(logging.WARNING, "dropq"), queue.subscribe(filter="/x = 1") as subscription:
            for _ in range(3):
                assert subscription.receive() is None
        [logged] = [record.getMessage() for record in caplog.records if "NULLs" in record.getMessage()]
        assert "long.json: it is longer than" in logged

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
    def test_that_may_not_be_read_are_passed_over(self, make: Make) -> None:
        """They have only NULLs, until they may be read."""
        queue = make()
        drop(queue, "a.json", b'{"x": 1}')
        (base(queue) / "target" / "a.json").chmod(0)
        assert not list(queue.browse(filter="/x = 1"))
        (base(queue) / "target" / "a.json").chmod(0o600)
        assert [message.id for message in queue.browse(filter="/x = 1")] == ["a.json"]

    def test_answer_to_any_question(self, make: Make) -> None:
        """Not only whether they match."""
        queue = make()
        (base(queue) / "target" / "a.json").write_text('{"x": 5}')
        asked = Lookups(queue.context).remembering(lambda lookup: lookup("JMSPriority"))
        assert asked(MessageFile("a.json")) == 4


class TestAcrossTheVerbs:
    def test_a_subscription_takes_what_matches_and_leaves_the_rest(self, make: Make) -> None:
        """By what is in the body and what the name tells at once."""
        queue = make()
        for number in range(6):
            queue.send(json.dumps({"order": {"total": number * 50}}), properties={"n": number})
        with queue.subscribe(filter="/order/total > 100 AND n <> 4", max_backlog=None) as subscription:
            taken = [message.properties["n"] for message in subscription.receive_many(6)]
        assert taken == [3, 5]

    @pytest.mark.parametrize("state", ["target", "processing", "processed", "error", "delayed"])
    def test_browse_reads_the_bodies_of_every_state(self, make: Make, state: str) -> None:
        """Also of what is held, under its holder's name."""
        queue = make()
        for number in (1, 2):
            queue.send(json.dumps({"x": number}), delay="1h" if state == "delayed" else None)
        if state in ("processing", "processed", "error"):
            held = [take(queue), take(queue)]
            for message in held if state != "processing" else ():
                message.ack() if state == "processed" else message.reject("bad")
        assert [message.text for message in queue.browse(state, "/x = 2")] == ['{"x": 2}']

    def test_what_is_requeued_is_chosen_by_its_body(self, make: Make) -> None:
        """Administrators have the same language."""
        queue = make()
        for number in (1, 2):
            queue.send(json.dumps({"x": number}))
            take(queue).reject("bad")
        assert [outcome.ok for outcome in queue.requeue(filter="/x = 2")] == [True]
        assert where(queue) == {"target": [b'{"x": 2}'], "error": [b'{"x": 1}']}


class TestTheFilterOfAQueue:
    def test_holds_for_all_who_receive(self, make: Make) -> None:
        """What does not match is not in the queue: it stays where it is, untouched."""
        queue = make(filter="/x > 1")
        for number in range(4):
            queue.send(json.dumps({"x": number}))
        drop(queue, "note.txt", b"no json")
        before = names_in(queue, "target")
        assert [take(queue).text for _ in range(2)] == ['{"x": 2}', '{"x": 3}']
        assert queue.receive() is None
        assert where(queue)["target"] == [b"no json", b'{"x": 0}', b'{"x": 1}']
        assert set(names_in(queue, "target")) < set(before)

    def test_and_that_of_a_subscription_are_both_to_hold(self, make: Make) -> None:
        """Each in a language of its own."""
        queue = make(filter="JMSPriority > 4")
        queue.send('{"x": 1}', priority=9)
        queue.send('{"x": 2}', priority=9)
        queue.send('{"x": 2}', priority=1)
        with queue.subscribe(filter="/x = 2", max_backlog=None) as subscription:
            assert [(message.priority, message.text) for message in subscription.receive_many(3)] == [(9, '{"x": 2}')]

    def test_does_not_hold_for_who_looks_or_administrates(self, make: Make) -> None:
        """What is not in the queue can still be seen, and be moved away."""
        queue = make(filter="/x = 1")
        queue.send('{"x": 2}')
        assert [message.text for message in queue.browse()] == ['{"x": 2}']
        assert queue.counts()["target"] == 1

    def test_reads_bodies_as_the_message_type_says(self, make: Make) -> None:
        """Text is no JSON although it might be read as such."""
        queue = make(filter="/ LIKE 'urgent'", message_type="text")
        queue.send("not so")
        queue.send("this is urgent")
        assert take(queue).text == "this is urgent"
        assert queue.receive() is None

    def test_of_a_queue_that_needs_an_extra_does_not_hinder_who_sends(
        self, make: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Only who receives has to know the language."""

        def missing() -> Any:
            raise Unavailable("install dropq with its extra `amps`")

        monkeypatch.setattr("dropq.filters.regex._re2", missing)
        queue = make(filter="/x LIKE 'a'")
        queue.send('{"x": "a"}')
        with pytest.raises(Unavailable, match="extra `amps`"):
            queue.receive()
        assert where(queue) == {"target": [b'{"x": "a"}']}

    def test_that_cannot_be_read_is_an_error_with_file_key_and_column(self, make: Make) -> None:
        """Nobody receives by a guess."""
        queue = make()
        (base(queue) / "queue.toml").write_text('Filter = "/x >"\n')
        with pytest.raises(ConfigError, match=r'queue.toml: Filter = "/x >": bad filter, column 5: expected a value'):
            queue.root.queue(queue.name).receive()

    def test_of_a_subscription_that_cannot_be_read_takes_nothing(self, make: Make) -> None:
        """The error comes before anything is claimed."""
        queue = make()
        queue.send('{"x": 1}')
        with pytest.raises(InvalidFilter, match="column 5"):
            queue.subscribe(filter="/x >")
        assert where(queue) == {"target": [b'{"x": 1}']}


@pytest.mark.parametrize("blank", ["", " \n"])
def test_an_empty_filter_is_for_looking_only(make: Make, blank: str) -> None:
    queue = make()
    queue.send("a")
    assert len(list(queue.browse(filter=blank))) == 1
    with pytest.raises(InvalidFilter, match="would match every message"):
        queue.subscribe(filter=blank)
    assert where(queue) == {"target": [b"a"]}
