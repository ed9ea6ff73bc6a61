"""Addresses: the names of queues, topics and subscriptions, and where each lies below a root; text only.

`orders` is a queue, `sales.eu` a queue or else a topic, `sales.eu/audit.hq` the topic's subscription `audit` of the
client `hq`. The part behind the slash is the name of the subscription's folder, as DropboxMQ writes it: name and client
id are encoded, so that a dot only separates them.
"""

from __future__ import annotations

from typing import NamedTuple

from dropq.errors import InvalidName
from dropq.format import names
from dropq.format.escapes import decode, encode
from dropq.format.layout import NO_LOCAL, SUBSCRIPTIONS, TOPIC_INCOMING, TOPIC_ROOT, QueueLayout

#: Bytes that the folder's name of a subscription may have, so that there is room for what is put around it.
SUBSCRIPTION_LIMIT = 200


class SubscriptionName(NamedTuple):
    """What the folder of a subscription is called after: its name, its client, and whether it has no local messages."""

    name: str
    client_id: str
    no_local: bool = False

    @property
    def folder(self) -> str:
        """The name of the folder."""
        return f"{encode(self.name)}.{encode(self.client_id)}" + (NO_LOCAL if self.no_local else "")

    @classmethod
    def of(cls, folder: str) -> SubscriptionName | None:
        """Return the subscription that a folder is called after; None for any other name."""
        name, _, rest = folder.partition(".")  # a client may be called no-local: the first two parts count
        client_id, no_local = (rest.removesuffix(NO_LOCAL), True) if "." in rest else (rest, False)
        if not client_id or any(encode(decode(part)) != part for part in (name, client_id)):
            return None
        return cls(decode(name), decode(client_id), no_local)


def check_address(address: str) -> None:
    """Raise InvalidName if neither a queue, nor a topic, nor a subscription can have an address."""
    topic, slash, folder = address.partition("/")
    if not slash:
        names.check_queue_name(address)
        return
    try:
        check_topic_name(topic)
    except InvalidName as error:
        raise InvalidName(f"{address!r} is no address: {error}") from None
    if SubscriptionName.of(folder) is None or names.DELETED.search(folder):
        raise InvalidName(
            f"{address!r} is no address: give QUEUE, TOPIC or TOPIC/SUBSCRIPTION.CLIENT, such as sales.eu/audit.hq; a "
            "dot within a subscription's name or a client id is %2E"
        )


def is_address(text: str) -> bool:
    """Return whether a queue, a topic or a subscription can have an address, which a stranger may have written."""
    try:
        check_address(text)
    except InvalidName:
        return False
    return True


def check_topic_name(topic: str) -> None:
    """Raise InvalidName if a topic cannot have a name."""
    if "/" in topic or not all(topic.split(".")):
        raise InvalidName(
            f"{topic!r} cannot name a topic: give one or more parts with dots between, such as sales.eu, without / and "
            "with no part empty"
        )
    names.check_queue_name(topic, "topic")


def check_subscription_name(name: str, client_id: str) -> None:
    """Raise InvalidName if a subscription cannot have a name and a client id."""
    _check_text("name of a subscription", name)
    check_client_id(client_id)
    folder = SubscriptionName(name, client_id, no_local=True).folder
    if len(folder) > SUBSCRIPTION_LIMIT:
        raise InvalidName(
            f"{name!r} of client {client_id!r} cannot name a subscription: its folder may have a name of "
            f"{SUBSCRIPTION_LIMIT} bytes, and {folder!r}, as it would be called with --no-local, has {len(folder)}; "
            "give a shorter name"
        )


def check_client_id(client_id: str) -> None:
    """Raise InvalidName if nobody can publish or subscribe under a client id."""
    _check_text("client id", client_id)


def _check_text(what: str, text: str) -> None:
    if not text:
        raise InvalidName(f"the {what} is empty: give one or more characters")
    if "\0" in text:
        raise InvalidName(f"{text!r} cannot be the {what}: give a text without NUL")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidName(f"{text!r} cannot be the {what}: UTF-8 cannot encode it") from None


def is_topic_name(text: str) -> bool:
    """Return whether a topic can have a name."""
    return names.can_name_queue(text) and all(text.split("."))


def topic_layout(root: str, topic: str) -> QueueLayout:
    """Return where the messages lie that are published to a topic."""
    home = f"{root}/{TOPIC_ROOT}/{topic.replace('.', '/')}"
    return QueueLayout(home, f"{home}/{TOPIC_INCOMING}", topic=home)


def subscription_layout(topic: QueueLayout, folder: str) -> QueueLayout:
    """Return where the messages of a topic's subscription lie."""
    home = f"{topic.topic}/{SUBSCRIPTIONS}/{folder}"
    return QueueLayout(home, home, topic=topic.topic)


def ancestors(topic: str) -> list[str]:
    """Return a topic and the topics above it, to whose subscriptions it is published, too: a.b.c, a.b, a."""
    parts = topic.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


def layouts(root: str, address: str) -> tuple[QueueLayout, ...]:
    """Return the layouts that a queue, topic or subscription of an address may have; the first that is there counts."""
    topic, slash, folder = address.partition("/")
    if slash:
        return (subscription_layout(topic_layout(root, topic), folder),)
    home = f"{root}/{address}"
    queue = QueueLayout.flat(home), QueueLayout.incoming(home)
    return (*queue, topic_layout(root, address)) if all(address.split(".")) else queue
