"""The promises of the configuration: nothing is accepted and ignored, and every error tells the way out."""

from __future__ import annotations

import dataclasses
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dropq.config.amps import AmpsQueue, read_queues
from dropq.config.load import (
    Setting,
    check_file,
    explain_queue,
    load_queue,
    load_root,
    toml_text,
    validate_options,
)
from dropq.config.schema import QueueConfig, RootConfig
from dropq.durations import format_duration, parse_duration
from dropq.errors import ConfigError, StorageError
from dropq.format.layout import QueueLayout

DOC = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
#: Every key of a queue, as the configuration has them.
KEYS = [field.name for field in dataclasses.fields(QueueConfig)]
#: A number that TOML may write in hex, and Python does not write in decimal digits.
LONG = f"0x{'f' * 5000}"

#: AMPS spelling -> a value that is valid by itself.
AMPS = {
    "MessageType": "fix",
    "FieldSeparator": 124,
    "UnderlyingTopic": "prices",
    "DefaultPublishTarget": "prices",
    "LeasePeriod": "30s",
    "Semantics": "at-most-once",
    "MaxBacklog": 10,
    "MaxPerSubscriptionBacklog": 10,
    "Expiration": "1h",
    "ExpirationModel": "latest",
    "Filter": "/a = 1",
    "RecoveryPoint": "now",
    "FairnessModel": "fast",
    "Leasing": "strict",
    "MaxDeliveries": 2,
    "MaxCancels": 2,
    "Priority": "/priority",
    "BarrierExpression": "/sync IS NOT NULL",
    "FileBackedMetadata": "enabled",
    "TargetQueueDepth": 12500,
    "DeferredAckExpiration": "15m",
}

WRONG: list[tuple[str, object, str]] = [
    ("lease_period", "30 parsecs", "a duration such as 500ms"),
    ("lease_period", 0, "at least 1ms"),
    ("expiration", "0.1ms", "at least 1ms"),
    ("lease_period", True, "a duration such as"),
    ("redelivery_delay", -1, "a duration such as"),
    ("history_age", float("nan"), "a duration such as"),
    ("semantics", "exactly-once", 'one of "at-least-once", "at-most-once"'),
    ("leasing", ["strict"], 'one of "sublet", "strict"'),
    ("expiration_model", {"a": 1}, '"earliest"'),
    ("exhausted", "processed", 'one of "error", "expired", "dead-letter"'),
    ("dead_letter_queue", "", "the name of a queue"),
    ("self_destruct", "yes", "true or false"),
    ("self_destruct_after", "soon", "a duration such as"),
    ("dead_letter_queue", "sales.eu/audit.hq", "the name of a queue"),
    ("dead_letter_queue", ["letters"], "the name of a queue"),
    ("durability", "FULL", 'one of "none", "file", "full"'),
    ("fairness_model", "slow", '"proportional"'),
    ("overflow", "drop", '"reject"'),
    ("overflow", "selector", 'one of "reject", "discard", "block"'),
    ("message_type", "protobuf", 'one of "json", "text", "binary", "fix", "nvfix", "xml", "msgpack", "bson"'),
    ("field_separator", "", "an ASCII character"),
    ("field_separator", "||", "an ASCII character"),
    ("field_separator", "=", "an ASCII character that is no letter, digit or = is allowed"),
    ("field_separator", "A", "an ASCII character"),
    ("field_separator", 65, "an ASCII character"),
    ("field_separator", 0, "an ASCII character"),
    ("field_separator", "\0", "an ASCII character"),
    ("field_separator", 10**20, "an ASCII character"),
    ("field_separator", "¦", "an ASCII character"),
    ("field_separator", True, "an ASCII character"),
    ("file_backed_metadata", "disabled", '"enabled"'),
    ("max_deliveries", -1, "a whole number from 0"),
    ("max_deliveries", 2**31, "to 2147483647"),
    ("max_deliveries", True, "a whole number from 0"),
    ("max_cancels", "5 times", "a whole number from 0"),
    ("max_backlog", "0", "a whole number from 1"),
    ("max_backlog", "15kb", "a whole number from 1"),
    ("max_backlog", "1.5k", "a whole number from 1"),
    ("max_backlog", "-1", "a whole number from 1"),
    ("max_backlog", "3000M", "to 2147483647"),
    ("max_backlog", "\u0664", "a whole number from 1"),
    ("redelivery_attempts", 1.5, "a whole number from 0"),
    ("max_backlog", 0, "a whole number from 1"),
    ("max_per_subscription_backlog", 0, "a whole number from 1"),
    ("max_unprocessed", 0, "a whole number from 1"),
    ("target_queue_depth", 999, "a whole number from 1000"),
    ("max_history", -1, "a whole number from 0"),
    ("history", 1, "true or false"),
    ("redelivery_backoff", 0.5, "a number from 1"),
    ("redelivery_backoff", float("inf"), "a number from 1"),
    ("redelivery_backoff", True, "a number from 1"),
    ("filter", "", "an expression"),
    ("filter", " ", "an expression"),
    ("filter", "/a >", "bad filter, column 5: expected a value, found the end of the filter"),
    ("filter", "JMSPriority + 1", "bad filter, column 1: expected a condition, found a number"),
    ("filter", "/a LIKE '('", "bad filter, column 9: expected a regular expression that RE2 accepts"),
    ("priority", 4, "an expression"),
    ("priority", "", "an expression"),
    ("priority", "/a *", "bad expression, column 5: expected a value, found the end of the expression"),
    ("barrier_expression", "a b", "bad filter, column 3: expected an operator"),
    ("recovery_point", "yesterday", "ISO 8601"),
    ("recovery_point", 5, "ISO 8601"),
    ("file_mode", "0666", "without write permission for others"),
    ("dir_mode", "2777", "without write permission for others"),
    ("file_mode", 664, "write it as a string"),
    ("dir_mode", 755, "write it as a string"),
    ("file_mode", "0444", "at least 0600"),
    ("file_mode", "4755", "within 0775"),
    ("dir_mode", "1775", "within 2775"),
    ("file_mode", "rw-r--r--", "octal"),
    ("file_mode", True, "octal"),
    ("file_mode", -1, "at least 0600"),
    ("group", "", "the name of a group"),
    ("group", "two words", "the name of a group"),
    ("group", -1, "the name of a group"),
    ("group", True, "the name of a group"),
    ("ignore", ["*"], "'*' cannot be ignored: a pattern has no slash, and matches no coded name"),
    ("ignore", "a/b", "'a/b' cannot be ignored: a pattern has no slash"),
    ("ignore", [1], "patterns of file names"),
    ("ignore", 1, "patterns of file names"),
]


