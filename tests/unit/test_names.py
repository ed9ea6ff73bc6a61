"""Every name round-trips, nothing in a folder can upset the reader, and names sort as they are delivered."""

from __future__ import annotations

import json
import math
import os
import pickle
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from forks import ended, fork
from hypothesis import example, given
from hypothesis import strategies as st

from dropq.errors import InvalidName
from dropq.format.claims import Claim, claim_owner, claim_owners, client_part, split_claim
from dropq.format.escapes import decode, encode
from dropq.format.ids import IdSource
from dropq.format.names import (
    CLASSES,
    DO_NOT_ROUTE,
    ID_LIMIT,
    MARK_LIMIT,
    NAME_BUDGET,
    PREFIX_LIMIT,
    Name,
    bears,
    check_message_id,
    check_property,
    check_property_name,
    check_queue_name,
    file_name,
    order,
    parse,
    restore,
    room,
    shorten,
    squeeze,
    write,
)
from dropq.format.typed import Typed

PLAIN = "4.1140429201295000-9262574723.T"
ALL_FIELDS = "4.1140429201295000-9262574723.T.1140429211295.corr1283.TestQueue1.XYZType.prop1S=hello"
VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "dropboxmq-1.2-names.json").read_text("utf-8"))
JAVA_TYPES = {
    "Boolean": "B", "Byte": "Y", "Short": "H", "Integer": "I", "Long": "L", "Float": "F", "Double": "D",
    "String": "S",
}  # fmt: skip

text = st.text(st.characters(codec="utf-8"))
some_text = text.filter(bool)
any_text = st.text(st.characters(exclude_categories=()))
file_names = (
    st.binary(min_size=1, max_size=255).filter(lambda raw: b"/" not in raw and b"\0" not in raw).map(os.fsdecode)
)
generated_ids = st.builds("{:016d}-{:010d}".format, st.integers(10**15, 10**16 - 1), st.integers(0, 10**10 - 1))
typed_values = st.one_of(
    st.booleans().map(lambda value: Typed("B", value)),
    *[
        st.builds(Typed, st.just(kind), st.integers(-(1 << bits), (1 << bits) - 1))
        for kind, bits in {"Y": 7, "H": 15, "I": 31, "L": 63}.items()
    ],
    st.floats(width=32).map(lambda value: Typed("F", value)),
    st.floats().map(lambda value: Typed("D", value)),
    text.map(lambda value: Typed("S", value)),
)
senders_properties = st.dictionaries(
    some_text.filter(lambda name: not name.startswith("JMS")), typed_values, max_size=4
)
#: What is acted on, of all that dropq writes into a name.
ACTED_ON = ("cancels", "died", "since", "hops", "copied", "via", "copy", "first", "delivery_count")
counts = st.integers(0, (1 << 31) - 1)
times = st.integers(0, (1 << 63) - 1)
tokens = st.from_regex(r"[0-9a-z]{8,16}", fullmatch=True)
marks = st.text(max_size=MARK_LIMIT).filter(lambda mark: len(encode(mark)) <= MARK_LIMIT)
names = st.builds(
    Name,
    id=st.one_of(generated_ids, some_text, file_names),
    priority=st.integers(-(1 << 31), (1 << 31) - 1),
    message_class=st.sampled_from(CLASSES),
    expiration=times,
    correlation_id=st.none() | some_text,
    reply_to=st.none() | some_text,
    type=st.none() | some_text,
    properties=senders_properties,
    delivery_count=counts,
    cancels=counts,
    not_before=times,
    since=times,
    copy=marks,
    meta=st.just("") | tokens,
    via=marks,
    hops=counts,
    origin=text,
    from_client=text,
    first=counts,
    record=counts,
    records=counts,
    cut=counts,
    replayed=st.booleans(),
)


def without_prefix(filename: str) -> str:
    return split_claim(filename)[1]


class TestEveryNameRoundTrips:
    @given(names)
    def test_what_is_written_reads_back_equal(self, name: Name) -> None:
        assert parse(write(name)) == name

    @given(names)
    def test_with_typed_replies_too(self, name: Name) -> None:
        assert parse(write(name, typed_replies=True), typed_replies=True) == name

    @given(names)
    def test_the_order_of_properties_survives(self, name: Name) -> None:
        assert list(parse(write(name)).properties) == list(name.properties)

    @given(names)
    def test_a_written_name_is_safe_in_a_file_system_and_before_a_claim_prefix(self, name: Name) -> None:
        written = write(name)
        assert written.isascii()
        assert written.isprintable()
        assert not set(written) & set("/~, \0")
        assert not written.endswith(".")
        assert split_claim(written) == (None, written)

    @given(any_text.filter(bool), st.booleans())
    @example("4.\ud800.B", False)
    @example("4.a.B..\udc80", False)
    @example("4.a.B..%80.%zz.+%", True)
    @example("4.a.B...Qtopic-root/", True)
    @example("4.a.B...Ttopic-root/", True)
    @example("4.a.B...QTx", True)
    @example("4.a.B.....aD=1e999&b=1&=&S=&&x", False)
    @example("4.a.B.....JMS_dropq_metaS=..%2F..&JMS_dropq_cancelsI=-1&JMSXDeliveryCountS=x", False)
    def test_writing_what_was_read_settles_at_once(self, filename: str, typed: bool) -> None:
        once = write(parse(filename, typed_replies=typed), typed_replies=typed)
        assert write(parse(once, typed_replies=typed), typed_replies=typed) == once

    @given(any_text)
    def test_reading_never_raises(self, filename: str) -> None:
        claim, rest = split_claim(filename)
        assert parse(rest).id or not rest
        assert (claim.prefix if claim else "") + rest == filename
        assert parse(filename).born_foreign in (filename, None)

    @given(st.text("4.-BT%&=+~,QIS0é\udc80", min_size=3))
    def test_nor_does_it_on_what_almost_looks_like_a_name(self, tail: str) -> None:
        once = write(parse("4.a.B" + tail))
        assert write(parse(once)) == once

    @given(file_names)
    def test_a_foreign_name_that_was_coded_gives_the_same_bytes_back(self, filename: str) -> None:
        name = parse(filename)
        if name.foreign:
            assert file_name(name) == name.born_foreign == filename
            assert os.fsencode(parse(write(name)).id) == os.fsencode(filename)

    def test_a_name_can_be_pickled_hashed_and_changed_only_by_replacing(self) -> None:
        name = parse(ALL_FIELDS)
        assert pickle.loads(pickle.dumps(name)) == name == parse(ALL_FIELDS)
        assert hash(name) == hash(parse(ALL_FIELDS))
        assert replace(parse(PLAIN), priority=9) == Name("1140429201295000-9262574723", 9, "T")
        with pytest.raises(AttributeError):
            name.priority = 5  # type: ignore[misc]

    def test_a_value_that_cannot_stand_in_a_name_is_not_written(self) -> None:
        for bad in (
            Name("a", 1 << 31),
            Name("a", 4, "X"),
            Name("a", 4, ""),
            Name("a", 4, "MB"),
            Name("a", expiration=-1),
        ):
            with pytest.raises(ValueError, match=r"priority|class|expiration"):
                write(bad)


