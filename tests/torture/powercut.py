"""What outlives a power cut, by durability: a guest of user-mode-linux sends and settles until its power is cut.

What had returned is told on the guest's console, in which none of its disk is; nothing but dropq syncs. Then it boots
again on the same disk, replays the journal, and what lies there is held against what had returned.
"""

from __future__ import annotations

import math
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from forks import fork

from dropq import Message, Queue, Root
from dropq.queue.message import ack_all
from dropq.staging.jobs import Job
from dropq.storage import files as storage_files
from torture import graph_powercut, output_powercut, record_powercut, root_powercut, topic_powercut
from torture.account import Found, Location, body, found_in, in_short, judge, look, name_of, plainly
from torture.guest import never_write_back, say
from torture.table import Options, Row
from torture.uml import cut_power, kernel

#: The ways to send, and to settle.
WAYS = ("plain", "many", "writer", "delayed", "wide", "job", "forgetting")
VERBS = ("acked", "together", "forgotten", "nacked", "rejected", "expired")
#: What the guest does until each cut. On a journal a sync of anything keeps all that was done before it; so after some
#: sending, or settling, it makes a few calls of one kind alone, and then rests.
CUTS = {
    "full": [f"sending {way}" for way in WAYS] + [f"settling {verb}" for verb in VERBS] + ["both", "both often"] * 3,
    "file": ["sending plain", "settling acked"] + ["both", "both often"] * 3,
    "none": ["both", "both often"] * 2,
}
#: Other file systems than ext4, each with the options by which it commits nothing by itself.
OTHERS = {"xfs": "noatime", "btrfs": "noatime,commit=3600"}
#: How many cuts come on each file system while a guest publishes to a topic, settles records, sends with its acks, and
#: takes from another root.
TOPIC_CUTS = RECORD_CUTS = OUTPUT_CUTS = ROOT_CUTS = 8
#: How many lines the guest says before its power is cut, at the most; and before it makes the last calls.
LINES, CALLS = 1200, 60
#: How many messages wait where they are only settled, in each queue.
WAITING = 200
#: How many calls come last, all of one kind.
LAST = 3
#: Seconds in which a journal that commits each second has done so.
COMMITTED = 2.0
#: The journal commits when somebody syncs, or not before an hour has passed; on some cuts each second, which writes
#: names whose bodies nobody synced.
SELDOM, OFTEN = "noatime,noauto_da_alloc,commit=3600", "noatime,noauto_da_alloc,commit=1"
#: How long the property is that does not fit a name.
WIDE = 300
#: The queue that keeps a history, and the one that keeps none.
KEEPING, FORGETTING = "q", "forgetting"


def run(options: Options) -> Iterator[Row]:
    """Cut the power of guests, a row for each durability; and for each other file system at the durability `full`."""
    kernel()
    rng = random.Random(options.seed)
    for durability, kinds in CUTS.items():
        yield _row(options, durability, kinds if options.long else kinds[-1:], rng)
    for system in OTHERS if options.long else ():
        yield _row(options, "full", CUTS["full"][:-5], rng, system=system)
    systems = {"ext4": SELDOM} | (OTHERS if options.long else {})
    for system, mount in systems.items():
        yield topic_powercut.row(options, system, mount, TOPIC_CUTS if options.long else 1, rng)
    for system, mount in systems.items():
        yield record_powercut.row(options, system, mount, RECORD_CUTS if options.long else 1, rng)
    for system, mount in systems.items():
        yield output_powercut.row(options, system, mount, OUTPUT_CUTS if options.long else 1, rng)
    for system, mount in systems.items():
        yield root_powercut.row(options, system, mount, ROOT_CUTS if options.long else 1, rng)
    for system, mount in systems.items():
        yield graph_powercut.row(options, system, mount, rng)


def _row(options: Options, durability: str, kinds: Sequence[str], rng: random.Random, *, system: str = "ext4") -> Row:
    row = Row(f"durability {durability}: {system}", kills=len(kinds))
    reckonings = []
    for number, kind in enumerate(kinds):
        folder = options.folder / f"{system}-{durability}-{number}"
        reckonings.append(cut_once(folder, durability, kind, rng, system=system))
        row.cases += reckonings[-1].returned
    return judged(row, durability, reckonings)