class Files:
    """A root's two files, and what comes of them."""

    def __init__(self, folder: Path) -> None:
        self.root_file = folder / "dropq.toml"
        self.queue_file = folder / "orders" / "queue.toml"
        self.queue_file.parent.mkdir()
        self.layout = QueueLayout.flat(str(self.queue_file.parent))

    def write(self, *, root: str | bytes | None = None, queue: str | bytes | None = None) -> Files:
        for path, text in ((self.root_file, root), (self.queue_file, queue)):
            if text is not None:
                path.write_bytes(text.encode() if isinstance(text, str) else text)
        return self

    def load(self) -> QueueConfig:
        return load_queue("orders", self.load_root(), str(self.root_file), self.layout)

    def load_root(self) -> RootConfig:
        return load_root(str(self.root_file))

    def explain(self) -> dict[str, Setting]:
        settings = explain_queue("orders", self.load_root(), str(self.root_file), self.layout)
        return {setting.key: setting for setting in settings}


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def problems_of(call: Callable[[], object]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        call()
    return str(caught.value).split("\n")


def refused(options: Mapping[str, object]) -> list[str]:
    return problems_of(lambda: validate_options(options, "here"))


# Durations.


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("500ms", 0.5), ("30s", 30), ("5m", 300), ("2h", 7200), ("1d", 86400), ("1h30m", 5400),
        ("1h 30m", 5400), (" 1m5s500ms ", 65.5), ("1.5h", 5400), ("30", 30), ("0", 0), ("0.25", 0.25),
        (30, 30), (0.5, 0.5), (timedelta(minutes=1), 60), ("36500d", 36500 * 86400),
        ("30S", 30), ("500MS", 0.5), ("5M", 300), ("1H30M", 5400), ("1D", 86400), ("2w", 14 * 86400),
        ("1W1d", 8 * 86400), ("2500us", 0.003), ("1s 500000US", 1.5), ("3000000ns", 0.003), ("1NS", 0),
    ],
)  # fmt: skip
def test_a_duration_is_read_as_people_write_it(written: object, seconds: float) -> None:
    assert parse_duration(written) == seconds


@pytest.mark.parametrize(
    "junk",
    ["", " ", "s", "5 parsecs", "30m1h", "1h1h", "5m3", "-5s", "1e3", "inf", "nan", "3:30", "5y", "1us1ms", "٣s", "1.s",
     ".5s", "36501d", "9" * 99, "1" * 5000, True, None, [], -1, 1e300, 10**400, float("nan"), float("inf"),
     timedelta(seconds=-1), b"5s"],
)  # fmt: skip
def test_what_is_no_duration_is_refused_with_what_is_allowed(junk: object) -> None:
    with pytest.raises(ValueError, match="500ms, 30s, 5m, 2h, 1d"):
        parse_duration(junk)


@given(st.integers(min_value=0, max_value=36500 * 86400 * 1000))
def test_a_duration_that_was_written_is_read_back(milliseconds: int) -> None:
    assert parse_duration(format_duration(milliseconds / 1000)) == pytest.approx(milliseconds / 1000, abs=1e-6)


@pytest.mark.parametrize(
    ("seconds", "written"),
    [
        (0, "0s"),
        (0.5, "500ms"),
        (90, "1m30s"),
        (5400, "1h30m"),
        (86400, "1d"),
        (-90, "-1m30s"),
        (0.0014, "1ms"),
    ],
)
def test_a_duration_is_written_largest_unit_first(seconds: float, written: str) -> None:
    assert format_duration(seconds) == written


# Defaults and precedence.


def test_missing_files_are_all_defaults(files: Files) -> None:
    assert files.load_root() == RootConfig()
    assert files.load() == QueueConfig()