class TestTheExamplesOfTheProtocol:
    @pytest.mark.parametrize("example_name", [PLAIN, ALL_FIELDS])
    def test_both_round_trip_byte_for_byte(self, example_name: str) -> None:
        assert write(parse(example_name)) == example_name

    def test_all_fields_are_read(self) -> None:
        assert parse(ALL_FIELDS) == Name(
            id="1140429201295000-9262574723",
            priority=4,
            message_class="T",
            expiration=1140429211295,
            correlation_id="corr1283",
            reply_to="TestQueue1",
            type="XYZType",
            properties={"prop1": Typed("S", "hello")},
        )

    def test_trailing_dots_are_read_and_not_written(self) -> None:
        for dots in range(12):
            assert write(parse(PLAIN + "." * dots)) == PLAIN
            assert write(parse(ALL_FIELDS + "." * dots)) == ALL_FIELDS

    def test_the_last_field_may_hold_dots(self) -> None:
        assert parse("4.a.T.....zeroD=0.0&sS=a.b.c").properties == {
            "zero": Typed("D", 0.0),
            "s": Typed("S", "a.b.c"),
        }

    def test_a_generated_id_tells_its_time(self) -> None:
        assert parse(PLAIN).generated
        assert parse(PLAIN).timestamp == 1140429201295
        for other in (
            "4.corr-1.B",
            "4.114042920129500-9262574723.B",
            "4.1140429201295000-9262574723x.B",
            "x.csv",
        ):
            assert not parse(other).generated
            assert parse(other).timestamp is None
        assert not Name("1140429201295000-9262574723\n").generated

    def test_counters_go_first_and_ours_last(self) -> None:
        name = Name(
            "a",
            delivery_count=2,
            properties={"x": Typed("I", 1)},
            cancels=3,
            not_before=4,
            since=5,
            copy="c",
            meta="m",
            via="q/s",
            hops=6,
            origin="o",
            from_client="c.d",
        )
        assert write(name) == (
            "4.a.B.....JMSXDeliveryCountI=2&xI=1&JMS_dropq_cancelsI=3&JMS_dropq_notBeforeL=4&JMS_dropq_sinceL=5"
            "&JMS_dropq_copyS=c&JMS_dropq_metaS=m&JMS_dropq_viaS=q%2Fs&JMS_dropq_hopsI=6&JMS_dropq_originS=o"
            "&JMS_dropq_fromS=c%2Ed"
        )


def vectors(*keys: str) -> list[Any]:
    found = [(vector, key) for vector in VECTORS for key in keys if key in vector]
    return [pytest.param(vector, key, id=f"{vector['case']}-{key}") for vector, key in found]


class TestNamesThatDropboxMQWrote:
    @pytest.mark.parametrize(
        ("vector", "key"),
        vectors("target_name", "processing_name", "processed_name", "error_name", "expired_name"),
    )
    def test_are_read_as_it_reads_them(self, vector: dict[str, Any], key: str) -> None:
        claim, rest = split_claim(vector[key])
        assert (claim is None) == (key == "target_name")
        assert not (claim and claim.ours)
        name, said = parse(rest, typed_replies=True), vector["read_back"]
        assert not name.foreign
        assert name.generated
        if not said:
            return
        assert said["id"] == "ID:" + name.id
        assert (said["priority"], said["class"]) == (name.priority, name.message_class)
        assert (said["expiration"], said["timestamp"]) == (name.expiration, name.timestamp)
        assert (said["type"], said["corr"]) == (name.type, name.correlation_id)
        assert said["reply"] == (name.reply_to and "queue:" + name.reply_to)
        assert name.delivery_count == {"processed_name": 1, "error_name": 2}.get(key, 0)
        read = {key: [typed.type, typed.text] for key, typed in name.properties.items()}
        expected = {key: [JAVA_TYPES[kind], value] for key, (kind, value) in said["properties"].items()}
        expected.pop("JMSXDeliveryCount")
        assert read == expected

    @pytest.mark.parametrize(("vector", "key"), vectors("target_name"))
    def test_are_written_byte_for_byte(self, vector: dict[str, Any], key: str) -> None:
        written = vector[key]
        assert write(parse(written, typed_replies=True), typed_replies=True) == written
        assert write(parse(written)) == written

    def test_a_reply_to_a_topic_keeps_its_kind(self) -> None:
        for bare, typed in (
            ("q", "Qq"),
            ("topic-root/t", "Tt"),
            ("Tq", "QTq"),
            ("topic-root/", "Qtopic-root%2F"),
        ):
            assert write(Name("a", reply_to=bare), typed_replies=True) == f"4.a.B...{typed}"
            assert parse(f"4.a.B...{typed}", typed_replies=True).reply_to == bare
        assert parse("4.a.B...TestQueue1").reply_to == "TestQueue1"
        assert parse("4.a.B...xyz", typed_replies=True).reply_to == "xyz"
        assert parse("4.a.B...Q", typed_replies=True) == parse("4.a.B...T", typed_replies=True) == Name("a")