def judged(row: Row, durability: str, reckonings: list[Reckoning]) -> Row:
    """Fill in a row with what the cuts of one durability came to."""
    lost, undone, damaged = (sum(len(getattr(r, what)) for r in reckonings) for what in ("lost", "undone", "damaged"))
    figures = f"{lost} sends and {undone} settlements undone, {damaged} bodies not whole"
    for number, reckoning in enumerate(reckonings):
        row.doubled += len(reckoning.doubled)
        wrong = [*reckoning.wrong, *(f"{name} lies in two places" for name in reckoning.doubled)]
        if durability != "none":
            wrong += [f"{path} is not whole" for path in reckoning.damaged]
        if durability == "full":
            row.lost += len(reckoning.lost)
            wrong += [f"the send of {name} had returned, and is lost" for name in reckoning.lost] + reckoning.undone
        row.wrong += [f"cut {number + 1}: {line}" for line in wrong[:10]]
    if durability == "none":
        row.test += f" (the control: {figures})"
        if not (lost and damaged):
            row.wrong.append(f"the rig proves nothing: {figures}, although nothing was synced")
    elif durability == "file":
        row.test += f" ({figures})"
    return row


def cut_once(folder: Path, durability: str, kind: str, rng: random.Random, *, system: str = "ext4") -> Reckoning:
    """Let a guest send and settle, cut its power, boot it again, and reckon up."""
    lines, pause = rng.randrange(50, LINES), rng.random() / 20
    what, _, last = kind.partition(" ")
    often = last == "often"
    mount = OTHERS.get(system, OFTEN if often else SELDOM)
    arguments: dict[str, Any] = {
        "durability": durability,
        "what": what,
        "last": "" if often else last,
        "seed": rng.randrange(1 << 30),
    }
    when = {"lines": lines, "pause": pause + often * COMMITTED} if what == "both" else {"lines": math.inf, "pause": 0}
    return reckon(*cut_power(folder, __name__, system, [mount], **when, **arguments))


# -- inside: until the cut -----------------------------------------------------------------------------------------


def work(disk: Path, durability: str, what: str, last: str, seed: int) -> None:
    """Send and settle for ever, or do one of both and rest; tell of each call before it, and when it has returned."""
    never_write_back()
    root = Root.create(disk / "root")
    root.create_queue(KEEPING, durability=durability, redelivery_delay=0)
    root.create_queue(FORGETTING, durability=durability, history=False, redelivery_delay=0)
    if what == "settling":
        for queue in (KEEPING, FORGETTING):
            names = [f"{queue}-before-{number}" for number in range(WAITING)]
            say(f"try {' '.join(names)}")
            root.queue(queue).send_many([_body(name) for name in names])
            os.sync()
            say(f"sent {' '.join(names)}")
    os.sync()  # the last one
    rng = random.Random(seed)
    if what == "sending":
        send(root, rng, last=last)
    if what == "settling":
        settle(root, rng, last=last)
    fork(lambda: _settle_all(disk, seed + 1), longest=0)
    send(Root(disk / "root"), random.Random(seed))


def _settle_all(disk: Path, seed: int) -> None:
    """Settle until the power is cut."""
    try:
        settle(Root(disk / "root"), random.Random(seed))
    except BaseException as error:
        say(f"failed {error!r}")
        raise


def send(root: Root, rng: random.Random, *, last: str = "") -> None:
    """Send by every way there is; for ever, or until a few times by the last one."""
    queue, forgetting = root.queue(KEEPING), root.queue(FORGETTING)
    storage_files.SYNCED_TOGETHER = 5  # of what is sent at once, some is synced one by one
    calls: dict[str, Callable[[list[str]], object]] = {
        "plain": lambda names: [queue.send(_body(name)) for name in names],
        "many": lambda names: queue.send_many([_body(name) for name in names]),
        "writer": lambda names: _write(queue, names),
        "delayed": lambda names: [queue.send(_body(name), delay="1d") for name in names],
        "wide": lambda names: [queue.send(_body(name), properties={"wide": "x" * WIDE}) for name in names],
        "job": lambda names: _commit(queue, names),
        "forgetting": lambda names: [forgetting.send(_body(name)) for name in names],
    }
    number = 0
    for way in _in_turn(WAYS, (6, 1, 2, 1, 1, 1, 3), last, rng):
        count = rng.randint(2, 12) if way in ("many", "job") else 1
        names = [f"{way}-{number + one}" for one in range(count)]
        number += count
        say(f"try {' '.join(names)}")
        calls[way](names)
        say(f"sent {' '.join(names)}")
    _rest()


