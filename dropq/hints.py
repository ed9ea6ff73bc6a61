"""Find the command, option, key or argument that an unknown word means.

What other programs call a thing comes first, as its spelling says nothing about the name here. Then the most similar
spelling counts. Names that users gave, as those of queues, have no synonyms.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

#: Each name here, with what other programs call it. A word that stands with several names means the first of those that
#: can be given where the word was: `timeout` is `--wait` of `receive`, and `lease_period` of a queue.
_CALLED = {
    # commands
    "ls": "list queues stats stat status count counts info length size depth top",
    "create": "new make mk mkdir declare",
    "delete": "remove rm drop destroy del rmdir",
    "rm": "remove delete drop del",
    "add": "create new make",
    "config_show": "settings get_config",
    "health": "check ping healthcheck monitor",
    "browse": "peek dlq dead_letter dead_letters failed error errors pending messages explain why",
    "receive": "pop get dequeue take fetch pull poll reserve claim lease recv",
    "show": "get inspect describe view details",
    "cat": "read body payload",
    "tail": "watch log logs follow events history",
    "send": "push put enqueue produce emit post insert add dispatch",
    "ack": "acknowledge done complete finish confirm commit sow_delete",
    "nack": "release return unlock abandon defer unack",
    "reject": "bury discard",
    "extend": "touch renew keepalive heartbeat change_visibility visibility_timeout",
    "work": "consume worker run process start listen exec",
    "topic_publish": "publish pub broadcast",
    "topic_subscribe": "subscribe sub",
    "topic_unsubscribe": "unsubscribe unsub",
    "publish": "push put send produce emit post",
    "unsubscribe": "remove rm",
    "selector_add": "route_add forward shovel",
    "requeue": "retry redrive redeliver kick resubmit",
    "purge": "clear flush truncate drain empty",
    "pause": "stop suspend freeze hold",
    "resume": "unpause continue",
    "sweep": "cleanup clean gc vacuum reap recover",
    "fsck": "repair verify scrub fix",
    # options
    "expires_in": "ttl expire expires expiry expiration message_ttl time_to_live max_age",
    "wait": "timeout wait_time wait_time_seconds block",
    "wait_reply": "timeout",
    "ack_timeout": "timeout visibility_timeout lease",
    "lease": "visibility_timeout visibility ack_timeout timeout lease_period lock ttr",
    "by": "timeout visibility_timeout lease period duration",
    "n": "limit max max_messages max_number count head number lines",
    "jobs": "concurrency workers threads parallel processes parallelism",
    "until_empty": "burst once drain exit_when_empty oneshot",
    "follow": "watch tail stream",
    "property": "header headers attribute attributes prop props properties metadata",
    "filter": "selector where query match grep",
    "delay": "delay_seconds countdown schedule not_before retry_delay backoff defer",
    "id": "message_id key",
    "reason": "message error",
    "yes": "force confirm assume_yes no_input",
    "dry_run": "simulate noop what_if",
    "quiet": "silent",
    "json": "output format",
    "older_than": "max_age age min_age",
    "keep_age": "max_age age older_than retention",
    "keep_count": "max_count count keep",
    "max_age": "age older_than",
    "to": "destination dest into",
    "to_origin": "source origin",
    "client_id": "client consumer group consumer_group consumer_id",
    # arguments of Python
    "properties": "headers header attributes metadata props",
    "message_id": "id key",
    "timeout": "wait max_wait block",
    "concurrency": "workers threads parallel processes parallelism jobs",
    # keys of configuration
    "lease_period": (
        "visibility_timeout visibility timeout lease lease_time lease_timeout lease_duration ack_timeout ack_wait "
        "ack_deadline lock_timeout lock_duration job_timeout ttr"
    ),
    "expiration": "ttl message_ttl time_to_live expiry expires expires_in default_ttl",
    "redelivery_attempts": (
        "max_retries retry retries max_attempts attempts max_tries tries retry_limit retry_count redeliveries "
        "max_redeliveries"
    ),
    "max_deliveries": "max_receive_count delivery_limit max_deliver",
    "redelivery_delay": "retry_delay delay retry_interval",
    "redelivery_backoff": "backoff retry_backoff multiplier",
    "redelivery_delay_limit": "max_retry_delay max_backoff max_delay",
    "dead_letter_queue": "dlq dead_letter dead_letters dlx dead_letter_exchange dead_letter_topic",
    "max_backlog": "prefetch prefetch_count in_flight max_in_flight max_inflight max_ack_pending concurrency",
    "max_unprocessed": "max_length maxlen max_len max_size capacity limit max_messages",
    "history_age": "retention retention_period keep_age",
    "max_history": "keep keep_count",
    "fairness_model": "fair fairness",
    "durability": "durable fsync sync persistent",
    "file_mode": "mode umask permissions",
    "semantics": "delivery guarantee at_least_once at_most_once",
    "self_destruct": "auto_delete",
}


def _plain(name: str) -> str:
    """Return the letters of a name, in which all spellings of it agree: `--max-retries`, `MaxRetries`."""
    return re.sub("[-_ ]", "", name).lower()


def _by_word() -> dict[str, tuple[str, ...]]:
    words: dict[str, tuple[str, ...]] = {}
    for name, called in _CALLED.items():
        for word in map(_plain, called.split()):
            words[word] = (*words.get(word, ()), _plain(name))
    return words


#: What each word may mean, the first first; words and names are in letters alone.
SYNONYMS: Mapping[str, tuple[str, ...]] = _by_word()


def nearest(word: str, known: Iterable[str], *, n: int = 1, cutoff: float = 0.6) -> list[str]:
    """Return which of the known names a word means, as they are written there, the likeliest first.

    Args:
        word: a command, an option or a key that is not known, in any spelling.
        known: the names that can stand in its place.
        n: the most names to return; of what a synonym means it is one.
        cutoff: how like a spelling has to be, from 0 to 1.
    """
    from difflib import get_close_matches

    names = {_plain(name): name for name in known}
    meant = [name for name in SYNONYMS.get(_plain(word), ()) if name in names][:1]
    return [names[name] for name in meant or get_close_matches(_plain(word), names, n=n, cutoff=cutoff)]


def hinting(call: Callable[P, R]) -> Callable[P, R]:
    """Return a function that says with the TypeError about an unknown argument which one was meant."""

    @wraps(call)
    def hinted(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return call(*args, **kwargs)
        except TypeError as error:
            from inspect import signature

            known = signature(call).parameters
            for word in kwargs.keys() - known.keys():
                for near in nearest(word, known):
                    error.add_note(f"{call.__name__} has no argument {word}: is it {near}?")
            raise

    return hinted
