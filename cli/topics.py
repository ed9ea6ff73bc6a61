"""Commands of topics: make them, publish, make and remove subscriptions, and list them.

A topic and a subscription are queues: every other command takes their addresses, `TOPIC` and `TOPIC/NAME.CLIENT`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import starmap
from socket import gethostname
from typing import TYPE_CHECKING, Annotated, Unpack

import typer

from dropq.format.addresses import SubscriptionName, check_subscription_name
from dropq.format.layout import NO_LOCAL
from dropq.lifecycle.open_queue import find_layout
from dropq.storage.reading import exists

from . import messages, output
from .options import DryRun, Headers, Quiet, Settings, TopicName, Yes, argument, duration, option, point, with_options
from .output import OK, Record, unescape
from .parsing import Command, group
from .setup import options_of
from .shell import Shell, in_states

if TYPE_CHECKING:
    from dropq import Queue

#: The columns of `topic ls`.
COLUMNS = ("queue", "target", "delayed", "processing", "error", "about", "filter")

ClientId = Annotated[
    str | None, option("--client-id CLIENT", "Whose subscription it is; the name of this host by default.")
]
SubscriptionArgument = Annotated[str, argument("NAME", "The name of the subscription.")]

topic = group("topic", "Publish to topics, and make their subscriptions.")


@topic.command("create", cls=Command)
def create(ctx: typer.Context, name: TopicName, settings: Settings = None) -> None:
    """Make a topic; prints its path.

    VALUE is TOML, or else text, as of `dropq create`. Some options are for what is published, and the others are
    defaults of the topic's subscriptions: docs/topics.md lists them.
    """
    shell = Shell(ctx)
    made = shell.root.create_topic(unescape(name), **options_of(settings))
    shell.line({"topic": made.name, "path": made.queue.layout.home}, ("path",))


@topic.command("publish", cls=Command)
@with_options(Headers)
def publish(
    ctx: typer.Context,
    name: TopicName,
    files: messages.Files = None,
    *,
    lines: messages.Lines = False,
    move: messages.Move = False,
    client_id: Annotated[
        str | None, option("--client-id CLIENT", "Who publishes: no-local subscriptions of this client get nothing.")
    ] = None,
    timeout: Annotated[
        float | None,
        duration("--timeout", "Wait for the end of a pause, or for a full receiver, this long for each message."),
    ] = None,
    quiet: Quiet = False,
    **headers: Unpack[Headers],
) -> int:
    """Publish each FILE, or standard input; prints the ids.

    It is `dropq send` to every receiver of a topic. An id is printed once the message is sent, and every receiver has
    it. If the topic is paused, or a receiver is full, the message is sent all the same: stderr reports that, and the
    receivers get it later.
    """
    shell = Shell(ctx, quiet)
    topic = shell.root.topic(unescape(name), client_id=None if client_id is None else unescape(client_id))
    with topic._patient(timeout):
        return messages.send_all(shell, lambda: topic.queue, files, headers, lines=lines, move=move)


@topic.command("subscribe", cls=Command)
def subscribe(
    ctx: typer.Context,
    name: TopicName,
    subscription: SubscriptionArgument,
    client_id: ClientId = None,
    filter: Annotated[str | None, option("--filter FILTER", "Only messages that match it come in.")] = None,
    no_local: Annotated[bool, option("--no-local", "Leave out what the same client id publishes.")] = False,
    recovery_point: Annotated[
        str | None,
        option(
            "--recovery-point POINT",
            "Begin in the topic's processed/: at epoch, now, creation, a generated id, or an ISO 8601 date or time.",
            parser=point,
        ),
    ] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Make a durable subscription; prints its address.

    It gets what is published from now on. Receive with `dropq receive ADDRESS` or `dropq work ADDRESS`. If the
    subscription is there already, it stays as it is. If it is there with another filter, with or without --no-local, or
    in another topic, it is removed first, with its messages.
    """
    from dropq.filters import check_chooses, compile_filter
    from dropq.topics.subscriptions import replaced_by

    shell = Shell(ctx)
    topic = shell.root.topic(unescape(name))
    wanted = SubscriptionName(unescape(subscription), _client(client_id), no_local)
    check_subscription_name(wanted.name, wanted.client_id)
    if filter is not None:
        check_chooses(filter)
        compile_filter(filter)
    gone = _contents(map(shell.root.queue, replaced_by(topic._context, wanted, filter)))
    address = f"{topic.name}/{wanted.folder}"
    if dry_run:
        there = not gone and find_layout(str(shell.root.path), address) is not None
        _report_removal(shell, gone, address)
        return output.note(f"{'is there already' if there else 'would be made'}: {address}")
    differs = "; ".join(f"{name} is there already, {_difference(name, address)}" for name in gone)
    why = f"{differs}. Subscribing again removes it with its messages, and makes a new one."
    has_messages = _confirm(shell, gone, why, yes=yes)
    made = topic._made(wanted, filter, recovery_point, durable=True, force=has_messages)
    shell.line({"queue": made.name, "path": made.layout.home}, ("queue",))