class TestForeignNames:
    @pytest.mark.parametrize(
        "filename",
        [
            "20241105.csv", "2024.report.csv", "report~2.csv", "a.b.c.d", "report", "4.x", "4.x.", "4..B",
            "4.x..", "4.x......", "4...c", "x.y..5", "2147483648.x..5",
            "4.x.b", "4.x.Z", "+4.x.B", "4_0.x.B", " 4.x.B", "٤.x.B", "2147483648.x.B", "-2147483649.x.B",
            "--4.x.B", "4.x.BT", "9" * 5000 + ".x.B", "a,b,c", "x,1,2~y", "backup~", "~4.x.B",
            "Über größe.csv", "new\nline", "caf\udce9.txt", "4.x.B\n",
        ],
        ids=lambda filename: ascii(filename)[1:40],
    )  # fmt: skip
    def test_are_messages_of_priority_four_under_their_own_name(self, filename: str) -> None:
        assert split_claim(filename) == (None, filename)
        assert parse(filename) == Name(filename, foreign=True)
        assert file_name(parse(filename)) == filename

    @pytest.mark.parametrize(
        "filename",
        ["4.x.B", "-5.x.T", "-2147483648.x.S", "2147483647.x.O", "007.x.M", "4.a b.P", "4.report~2.B"],
    )
    def test_three_good_fields_make_a_coded_one(self, filename: str) -> None:
        assert not parse(filename).foreign
        assert parse(filename).priority == int(filename.split(".")[0])

    @pytest.mark.parametrize(
        ("filename", "read"),
        [
            ("4.x..1140429211295", Name("x", expiration=1140429211295)),
            ("6.x...c", Name("x", 6, correlation_id="c")),
            (
                "4.1140429201295000-9262574723......nI=1",
                Name("1140429201295000-9262574723", properties={"n": Typed("I", 1)}),
            ),
            ("4.x......nI=1", Name("x", properties={"n": Typed("I", 1)})),
        ],
    )
    def test_an_empty_class_before_other_fields_is_that_of_bytes(self, filename: str, read: Name) -> None:
        assert parse(filename) == read
        assert parse(write(read)) == read

    def test_are_coded_when_something_has_happened_to_them(self) -> None:
        assert write(replace(parse("report.csv"), delivery_count=1)) == "4.report%2Ecsv.B.....JMSXDeliveryCountI=1"

    def test_get_their_own_name_back(self) -> None:
        coded = replace(parse("report.csv"), foreign=False, copy="x7", delivery_count=3, cancels=1, since=5)
        assert parse(write(coded)).born_foreign == "report.csv"

    @pytest.mark.parametrize(
        "name",
        [
            Name("report.csv"),
            Name("report.csv", priority=5, copy="x"),
            Name("report.csv", message_class="T", copy="x"),
            Name("report.csv", expiration=5, copy="x"),
            Name("report.csv", correlation_id="c", copy="x"),
            Name("report.csv", reply_to="c", copy="x"),
            Name("report.csv", type="c", copy="x"),
            Name("report.csv", properties={"a": Typed("I", 1)}, copy="x"),
            Name("1140429201295000-9262574723", copy="x"),
            *[Name(own, copy="x") for own in (".hidden", "..", ".", "a/b", "a\0b", "x" * 256, "4.x.B", "me~4.x.B", "")],
        ],
        ids=repr,
    )
    def test_only_what_was_surely_a_foreign_name_is_given_back(self, name: Name) -> None:
        assert name.born_foreign is None


