"""Which folders a root and a queue have, and where: paths only, nothing is read or made here.

What belongs to a queue lies beside its `target/`: in the queue's own folder, or, in DropboxMQ's layout, one level down
in `incoming/`. What is published to a topic lies in the topic's folder `.incoming/`, and what each of its
subscriptions got lies in the subscription's folder, in `.subscriptions/`. Both are queues in every respect.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fnmatch import translate

from dropq.format.claims import split_claim
from dropq.format.escapes import is_coded
from dropq.format.names import NAME_BUDGET, SHARED_BUDGET

#: The states of messages that consumers may take, now or later.
WAITING = ("target", "delayed")
#: The states of messages that are sent and not settled.
UNSETTLED = (*WAITING, "processing")
#: The states of messages that lie there for a reason, which is kept beside them.
WITH_REASON = ("error", "expired")
#: Where a message went that is a dead letter now: into target/ of another queue.
DEAD_LETTER = "dead-letter"
#: The states of messages that are settled. A name may be reserved there before the file is renamed over it.
SETTLED = (*WITH_REASON, "processed")
#: All states of messages that are sent.
STATES = (*UNSETTLED, *SETTLED)
#: All states: in working/, messages are written.
ALL_STATES = (*STATES, "working")
#: The folders that every queue has. An older queue may lack delayed/; routing/ belongs to administrators.
FOLDERS = ("working", "target", "processing", *SETTLED)
#: DropboxMQ 1.2's folders for the transactions of a root.
DROPBOXMQ_TRANSACTIONS = (
    "associated", "unassociated", "prepared", "committing", "committed", "rolling-back", "rolled-back",
)  # fmt: skip
#: The folder that holds a queue's folders in DropboxMQ's own layout.
INCOMING = "incoming"
#: The folder of a root that holds its topics: `a.b` is in its folder `a/b`.
TOPIC_ROOT = "topic-root"
#: The folder of a topic that holds the folders of what is published to it.
TOPIC_INCOMING = ".incoming"
#: The folder of a topic that holds its subscriptions.
SUBSCRIPTIONS = ".subscriptions"
#: How the link ends by which a DropboxMQ feeds a view.
VIEW_LINK = ".dropq"
#: How the folder of a subscription ends that does not get what its own client publishes.
NO_LOCAL = ".no-local"
#: How the folder ends of a subscription that is taken away, and comes back if its routes took a message.
UNLESS_ROUTED = "-unless-routed"
#: The file that has the selectors of a queue's routes.
ROUTES_FILE = "routing.properties"
#: A route is in use while a file of its name, and this, lies in routing/.
IN_USE = ".in-use"
#: The private folder of a root or a queue.
PRIVATE = ".dropq"
#: The file that keeps an empty folder in git; it may lie in any folder of a queue.
KEEPER = ".keep"
#: A job that writes many messages stages them in working/ under this prefix.
JOB_PREFIX = ".job-"
#: A job's folder has this prefix, and a random end, once the job is finished or given up.
DROP_PREFIX = ".drop-"
#: What is being removed has this prefix; the rename to that name was the removal.
GONE_PREFIX = ".gone-"
#: The name of a small file of ours that was not finished: its writer renames it to its own name.
UNFINISHED = re.compile(r"\..+\.[0-9a-f]{12}\.tmp", re.DOTALL)
#: The prefix of the folder that `dropq doctor` works in. It lies in the private folder; where that is missing, its name
#: has the private folder's name and a dash in front.
DOCTOR_PREFIX = "doctor-"


class QueueLayout:
    """The paths of one queue; nothing changes them.

    Args:
        home: the queue's own folder.
        base: the folder that `target/` lies in.
        processing: where claims lie, if not in `processing/`.
        topic: the folder of the topic whose `.incoming/` or whose subscription it is; "" for a queue of its own.
        name_budget: how many bytes a name may have before a part of it goes to a sidecar; more in topics, whose names a
            DropboxMQ reads, too.
    """

    def __init__(
        self, home: str, base: str, *, processing: str = "", topic: str = "", name_budget: int = NAME_BUDGET
    ) -> None:
        private = f"{base}/{PRIVATE}"
        self.name_budget = SHARED_BUDGET if topic else name_budget
        self.home = home
        self.base = base
        self.topic = topic
        self.working = f"{base}/working"
        self.target = f"{base}/target"
        self.delayed = f"{private}/delayed"
        self.processing = processing or f"{base}/processing"
        self.error = f"{base}/error"
        self.expired = f"{base}/expired"
        self.processed = f"{base}/processed"
        self.routing = f"{base}/routing"
        self.routes_file = f"{base}/{ROUTES_FILE}"
        self.selectors = f"{base}/selectors"
        self.config_file = f"{home}/queue.toml" if topic == home else f"{base}/queue.toml"
        self.read_lock = f"{base}/read-lock"
        self.write_lock = f"{base}/write-lock.properties"
        self.private = private
        self.acks = f"{private}/acks"
        #: Says since when nothing needs a queue that destroys itself.
        self.alone = f"{private}/alone"
        self.barriers = f"{private}/barriers"
        self.consumers = f"{private}/consumers"
        #: The spent credits of its selectors.
        self.credits = f"{private}/credits"
        self.created = f"{private}/created"
        self.deleting = f"{private}/deleting"
        self.ephemeral = f"{private}/ephemeral"
        self.held = f"{private}/held"
        #: Says that the queue has had a selector or a named subscription.
        self.kept = f"{private}/kept"
        #: Where the version before put the parts of a bundle together.
        self.joining = f"{private}/joining"
        self.ledger = f"{private}/ledger"
        self.lock = f"{private}/lock"
        #: What went by: lines of all processes, in a file a host, user and day.
        self.log = f"{private}/log"
        #: The clients that have named subscriptions.
        self.named = f"{private}/named"
        #: Where a topic builds its subscriptions before they appear.
        self.new = f"{private}/new"
        self.recovering = f"{private}/recovering"
        #: Hides a subscription that was removed while a DropboxMQ wrote to it; its content ends the name that it gets.
        self.removed = f"{private}/removed"
        self.reasons = f"{private}/reasons"
        #: Where the parts of a bundle are put together.
        self.reassembly = f"{private}/reassembly"
        #: What a topic knows of its receivers.
        self.receivers = f"{private}/receivers"
        #: Says since when routers have looked at what no selector takes.
        self.routers = f"{private}/routers"
        self.set_aside = f"{private}/set-aside"
        self.staged = f"{private}/staged"
        self.streams = f"{private}/streams"
        self.swept = f"{private}/swept"
        #: What goes to queues on other file systems.
        self.transfers = f"{private}/transfers"
        self.turns = f"{private}/turns"
        #: What subscriptions want that found nothing, where other roots may have it.
        self.wanted = f"{private}/wanted"
        #: The folder of each state.
        self.folders: dict[str, str] = {state: getattr(self, state) for state in ALL_STATES}
        #: The folders of the reasons of messages.
        self.reason_folders = tuple(f"{self.reasons}/{state}" for state in WITH_REASON)

    @classmethod
    def flat(cls, home: str) -> QueueLayout:
        """Return the layout of a queue whose folders lie in its own folder."""
        return cls(home, home)

    @property
    def shared(self) -> bool:
        """Whether its folders lie in `incoming/`, as DropboxMQ's do."""
        return self.base == f"{self.home}/{INCOMING}"

    @classmethod
    def incoming(cls, home: str) -> QueueLayout:
        """Return the layout of a queue whose folders lie in `incoming/`, as DropboxMQ's do."""
        return cls(home, f"{home}/{INCOMING}", name_budget=SHARED_BUDGET)

    def with_claims_in(self, folder: str) -> QueueLayout:
        """Return the same layout with another folder for claims."""
        return QueueLayout(self.home, self.base, processing=folder, topic=self.topic, name_budget=self.name_budget)

    def moved(self, home: str) -> QueueLayout:
        """Return the layout of the same queue in another folder."""
        topic = self.topic.replace(self.home, home, 1)
        return QueueLayout(home, self.base.replace(self.home, home, 1), topic=topic, name_budget=self.name_budget)

    @property
    def is_topic(self) -> bool:
        """Whether it holds what is published to a topic."""
        return bool(self.topic) and self.home == self.topic

    @property
    def is_subscription(self) -> bool:
        """Whether it holds what a subscription of a topic got."""
        return bool(self.topic) and self.home != self.topic

    @property
    def first_folders(self) -> tuple[str, ...]:
        """The folders that a queue is made with, parents first.

        Those of private files are among them so that no NFS client ever remembers them as missing. An older queue may
        lack some, and so may a queue whose delete was undone: they are made when they are needed.
        """
        states = (self.folders[state] for state in FOLDERS)
        return (*dict.fromkeys((self.home, self.base)), *states, self.routing, *self._first_private_folders)

    @property
    def private_folders(self) -> tuple[str, ...]:
        """The folders that hold private files, parents first; they are never links."""
        own = (self.new, self.deleting, self.receivers) if self.is_topic else ()  # a queue's `deleting` is a file
        later = (self.credits, self.joining, self.named, self.reassembly, self.staged, self.set_aside, self.transfers)
        return (*self._first_private_folders, *later, self.wanted, *own)

    @property
    def _first_private_folders(self) -> tuple[str, ...]:
        own = (self.consumers, self.held, self.reasons, *self.reason_folders, self.delayed, self.ledger, self.log)
        return (self.private, *own, self.streams, self.acks, self.turns, self.barriers)

    def folder(self, state: str) -> str:
        """Return the folder of a state, `delayed` included."""
        try:
            return self.folders[state]
        except KeyError:
            raise ValueError(f"no state {state!r}: a message is in one of {', '.join(self.folders)}") from None