def test_the_defaults_limit_nothing_and_keep_everything() -> None:
    there = QueueConfig()
    assert (there.semantics, there.leasing, there.fairness_model) == ("at-least-once", "sublet", "fast")
    assert (there.lease_period, there.expiration, there.max_per_subscription_backlog) == (None, None, None)
    assert (there.max_deliveries, there.max_cancels, there.redelivery_attempts) == (0, 0, 0)
    assert (there.exhausted, there.expiration_model, there.durability) == ("error", "default", "full")
    assert (there.history, there.max_history, there.history_age) == (True, None, None)
    assert {"_SUCCESS", "_temporary", "*.tmp", "*.part", "*.crc", "*.filepart"} <= set(there.ignore)
    assert there.settle_time is None


def test_the_queue_wins_over_the_root_and_the_root_over_what_is_built_in(files: Files) -> None:
    files.write(
        root='[defaults]\nLeasePeriod = "30s"\nmax_cancels = 3\nhistory = false\n',
        queue='lease_period = "5m"\nmax_cancels = "unset"\n',
    )
    there = files.load()
    assert (there.lease_period, there.max_cancels, there.history) == (300, 0, False)


def test_explain_tells_where_each_value_comes_from(files: Files) -> None:
    files.write(root='[defaults]\nLeasePeriod = "30s"\nfile_mode = 0o660\n', queue='lease_period = "90s"\n')
    there = files.explain()
    assert list(there) == KEYS
    assert there["lease_period"] == Setting("lease_period", "1m30s", str(files.queue_file))
    assert there["file_mode"] == Setting("file_mode", "0660", str(files.root_file))
    assert there["history"] == Setting("history", True, "default")
    assert (there["lease_period"].text, there["history"].text, there["group"].text) == (
        '"1m30s"',
        "true",
        '"unset"',
    )


def test_what_explain_shows_can_be_pasted_into_a_queue_toml(files: Files) -> None:
    text = "".join(f"{setting.key} = {setting.text}\n" for setting in files.explain().values())
    assert files.write(queue=text).load() == QueueConfig()


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        QueueConfig().history = False  # type: ignore[misc]


# Keys and values.


@pytest.mark.parametrize("spelt", AMPS)
def test_the_amps_spelling_is_the_same_key(spelt: str) -> None:
    snake = re.sub("(?<!^)(?=[A-Z])", "_", spelt).lower()
    assert snake in KEYS
    needed = {"default_publish_target": "underlying_topic", "field_separator": "message_type"}
    others = {needed[snake]: AMPS["".join(map(str.capitalize, needed[snake].split("_")))]} if snake in needed else {}
    there = validate_options({spelt: AMPS[spelt], **others}, "x")
    assert there == validate_options({snake: AMPS[spelt], **others}, "x")


def test_a_key_in_two_spellings_is_an_error() -> None:
    assert refused({"lease_period": "1s", "LeasePeriod": "1s"}) == [
        "here: lease_period and LeasePeriod are the same key: give one of them"
    ]


def test_an_unknown_key_is_an_error_with_the_nearest_known_one() -> None:
    assert refused({"lease_perod": "1s"}) == ["here: lease_perod is not a key of a queue; the nearest is lease_period"]
    assert refused({"LeasPeriod": "1s"}) == ["here: LeasPeriod is not a key of a queue; the nearest is LeasePeriod"]


def test_a_key_with_control_characters_does_not_break_the_line() -> None:
    (problem,) = refused({"a\nb\x1b\x9b": 1})
    assert problem.startswith('here: "a\\nb\\u001b\\u009b" is not a key')


@pytest.mark.parametrize(("key", "value", "allowed"), WRONG)
def test_a_wrong_value_is_refused_with_place_key_and_what_is_allowed(key: str, value: object, allowed: str) -> None:
    problems = refused({key: value})
    assert any(p.startswith("here: ") and key in p and allowed in p for p in problems), problems


@pytest.mark.parametrize(
    ("value", "shown"), [("{}", "0xf"), ("[{}]", "[0xf"), ("{{ a = {} }}", "{ a = 0xf")], ids=["plain", "list", "table"]
)
@pytest.mark.parametrize("key", ["max_backlog", "lease_period", "ignore", "file_mode", "name"])
def test_a_number_too_long_for_decimal_digits_is_refused_as_any_other(
    files: Files, key: str, value: str, shown: str
) -> None:
    files.write(root="", queue=f"{key} = {value.format(LONG)}\n")
    (problem,) = problems_of(files.load)
    assert problem.startswith(f"{files.queue_file}: {key} = {shown}") and "allowed" in problem
    assert len(problem) < 500 and check_file(str(files.queue_file)) == [problem]


@pytest.mark.parametrize("key", ["format", "dead_letter_queue", "defaults"])
def test_a_number_too_long_for_decimal_digits_is_refused_in_a_roots_file(files: Files, key: str) -> None:
    (problem,) = problems_of(files.write(root=f"{key} = {LONG}\n").load_root)
    assert problem.startswith(f"{files.root_file}: {key} = 0xf")
    assert len(problem) < 500 and check_file(str(files.root_file)) == [problem]


def test_all_problems_of_a_file_are_told_together(files: Files) -> None:
    files.write(queue='nam = 1\nhistory = 3\nlease_period = "x"\nself_destruct = 1\nInitialOwner = "a"\n')
    assert [problem.split(": ")[1].split(" ")[0] for problem in problems_of(files.load)] == [
        "nam", "history", "lease_period", "self_destruct", "InitialOwner",
    ]  # fmt: skip
    assert all(problem.startswith(str(files.queue_file)) for problem in problems_of(files.load))