def _in_turn(kinds: Sequence[str], weights: Sequence[int], last: str, rng: random.Random) -> Iterator[str]:
    """Yield kinds by chance; for ever, or some and then the last one a few times."""
    while not last:
        yield rng.choices(kinds, weights)[0]
    yield from rng.choices(kinds, weights, k=rng.randrange(CALLS))
    yield from [last] * LAST


def _rest() -> NoReturn:
    """Do nothing any more, until the power is cut."""
    say("resting")
    while True:
        signal.pause()


def _body(name: str) -> bytes:
    return body(name, hash_of(name) % 4 * hash_of(name[::-1]) % 20_000)


def hash_of(text: str) -> int:
    """Return a number that is the same in every process."""
    return sum(ord(letter) * 31**index for index, letter in enumerate(text))


def _write(queue: Queue, names: list[str]) -> None:
    for name in names:
        content = _body(name)
        with queue.writer() as file:
            for start in range(0, len(content), 1000):
                file.write(content[start : start + 1000])


def _commit(queue: Queue, names: list[str]) -> None:
    job = Job(queue.context, f"job-{names[0]}")
    job.begin()
    attempt = job.attempt("0")
    attempt.write_all(queue._plain_addresses(len(names), "B"), [_body(name) for name in names])
    job.commit([attempt.finish()])


def settle(root: Root, rng: random.Random, *, last: str = "") -> None:
    """Settle in every way there is; for ever, or until a few times by the last one."""
    calls: dict[str, Callable[[list[Message]], object]] = {
        "acked": lambda messages: messages[0].ack(),
        "together": ack_all,
        "forgotten": lambda messages: messages[0].ack(),
        "nacked": lambda messages: messages[0].nack(),
        "rejected": lambda messages: messages[0].reject("as it comes"),
        "expired": lambda messages: messages[0].expire(),
    }
    with root.queue(KEEPING).subscribe(max_backlog=8) as keeping, root.queue(FORGETTING).subscribe() as forgetting:
        for verb in _in_turn(VERBS, (6, 2, 2, 3, 1, 1), last, rng):
            subscription = forgetting if verb == "forgotten" else keeping
            messages = subscription.receive_many(rng.randint(2, 8) if verb == "together" else 1, timeout=0.05)
            names = [name_of(message.body) or f"half:{message.file}" for message in messages]
            if names:
                say(f"take {' '.join(names)}")
                calls[verb](messages)
                say(f"{'acked' if verb in ('together', 'forgotten') else verb} {' '.join(names)}")
        _rest()


# -- inside: after the cut -----------------------------------------------------------------------------------------


def inspect(disk: Path) -> dict[str, Any]:
    """Tell what lies on the disk; what dropq knows of it; and what lies there when it has taken all that waits."""
    root = Root(disk / "root")
    first = look(disk / "root")
    about = {}
    for queue in root.queues():
        for state in ("target", "processing", "processed", "expired", "error", "delayed"):
            for message in queue.browse(state):
                if name := name_of(message.body):
                    wide = len(str(message.properties.get("wide", "")))
                    about[name] = [wide, message.cancels, bool(message.reason)]
    for queue in root.queues():
        queue.sweep(unleased_older_than=0)
        with queue.subscribe() as subscription:
            while (waiting := subscription.receive()) is not None:
                waiting.ack()
    return {"first": plainly(first), "about": about, "last": plainly(look(disk / "root"))}


# -- outside again -------------------------------------------------------------------------------------------------