class TestClaimPrefixes:
    OURS = "host-0123456789-1z,1795248505310,3~"

    def test_our_own_form_is_split_off_any_name(self) -> None:
        for rest in (PLAIN, "report.csv", "report~2.csv", "caf\udce9", "a\nb", "me~" + PLAIN):
            claim, name = split_claim(self.OURS + rest)
            assert (claim, name) == (Claim("host-0123456789-1z", 1795248505310, 3), rest)
            assert claim is not None
            assert claim.prefix == self.OURS
            assert claim.subscription == "host-0123456789"

    def test_a_claim_without_lease_has_deadline_nought(self) -> None:
        assert split_claim("h-0123456789-0,0,1~x")[0] == Claim("h-0123456789-0", 0, 1)

    @pytest.mark.parametrize(
        "prefix",
        [
            "host-0123456789-1z,01,3~", "host-0123456789-1z,1,03~", "host-012345678-1z,1,3~",
            "host-0123456789-1Z,1,3~", "host-0123456789-,1,3~", "host.a-0123456789-1,1,3~",
            "averyveryverylongclient-0123456789-1,1,3~", "host-0123456789-123456789,1,3~",
            "host-0123456789-1z,1~", "host-0123456789-1z,-1,3~", "host,1,3~", "host-0123456789-1z,1,0~",
        ],
    )  # fmt: skip
    def test_anything_less_exact_belongs_to_the_foreign_name(self, prefix: str) -> None:
        assert split_claim(prefix + PLAIN) == (None, prefix + PLAIN)
        assert split_claim(self.OURS) == (None, self.OURS)

    def test_a_share_that_nobody_has_taken_yet_has_number_nought(self) -> None:
        assert split_claim("h-0123456789-0,0,0~x")[0] == Claim("h-0123456789-0", 0, 0)
        assert split_claim("h-0123456789-0,5,0~x")[0] is None

    def test_what_stands_before_a_hidden_name_is_no_prefix(self) -> None:
        assert split_claim(self.OURS + ".hidden") == (None, self.OURS + ".hidden")
        assert split_claim(self.OURS + "report.csv")[1] == "report.csv"

    def test_dropboxmq_clients_are_known_before_a_coded_name_only(self) -> None:
        client = "Host-1%2Emy+app%7E%C3%BC%2Fx"
        claim, name = split_claim(f"{client}~{PLAIN}")
        assert (claim, name) == (Claim(client, 0, 0, ours=False), PLAIN)
        assert claim is not None
        assert claim.prefix == client + "~"
        assert claim.subscription == client
        for foreign in ("me~report.csv", "me~4.x", "me~you~" + PLAIN, "a.b~" + PLAIN, "me~2147483648.x.B"):
            assert split_claim(foreign) == (None, foreign)

    @given(
        any_text,
        st.integers(1, 16**8 - 1),
        st.integers(0, 10**13 - 1),
        st.integers(1, 10**10 - 1),
        any_text.filter(lambda rest: rest[:1] not in ("", ".")),
    )
    def test_every_claim_splits_into_what_made_it(
        self, client: str, seq: int, deadline: int, number: int, rest: str
    ) -> None:
        claim = Claim(claim_owner(f"{client_part(client)}-0a1b2c3d4e", seq), deadline, number)
        assert split_claim(claim.prefix + rest) == (claim, rest)
        assert len(claim.prefix) <= PREFIX_LIMIT
        assert claim.prefix.isascii()

    def test_the_client_part_is_cut_between_escapes(self) -> None:
        assert client_part("printer") == "printer"
        assert client_part("x" * 40) == "x" * 16
        assert client_part("x" * 14 + "é") == "x" * 14
        assert client_part("x" * 15 + "é") == "x" * 15
        assert client_part("x" * 13 + "é") == "x" * 13 + "%C3"
        assert client_part("") == "client"

    def test_an_owner_is_its_subscription_and_a_hexadecimal_sequence(self) -> None:
        assert [claim_owner("a-b", n) for n in (1, 15, 16, 16**8 - 1)] == ["a-b-1", "a-b-f", "a-b-10", "a-b-ffffffff"]
        assert len({claim_owner("a-b", n) for n in range(5000)}) == 5000

    @given(any_text)
    def test_a_subscription_counts_its_claims_from_one(self, client: str) -> None:
        subscription = f"{client_part(client)}-0a1b2c3d4e"
        owners = [claim_owner(subscription, n) for n in range(1, 21)]
        assert list(islice(claim_owners(subscription), 20)) == owners


def test_no_name_has_less_room_than_its_budget() -> None:
    largest = Name("i", delivery_count=2**31 - 1, not_before=2**63 - 1)
    assert min(room(largest), room(replace(largest, meta="m"))) == NAME_BUDGET


class TestEncoding:
    def test_dots_and_tildes_are_escaped_and_stars_are_not(self) -> None:
        assert encode("a.b~c d*e-f_g/é") == "a%2Eb%7Ec+d*e-f_g%2F%C3%A9"

    @given(text)
    def test_text_survives(self, value: str) -> None:
        assert decode(encode(value)) == value

    @given(any_text)
    def test_neither_side_ever_raises(self, value: str) -> None:
        assert encode(value).isascii()
        decode(value)

    @pytest.mark.parametrize("malformed", ["%", "%4", "%zz", "100%", "a+b%", "%80", "%C3%28", "%ED%A0%80", "+%FF"])
    def test_a_malformed_escape_keeps_the_field_literally(self, malformed: str) -> None:
        assert decode(malformed) == malformed
        assert parse(f"4.a.B..{malformed}.ok+ay").correlation_id == malformed
        assert parse(f"4.a.B..{malformed}.ok+ay").reply_to == "ok ay"
        assert parse(f"4.a.B....{malformed}").type == malformed
        assert parse(f"4.a.B.....xS={malformed}").properties == {"x": Typed("S", malformed)}

    def test_a_malformed_id_is_kept_and_an_undecodable_one_is_its_bytes(self) -> None:
        assert parse("4.100%+x.B").id == "100%+x"
        assert parse("4.caf%E9.B").id == parse("4.caf\udce9.B").id == "caf\udce9"
        assert write(parse("4.caf\udce9.B")) == "4.caf%E9.B"

    def test_undecodable_bytes_in_other_fields_are_shown_as_escapes(self) -> None:
        name = parse("4.a.B..c\udce9+d")
        assert name.correlation_id == "c%E9+d"
        assert write(name) == "4.a.B..c%25E9%2Bd"


