"""A hint names what was meant: what other programs call a thing first, then the likest spelling."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from dropq import ConfigError, Queue, Root, Topic, work
from dropq.cli import main as cli
from dropq.config.schema import QueueConfig
from dropq.hints import SYNONYMS, _plain, nearest

#: The calls of Python whose arguments get hints.
CALLS = (Queue.send, Queue.subscribe, Queue.receive, Topic.subscribe, work)
#: The same as `work`, with any argument for the type checker.
anyhow: Any = work
KEYS = [field.name for field in fields(QueueConfig)]


def commands() -> Iterator[tuple[str, Any]]:
    top: Any = get_command(cli.build())
    for name, command in top.commands.items():
        yield name, command
        for inner, each in getattr(command, "commands", {}).items():
            yield f"{name} {inner}", each


OPTIONS = {name: [option for param in command.params for option in param.opts] for name, command in commands()}


def test_every_name_that_a_synonym_leads_to_is_there() -> None:
    names = {*KEYS, *OPTIONS, *(option for options in OPTIONS.values() for option in options)}
    names |= {name for call in CALLS for name in signature(call).parameters}
    names |= {name.rpartition(" ")[2] for name in OPTIONS}
    names |= {option for param in get_command(cli.build()).params for option in param.opts}  # of every command
    targets = {target for meant in SYNONYMS.values() for target in meant}
    assert targets <= set(map(_plain, names)), targets - set(map(_plain, names))


@pytest.mark.parametrize(
    ("word", "command"),
    [
        *(("list", "ls"), ("stats", "ls"), ("top", "ls"), ("watch", "tail"), ("peek", "browse"), ("rm", "delete")),
        *(("dlq", "browse"), ("dead_letter", "browse"), ("dead-letter", "browse"), ("push", "send"), ("put", "send")),
        *(("pop", "receive"), ("get", "receive"), ("retry", "requeue"), ("clear", "purge"), ("inspect", "show")),
        *(("subscribe", "topic subscribe"), ("publish", "topic publish"), ("recieve", "receive"), ("sned", "send")),
    ],
)
def test_a_command_of_other_programs_leads_to_ours(word: str, command: str) -> None:
    assert nearest(word, OPTIONS) == [command]


@pytest.mark.parametrize(
    ("command", "word", "option"),
    [
        ("send", "--ttl", "--expires-in"),
        ("send", "--message-id", "--id"),
        ("send", "--header", "--property"),
        ("send", "--timeout", "--wait-reply"),
        ("receive", "--timeout", "--wait"),
        ("receive", "--visibility-timeout", "--lease"),
        ("receive", "--max-messages", "-n"),
        ("work", "--visibility_timeout", "--lease"),
        ("work", "--concurrency", "--jobs"),
        ("extend", "--timeout", "--by"),
        ("tail", "--watch", "--follow"),
        ("purge", "--force", "--yes"),
        ("nack", "--retry-delay", "--delay"),
        ("browse", "--limit", "-n"),
    ],
)
def test_an_option_of_other_programs_leads_to_the_one_that_the_command_has(
    command: str, word: str, option: str
) -> None:
    assert nearest(word, OPTIONS[command]) == [option]


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("ttl", "expiration"),
        ("TTL", "expiration"),
        ("visibility_timeout", "lease_period"),
        ("VisibilityTimeout", "lease_period"),
        ("timeout", "lease_period"),
        ("max_retries", "redelivery_attempts"),
        ("retry", "redelivery_attempts"),
        ("dlq", "dead_letter_queue"),
        ("dead_letter", "dead_letter_queue"),
        ("prefetch", "max_backlog"),
        ("redelivery_atempts", "redelivery_attempts"),
    ],
)
def test_a_key_of_other_programs_leads_to_ours(word: str, key: str) -> None:
    assert nearest(word, KEYS) == [key]


def test_a_word_that_is_like_no_name_gets_no_hint() -> None:
    assert nearest("zzz", OPTIONS) == []


def test_an_option_of_create_queue_is_answered_with_the_key(tmp_path: Path) -> None:
    root = Root.create(tmp_path / "root")
    with pytest.raises(ConfigError, match="max_retries is not a key of a queue; the nearest is redelivery_attempts"):
        root.create_queue("orders", max_retries=3)
    with pytest.raises(ConfigError, match=r"visibility_timeout .*; the nearest is lease_period"):
        root.create_queue("orders", visibility_timeout="5m")


def test_an_option_of_spark_is_answered_with_the_one_that_is_there() -> None:
    from dropq.spark.options import by_name

    with pytest.raises(ConfigError, match=r"option ttl is unknown: did you mean expiresIn\? a write takes"):
        by_name({"ttl": "5m"}, ("root", "queue", "expiresIn"), "a write")


@pytest.mark.parametrize(
    ("call", "note"),
    [
        (lambda queue: queue.send("x", ttl=5), "send has no argument ttl: is it expires_in?"),
        (lambda queue: queue.send_json({}, headers={}), "send has no argument headers: is it properties?"),
        (
            lambda queue: queue.subscribe(visibility_timeout=5),
            "subscribe has no argument visibility_timeout",
        ),
        (lambda queue: queue.subscribe(prefetch=5), "subscribe has no argument prefetch: is it max_backlog?"),
        (lambda queue: queue.receive(wait=5), "receive has no argument wait: is it timeout?"),
        (lambda queue: anyhow(queue, print, workers=5), "work has no argument workers: is it concurrency?"),
        (lambda queue: anyhow(queue, print, concurency=5), "work has no argument concurency: is it concurrency?"),
    ],
)
def test_an_argument_of_other_programs_is_answered_with_ours(
    call: Callable[[Any], object], note: str, tmp_path: Path
) -> None:
    queue = Root.create(tmp_path / "root").create_queue("orders")
    with pytest.raises(TypeError, match="unexpected keyword argument") as refused:
        call(queue)
    assert [text[: len(note)] for text in refused.value.__notes__] == [note]
    assert queue.counts()["target"] == 0


def test_a_type_error_about_something_else_has_no_hint(tmp_path: Path) -> None:
    queue = Root.create(tmp_path / "root").create_queue("orders")
    wrong: Any = 5
    with pytest.raises((TypeError, ValueError)) as refused:
        queue.send(wrong, priority=4)
    assert not hasattr(refused.value, "__notes__")