def test_modes_are_octal_however_written() -> None:
    for written in ("0664", "664", "0o664", 0o664):
        assert validate_options({"file_mode": written}, "x").file_mode == 0o664
    assert validate_options({"dir_mode": "2775"}, "x").dir_mode == 0o2775


def test_a_field_separator_is_a_character_or_its_number_as_in_amps() -> None:
    for written in ("|", 124, "124"):
        assert validate_options({"message_type": "nvfix", "field_separator": written}, "x").field_separator == "|"
    for written in ("\x01", 1, "1"):
        assert toml_text({"message_type": "fix", "FieldSeparator": written}).endswith('field_separator = "\\u0001"\n')


@pytest.mark.parametrize("others", [{}, {"message_type": "json"}, {"MessageType": "xml"}])
def test_a_field_separator_is_for_fix_and_nvfix_alone(others: Mapping[str, object]) -> None:
    assert refused({"field_separator": "|", **others}) == [
        'here: field_separator = "|": only message_type = "fix" and message_type = "nvfix" have one'
    ]
    assert validate_options({"field_separator": "unset", **others}, "here").field_separator is None


def test_a_group_is_a_name_or_a_number() -> None:
    assert [validate_options({"group": value}, "x").group for value in ("staff", "1000", 0)] == [
        "staff",
        1000,
        0,
    ]


def test_ignore_is_a_list_or_one_string() -> None:
    assert validate_options({"ignore": ["*.bak", "a b"]}, "x").ignore == ("*.bak", "a b")
    assert validate_options({"ignore": "*.bak  *.swp"}, "x").ignore == ("*.bak", "*.swp")
    assert validate_options({"ignore": []}, "x").ignore == ()


def test_max_deliveries_and_redelivery_attempts_may_stand_together() -> None:
    there = validate_options({"max_deliveries": 3, "redelivery_attempts": 2}, "x")
    assert (there.max_deliveries, there.redelivery_attempts) == (3, 2)


def test_a_name_must_be_the_folders(files: Files) -> None:
    assert files.write(queue='Name = "orders"\n').load() == QueueConfig()
    assert files.write(queue='Topic = "orders"\n').load() == QueueConfig()
    (problem,) = problems_of(files.write(queue='Name = "bills"\n').load)
    assert problem == f'{files.queue_file}: Name = "bills": only "orders", its folder\'s name, is allowed'
    assert "same key" in "".join(problems_of(files.write(queue='Name = "orders"\nTopic = "orders"\n').load))
    assert "leave it out" in "".join(problems_of(files.write(root='[defaults]\nname = "a"\n').load_root))
    assert "leave it out" in "".join(refused({"name": "orders"}))


@pytest.mark.parametrize(
    ("written", "count"), [("100", 100), ("15k", 15_000), ("15K", 15_000), ("1M", 1_000_000), (" 2m ", 2_000_000)]
)
def test_a_count_is_read_as_amps_writes_it(written: str, count: int, files: Files) -> None:
    assert validate_options({"MaxBacklog": written}, "here").max_backlog == count
    assert problems_of(files.write(root='format = "2"').load_root)
    files.root_file.unlink()
    assert files.write(queue=f'MaxHistory = "{written}"\n').load().max_history == count


@pytest.mark.parametrize("spelt", ["selector", "Selector"])
def test_selectors_are_refused_with_where_they_belong(spelt: str, files: Files) -> None:
    refusal = (
        f"{spelt}: this is no key of queue.toml: each selector is a file of its own, selectors/NAME.toml in the "
        "queue's folder; `dropq selector add QUEUE NAME` writes it"
    )
    for value in ([{"name": "big", "to": "large-orders"}], [], None):
        assert refused({spelt: value}) == [f"here: {refusal}"]
    files.write(queue=f'[[{spelt}]]\nname = "big"\nto = "large-orders"\n')
    assert problems_of(files.load) == check_file(str(files.queue_file)) == [f"{files.queue_file}: {refusal}"]


# What does not go together.


@pytest.mark.parametrize(
    "pair",
    [
        {"priority": "/a", "barrier_expression": "/b"},
        {"TargetQueueDepth": 1000, "Priority": "/a"},
        {"target_queue_depth": 1000, "BarrierExpression": "/b"},
    ],
)
def test_a_forbidden_pair_is_an_error_naming_both_keys(pair: dict[str, object]) -> None:
    one, other = pair
    assert any(one in problem and other in problem and "here: " in problem for problem in refused(pair))


def test_a_forbidden_pair_is_found_across_files(files: Files) -> None:
    files.write(root='[defaults]\npriority = "/a"\n', queue='BarrierExpression = "/b"\n')
    (problem,) = problems_of(files.load)
    assert f"{files.root_file}: priority, and {files.queue_file}: BarrierExpression, cannot both be set" in problem
    assert files.write(queue='priority = "unset"\nBarrierExpression = "/b"\n').load().barrier_expression == "/b"


@pytest.mark.parametrize("key", ["InitialOwner", "GroupLocalQueueDomain", "initial_owner"])
def test_keys_of_a_group_local_queue_are_refused_of_others(key: str) -> None:
    (problem,) = refused({key: "x"})
    assert key in problem and "only a GroupLocalQueue has this key" in problem