def unsettled_config(topic: str) -> str:
    """Return where a topic's queue.toml lies while the topic is made or removed; `topic` is its folder."""
    return f"{topic}/{TOPIC_INCOMING}/{PRIVATE}/queue.toml"


def removed_subscriptions(topic: str) -> str:
    """Return the folder that a topic's subscriptions are renamed into to remove them; `topic` is its folder."""
    return f"{topic}/{TOPIC_INCOMING}/{PRIVATE}/deleting"


class RootLayout:
    """The paths of a root; nothing changes them."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.config_file = f"{path}/dropq.toml"
        #: While this file exists, consumers of all queues wait.
        self.read_lock = f"{path}/global-read-lock"
        self.private = f"{path}/{PRIVATE}"
        #: The modification time of this file is the file server's time.
        self.clock = f"{self.private}/clock"
        #: Metadata that does not fit a name.
        self.meta = f"{self.private}/meta"
        #: Notes about the queues that the root knows, so that a queue that is away is missed.
        self.queues = f"{self.private}/queues"
        #: Which selector has which token.
        self.tokens = f"{self.private}/tokens"
        #: A file for each queue that is a view on topics.
        self.views = f"{self.private}/views"
        #: Who has the lock of this file makes a view, or forgets one.
        self.views_lock = f"{self.private}/views.lock"

    @property
    def dropboxmq(self) -> tuple[str, ...]:
        """The folders that a running DropboxMQ 1.2 needs in a root, parents first."""
        top = f"{self.path}/dropboxmq"
        transactions = tuple(f"{top}/transaction/{name}" for name in DROPBOXMQ_TRANSACTIONS)
        return (top, f"{top}/clients", f"{top}/transaction", *transactions)


_WILD = re.compile(r"[*?\[]")


def ignoring(patterns: tuple[str, ...]) -> Callable[[str], object]:
    """Return a test, true for names that are never messages: dot files, and foreign names that match a pattern.

    A coded name is a message whatever it ends in. A claim's prefix does not count. Plain names and `*.suffix` patterns,
    which is what people write, are compared without a regular expression.
    """
    plain = frozenset(pattern for pattern in patterns if not _WILD.search(pattern))
    suffixes = tuple(pattern[1:] for pattern in patterns if pattern[0] == "*" and not _WILD.search(pattern[1:]))
    others = [p for p in patterns if p not in plain and (p[0] != "*" or p[1:] not in suffixes)]
    odd = re.compile("|".join(map(translate, others))).match if others else None

    def ignored(name: str) -> bool:
        if name[0] == ".":
            return True
        bare = split_claim(name)[1] if "~" in name else name
        found = bare.endswith(suffixes) or bare in plain or (odd is not None and odd(bare) is not None)
        return found and not is_coded(bare)

    return ignored


def ignored_ends(patterns: tuple[str, ...]) -> frozenset[str] | None:
    """Return the last characters of the names that patterns match; None where one ends in a wildcard.

    Most names end in another character: to count a million names, only the others are matched.
    """
    ends = frozenset(pattern[-1:] for pattern in patterns)
    return None if ends & {"*", "?", "]"} else ends
