"""A filter with a path reads bodies, each once and only when it must; a queue's filter holds for all who receive."""

from __future__ import annotations

import errno
import json
import logging
import os
import struct
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import bson
import msgpack
import pytest
from helpers import Make, base, drop, names_in, take, where

from dropq.config.schema import QueueConfig, kinds
from dropq.errors import ConfigError, InvalidFilter, Unavailable
from dropq.filters import LIMIT, Body, Value, compile_expression, compile_filter, for_name, message_type
from dropq.filters import message_types as types_module
from dropq.filters.message_types import DEPTH, TYPES
from dropq.format.message_file import MessageFile
from dropq.format.names import Name
from dropq.policies import matching
from dropq.policies.matching import Lookups, matcher
from dropq.storage import reading


def matches(text: str, body: bytes, kind: str = "json", separator: str | None = None) -> bool:
    content = Body(lambda: body, message_type(kind, separator))
    return compile_filter(text).matches(for_name(Name("a"), body=content))


def value(text: str, body: bytes, kind: str) -> Value:
    return compile_expression(text).value(for_name(Name("a"), body=Body(lambda: body, message_type(kind))))


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
        assert not compile_filter("x = 1 OR JMSPriority > 4").matches(for_name(Name("a"), body=Body(body)))
        assert body.count == 0

    def test_is_read_once_however_many_paths_ask(self) -> None:
        """For one message and one filter."""
        body = Reads(b'{"x": 1, "y": 2}')
        assert compile_filter("/x = 1 AND /y = 2 AND /x + /y = 3").matches(for_name(Name("a"), body=Body(body)))
        assert body.count == 1

    @pytest.mark.parametrize(
        "text", ["JMSPriority > 4 AND /x = 1", "JMSPriority = 4 OR /x = 1", "NOT (JMSPriority = 4 OR /x = 1)"]
    )
    def test_is_not_read_where_what_stands_before_decides(self, text: str) -> None:
        """So what the name tells is best written first."""
        body = Reads(b'{"x": 1}')
        compile_filter(text).matches(for_name(Name("a"), body=Body(body)))
        assert body.count == 0

    @pytest.mark.parametrize(
        "body",
        [
            b"", b"hello", b"{", b'{"x": 1', b'{"x": 1} x', b"\xff\xfe\xfa", b'{"x": NaN, "y": 1}', b'{"x": Infinity}',
            b"[" * 100_000, b'{"y":' * 100_000, b'{"x": ' + b"9" * 5000 + b"}", b"{'x': 1}", b"\0",
        ],
        ids=lambda body: repr(body[:20]),
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
        assert compile_filter("/x IS NULL AND /y IS NULL").matches(for_name(Name("a"), body=Body(body)))
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
        lookup = for_name(Name("a"), body=Body(body, message_type("binary")))
        assert compile_filter("/x IS NULL AND / IS NOT NULL").matches(lookup)
        assert body.count == 0


FIX = b"8=FIX.4.4\x0135=W\x0149=BANK\x01268=2\x01269=0\x01270=1.5\x01269=1\x01270=1.6\x0158=a=b\x01"
XML = b"""<?xml version="1.0"?>
<o:order id="7" o:urgent="yes" xmlns:o="urn:orders">
  <customer>Smith &amp; Co</customer><note/><blank> </blank>
  <item sku="A1"><price>10</price></item><item sku="B2">last</item>
  <text>before <b>bold</b> after</text>
</o:order>"""


def nested_bson(depth: int) -> bytes:
    sizes = range(5 + 8 * depth, 5, -8)
    return b"".join(struct.pack("<i", size) + b"\x03a\0" for size in sizes) + b"\5\0\0\0\0" + b"\0" * depth


def bson_of(kind: int, content: bytes) -> bytes:
    """A document with one field, /a."""
    return struct.pack("<iB", len(content) + 8, kind) + b"a\0" + content + b"\0"


class TestMessageTypes:
    def test_are_those_of_the_configuration(self) -> None:
        """Each that a queue may have is read somehow."""
        for name in TYPES:
            assert kinds(QueueConfig)["message_type"].read(name) == name
        assert kinds(QueueConfig)["message_type"].allowed.count('"') == 2 * len(TYPES)

    @pytest.mark.parametrize(
        "text",
        [
            "/35 = 'W' AND /49 = 'BANK'", "/269 = '1' AND /269 = '0' AND /269[1] = '1' AND /269[2] IS NULL",
            "/35[0] = 'W'", "/58 = 'a=b'", "/55 IS NULL AND / IS NOT NULL", "/270 BEGINS WITH '1.6'",
        ],
    )  # fmt: skip
    def test_fix_has_its_tags(self, text: str) -> None:
        """Each is the array of all its values."""
        assert matches(text, FIX, "fix")

    @pytest.mark.parametrize(
        ("kind", "separator", "body"),
        [
            ("fix", None, b"35=D"), ("fix", "|", b"35=D|49=\xff|"), ("nvfix", None, b"35=D\x01"),
            ("nvfix", ";", b"x=1;35=D"), ("fix", None, b"35=D\x0196=\x00\x01raw\x0149=x\x01\n"),
        ],
    )  # fmt: skip
    def test_fix_may_be_written_in_several_ways(self, kind: str, separator: str | None, body: bytes) -> None:
        """The last field may lack its separator, data may have one inside, and not every text is UTF-8."""
        assert matches("/35 = 'D'", body, kind, separator)

    def test_nvfix_has_names(self) -> None:
        """In place of numbers."""
        body = b"Name=x\x01Order Id=y\x0134=12\x01Empty=\x01"
        assert matches("/Name = 'x' AND /\"Order Id\" = 'y' AND /34 > 9 AND /Empty IS NULL", body, "nvfix")
        assert matches("/Name IS NULL AND /34 = '1'", b"34=1\x01Name=x\x01", "fix")

    @pytest.mark.parametrize(
        "text",
        [
            "/o:order/@id = '7' AND /o:order/@o:urgent = 'yes'", "/o:order/customer = 'Smith & Co'",
            "/o:order/note IS NULL AND /o:order/blank IS NULL AND /o:order/none IS NULL",
            "/o:order/item/price = '10' AND /o:order/item/@sku = 'B2'", "/o:order/item[1] = 'last'",
            "/o:order/item[0]/price IS NOT NULL AND /o:order/item[0] IS NOT NULL", "/o:order/customer[0] LIKE '^Smith'",
            "/o:order/text = 'before  after' AND /o:order/text/b = 'bold'", "/order IS NULL AND / IS NOT NULL",
        ],
    )  # fmt: skip
    def test_xml_has_elements_and_attributes(self, text: str) -> None:
        """By the names that stand there; what is repeated is an array, and an empty element is NULL."""
        assert matches(text, XML, "xml")

    @pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "latin-1", "cp1252"])
    def test_xml_says_its_encoding(self, encoding: str) -> None:
        """As XML does."""
        assert matches("/a = 'ü'", f'<?xml version="1.0" encoding="{encoding}"?><a>ü</a>'.encode(encoding), "xml")

    @pytest.mark.parametrize(
        ("path", "expected"),
        [
            ("/a", 1), ("/b/c", "x"), ("/b[0]", 2.5), ("/3", "a string"), ("/'-1'", "an integer"),
            ("/'1.5'", "a double"), ("/null", "nil"), ("/true", "a boolean"), ("/at", 1767225600005),
            ("/far", 2.0**62 * 1000), ("/u", 2.0**64), ("/none", None),
            ("/flag", True), ("/bin", None), ("/ext", None), ("/by", None),
        ],
    )  # fmt: skip
    def test_msgpack_has_the_fields_of_its_maps(self, path: str, expected: object) -> None:
        """By the texts of their keys; times are in ms since 1970."""
        body = msgpack.packb(
            {
                "a": 1, "b": [2.5, {"c": "x"}], 3: "an integer", "3": "a string", -1: "an integer", 1.5: "a double",
                None: "nil", True: "a boolean", "at": msgpack.Timestamp(1767225600, 5_999_999), "none": None,
                "far": msgpack.Timestamp(2**62, 0), "u": 2**64 - 1, "flag": True, "bin": b"a", b"by": 1,
                "ext": msgpack.ExtType(5, b"a"),
            }
        )  # fmt: skip
        assert value(path, body, "msgpack") == expected
        assert matches("/bin IS NOT NULL AND /ext IS NOT NULL AND /by IS NULL", body, "msgpack")

    @pytest.mark.parametrize(
        ("path", "expected"),
        [
            ("/a", 1), ("/long", 2**60), ("/b/c", "x"), ("/b[0]", 2.5), ("/at", 1767225600005), ("/far", 2**62),
            ("/id", "0123456789abcdef01234567"), ("/price", 1.5), ("/big", float("inf")), ("/none", None),
            ("/bin", None), ("/like", None), ("/ref", None),
        ],
    )  # fmt: skip
    def test_bson_has_the_fields_of_its_documents(self, path: str, expected: object) -> None:
        """Times are in ms since 1970, ids are texts, and decimals doubles."""
        body = bson.encode(
            {
                "a": 1, "long": 2**60, "b": [2.5, {"c": "x"}], "at": bson.DatetimeMS(1767225600005), "none": None,
                "far": bson.DatetimeMS(2**62), "id": bson.ObjectId("0123456789abcdef01234567"), "bin": b"a",
                "price": bson.Decimal128("1.5"), "big": bson.Decimal128("1E+6000"), "like": bson.Regex("a"),
                "ref": bson.DBRef("a", 1),
            }
        )  # fmt: skip
        assert value(path, body, "bson") == expected
        assert matches("/bin IS NOT NULL AND /like IS NOT NULL AND /ref IS NOT NULL", body, "bson")

    def test_bson_may_have_a_decimal_that_is_no_number(self) -> None:
        """Also one that Python refuses to convert."""
        assert not matches("/a = 1 OR /a < 1 OR /a >= 1", bson_of(0x13, b"\0" * 15 + b"\x7e"), "bson")

    @pytest.mark.parametrize(
        ("kind", "body"),
        [
            ("fix", b""), ("fix", b"hello"), ("fix", b"\x0135=D\x01"), ("fix", b"Name=x\x01"), ("fix", b"=D\x01"),
            ("nvfix", b"hello"), ("nvfix", b"=x"), ("fix", "٣=D".encode()), ("xml", b""), ("xml", b"hello"),
            ("xml", b"<a>"), ("xml", b"<a/><a/>"), ("xml", b"<a>\0</a>"), ("xml", b"<a>&b;</a>"),
            ("xml", b"<a>\xff</a>"),
            ("xml", b'<!DOCTYPE a [<!ENTITY b "bb"><!ENTITY c "&b;&b;&b;">]><a>&c;&c;&c;</a>'),
            ("xml", b'<!DOCTYPE a [<!ENTITY b SYSTEM "file:///etc/passwd">]><a>&b;</a>'),
            ("xml", b'<!DOCTYPE a [<!ENTITY % b SYSTEM "http://127.0.0.1:9/b"> %b;]><a>1</a>'),
            ("xml", b'<!DOCTYPE a SYSTEM "http://127.0.0.1:9/a.dtd"><a>1</a>'), ("xml", b"<!DOCTYPE a><a>1</a>"),
            ("xml", b'<?xml version="1.0" encoding="zlib"?><a>1</a>'),
            ("xml", b'<?xml version="1.0" encoding="undefined"?><a>1</a>'),
            ("msgpack", b""), ("msgpack", b"hello"), ("msgpack", b"\x81\xa1a"), ("msgpack", b"\x81\xa1a\1\1"),
            ("msgpack", b"\x81\xa1a\xa1\xff"), ("msgpack", b"\xc1"), ("msgpack", b"\xd4\xffa"),
            ("msgpack", b"\xdf\xff\xff\xff\xff\xa1a\1"), ("msgpack", b"\xdb\xff\xff\xff\xffa"),
            ("msgpack", b"\xc6\xff\xff\xff\xffa"), ("msgpack", b"\xc9\xff\xff\xff\xff\1a"),
            ("bson", b""), ("bson", b"hello"), ("bson", b'{"a": 1}'), ("bson", bson.encode({"a": 1})[:-1]),
            ("bson", bson.encode({"a": 1}) + b"\0"), ("bson", b"\xff\xff\xff\xff" + bson.encode({"a": 1})[4:]),
            ("bson", b"\xff\xff\xff\x7f" + bson.encode({"a": 1})[4:]), ("bson", bson_of(2, b"\xff\xff\xff\x7fa\0")),
            ("bson", bson_of(5, b"\xff\xff\xff\x7f\0a")), ("bson", bson_of(2, b"\2\0\0\0\xff\0")),
            ("bson", bson_of(99, b"")),
        ],
        ids=repr,
    )  # fmt: skip
    def test_of_which_a_body_is_not_give_it_only_nulls(self, kind: str, body: bytes) -> None:
        """Whatever it lacks, refers to, or pretends to have."""
        content = Body(lambda: body, message_type(kind))
        lookup = for_name(Name("a"), body=content)
        assert compile_filter("/ IS NULL AND /a IS NULL AND /35 IS NULL AND /Name IS NULL").matches(lookup)
        assert content.unread == ""

    @pytest.mark.parametrize(
        ("kind", "begin", "end", "times"),
        [
            ("json", b"[", b"]", 100_000), ("xml", b"<a>", b"</a>", 100_000), ("xml", b"<a>", b"</a>", DEPTH + 1),
            ("msgpack", b"\x91", b"\1", 100_000), *((kind, b" ", b"", LIMIT + 1) for kind in TYPES if kind != "binary"),
            *((kind, b" ", b"", LIMIT // 4 + 1) for kind in ("xml", "msgpack", "bson")),
        ],
    )  # fmt: skip
    def test_say_of_what_is_too_deep_or_too_long_that_it_was_not_read(
        self, kind: str, begin: bytes, end: bytes, times: int
    ) -> None:
        """It may be of its type."""
        self._is_not_read(kind, begin * times + end * times)

    def test_say_of_bson_that_is_too_deep_that_it_was_not_read(self) -> None:
        """As of the others."""
        self._is_not_read("bson", nested_bson(100_000))

    def _is_not_read(self, kind: str, body: bytes) -> None:
        content = Body(lambda: body, message_type(kind))
        assert compile_filter("/a IS NULL AND / IS NULL").matches(for_name(Name("a"), body=content))
        assert content.unread == ("Nested too deeply" if len(body) <= LIMIT // 4 else "File too large")

    def test_say_why_the_system_refused(self) -> None:
        """Until something is looked up there is nothing to say."""
        content = Body(Reads(PermissionError(errno.EACCES, "Permission denied")))
        assert content.unread == ""
        assert compile_filter("/a IS NULL").matches(for_name(Name("a"), body=content))
        assert content.unread == "Permission denied"

    @pytest.mark.parametrize(
        ("kind", "body"),
        [("xml", b"<a>" * 500 + b"x" + b"</a>" * 500), ("msgpack", b"\x91" * 500 + b"\1"), ("bson", nested_bson(500))],
    )
    def test_are_read_where_they_are_nested_less_deeply(self, kind: str, body: bytes) -> None:
        """Like JSON."""
        assert matches("/ IS NOT NULL", body, kind)

    def test_take_no_memory_for_what_a_body_only_pretends_to_have(self) -> None:
        """A thousand arrays in each other, each said to be almost as long as the body, would take gigabytes."""
        body = (b"\xdd" + struct.pack(">I", 1_000_000)) * 1000
        body += b"\0" * (1_010_000 - len(body))
        parsing = message_type("msgpack")
        tracemalloc.start()
        try:
            assert compile_filter("/ IS NULL").matches(for_name(Name("a"), body=Body(lambda: body, parsing)))
            assert tracemalloc.get_traced_memory()[1] < 20 << 20
        finally:
            tracemalloc.stop()


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
        monkeypatch.setattr(types_module, "JSON", types_module.JSON._replace(longest=100_000))
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

    def test_reads_fix_with_the_separator_of_the_queue(self, make: Make) -> None:
        """And so do those who look."""
        queue = make(MessageType="fix", FieldSeparator=124, filter="/35 = 'D'")
        queue.send("35=D\x0149=a")
        queue.send("35=D|49=b|")
        assert take(queue).text == "35=D|49=b|"
        assert queue.receive() is None
        assert [message.text for message in queue.browse(filter="/35 BEGINS WITH 'D'")] == ["35=D\x0149=a"]

    @pytest.mark.parametrize(("kind", "encode"), [("msgpack", msgpack.packb), ("bson", bson.encode)])
    def test_and_its_priority_read_what_is_not_text(self, make: Make, kind: str, encode: Any) -> None:
        """The message with the higher number comes first."""
        queue = make(message_type=kind, filter="/n > 1", priority="/n")
        for number in (1, 2, 3):
            queue.send(encode({"n": number}))
        assert [take(queue).body for _ in range(2)] == [encode({"n": 3}), encode({"n": 2})]
        assert queue.receive() is None

    @pytest.mark.parametrize(("kind", "package"), [("msgpack", "msgpack"), ("bson", "pymongo")])
    @pytest.mark.parametrize("option", ["filter", "barrier_expression", "priority"])
    def test_needs_the_package_of_its_message_type_only_where_bodies_are_read(
        self, make: Make, monkeypatch: pytest.MonkeyPatch, kind: str, package: str, option: str
    ) -> None:
        """Who sends does not need it, nor who reads names alone."""
        monkeypatch.setitem(sys.modules, kind, None)
        queue = make(message_type=kind, **{option: "/n > 1"})
        queue.send(b"a")
        with pytest.raises(Unavailable, match=rf"need the package {package}, .* pip install 'dropq\[{kind}\]'"):
            queue.receive()
        named = make(message_type=kind, **{option: "JMSPriority > 3"})
        named.send(b"a")
        assert take(named).body == b"a"

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