# Files that cannot be read, and the root's own.


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'history = true\nlease_period = "30s\n', "line 2"),
        (b"history = true\nname = caf\n", "line 2"),
        (b'history = true\n\ngroup = "\xff"\n', "line 3: this is not UTF-8"),
        (b"history =", "line 1"),
        (b"a = " + b"[" * 100_000, "line 1"),
        (b"max_history = " + b"9" * 5000, "line 1"),
        (b"a = 1\na = 2\n", "line 2"),
    ],
)
def test_what_is_no_toml_is_refused_with_file_and_line(files: Files, content: bytes, expected: str) -> None:
    (problem,) = problems_of(files.write(queue=content).load)
    assert problem.startswith(f"{files.queue_file}: {expected}")
    assert check_file(str(files.queue_file)) == [problem]
    assert str(files.root_file) in problems_of(files.write(root=content).load_root)[0]


def test_a_byte_order_mark_and_windows_line_ends_are_no_problem(files: Files) -> None:
    assert files.write(queue=b"\xef\xbb\xbfhistory = false\r\n").load().history is False


def test_a_file_that_cannot_be_read_is_refused(files: Files) -> None:
    files.queue_file.mkdir()
    assert "cannot be read" in problems_of(files.load)[0]
    files.queue_file.rmdir()
    os.mkfifo(files.queue_file)
    assert "a regular file" in problems_of(files.load)[0]
    files.queue_file.unlink()
    files.queue_file.symlink_to(files.queue_file)
    assert "cannot be read" in problems_of(files.load)[0]
    assert "cannot be read" in problems_of(lambda: load_root("a\0b"))[0]


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_without_read_permission_is_refused(files: Files) -> None:
    files.write(queue="").queue_file.chmod(0)
    assert "Permission denied" in problems_of(files.load)[0]


def test_a_newer_root_is_refused_with_both_numbers(files: Files) -> None:
    (problem,) = problems_of(files.write(root="format = 7\nunheard_of = 1\n").load_root)
    assert problem == f"{files.root_file}: format = 7: this dropq reads format 1, and the root has format 7"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("format = 0", "the number 1 is allowed"),
        ("format = true", "the number 1 is allowed"),
        ('reply_to_style = "long"', 'one of "bare", "typed" is allowed'),
        ("dead_letter_queue = true", "the name of a queue is allowed"),
        ('dead_letter_queue = "../letters"', "the name of a queue is allowed"),
        ("defaults = 5", "a table of keys"),
        ('lease_period = "5s"', "under [defaults]"),
        ("formt = 1", "the nearest is format"),
        ("format = 1\nFormat = 1", "the same key"),
        (
            "[defaults]\nlease_perod = 1",
            "[defaults]: lease_perod is not a key of a queue; the nearest is lease_period",
        ),
        ("[defaults]\nhistory = 1", "[defaults]: history = 1: true or false is allowed"),
        ("[defaults]\nselector = 5", "[defaults]: selector: this is no key of queue.toml"),
    ],
)
def test_a_wrong_root_is_refused(files: Files, text: str, expected: str) -> None:
    (problem,) = problems_of(files.write(root=text).load_root)
    assert problem.startswith(f"{files.root_file}: ") and expected in problem
    assert check_file(str(files.root_file)) == [problem]


def test_a_root_has_its_reply_style(files: Files) -> None:
    assert files.write(root='format = 1\nReplyToStyle = "typed"\n').load_root().reply_to_style == "typed"


# Dead letters.


def make_letters(files: Files, name: str = "letters") -> None:
    (files.root_file.parent / name / "target").mkdir(parents=True)


@pytest.mark.parametrize(
    ("root", "queue", "expected"),
    [
        ("", "", None),
        ('dead_letter_queue = "letters"', "", "letters"),
        ('[defaults]\ndead_letter_queue = "letters"', "", "letters"),
        ("", 'dead_letter_queue = "letters"', "letters"),
        ('dead_letter_queue = "of-root"\n[defaults]\ndead_letter_queue = "of-all"', "", "of-all"),
        ('dead_letter_queue = "of-root"\n[defaults]\ndead_letter_queue = "of-all"', 'DeadLetterQueue = "own"', "own"),
        (
            'dead_letter_queue = "of-root"\n[defaults]\ndead_letter_queue = "of-all"',
            'dead_letter_queue = "unset"',
            "of-root",
        ),
    ],
)
def test_a_queue_has_its_own_dead_letter_queue_else_that_of_the_root(
    files: Files, root: str, queue: str, expected: str | None
) -> None:
    assert files.write(root=root, queue=queue).load().dead_letter_queue == expected


def test_a_queue_says_which_file_names_its_dead_letter_queue(files: Files) -> None:
    files.write(root='dead_letter_queue = "letters"')
    assert files.explain()["dead_letter_queue"] == Setting("dead_letter_queue", "letters", str(files.root_file))


def test_no_queue_is_its_own_dead_letter_queue(files: Files) -> None:
    (problem,) = problems_of(files.write(root="", queue='dead_letter_queue = "orders"').load)
    assert problem.startswith(f'{files.queue_file}: dead_letter_queue = "orders": a queue cannot be its own')
    assert problem in check_file(str(files.queue_file))
    with pytest.raises(ConfigError, match="cannot be its own"):
        validate_options({"dead_letter_queue": "orders"}, "here", root=RootConfig(), queue="orders")