class TestBadValuesInNames:
    @pytest.mark.parametrize(
        "bad",
        [
            "xY=128", "xH=-32769", "xI=2147483648", "xL=9223372036854775808", "xI=1.5", "xI=", "xI=1_0",
            "xI=٤", "xI=0x1", "xB=yes", "xB=", "xF=1e39", "xF=abc", "xD=nan", "xD=1_0.0", "xD=+",
            "xI=" + "9" * 5000, "x", "S=v", "=v", "JMSXDeliveryCountI=-1", "JMSXDeliveryCountS=1",
            "JMS_dropq_metaS=..%2F..%2Fetc", "JMS_dropq_cancelsI=x", "JMS_dropq_copyI=5",
            "JMS_dropq_copyS=" + "a" * 33, "JMS_dropq_lapsedS=" + "a" * 33, "JMS_dropq_viaS=" + "%2E" * 11,
            "JMS_dropq_metaS=" + "a" * 33,
        ],
        ids=lambda bad: ascii(bad)[1:40],
    )  # fmt: skip
    def test_a_bad_property_is_dropped_with_a_sentence_about_it_and_the_rest_kept(
        self, bad: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        problems: list[str] = []
        assert parse(f"5.a.T..c...aI=1&{bad}&zS=2", problems=problems) == Name(
            "a", 5, "T", correlation_id="c", properties={"a": Typed("I", 1), "z": Typed("S", "2")}
        )
        assert len(problems) == 1
        assert "dropped" in problems[0]
        assert caplog.records == []  # whoever lists a folder reads its names again and again

    @pytest.mark.parametrize("bad", ["soon", "-1", "9223372036854775808", "1_0", "٤", "9" * 50])
    def test_a_bad_expiration_is_none(self, bad: str, caplog: pytest.LogCaptureFixture) -> None:
        problems: list[str] = []
        assert parse(f"4.a.B.{bad}.c", problems=problems) == Name("a", correlation_id="c")
        assert problems == [f"{bad!r} is not an expiration time: the message never expires"]
        assert caplog.records == []

    def test_no_expiration_is_written_empty(self) -> None:
        assert parse("4.a.B.0") == parse("4.a.B.") == Name("a")
        assert write(Name("a", correlation_id="c")) == "4.a.B..c"

    def test_good_values_are_read_as_java_reads_them(self) -> None:
        read = parse(
            "4.a.B.....tB=TRUE&fB=False&yY=-128&pI=%2B5&dD=1.5E10&eD=.5&nD=-Infinity&mF=NaN&oD=1e999"
        ).properties
        assert {key: typed.text for key, typed in read.items()} == {
            "t": "true", "f": "false", "y": "-128", "p": "5", "d": "15000000000.0", "e": "0.5",
            "n": "-Infinity", "m": "NaN", "o": "Infinity",
        }  # fmt: skip

    def test_an_unknown_type_is_a_string_and_the_last_of_two_counts(self) -> None:
        assert parse("4.a.B.....xQ=5&yI=1&yS=2").properties == {"x": Typed("S", "5"), "y": Typed("S", "2")}

    def test_what_others_reserve_is_kept_as_it_was_read(self) -> None:
        foreign = "4.a.B.....JMSXGroupIDS=g&JMS_dropq_laterI=5&JMS_dropboxmq_do_not_routeB=true&NOTS=x"
        assert write(parse(foreign)) == foreign
        assert len(parse(foreign).properties) == 4


class TestTypedValues:
    @pytest.mark.parametrize(
        ("kind", "value"),
        [
            ("B", 1), ("B", "true"), ("Y", 128), ("Y", -129), ("H", 32768), ("I", 1 << 31), ("L", 1 << 63),
            ("I", True), ("I", 1.0), ("I", "1"), ("F", 1e39), ("F", "1"), ("D", True), ("D", 1 << 1100),
            ("F", 1 << 1100), ("S", 5), ("S", None), ("S", "\ud800"), ("X", 5), ("", "x"), ("SB", "x"),
            ("II", 5),
        ],
        ids=lambda part: repr(part)[:20],
    )  # fmt: skip
    def test_are_checked_for_range(self, kind: str, value: Any) -> None:
        with pytest.raises(ValueError, match="property"):
            Typed(kind, value)

    @pytest.mark.parametrize(
        ("value", "kind"),
        [
            (True, "B"), (5, "I"), (-(1 << 31), "I"), (1 << 31, "L"), (1.5, "D"), (math.inf, "D"),
            ("x", "S"), ("", "S"),
        ],
    )  # fmt: skip
    def test_take_their_type_from_python(self, value: Any, kind: str) -> None:
        assert Typed.of(value) == Typed(kind, value)

    @pytest.mark.parametrize("value", [1 << 63, -(1 << 63) - 1, None, b"x", [1], object()])
    def test_refuse_what_jms_has_no_type_for(self, value: Any) -> None:
        with pytest.raises(ValueError, match="property"):
            Typed.of(value)

    def test_a_typed_value_is_itself(self) -> None:
        short = Typed("H", 5)
        assert Typed.of(short) is short

    def test_no_number_is_equal_to_no_number(self) -> None:
        assert Typed("D", math.nan) == Typed("D", float("nan")) == Typed.read("D", "NaN") != Typed("F", math.nan)
        assert len({Typed("D", math.nan), Typed("D", -math.nan)}) == 1

    @given(typed_values)
    def test_read_back_from_their_text(self, typed: Typed) -> None:
        assert Typed.read(typed.type, typed.text) == typed


class TestTheBudget:
    @given(names, tokens)
    def test_what_is_shortened_is_restored(self, name: Name, token: str) -> None:
        name = replace(name, meta="")
        short, sidecar = shorten(name, token)
        assert short.meta == token
        assert parse(write(short)) == short
        assert restore(parse(write(short)), json.loads(json.dumps(sidecar))) == name

    @given(file_names, tokens)
    @example("x" * 255, "0123456789abcdef")
    @example("\udcff" * 255, "0123456789abcdef")
    @example("." + "~" * 254, "0123456789abcdef")
    def test_a_foreign_name_gets_short_and_gets_its_own_name_back(self, filename: str, token: str) -> None:
        name = parse(filename)
        if not name.foreign or split_claim(filename)[0]:
            return
        short, sidecar = shorten(name, token)
        assert not short.foreign
        assert len(write(short)) <= NAME_BUDGET
        back = restore(parse(write(short)), json.loads(json.dumps(sidecar)))
        assert back == replace(name, foreign=False, copy=token)
        if filename[0] != "." and not name.generated:
            assert sidecar["foreign_name"] == back.born_foreign == filename

    @given(
        st.one_of(generated_ids, some_text),
        st.integers(-(1 << 31), (1 << 31) - 1),
        st.integers(0, 10**13 - 1),
        st.integers(0, 999),
        st.integers(0, 99),
        tokens,
        senders_properties,
        text,
    )
    @example("x" * 100, -(1 << 31), 10**13 - 1, 999, 99, "0123456789abcdef", {}, "t" * 300)
    def test_a_shortened_name_keeps_to_it(
        self,
        message_id: str,
        priority: int,
        expiration: int,
        deliveries: int,
        cancels: int,
        token: str,
        properties: dict[str, Typed],
        other: str,
    ) -> None:
        name = Name(
            message_id,
            priority,
            "T",
            expiration,
            other,
            other,
            other,
            properties,
            delivery_count=deliveries,
            cancels=cancels,
            origin=other,
            from_client=other,
        )
        short, _ = shorten(name, token)
        assert len(write(short)) <= NAME_BUDGET

    @given(
        st.builds(
            Name,
            id=st.one_of(generated_ids, some_text, file_names),
            priority=st.integers(-(1 << 31), (1 << 31) - 1),
            expiration=times,
            properties=senders_properties,
            delivery_count=counts,
            cancels=counts,
            not_before=times,
            since=times,
            copy=marks,
            lapsed=marks,
            meta=st.just("") | tokens,
            via=marks,
            hops=counts,
            first=counts,
            record=counts,
            records=counts,
            cut=counts,
            copied=st.sampled_from(["", "0123456789abcdef"]),
            replayed=st.booleans(),
        )
    )
    @example(
        Name(
            "x" * 300, -(1 << 31), "B", (1 << 63) - 1, delivery_count=(1 << 31) - 1, cancels=(1 << 31) - 1,
            since=(1 << 63) - 1, copy="c" * MARK_LIMIT, lapsed="l" * MARK_LIMIT, via="v" * MARK_LIMIT,
            hops=(1 << 31) - 1, not_before=(1 << 63) - 1, first=(1 << 31) - 1, record=(1 << 31) - 1,
            records=(1 << 31) - 1, cut=(1 << 31) - 1, copied="0123456789abcdef", replayed=True,
        )
    )  # fmt: skip
    def test_a_claim_has_room_for_every_name_however_large_its_values(self, name: Name) -> None:
        text, _ = squeeze(shorten(name, "0123456789abcdef")[0])
        fits = parse(text)
        assert len(text) <= room(fits) <= 255
        claimed = replace(fits, not_before=0)
        prefix = PREFIX_LIMIT - 10 + len(str(claimed.delivery_count + 1))
        assert prefix + len(squeeze(claimed)[0]) <= 255
        assert (fits.meta, fits.delivery_count) == ("0123456789abcdef", name.delivery_count)
        assert fits.copy == name.copy or (fits.copy == "" and name.generated)

    @pytest.mark.parametrize("place", [{"first": (1 << 31) - 1}, {"record": (1 << 31) - 1}])
    def test_a_part_of_a_bundle_keeps_its_number_and_credit_in_the_longest_name(self, place: dict[str, Any]) -> None:
        name = Name("é" * 300, 9, "B", 10**13 - 1, delivery_count=99, cancels=99, copy="0123456789", hops=16, **place)
        fits = parse(squeeze(shorten(replace(name, via="abcdef-0123456789", cut=99), "0123456789abcdef")[0])[0])
        assert {key: getattr(fits, key) for key in place} == place
        assert (fits.via, fits.delivery_count) == ("abcdef-0123456789", 99)

    def test_what_fits_is_not_squeezed(self) -> None:
        short, _ = shorten(replace(parse(ALL_FIELDS), cancels=3, via="v", hops=2, since=5), "t0")
        assert squeeze(short) == (write(short), {})

    @pytest.mark.parametrize("more", [
        {}, {"expiration": 10**13 - 1}, {"copy": "0123456789", "via": ""},
        {"expiration": 10**13 - 1, "delivery_count": 12, "cancels": 9, "hops": 15},
    ])  # fmt: skip
    def test_what_dropq_acts_on_is_left_out_of_no_name_that_it_writes(self, more: dict[str, Any]) -> None:
        marks = {
            "via": "abcdef-0123456789", "hops": 2, "since": 10**13 - 1, "first": 2, "died": 1, "delivery_count": 1,
            "copied": "0123456789abcdef", "reason": "unroutable", "cancels": 1, "records": 5, "replayed": True, **more,
        }  # fmt: skip
        text, left_out = squeeze(shorten(Name("x" * 300, **marks), "0123456789abcdef")[0])
        assert {key: getattr(parse(text), key) for key in marks} | left_out == marks
        assert left_out.keys() <= {"records", "replayed", "reason"}

    def test_what_is_packed_is_read_with_what_is_not(self) -> None:
        problems: list[str] = []
        packed = "C3D2Sloyw3v28H4K0123456789abcdefVab-0"
        name = parse(f"4.a.B.....JMS_dropq_diedI=7&JMS_dropq_allS={packed}", problems=problems)
        assert (name.cancels, name.died, name.since, name.hops) == (3, 7, 1700000000000, 4)
        assert (name.copied, name.via, problems) == ("0123456789abcdef", "ab-0", [])

    @pytest.mark.parametrize("text", ["C", "Cx", "c3", "X3", "3", "K../../x", "D-1"])
    def test_what_cannot_be_unpacked_is_dropped_and_said(self, text: str) -> None:
        problems: list[str] = []
        name = parse(f"4.a.B.....JMS_dropq_allS={encode(text)}H2", problems=problems)
        assert name == Name("a", hops=2)
        assert len(problems) == 1 and "dropped" in problems[0]

    def test_a_name_with_every_counter_still_leaves_room_for_a_claim(self) -> None:
        name = Name(
            "é" * 300,
            4,
            "T",
            10**13 - 1,
            "c" * 300,
            delivery_count=99999,
            cancels=999,
            since=10**13 - 1,
            copy="0123456789",
        )
        short, _ = shorten(name, "0123456789abcdef")
        assert PREFIX_LIMIT + len(write(short)) <= 255

    def test_an_id_stays_in_the_name_while_there_is_room(self) -> None:
        assert shorten(Name("x" * 99, type="t" * 99), "0123456789abcdef")[0].id == "x" * 99
        assert shorten(Name("x" * 101), "0123456789abcdef")[0].id.startswith("long-")
        assert shorten(Name("x" * 100, delivery_count=99, cancels=99), "0123456789abcdef")[0].id.startswith("long-")

    def test_the_sidecar_is_plain_json(self) -> None:
        short, sidecar = shorten(replace(parse(ALL_FIELDS), origin="o"), "t0")
        assert write(short) == "4.1140429201295000-9262574723.T.1140429211295....JMS_dropq_metaS=t0"
        assert sidecar == {
            "format": 1, "id": "1140429201295000-9262574723", "foreign_name": None,
            "correlation_id": "corr1283", "reply_to": "TestQueue1", "type": "XYZType",
            "properties": {"prop1": ["S", "hello"], "JMS_dropq_origin": ["S", "o"]},
        }  # fmt: skip

    def test_what_the_name_gained_since_wins_over_the_sidecar(self) -> None:
        short, sidecar = shorten(
            Name("a", correlation_id="c", type="t", origin="o", properties={"x": Typed("I", 1)}), "t0"
        )
        back = restore(replace(short, type="new", origin="p", delivery_count=2), sidecar)
        assert back == Name(
            "a", correlation_id="c", type="new", origin="p", properties={"x": Typed("I", 1)}, delivery_count=2
        )

    @pytest.mark.parametrize(
        "damaged",
        [
            {},
            {"id": 5, "correlation_id": [], "reply_to": 1, "type": {}, "properties": []},
            {
                "id": "other",
                "properties": {"x": None, "y": ["I"], "z": ["I", "abc"], "a": "", "b": ["Q", "1"], "c": 5},
            },
            {
                "id": "a",
                "properties": {
                    "JMS_dropq_meta": ["S", "evil"],
                    "JMSXDeliveryCount": ["I", "99"],
                    "x": [[], {}],
                },
            },
            {"properties": "x"},
            [],
            None,
            "text",
        ],
        ids=repr,
    )
    def test_a_damaged_sidecar_costs_what_is_damaged_and_nothing_else(self, damaged: Any) -> None:
        assert restore(Name("a", 7, delivery_count=1, meta="t0"), damaged) == Name("a", 7, delivery_count=1)

    def test_an_id_is_taken_from_its_own_sidecar_only(self) -> None:
        short, _ = shorten(Name("x" * 101), "t0")
        _, other = shorten(Name("y" * 101), "t1")
        assert restore(short, other).id == short.id

    def test_a_token_that_would_lead_elsewhere_is_refused(self) -> None:
        for token in ("", "../x", "a b", "a.b", "x" * 65):
            with pytest.raises(ValueError, match="cannot name a sidecar"):
                shorten(Name("a"), token)


class TestFindingAnId:
    @given(names, st.one_of(generated_ids, some_text, file_names), st.booleans())
    @example(Name("a b"), "a b", True)
    @example(Name("1140429201295000-9262574723", meta="m"), "1140429201295000-9262574723", True)
    @example(Name("é" * 60), "é" * 60, True)
    def test_is_true_of_the_names_that_have_it_and_of_no_others(self, name: Name, message_id: str, same: bool) -> None:
        name = replace(name, id=message_id) if same else name
        test = bears(message_id)
        for written in (write(name), f"host-0123456789-1z,0,3~{write(name)}"):
            assert test(written) is (name.id == message_id)
        if len(write(name)) > NAME_BUDGET:
            assert test(write(shorten(name, "0123456789abcdef")[0])) is (name.id == message_id)

    @pytest.mark.parametrize(
        "filename", ["4.%61b.B", "4.a%62.T....x", "host-0123456789-1z,0,3~ab", "client~4.ab.B", "ab", "4.ab..5"]
    )
    def test_is_true_of_a_name_that_somebody_wrote_in_another_way(self, filename: str) -> None:
        assert bears("ab")(filename)

    @pytest.mark.parametrize("filename", ["4.abc.B", "4.c.B..ab", "ab.csv", "4.ab", "host-0123456789-1z,0,0~ab"])
    def test_is_false_where_the_text_stands_for_something_else(self, filename: str) -> None:
        assert not bears("ab")(filename)

    def test_is_true_of_a_whole_name_with_or_without_its_claim(self) -> None:
        held = f"host-0123456789-1z,0,3~{ALL_FIELDS}"
        assert bears(ALL_FIELDS)(held) and bears(ALL_FIELDS)(ALL_FIELDS) and bears(held)(held)


class TestOrder:
    def sorted(self, *filenames: str, arrival: int = 1795248505310) -> list[str]:
        return sorted(filenames, key=lambda filename: order(parse(filename), arrival))

    def test_is_priority_then_time_then_sequence_then_name(self) -> None:
        delivered = [
            "4001.1795248503191000-1079511619.T",
            "9.1795248503191001-0000000000.T",
            "4.1795248503191000-1079511619.T",
            "4.1795248503191000-1079511620.T",
            "4.1795248503191001-0000000000.T",
            "4.1795248503192000-0000000000.T",
            "-1.1795248503191000-1079511619.T",
            "-2147483648.1795248503191000-1079511619.T",
        ]
        shuffled = random.Random(5).sample(delivered, len(delivered))
        assert self.sorted(*shuffled) == delivered

    def test_a_foreign_name_stands_where_it_arrived(self) -> None:
        earlier, later = "4.1795248505309999-9999999999.B", "4.1795248505310001-0000000000.B"
        assert self.sorted(later, "0.csv", earlier) == [earlier, "0.csv", later]
        assert self.sorted("9999.csv", "0000.csv") == ["0000.csv", "9999.csv"]

    def test_a_requeued_message_keeps_its_place_by_its_id_else_by_its_own_clock(self) -> None:
        assert order(Name("a", since=5), 7)[1] == "0000000000005000"
        assert order(Name("1795248503191000-1079511619", since=5), 7)[1] == "1795248503191000"

    @given(st.lists(st.tuples(st.integers(-5, 5), generated_ids), unique=True))
    def test_the_order_of_names_is_the_order_of_delivery(self, sent: list[tuple[int, str]]) -> None:
        delivered = sorted(
            (Name(message_id, priority) for priority, message_id in sent), key=lambda name: order(name, 0)
        )  # fmt: skip
        assert [(name.priority, name.id) for name in delivered] == sorted(sent, key=lambda one: (-one[0], one[1]))


def source(*moments: int) -> IdSource:
    left = list(moments)
    return IdSource(lambda: left.pop(0) if len(left) > 1 else left[0])


class TestGeneratedIds:
    def test_have_the_generated_form_and_tell_their_time(self) -> None:
        name = Name(source(1795248505310).next())
        assert name.generated
        assert name.timestamp == 1795248505310
        assert name.id[13:16] == "000"

    def test_increase_within_a_millisecond_and_carry_into_the_next(self) -> None:
        ids = source(1795248505310)
        made = [ids.next() for _ in range(1001)]
        assert made[999][:16] == "1795248505310999"
        assert made[1000][:16] == "1795248505311000"

    def test_increase_after_the_clock_was_set_back(self) -> None:
        ids = source(1795248505310, 1795248500000, 1, 1795248505311)
        heads = [ids.next()[:16] for _ in range(4)]
        assert heads == ["1795248505310000", "1795248505310001", "1795248505310002", "1795248505311000"]

    def test_increase_strictly_across_threads(self) -> None:
        ids, made = source(1795248505310), [list[str]() for _ in range(8)]
        start = threading.Barrier(len(made))

        def work(mine: list[str]) -> None:
            start.wait(10)
            mine.extend(ids.next() for _ in range(500))

        threads = [threading.Thread(target=work, args=(mine,)) for mine in made]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        heads = [one[:16] for mine in made for one in mine]
        assert len(set(heads)) == 4000
        assert all(mine == sorted(mine) for mine in made)

    def test_follow_a_given_generator(self) -> None:
        first, second = (IdSource(lambda: 1795248505310, random.Random(7)).next() for _ in range(2))
        assert first == second

    @pytest.mark.parametrize("rng", [None, lambda: random.Random(7)], ids=["own", "given"])
    def test_differ_in_a_forked_child_even_when_its_parent_was_just_making_one(
        self, rng: Callable[[], random.Random] | None
    ) -> None:
        ids = IdSource(lambda: 1795248505310, rng() if rng else None)
        ids.next()
        reader, writer = os.pipe()
        with ids._lock:  # as if another thread of the parent were inside
            # The limit ends a child that waits for a lock nobody holds.
            child = fork(lambda: os.write(writer, "\n".join(ids.next() for _ in range(20)).encode()), longest=20)
        os.close(writer)
        with open(reader) as pipe:
            theirs = pipe.read().split("\n")
        assert ended(child) == 0
        ours = [ids.next() for _ in range(20)]
        assert [one[:16] for one in theirs] == [one[:16] for one in ours]
        assert not set(theirs) & set(ours)


class TestWhatASenderMaySay:
    @pytest.mark.parametrize("name", ["orders", "orders.eu", "Größe", "a b", "-", "q~1", "x" * 255, "temp-1"])
    def test_queue_names(self, name: str) -> None:
        check_queue_name(name)

    @pytest.mark.parametrize(
        "name",
        [
            "", ".", "..", ".hidden", "a/b", "/", "a\0b", "a\nb", "a\x7f", "a\x85b", "\udce9",
            "topic-root", "dropboxmq", "é" * 128,
        ],
    )  # fmt: skip
    def test_what_cannot_name_a_queue(self, name: str) -> None:
        with pytest.raises(InvalidName, match="cannot name a queue"):
            check_queue_name(name)

    @pytest.mark.parametrize(
        "name",
        ["a", "_x", "$a_b", "größe", "a1", "数", "JMSXGroupID", "JMSXGroupSeq", DO_NOT_ROUTE, "jmsx", "nullable"],
    )
    def test_property_names(self, name: str) -> None:
        check_property_name(name)

    @pytest.mark.parametrize(
        "name",
        [
            "", "1a", "a b", "a.b", "a-b", "a=b", "\ud800", "JMSType", "JMSXDeliveryCount",
            "JMS_dropq_meta", "JMS_dropboxmq_other", "JMS", "NULL", "true", "False", "not", "AND", "or", "BETWEEN",
            "like", "In", "IS", "escape",
        ],
    )  # fmt: skip
    def test_what_cannot_name_a_property(self, name: str) -> None:
        with pytest.raises(ValueError, match="property name"):
            check_property_name(name)

    @pytest.mark.parametrize("value", [True, False, "true", "false"])
    def test_a_sender_may_forbid_routes(self, value: bool | str) -> None:
        check_property(DO_NOT_ROUTE, Typed.of(value))

    @pytest.mark.parametrize("value", [1, 1.0, "yes", "TRUE", ""])
    def test_what_forbids_routes_is_true_or_false(self, value: object) -> None:
        with pytest.raises(ValueError, match="it is a boolean, true or false"):
            check_property(DO_NOT_ROUTE, Typed.of(value))

    @pytest.mark.parametrize("message_id", ["1", "order 17/é", "x" * 100, "." * 33, "report.csv"])
    def test_message_ids(self, message_id: str) -> None:
        check_message_id(message_id)
        assert len(encode(message_id)) <= ID_LIMIT
        assert parse(write(Name(message_id))).id == message_id

    @pytest.mark.parametrize("message_id", ["", "a\0b", "x" * 101, "." * 34, "caf\udce9", "\ud800"])
    def test_what_cannot_be_a_message_id(self, message_id: str) -> None:
        with pytest.raises(ValueError, match="message id"):
            check_message_id(message_id)
