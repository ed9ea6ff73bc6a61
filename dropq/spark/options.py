"""The options and columns of reads and writes, checked in the driver before any task runs.

Invariant: no option and no column is ignored. What cannot be read or written as the caller asks is refused by name.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from dataclasses import field as of_class
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple, TypeVar

from pyspark.sql import types as t

from dropq.api import Queue, Root
from dropq.durations import parse_duration
from dropq.errors import ConfigError
from dropq.filters import check_chooses, compile_filter
from dropq.format.escapes import is_int32
from dropq.format.layout import STATES
from dropq.format.names import check_property, check_property_name
from dropq.format.typed import Typed, read_property
from dropq.hints import nearest
from dropq.spark.columns import COLUMNS, MESSAGE, repeated

T = TypeVar("T")

#: The options of each use of the format, in the spelling that errors use; Spark hands them over in lower case.
STREAM_WRITE_OPTIONS = (
    "root", "queue", "topic", "messagePer", "bodyFormat", "recordsPerMessage", "maxRecordsPerMessage", "keyColumns",
    "type", "priority", "expiresIn", "delay", "properties",
)  # fmt: skip
WRITE_OPTIONS = (*STREAM_WRITE_OPTIONS, "jobId")
CSV_OPTIONS = ("sep", "quote", "escape", "nullValue")
CLAIM_OPTIONS = ("bodyFormat", *CSV_OPTIONS, "badBodies", "numPartitions")
READ_OPTIONS = (
    "root", "queue", "topic", "state", "filter", "sentAfter", "sentBefore", *CLAIM_OPTIONS, "corruptRecordColumn",
    "claimed",
)  # fmt: skip
STREAM_READ_OPTIONS = (
    "root", "queue", "filter", *CLAIM_OPTIONS, "maxMessagesPerTrigger", "maxBytesPerTrigger", "leasePeriod", "clientId",
)  # fmt: skip
#: Spark's own options of a stream, which it passes to the format, too.
_SPARKS_OWN = frozenset({"checkpointlocation"})
#: Options of Spark's own readers of lines that its functions for one line take, too.
_OF_FUNCTIONS = frozenset({"comment", "timestampformat", "timestampntzformat", "dateformat", "mode",
                           "columnnameofcorruptrecord"})  # fmt: skip
#: The variable of the environment that has the root where the option `root` is missing.
ROOT_VARIABLE = "DROPQ_ROOT"
#: What a job id may have in braces, for the tasks to fill in: those of a batch in foreachBatch, and of a claim's block.
QUERY, BATCH, CLAIM = "{query}", "{batch}", "{claim}"
#: The most tasks that read messages.
PARTITIONS = 8
#: The fewest messages that are worth a task of their own, if their bodies are short.
TASK_MESSAGES = 1000
#: The most messages of a micro-batch.
MESSAGES_PER_TRIGGER = 10_000
#: What becomes of a body that cannot be read: for what takes messages, and for a table; the first is the default.
BAD_BODIES = {True: ("fail", "reject"), False: ("fail", "null")}
#: Why a value is refused that is for the other use.
_OTHER_USE = {
    True: "only a table has rows of nulls, as streams and claim() settle what they read; fail or reject is allowed",
    False: "only streams and claim() take messages, and can reject one; fail or null is allowed",
}
#: The column of a table that has the error of a bad body.
CORRUPT_COLUMN = "_corrupt_record"
#: What becomes a message; the first is the default.
MESSAGE_PER = ("row", "partition", "key")
#: The formats in which the rows of a partition become a body; the first is the default.
BODY_FORMATS = ("jsonl", "csv", "parquet", "arrow", "text")
#: What may stand before a quote inside quotes of csv: another quote, or a backslash; the first is the default.
ESCAPES = ('"', "\\")
#: The formats in which values become the records of a bundle.
RECORD_FORMATS = ("text", "frames", "jsonl")

_INTEGERS = (t.ByteType, t.ShortType, t.IntegerType, t.LongType)
_TEXT = (t.StringType, t.CharType, t.VarcharType)
_PERIOD = (*_TEXT, *_INTEGERS, t.FloatType, t.DoubleType)
_FLAT = (*_PERIOD, t.BooleanType, t.DecimalType, t.DateType, t.TimestampType, t.TimestampNTZType)
_RICH = (*_FLAT, t.BinaryType, t.NullType)
#: The column types of a body format, besides arrays, maps and structs, which csv and text do not have.
_LEAVES: dict[str, tuple[type[t.DataType], ...]] = {
    "jsonl": _RICH,
    "csv": _FLAT,
    "parquet": (*_RICH, t.TimeType, t.DayTimeIntervalType),
    "arrow": (*_RICH, t.TimeType, t.DayTimeIntervalType),
    "text": _TEXT,
}
#: The columns of a row that becomes a message: their types, and what errors say is allowed.
_COLUMNS: dict[str, tuple[tuple[type[t.DataType], ...], str]] = {
    "value": ((*_TEXT, t.BinaryType), "string or binary"),
    "priority": (_INTEGERS, "an integer"),
    "type": (_TEXT, "string"),
    "correlation_id": (_TEXT, "string"),
    "reply_to": (_TEXT, "string"),
    "expires_in": (_PERIOD, "string (a duration such as 30s) or a number of seconds"),
    "delay": (_PERIOD, "string (a duration such as 30s) or a number of seconds"),
    "properties": ((t.MapType,), "map<string,string>"),
    "message_id": (_TEXT, "string"),
}
#: The columns, and options, that rows do not have which share a message, and why.
_NOT_SHARED = {
    "type": "the type of a bundle is the format of its records",
    "message_id": "each bundle gets an id of its own",
}
#: The columns that can make a key, which is a text in the name of its message.
_KEYS = (*_TEXT, *_INTEGERS, t.BooleanType, t.DateType)


class CsvOptions(NamedTuple):
    """How csv is written."""

    sep: str = ","
    #: The byte around a text; NUL for none.
    quote: str = '"'
    #: What stands before a quote inside quotes.
    escape: str = ESCAPES[0]
    #: What is a null without quotes, as nothing is.
    null: str = ""


CSV = CsvOptions()


@dataclass(frozen=True)
class Options:
    """The options of every use of the format: the root, by a path that is valid on all executors, and the queue.

    `is_topic` says that `queue` is the name of a topic, and not of a queue.
    """

    root: str
    queue: str
    is_topic: bool

    def open(self) -> Queue:
        """Return the queue, or the queue of what is published to the topic; NoSuchQueue without one."""
        root = Root(self.root)
        if not self.is_topic:
            return root.queue(self.queue)
        topic = root.topic(self.queue)
        topic._context  # noqa: B018 - raises where there is no such topic
        return topic.queue


@dataclass(frozen=True)
class WriteOptions(Options):
    """The options of a write.

    `body_format` is "" where the type of the values decides. `max_records` is the most rows of a message, and None for
    any number; None makes each row a message where `message_per` is row. `headers` are arguments of `Queue.send`.
    """

    message_per: str
    body_format: str
    max_records: int | None
    job_id: str | None
    key_columns: tuple[str, ...] = ()
    headers: Mapping[str, Any] = of_class(default_factory=dict)

    @classmethod
    def parse(cls, options: Mapping[str, str], *, stream: bool = False) -> WriteOptions:
        """Parse the options of a write, or of a stream that is written; ConfigError says what one may be."""
        values = by_name(options, STREAM_WRITE_OPTIONS if stream else WRITE_OPTIONS, "save()", stream=stream)
        message_per = _choice(values, "messagePer", MESSAGE_PER)
        _check_uses(values, message_per)
        is_row = message_per == "row"
        return cls(
            *_address(values),
            message_per=message_per,
            body_format=_choice(values, "bodyFormat", RECORD_FORMATS if is_row else BODY_FORMATS)
            if not is_row or "bodyformat" in values
            else "",
            max_records=_count(values, "recordsPerMessage" if is_row else "maxRecordsPerMessage"),
            job_id=_given(values, "jobId", _job_id),
            key_columns=_given(values, "keyColumns", _key_columns) or (),
            headers=_headers(values),
        )

    @property
    def is_per_batch(self) -> bool:
        """Whether the tasks have to fill in the job id, as it has `{query}` and `{batch}`."""
        return self.job_id is not None and BATCH in self.job_id

    @property
    def is_per_claim(self) -> bool:
        """Whether the tasks have to fill in the job id, as it has `{claim}`."""
        return self.job_id is not None and CLAIM in self.job_id

    @property
    def is_for_tasks(self) -> bool:
        """Whether the tasks have to fill in the job id."""
        return self.is_per_batch or self.is_per_claim

    def check_columns(self, schema: t.StructType) -> None:
        """Refuse columns that these options cannot write."""
        problems = [*repeated(schema)]
        if self.message_per == "row":
            problems += _row_problems(schema, is_shared=self.max_records is not None)
        elif not schema.names:
            problems.append("there is none, so that a body would be empty")
        else:
            problems += [*body_problems(schema, self.body_format), *self._key_problems(schema)]
        if problems:
            raise ConfigError(f"these columns cannot be sent: {'; '.join(problems)}")

    def _key_problems(self, schema: t.StructType) -> Iterator[str]:
        kinds = {field.name: field.dataType for field in schema.fields}
        for name in self.key_columns:
            if name not in kinds:
                near = difflib.get_close_matches(name, kinds, n=1)
                hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(kinds)}"
                yield f"keyColumns names {name}, which is not there ({hint})"
                continue
            if not isinstance(kinds[name], _KEYS):
                allowed = "a string, an integer, a boolean or a date"
                yield f"column {name} of keyColumns is {kinds[name].simpleString()}, and must be {allowed}: cast it"
            if name in self.headers.get("properties", ()):
                yield f"the property {name} is in keyColumns and in the option properties: leave it out of one"
            try:
                check_property_name(name)
            except ValueError as error:
                yield f"column {name} of keyColumns cannot be a property ({error}): rename it, by withColumnRenamed"


@dataclass(frozen=True)
class ReadOptions(Options):
    """The options of a read, or of a stream that is read.

    `claimed` names a claiming batch: its subscription and the number of its messages. `task_messages` is the fewest
    messages that are worth a task. `sent_after` and `sent_before` are in ms since 1970.
    """

    states: tuple[str, ...]
    filter: str | None
    body_format: str | None
    partitions: int
    task_messages: int = TASK_MESSAGES
    claimed: str | None = None
    limit: int = MESSAGES_PER_TRIGGER
    lease: float | None = None
    client_id: str = "spark"
    bad_bodies: str = "fail"
    corrupt_column: str = CORRUPT_COLUMN
    csv: CsvOptions = CSV
    max_bytes: int | None = None
    sent_after: int | None = None
    sent_before: int | None = None

    @classmethod
    def parse(cls, options: Mapping[str, str], *, stream: bool = False) -> ReadOptions:
        """Parse the options of a read, or of a stream that is read; ConfigError says what one may be.

        InvalidFilter: the filter cannot be read, or is empty although the stream takes messages.
        """
        values = by_name(options, STREAM_READ_OPTIONS if stream else READ_OPTIONS, "load()", stream=stream)
        if "filter" in values:
            compile_filter(values["filter"])
            if stream:
                check_chooses(values["filter"])
        any_number = "numpartitions" in values or "bodyformat" in values  # the caller decides; or bodies may be large
        return cls(
            *_address(values),
            states=_states(values),
            filter=values.get("filter"),
            body_format=_choice(values, "bodyFormat", BODY_FORMATS) if "bodyformat" in values else None,
            partitions=_count(values, "numPartitions") or PARTITIONS,
            task_messages=1 if any_number else TASK_MESSAGES,
            claimed=_claimed(values),
            limit=_count(values, "maxMessagesPerTrigger") or MESSAGES_PER_TRIGGER,
            lease=_period(values, "leasePeriod"),
            client_id=values.get("clientid", "spark"),
            bad_bodies=_bad_bodies(values, takes=stream or "claimed" in values),
            corrupt_column=_corrupt_column(values),
            csv=_csv(values),
            max_bytes=_count(values, "maxBytesPerTrigger", 15),
            sent_after=_time(values, "sentAfter"),
            sent_before=_time(values, "sentBefore"),
        )

    def body_columns(self, schema: t.StructType) -> t.StructType:
        """Return the columns of a schema that bodies have: not `_message`, nor the one for the error of a bad body."""
        others = {MESSAGE, self.corrupt_column} if self.bad_bodies == "null" else {MESSAGE}
        return t.StructType([field for field in schema.fields if field.name not in others])

    def null_problems(self, schema: t.StructType) -> Iterator[str]:
        """Yield what keeps a bad body from being a row of nulls."""
        if self.bad_bodies != "null":
            return
        for field in schema.fields:
            if not field.nullable:
                yield f"column {field.name} is declared NOT NULL, and badBodies=null makes a bad body a row of nulls"
            if field.name == self.corrupt_column and not isinstance(field.dataType, t.StringType):
                yield f"column {field.name} is {field.dataType.simpleString()}, and the error of a bad body is a string"
        if not self.body_columns(schema).fields:
            yield "it names no column of the bodies"


def by_name(options: Mapping[str, str], allowed: tuple[str, ...], call: str, *, stream: bool = False) -> dict[str, str]:
    """Return options by their names in lower case; ConfigError names an unknown one, and says what is allowed."""
    values = {key.lower(): value for key, value in options.items() if not (stream and key.lower() in _SPARKS_OWN)}
    known = {option.lower() for option in allowed}
    for key in values:
        if key == "path":
            raise ConfigError(f"{call} takes no path here: give the options root and queue")
        if key == "topic" and "topic" not in allowed:
            raise ConfigError(
                "option topic: what waits in a topic is on its way to its subscriptions, and is not to be taken: give "
                "a subscription of it as the queue, such as sales.eu/audit.hq"
            )
        if key not in known:
            near = nearest(key, allowed, cutoff=0.7)
            hint = f"did you mean {near[0]}? " if near else ""
            if key in _OF_FUNCTIONS and call != "save()":
                hint = "Spark's from_csv and from_json take it, for lines that are read with bodyFormat=text; "
            raise ConfigError(f"option {key} is unknown: {hint}{call} takes {', '.join(allowed)}")
    return values


def _address(values: Mapping[str, str]) -> tuple[str, str, bool]:
    """Return the root, the queue or the topic, and whether it is a topic."""
    for option in ("root", "queue", "topic"):
        if values.get(option) == "":
            raise ConfigError(f"option {option} is empty: name the {option}, or leave the option out")
    root = values.get("root") or os.environ.get(ROOT_VARIABLE)
    if not root:
        raise _missing("root", f"or set {ROOT_VARIABLE} before Spark starts")
    queue, topic = values.get("queue"), values.get("topic")
    if queue and topic:
        raise ConfigError(f"options queue = {queue!r} and topic = {topic!r}: give one of the two")
    if not (address := queue or topic):
        raise _missing("queue", "or topic")
    if topic and "/" in topic:
        raise ConfigError(f"option topic = {topic!r}: this is the address of a subscription, which is a queue: "
                          "give it as option queue")  # fmt: skip
    return os.path.abspath(root), address, bool(topic)  # executors work in other folders


def _missing(option: str, instead: str) -> ConfigError:
    return ConfigError(
        f"option {option} is missing: give the options root and queue, {instead}; in SQL, say "
        "WITH (root = '...', queue = '...') behind the table's name, as a table made by CREATE TABLE loses its OPTIONS"
    )


def _check_uses(values: Mapping[str, str], message_per: str) -> None:
    """Refuse the options of a write that would have no effect, or lack another one."""
    is_row = message_per == "row"
    is_shared = is_row and "recordspermessage" in values
    for option, is_used, needed in (
        ("bodyFormat", is_shared or not is_row, "messagePer=partition or key, or recordsPerMessage"),
        ("maxRecordsPerMessage", not is_row, "messagePer=partition or key; for rows there is recordsPerMessage"),
        ("recordsPerMessage", is_row, "messagePer=row; for partitions and keys there is maxRecordsPerMessage"),
        ("keyColumns", message_per == "key", "messagePer=key"),
    ):
        if option.lower() in values and not is_used:
            raise ConfigError(f"option {option} needs {needed}")
    if is_shared and "type" in values:
        raise ConfigError(f"option type does not go with recordsPerMessage: {_NOT_SHARED['type']}, see bodyFormat")
    if message_per == "key" and "keycolumns" not in values:
        raise ConfigError("option keyColumns is missing: name the columns that make the key of a message, with commas")


def _given(values: Mapping[str, str], option: str, read: Callable[[str], T]) -> T | None:
    """Return what a function reads in an option; None if the option is not given."""
    text = values.get(option.lower())
    return None if text is None else read(text)


def _key_columns(text: str) -> tuple[str, ...]:
    columns = tuple(column.strip() for column in text.split(","))
    if not all(columns) or len({*columns}) < len(columns):
        raise ConfigError(f"option keyColumns = {text!r}: names of columns are allowed, each once, with commas")
    return columns


def _headers(values: Mapping[str, str]) -> dict[str, Any]:
    """Return the headers that the options give to all messages, as arguments of `Queue.send`."""
    if values.get("type") == "":
        raise ConfigError("option type is empty: name the type, or leave the option out")
    body_format = values.get("bodyformat", BODY_FORMATS[0])
    is_shared = values.get("messageper", MESSAGE_PER[0]) != "row"
    if is_shared and values.get("type", body_format) in {*BODY_FORMATS, *RECORD_FORMATS} - {body_format}:
        raise ConfigError(f"option type = {values['type']!r}: consumers would read the bodies, which are "
                          f"{body_format}, in this format: leave the option out, or name no format")  # fmt: skip
    headers = {
        "type": values.get("type"),
        "priority": _given(values, "priority", _priority),
        "expires_in": _duration(values, "expiresIn"),
        "delay": _duration(values, "delay"),
        "properties": _given(values, "properties", _properties),
    }
    return {name: header for name, header in headers.items() if header is not None}


def _priority(text: str) -> int:
    if not (re.fullmatch(r"[+-]?[0-9]{1,10}", text) and is_int32(int(text))):
        raise ConfigError(f"option priority = {text!r:.40}: an integer from -2147483648 to 2147483647 is allowed")
    return int(text)


def _properties(text: str) -> dict[str, Typed]:
    properties: dict[str, Typed] = {}
    for pair in text.split(","):
        try:
            name, typed = read_property(pair.lstrip())
            check_property(name, typed)
        except ValueError as error:
            raise ConfigError(f"option properties = {text!r}: {error}; a comma begins the next property") from error
        if name in properties:
            raise ConfigError(f"option properties = {text!r}: {name} is there twice")
        properties[name] = typed
    return properties


def _claimed(values: Mapping[str, str]) -> str | None:
    if (claimed := values.get("claimed")) is None:
        return None
    if not re.fullmatch(r"[^:]+:[0-9]+", claimed):
        raise ConfigError(f"option claimed = {claimed!r}: only dropq.spark.claim sets this option, for its own batch")
    for option in ("state", "filter", "sentAfter", "sentBefore"):
        if option.lower() in values:
            raise ConfigError(f"option {option} has no effect on the batch of dropq.spark.claim: leave it out")
    return claimed


def _bad_bodies(values: Mapping[str, str], *, takes: bool) -> str:
    """Return what becomes of bad bodies; a read `takes` messages if it is a stream or a claiming batch."""
    if (value := values.get("badbodies")) is None:
        return "fail"
    if "bodyformat" not in values:
        raise ConfigError("option badBodies needs bodyFormat, as it says what becomes of a body that does not fit it")
    if value in BAD_BODIES[not takes] and value not in BAD_BODIES[takes]:
        raise ConfigError(f"option badBodies = {value!r}: {_OTHER_USE[takes]}")
    return _choice(values, "badBodies", BAD_BODIES[takes])


def _csv(values: Mapping[str, str]) -> CsvOptions:
    for option in CSV_OPTIONS:
        if option.lower() in values and values.get("bodyformat") != "csv":
            raise ConfigError(f"option {option} needs bodyFormat=csv: it describes how the csv is written")
    sep = {"\\t": "\t"}.get(text := values.get("sep", CSV.sep), text)
    quote = values.get("quote", CSV.quote) or "\0"
    for option, character in (("sep", sep), ("quote", quote)):
        if len(character) != 1 or not character.isascii() or character in "\r\n\\":
            raise ConfigError(f"option {option} = {values[option]!r}: one ASCII character is allowed, and no line "
                              "break or backslash; bodyFormat=text with Spark's from_csv reads other csv")  # fmt: skip
    if sep == quote:
        raise ConfigError(f"options sep and quote are both {sep!r}: give two characters")
    return CsvOptions(sep, quote, _choice(values, "escape", ESCAPES), values.get("nullvalue", CSV.null))


def _corrupt_column(values: Mapping[str, str]) -> str:
    if (value := values.get("corruptrecordcolumn")) is None:
        return CORRUPT_COLUMN
    if values.get("badbodies") != "null":
        raise ConfigError("option corruptRecordColumn needs badBodies=null, as the column has the error of a bad body")
    if not value:
        raise ConfigError("option corruptRecordColumn is empty: name a column of the schema, or leave the option out")
    return value


def _states(values: Mapping[str, str]) -> tuple[str, ...]:
    states = tuple(state.strip() for state in values.get("state", "target").split(","))
    for state in states:
        if state not in STATES:
            raise ConfigError(f"option state = {values['state']!r}: one or more of {', '.join(STATES)}, with commas")
    return tuple(dict.fromkeys(states))


def _duration(values: Mapping[str, str], option: str) -> float | None:
    try:
        return _given(values, option, parse_duration)
    except ValueError as error:
        raise ConfigError(f"option {option} = {values[option.lower()]!r}: {error}") from error


def _period(values: Mapping[str, str], option: str) -> float | None:
    seconds = _duration(values, option)
    if seconds == 0:
        raise ConfigError(f"option {option} = 0: a claim that outlives its process needs a lease, such as 10m")
    return seconds


def _time(values: Mapping[str, str], option: str) -> int | None:
    try:
        time = _given(values, option, datetime.fromisoformat)
    except ValueError as error:
        allowed = "a time such as 2026-11-28T19:00:00Z is allowed, in UTC if it has no zone"
        raise ConfigError(f"option {option} = {values[option.lower()]!r:.40}: {allowed}") from error
    if time is None:
        return None
    aware = time if time.tzinfo else time.replace(tzinfo=UTC)
    return (aware - datetime.fromtimestamp(0, UTC)) // timedelta(milliseconds=1)


def _job_id(job_id: str) -> str:
    if not job_id.strip():
        raise ConfigError("option jobId is empty: name the job, or leave the option out")
    rest = job_id.replace(QUERY, "").replace(BATCH, "").replace(CLAIM, "")
    if "{" in rest or "}" in rest:
        raise ConfigError(f"option jobId = {job_id!r}: only {QUERY}, {BATCH} and {CLAIM} may be in braces")
    if CLAIM in job_id and (QUERY in job_id or BATCH in job_id):
        raise ConfigError(f"option jobId = {job_id!r}: {CLAIM} is for claim(), and the others are for foreachBatch")
    if QUERY in job_id and BATCH not in job_id:
        raise ConfigError(f"option jobId = {job_id!r} needs {BATCH}, too: else only the first batch would be sent")
    if BATCH in job_id and QUERY not in job_id:
        raise ConfigError(f"option jobId = {job_id!r} needs {QUERY}, too: a new checkpoint counts from 0 again, and "
                          "what was sent under a number is not sent again")  # fmt: skip
    return job_id


def _choice(values: Mapping[str, str], option: str, allowed: tuple[str, ...]) -> str:
    value = values.get(option.lower(), allowed[0])
    if value not in allowed:
        raise ConfigError(f"option {option} = {value!r}: {', '.join(allowed[:-1])} or {allowed[-1]} is allowed")
    return value


def _count(values: Mapping[str, str], option: str, digits: int = 9) -> int | None:
    if (text := values.get(option.lower())) is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= digits and int(text) > 0):
        raise ConfigError(f"option {option} = {text!r:.40}: a whole number from 1 to {'9' * digits} is allowed")
    return int(text)


def _row_problems(schema: t.StructType, *, is_shared: bool) -> Iterator[str]:
    if "value" not in schema.fieldNames():
        yield "the column value, the body of each message, is missing"
    of_a_read = [name for name in schema.fieldNames() if name in COLUMNS and name not in _COLUMNS]
    if of_a_read:
        yield (
            f"columns of a read cannot be written: drop {', '.join(of_a_read)} (how long a message may wait is said by "
            "the column expires_in)"
        )
    for field in schema.fields:
        if field.name in of_a_read:
            continue
        if field.name not in _COLUMNS:
            near = difflib.get_close_matches(field.name.lower(), _COLUMNS, n=1)
            hint = f"did you mean {near[0]}?" if near else "messagePer=partition sends any columns"
            yield f"column {field.name} is unknown where each row is a message ({hint})"
            continue
        if is_shared and field.name in _NOT_SHARED:
            yield f"column {field.name} does not go with recordsPerMessage: {_NOT_SHARED[field.name]}"
        kinds, allowed = _COLUMNS[field.name]
        kind = field.dataType
        pair = (kind.keyType, kind.valueType) if isinstance(kind, t.MapType) else ()
        if not isinstance(kind, kinds) or not all(isinstance(part, _TEXT) for part in pair):
            yield f"column {field.name} is {kind.simpleString()}, and must be {allowed}"


def body_problems(schema: t.StructType, body_format: str) -> Iterator[str]:
    """Yield a problem for each column that bodies of a format cannot hold."""
    if body_format == "text" and len(schema.fields) != 1:
        yield f"bodyFormat=text has one string column, and there are {len(schema.fields)}"
    for field in schema.fields:
        for path, kind in _refused(field.name, field.dataType, body_format):
            yield f"column {path} is {kind}, which bodyFormat={body_format} does not hold"


def _refused(path: str, kind: t.DataType, body_format: str) -> Iterator[tuple[str, str]]:
    """Yield the parts of a column that a format cannot hold, with the names of their types."""
    nested = body_format not in ("csv", "text")
    if nested and isinstance(kind, t.StructType) and (kind.fields or body_format != "parquet"):
        for field in kind.fields:
            yield from _refused(f"{path}.{field.name}", field.dataType, body_format)
    elif nested and isinstance(kind, t.ArrayType):
        yield from _refused(f"{path}[]", kind.elementType, body_format)
    elif nested and isinstance(kind, t.MapType):
        if body_format == "jsonl" and not isinstance(kind.keyType, (*_TEXT, *_INTEGERS)):
            yield f"the key of {path}", kind.keyType.simpleString()
        yield from _refused(f"{path}{{}}", kind.valueType, body_format)
    elif not isinstance(kind, _LEAVES[body_format]):
        yield path, kind.simpleString()