@pytest.mark.parametrize(
    "root",
    [
        'dead_letter_queue = "orders"',
        '[defaults]\ndead_letter_queue = "orders"\nexhausted = "dead-letter"',
        'dead_letter_queue = "orders"\n[defaults]\ndead_letter_queue = "other"\nexhausted = "dead-letter"',
        'dead_letter_queue = "other"\n[defaults]\ndead_letter_queue = "orders"\nexhausted = "dead-letter"',
    ],
)
def test_the_queue_that_the_root_names_needs_no_other_whatever_the_defaults_say(files: Files, root: str) -> None:
    there = files.write(root=root).load()
    assert (there.dead_letter_queue, there.exhausted) == (None, "error")
    written = validate_options({}, "here", root=files.load_root(), root_file=str(files.root_file), queue="orders")
    assert written.dead_letter_queue is None


def test_the_queue_that_the_root_names_may_have_another_of_its_own(files: Files) -> None:
    files.write(root='dead_letter_queue = "orders"', queue='dead_letter_queue = "more"\nexhausted = "dead-letter"')
    there = files.load()
    assert (there.dead_letter_queue, there.exhausted) == ("more", "dead-letter")


@pytest.mark.parametrize("root", ["", 'dead_letter_queue = "orders"'])
def test_exhausted_messages_cannot_go_to_a_dead_letter_queue_that_nobody_names(files: Files, root: str) -> None:
    files.write(root=root, queue='exhausted = "dead-letter"')
    (problem,) = problems_of(files.load)
    assert problem == (
        f'{files.queue_file}: exhausted = "dead-letter": there is no dead_letter_queue, neither of the queue nor of '
        "the root: set one"
    )
    assert check_file(str(files.queue_file)) == [problem]


def test_exhausted_messages_may_go_to_the_dead_letter_queue_of_the_root(files: Files) -> None:
    files.write(root='dead_letter_queue = "letters"', queue='exhausted = "dead-letter"')
    assert files.load().exhausted == "dead-letter" and check_file(str(files.queue_file)) == []
    assert toml_text({"exhausted": "dead-letter"}) == 'exhausted = "dead-letter"\n'


def test_the_defaults_may_leave_it_to_each_queue_to_name_a_dead_letter_queue(files: Files) -> None:
    files.write(root='[defaults]\nexhausted = "dead-letter"', queue='dead_letter_queue = "letters"')
    assert files.load().exhausted == "dead-letter"
    (problem,) = check_file(str(files.root_file))
    assert problem.startswith(f'{files.root_file}: [defaults]: exhausted = "dead-letter": there is no dead_letter')


@pytest.mark.parametrize(
    ("root", "queue", "at_root"),
    [
        ('dead_letter_queue = "letters"', "", True),
        ('[defaults]\ndead_letter_queue = "letters"', "", True),
        ("", 'dead_letter_queue = "letters"', False),
    ],
)
def test_check_finds_a_dead_letter_queue_that_is_missing_where_it_is_named(
    files: Files, root: str, queue: str, at_root: bool
) -> None:
    files.write(root=root, queue=queue)
    found = {True: check_file(str(files.root_file)), False: check_file(str(files.queue_file))}
    (problem,) = found[at_root]
    assert problem.endswith(
        'dead_letter_queue = "letters": the root has no queue of this name: `dropq create letters` makes it'
    )
    assert found[not at_root] == []
    assert files.load().dead_letter_queue == "letters", "it may be made later"
    make_letters(files)
    assert check_file(str(files.root_file)) == check_file(str(files.queue_file)) == []


# check_file.


def test_check_reads_a_queue_where_it_lies(files: Files) -> None:
    files.write(root="[defaults]\nmax_cancels = 1\n", queue='Name = "orders"\nhistory = false\n')
    assert check_file(str(files.queue_file)) == [] == check_file(str(files.root_file))
    files.write(queue='Name = "bills"\n')
    assert "its folder's name" in check_file(str(files.queue_file))[0]


def test_check_reads_a_draft_that_lies_anywhere(tmp_path: Path) -> None:
    draft = tmp_path / "draft.toml"
    draft.write_text('Name = "orders"\nlease_perod = 1\n')
    assert check_file(str(draft)) == [f"{draft}: lease_perod is not a key of a queue; the nearest is lease_period"]
    draft.write_text("format = 2\n")
    assert "reads format 1" in check_file(str(draft))[0]
    draft.write_text("Name = 5\n")
    assert "the name of a queue is allowed" in check_file(str(draft))[0]


def test_check_of_a_queue_leaves_the_roots_problems_to_the_root(files: Files) -> None:
    files.write(root="oops", queue="history = 1\n")
    assert check_file(str(files.queue_file)) == [f"{files.queue_file}: history = 1: true or false is allowed"]


def test_check_of_nothing_says_so(tmp_path: Path) -> None:
    assert check_file(str(tmp_path / "queue.toml")) == [f"{tmp_path / 'queue.toml'}: there is no such file"]


# Writing.