@topic.command("unsubscribe", cls=Command)
def unsubscribe(
    ctx: typer.Context,
    name: TopicName,
    subscription: SubscriptionArgument,
    client_id: ClientId = None,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Remove a durable subscription, with its messages.

    It asks if the subscription has any message, also in processed/ or in the folder of a route. While a consumer uses
    it, it stays (75).
    """
    shell = Shell(ctx)
    topic = shell.root.topic(unescape(name))
    subscription, client_id = unescape(subscription), _client(client_id)
    gone = _contents(topic._found(subscription, client_id))
    if dry_run:
        return _report_removal(shell, gone)
    has_messages = _confirm(shell, gone, yes=yes)
    topic.unsubscribe(subscription, client_id=client_id, force=has_messages)
    for address, counts in gone.items():
        if shell.json:
            shell.line({"queue": address, **counts}, ())
        output.note(f"subscription {_described(address, counts)} is removed")


def _client(given: str | None) -> str:
    """Return the client id that was given, else the name of this host, without its domain."""
    return unescape(given) if given is not None else gethostname().partition(".")[0]


def _contents(queues: Iterable[Queue]) -> dict[str, dict[str, int]]:
    """Return the contents of each subscription that is to be removed, by its address."""
    from dropq.upkeep.queues import contents

    return {queue.name: contents(queue.context) for queue in queues}


def _described(name: str, counts: Mapping[str, int]) -> str:
    return f"{name} ({in_states(counts)})"


def _confirm(shell: Shell, gone: Mapping[str, Mapping[str, int]], why: str = "", *, yes: bool) -> bool:
    """Ask before subscriptions are removed that have messages, and say why; return whether any has."""
    has_messages = any(any(counts.values()) for counts in gone.values())
    if has_messages:
        question = f"{why} Remove subscription {' and '.join(starmap(_described, gone.items()))}?"
        shell.confirm(question.lstrip(), yes=yes)
    return has_messages


def _report_removal(shell: Shell, gone: Mapping[str, Mapping[str, int]], wanted: str = "") -> None:
    """Report which subscriptions would be removed; the subscription at the address `wanted` would replace them."""
    for name, counts in gone.items():
        shell.line({"queue": name, **counts}, ("queue",))
        why = f", as it is there {_difference(name, wanted)}" if wanted else ""
        output.note(f"would be removed: {_described(name, counts)}{why}")


def _difference(found: str, wanted: str) -> str:
    """Return how a subscription differs from the new subscription of its name; both are given by address."""
    if found == wanted:
        return "with another filter"
    if found.partition("/")[0] != wanted.partition("/")[0]:
        return "in another topic"
    return "without --no-local" if wanted.endswith(NO_LOCAL) else "with --no-local"


@topic.command("ls", cls=Command)
def ls(
    ctx: typer.Context,
    name: Annotated[str | None, argument("TOPIC", "The topic; by default all topics of the root.")] = None,
) -> int:
    """List topics and subscriptions, with what waits there.

    The line of a topic counts what is published and not distributed yet. A subscription may be no-local (it does not
    get what its own client publishes), ephemeral (it goes with its consumer) or recovering (it is being filled from
    the topic's processed/).
    """
    shell = Shell(ctx)
    records: list[Record] = []
    list_one = shell.unless_gone(lambda address: records.append(_record(shell.root.queue(address))))
    code = shell.each(_addresses(shell, name), list_one)
    shell.show(records, COLUMNS, spare=("delayed", "error", "processing"))
    if not records and code == OK:
        shell.check_root()
        output.note(f"{shell.root.path} has no topics: `dropq topic create TOPIC` makes one")
    return code


def _addresses(shell: Shell, name: str | None) -> list[str]:
    if name is not None:
        topic = shell.root.topic(unescape(name))
        found = [queue.name for queue in topic.subscriptions()]
        if not found:
            _ = topic._context  # raises what is wrong with the name
        return [topic.name, *found] if topic.exists() else found
    root = str(shell.root.path)
    names = (queue.name for queue in shell.root.queues())
    return [name for name in names if (layout := find_layout(root, name)) is not None and layout.topic]


def _record(queue: Queue) -> Record:
    """Return a topic or a subscription as a record."""
    layout = queue.layout
    subscription = SubscriptionName.of(queue.name.partition("/")[2])
    recovering = queue.context.is_recovering
    traits = {
        "no_local": subscription is not None and subscription.no_local,
        "ephemeral": layout.is_subscription and exists(layout.ephemeral),
        "recovering": recovering,
        "paused": queue.paused and not recovering,
    }
    return {
        "queue": queue.name,
        "kind": "subscription" if layout.is_subscription else "topic",
        **queue.counts(),
        "filter": queue.config.filter,
        "about": ", ".join(trait.replace("_", "-") for trait, holds in traits.items() if holds),
        **traits,
    }