@dataclass
class Reckoning:
    """What had returned before a power cut, and what of that the cut has undone."""

    returned: int = 0
    #: Bodies whose sends had returned, and that lie nowhere.
    lost: list[str] = field(default_factory=list)
    #: Settlements that had returned, and are not there, a line each.
    undone: list[str] = field(default_factory=list)
    #: Bodies in two places; files in a state that are not whole; what no durability allows.
    doubled: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def reckon(said: Iterable[str], seen: dict[str, Any]) -> Reckoning:
    """Hold what lies on a disk against what was said before the cut.

    Args:
        said: the guest's lines: `try`, `sent`, `take` and the settlements, each followed by names.
        seen: what `inspect` returned, as it comes out of JSON.
    """
    tried: set[str] = set()
    jobs: list[list[str]] = []
    sent: set[str] = set()
    fate: dict[str, str] = {}
    reckoning = Reckoning()
    for line in said:
        verb, *names = line.split()
        match verb:
            case "booted" | "up" | "resting":
                continue
            case "failed":
                reckoning.wrong.append(line)
            case "try":
                tried.update(names)
                jobs += [names] if names and names[0].startswith("job-") else []
            case "sent":
                sent.update(names)
            case _:
                fate.update(dict.fromkeys(names, verb))
        reckoning.returned += verb not in ("try", "take")
    first, last = found_in(seen["first"]), found_in(seen["last"])
    removed = {name for name in fate if name.startswith(f"{FORGETTING}-")}
    account = judge(first, must=sent - removed, may=tried)
    reckoning.lost, reckoning.doubled, reckoning.damaged = account.lost, account.doubled, first.damaged
    reckoning.wrong += [line for line in account.wrong if "was never sent" in line]
    for name, verb in fate.items():
        reckoning.undone += _undone(name, verb, first.locations.get(name, []), seen["about"].get(name))
    for name in sorted(sent - fate.keys() & sent):
        reckoning.undone += _without(name, first.locations.get(name, []), seen["about"].get(name))
    reckoning.wrong += _afterwards(first, last)
    reckoning.undone += _parts(jobs, last)
    return reckoning


def _undone(name: str, verb: str, locations: list[Location], about: list[Any] | None) -> list[str]:
    """Tell what the last that was said of a message has become."""
    if name.startswith(f"{FORGETTING}-"):
        return [f"{name} had been acked, and is there again"] if verb == "acked" and locations else []
    states = {location.state for location in locations}
    allowed = {
        "acked": {"processed"},
        "rejected": {"error"},
        "expired": {"expired"},
        "nacked": {"target", "processing"},
    }.get(verb)
    if allowed is None or not locations:
        return []  # it was in the middle of it; or is counted as lost
    if not states <= allowed:
        return [f"{name} had been {verb}, and lies in {in_short(locations[0])}"]
    _, cancels, explained = about or (0, 0, False)
    if verb == "nacked" and not cancels:
        return [f"{name} had been nacked, and its name says nothing of that"]
    return (
        [f"{name} had been {verb}, and nothing says why"] if verb in ("rejected", "expired") and not explained else []
    )


def _without(name: str, locations: list[Location], about: list[Any] | None) -> list[str]:
    """Tell what a message lacks that nobody has settled."""
    if not locations:
        return []
    wanted = {"delayed"} if name.startswith("delayed-") else {"target", "processing"}
    if locations[0].state not in wanted:
        return [f"{name} had been sent, and lies in {in_short(locations[0])}"]
    wide = about[0] if about else 0
    return [f"{name} has lost what did not fit its name"] if name.startswith("wide-") and wide != WIDE else []


def _afterwards(first: Found, last: Found) -> list[str]:
    """Tell what went wrong when all that waited was swept and taken after the cut."""
    wrong = [f"{name} went when the queue was used again" for name in first.locations.keys() - last.locations.keys()]
    wrong = [line for line in wrong if not line.startswith(f"{FORGETTING}-")]
    left = Counter(location.state for locations in last.locations.values() for location in locations)
    wrong += [f"{left[state]} messages stay in {state}/ for ever" for state in ("target", "processing") if left[state]]
    return wrong + [
        f"{name} lies in two places afterwards" for name, locations in last.locations.items() if len(locations) > 1
    ]


def _parts(jobs: list[list[str]], last: Found) -> list[str]:
    """Tell which jobs are there in part, after a sweep."""
    wrong = []
    for names in jobs:
        there = [name for name in names if name in last.locations]
        if there and len(there) != len(names):
            wrong.append(f"of the job {names} only {there} is there")
    return wrong