def test_options_are_written_as_toml_that_reads_back(files: Files) -> None:
    options = {
        "LeasePeriod": timedelta(seconds=90),
        "expiration": 0.5,
        "ignore": ['a"b\\c', "tab\tnl\ndel\x7f", "ä\u2028€😀"],
        "file_mode": 0o664,
        "max_history": None,
        "history": False,
        "redelivery_backoff": 1.5,
        "group": "staff",
    }
    text = toml_text(options)
    assert files.write(queue=text).load() == validate_options(options, "x")
    assert tomllib.loads(text)["lease_period"] == "1m30s"
    assert 'max_history = "unset"\n' in text


def test_wrong_options_are_not_written() -> None:
    assert problems_of(lambda: toml_text({"histry": 1}))[0].startswith("options: histry")
    with pytest.raises(ConfigError):
        toml_text({"ignore": ["\udcff"]})


def test_no_options_are_an_empty_file() -> None:
    assert toml_text({}) == ""


_KEYS = st.sampled_from([*KEYS, "Name", "x"])
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.datetimes() | st.sampled_from(["unset"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | _KEYS, inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(_KEYS, _VALUES, max_size=6))
@example({"selector": [{"\n": None}]})
@example({"lease_period": {"\n": None}})
@example({"lease_period": 0.0078125})
def test_whatever_is_given_is_valid_or_a_config_error(options: dict[str, object]) -> None:
    problems = []
    try:
        there = validate_options(options, "here")
    except ConfigError as error:
        problems = str(error).split("\n")
    else:
        assert validate_options(tomllib.loads(toml_text(options)), "here") == there
    assert all(problem.startswith("here: ") for problem in problems)


# A configuration of AMPS.


@pytest.fixture
def imported(tmp_path: Path) -> Callable[..., list[AmpsQueue]]:
    """Read a configuration of AMPS with these elements below SOW, or the whole of a file."""

    def read(sow: str = "", whole: str = "") -> list[AmpsQueue]:
        text = f"<AMPSConfig><Name>x</Name>\n<SOW>\n{sow}</SOW></AMPSConfig>"
        (tmp_path / "amps.xml").write_text(whole or text)
        return read_queues(str(tmp_path / "amps.xml"), RootConfig(), "dropq.toml")

    return read


Imported = Callable[..., list[AmpsQueue]]


@pytest.mark.parametrize(
    ("element", "is_shared"),
    [("Queue", True), ("QueueDefinition", True), ("LocalQueue", False)],
)
def test_each_element_of_amps_that_defines_a_queue_is_read(imported: Imported, element: str, is_shared: bool) -> None:
    topic = "<Topic><Name>t</Name><FileName>t.sow</FileName></Topic>"
    (queue,) = imported(f"{topic}<{element}><Name> MQ\n</Name><MessageType>json</MessageType></{element}>")
    kind = {"ReplicationType": "Queue"} if is_shared else {}
    assert (queue.name, queue.options, queue.left_out) == ("MQ", {"MessageType": "json", **kind}, {})
    assert queue.is_shared is is_shared


def test_a_group_local_queue_of_amps_keeps_its_owner_and_its_domain(imported: Imported, tmp_path: Path) -> None:
    owned = "<Name>MQ</Name><InitialOwner>hub</InitialOwner><GroupLocalQueueDomain>eu</GroupLocalQueueDomain>"
    (problem,) = problems_of(lambda: imported(f"<GroupLocalQueue>{owned}</GroupLocalQueue>"))
    assert "set instance in" in problem
    (queue,) = read_queues(str(tmp_path / "amps.xml"), RootConfig(instance="spoke"), "dropq.toml")
    options = {"InitialOwner": "hub", "GroupLocalQueueDomain": "eu", "ReplicationType": "GroupLocalQueue"}
    assert (queue.options, queue.left_out, queue.is_shared) == (options, {}, True)


@pytest.mark.parametrize("key", AMPS)
def test_each_key_of_amps_is_read_from_the_text_of_its_element(imported: Imported, key: str) -> None:
    needed = {"DefaultPublishTarget": {"UnderlyingTopic": "prices"}, "FieldSeparator": {"MessageType": "fix"}}
    options = {**needed.get(key, {}), key: AMPS[key]}
    said = "".join(f"<{k}>{v}</{k}>" for k, v in options.items())
    (queue,) = imported(f"<LocalQueue><Topic>q</Topic>{said}</LocalQueue>")
    assert queue.name == "q" and not queue.left_out
    assert validate_options(queue.options, "") == validate_options(options, "")


def test_text_is_taken_from_xml_as_xml_means_it(imported: Imported) -> None:
    filter = "<Filter>/a &lt; 1 <!-- so --><![CDATA[AND /b < 2]]></Filter>"
    (queue,) = imported(f"<LocalQueue><Name>q</Name>{filter}</LocalQueue>")
    assert queue.options == {"Filter": "/a < 1 AND /b < 2"}


def test_what_the_root_cannot_have_is_left_out_with_the_reason(imported: Imported) -> None:
    keys = ("UnderlyingTopic", "DefaultPublishTarget", "MaxBacklogs")
    (queue,) = imported(f"<LocalQueue><Name>q</Name>{''.join(f'<{key}>q</{key}>' for key in keys)}</LocalQueue>")
    assert queue.options == {} and tuple(queue.left_out) == keys
    assert "own name" in queue.left_out["UnderlyingTopic"]
    assert "nearest is max_backlog" in queue.left_out["MaxBacklogs"]


def test_a_variable_of_the_environment_is_put_in_as_text(imported: Imported, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DESK", "<eu>")
    monkeypatch.delenv("NO_DESK", raising=False)
    (queue,) = imported("<LocalQueue><Name>q.${DESK}</Name><Filter>/desk = '${DESK}'</Filter></LocalQueue>")
    assert (queue.name, queue.options) == ("q.<eu>", {"Filter": "/desk = '<eu>'"})
    (problem,) = problems_of(lambda: imported("<Queue><Name>q</Name>\n<Filter>'${NO_DESK}'</Filter></Queue>"))
    assert problem.endswith("amps.xml: line 3: Filter: there is no variable NO_DESK in the environment: set it")
    assert imported("<Topic><FileName>${NO_DESK}</FileName></Topic>") == []


def test_all_problems_of_the_queues_of_amps_are_told_together(imported: Imported) -> None:
    problems = problems_of(
        lambda: imported(
            "<Queue><Name>/a/b</Name></Queue>\n<Queue><Name>q</Name><LeasePeriod>5 parsecs</LeasePeriod></Queue>\n"
            "<Queue><Name>q</Name></Queue>\n<Queue><MessageType>json</MessageType></Queue>\n"
            "<Queue><Name>r</Name><Filter><And/></Filter><Leasing>strict</Leasing><Leasing>strict</Leasing></Queue>\n"
            "<Include>more.xml</Include>"
        )
    )
    for line, says in (
        (8, "`ampServer --dump-config`"),
        (3, "'/a/b' cannot name a queue"),
        (4, 'LeasePeriod = "5 parsecs": a duration'),
        (5, "two queues q"),
        (6, "give the queue one Name"),
        (7, "Filter: a text is allowed"),
        (7, "Leasing: it is there twice"),
    ):
        assert any(f": line {line}: " in problem and says in problem for problem in problems), says
    assert len(problems) == 7


@pytest.mark.parametrize(
    ("whole", "says"),
    [
        ('<!DOCTYPE a [<!ENTITY e SYSTEM "file:///etc/passwd">]><AMPSConfig>&e;</AMPSConfig>', "line 1: a DOCTYPE"),
        ('<?xml version="1.0"?>\n<!DOCTYPE a SYSTEM "http://dtd.example/a.dtd"><AMPSConfig/>', "line 2: a DOCTYPE"),
        ("<AMPSConfig>", "not valid XML (no element found: line 1"),
        ("<AMPSConfig>&e;</AMPSConfig>", "not valid XML (undefined entity"),
        ('<?xml version="1.0" encoding="utf-7"?><AMPSConfig/>', "not valid XML"),
        ('<?xml version="1.0" encoding="none-such"?><AMPSConfig/>', "not valid XML"),
        ("\n", "not valid XML"),
        ("<SOW/>", "begins with <SOW>"),
        (f"<AMPSConfig>{' ' * (1 << 20)}</AMPSConfig>", "longer than"),
    ],
)
def test_what_is_no_configuration_of_amps_is_refused(imported: Imported, whole: str, says: str) -> None:
    (problem,) = problems_of(lambda: imported(whole=whole))
    assert "amps.xml: " in problem and says in problem


def test_a_configuration_of_amps_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="there is no file"):
        read_queues(str(tmp_path / "amps.xml"), RootConfig(), "dropq.toml")


# The paper.


def _blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", DOC, re.DOTALL)


@pytest.mark.parametrize("block", _blocks("toml"))
def test_the_examples_of_the_paper_are_what_they_say(block: str, files: Files) -> None:
    if block.startswith("# dropq.toml"):
        assert files.write(root=block).load_root().defaults
        files.load()
    elif block.startswith("# queue.toml, refused"):
        shown = [
            line.removeprefix(f"{files.queue_file.parent}/") for line in problems_of(files.write(queue=block).load)
        ]
        assert shown == _blocks("text")[0].strip().split("\n")
    else:
        assert block.startswith("# queue.toml\n")
        files.write(queue=block).load()
        assert check_file(str(files.queue_file)) == []


def test_the_configuration_of_amps_in_the_paper_is_read(imported: Imported, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOB_LEASE", "5m")
    (queue,) = imported(whole=_blocks("xml")[0])
    assert validate_options(queue.options, "") == QueueConfig(lease_period=300, max_backlog=15_000)


def test_the_paper_has_every_key_with_its_default() -> None:
    table = [[cell.strip() for cell in row.strip("|").split("|")] for row in DOC.split("\n")]
    rows = {cells[0].strip("`"): cells for cells in table if len(cells) == 5 and cells[0].startswith("`")}
    assert set(rows) == {*KEYS, "name"}
    shown = {key: setting.value for key, setting in _defaults().items()}
    for key in KEYS:
        _, amps, _, default, meaning = rows[key]
        assert meaning
        assert default.strip("`") == _as_in_the_paper(shown[key]), key
        camel = "".join(part.capitalize() for part in key.split("_"))
        assert amps == (f"`{camel}`" if camel in {*AMPS, "InitialOwner", "GroupLocalQueueDomain"} else "")


def _defaults() -> dict[str, Setting]:
    return {s.key: s for s in explain_queue("q", RootConfig(), "dropq.toml", QueueLayout.flat("/nonexistent"))}


def _as_in_the_paper(value: object) -> str:
    if isinstance(value, list):
        return " ".join(value) or "none"
    return "unset" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
