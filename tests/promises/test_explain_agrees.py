"""`explain` says what is then done, over queues that chance makes: what consumers get, and what routers do."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import FRESH, Clock, add_route, arrive, base, drop, first_and_long, make_queue, timed

from dropq import LeaseLost, Message, Queue, QueueFull, Root
from dropq.config.selectors import Selector
from dropq.diagnosis.explain import Explanation
from dropq.diagnosis.fsck_kinds import KINDS
from dropq.format.names import Name
from dropq.lifecycle import early_acks
from dropq.policies.send_limits import MustWait, SendLimits
from dropq.queue.browsing import listed
from dropq.queue.subscription import Subscription
from dropq.routing.forecast import Forecast
from dropq.staging import jobs
from dropq.storage import liveness, reading

#: A consumer waits for nobody's turn, and none is passed over.
PATIENT = replace(FRESH, turn_patience=1000, turns_wait=0)
SYNC, HIGH = "JMSType = 'sync'", "JMSPriority > 4"


class Play:
    """A queue that chance made, and consumers of it that do what chance says."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        self.clock = Clock()
        options = {
            "max_backlog": chance.choice([None, None, 1, 2]),
            "barrier_expression": chance.choice([None, None, SYNC]),
            "fairness_model": chance.choice([None, None, "round-robin", "proportional"]),
            "filter": chance.choice([None, None, "JMSPriority > 2"]),
            "filter_rest": chance.choice([None, "error"]),
        }
        self.told = f"seed {seed}: {options}"
        # A barrier that is over counts for the limit until somebody looks at it.
        self.breaks = options["max_backlog"] is None and options["barrier_expression"] is not None
        asked: dict[str, Any] = {key: value for key, value in options.items() if value is not None}
        self.queue = make_queue(folder, clock=self.clock, timing=PATIENT, **asked)
        if chance.random() < 0.2:
            add_route(self.queue, "big", "JMSPriority = 7")
        self.filters: dict[str, str | None] = {}
        self.consumers = [self.subscribe() for _ in range(chance.choice([1, 2, 3]))]
        self.held: list[Message] = []
        self.count = 0

    def subscribe(self) -> Subscription:
        """Return another consumer; some take only what has a high priority."""
        filter, lease = self.chance.choice([None, None, HIGH]), self.chance.choice([None, "10s"])
        consumer = Queue(self.queue.root, "q").subscribe(max_backlog=None, lease_period=lease, filter=filter)
        self.filters[consumer.id] = filter
        return consumer

    def step(self) -> None:
        """Let somebody do something."""
        steps = [self.send, self.send, self.drop, self.claim_by_hand, self.pass_time, self.settle, self.pause]
        self.chance.choice([*steps, self.ack_before])()

    def send(self) -> None:
        """Send a message."""
        chance = self.chance
        self.count += 1
        self.queue.send(
            f"m{self.count}",
            type=chance.choice([None, None, "sync"]),
            priority=chance.choice([1, 4, 4, 7]),
            delay=chance.choice(["0s", "0s", "0s", "5s"]),
            expires_in=chance.choice([None, None, "7s"]),
        )

    def ack_before(self) -> None:
        """Let a message be acknowledged as if it had not come yet, seldom."""
        waiting = [message.id for message in self.queue.browse() if Name(message.id).generated]
        if waiting and self.chance.random() < 0.3:
            early_acks.remember(self.queue.context, self.chance.choice(waiting))

    def drop(self) -> None:
        """Put a file into target/, as a script does; some are no messages."""
        self.count += 1
        name = self.chance.choice(["report.csv", "upload.part", ".hidden", "4.notes.......nI=1", "a~b"])
        draft = base(self.queue) / "working" / f"draft{self.count}"
        draft.write_bytes(b"x")
        arrive(draft, base(self.queue) / "target" / name)

    def claim_by_hand(self) -> None:
        """Put a file into processing/; some are no messages."""
        names = ["report.csv", "upload.part", ".hidden", "somebody~report.csv", "gone-0123456789-1,0,1~x"]
        (base(self.queue) / "processing" / self.chance.choice(names)).write_bytes(b"y")

    def pass_time(self) -> None:
        """Let leases, delays and expirations end."""
        self.clock.advance(self.chance.choice([1, 6, 20]))

    def pause(self) -> None:
        """Pause the queue, seldom; resume it."""
        if self.queue.paused:
            self.queue.resume()
        elif self.chance.random() < 0.3:
            self.queue.pause()

    def settle(self) -> None:
        """Let a consumer settle a message."""
        if not self.held:
            return
        message = self.held.pop(self.chance.randrange(len(self.held)))
        how = self.chance.randrange(4)
        with suppress(LeaseLost):  # it lapsed meanwhile
            if how == 0:
                message.ack()
            elif how == 1:
                message.fail("f")
            else:
                message.nack(delay=0 if how == 2 else 5)

    def break_off(self) -> None:
        """Leave a barrier as a crash does: claimed, and handed out to nobody; or with shares that settled nothing."""
        layout, chance = self.queue.layout, self.chance
        if not self.breaks or chance.random() < 0.5:
            return
        for share in Path(layout.barriers).glob("barrier*/*~*"):
            if chance.random() < 0.8:
                share.rename(share.parent / chance.choice(["acked", "left", "left", "aside"]) / share.name)
        barriers = [message for message in self.queue.browse() if message.type == "sync"]
        if barriers and not any("barrier%" in name for name in os.listdir(layout.processing)):
            claim = f"barrier%-{chance.randrange(10**10):010}-0,0,1~{barriers[0].file}"
            Path(barriers[0].path).rename(Path(layout.processing, claim))

    def finish_barriers(self, explained: list[Explanation]) -> list[Explanation]:
        """Return what is explained once a sweep has done what is said of barriers, and their claims and shares."""
        shared = [one for one in explained if one.message.state == "processing" and one.why == "barrier"]
        over = [one for one in shared if "any consumer, or" in one.detail]
        if not over:
            return explained
        waits = {one.message.id for one in explained if one.message.state == "target" and one.why in ("ready", "turn")}
        self.queue.sweep()
        again = list(self.queue.explain())
        for one in over:
            does = one.detail.rpartition(", ")[2]
            ends = {"archives it": ["processed"], "sets it aside": ["error", "expired"], "returns it": ["target"]}[does]
            assert self.queue.find(one.message.id).state in ends, one.detail
            if does == "returns it":
                assert not waits, (one.detail, waits)
            else:
                assert waits <= {now.message.id for now in again if now.message.state == "target"}, one.detail
        return again

    def takes(self, consumer: Subscription, explanation: Explanation) -> bool:
        """Whether a consumer may be given what is said to be for anybody, or for whose turn it is."""
        is_for_it = (
            self.filters[consumer.id] is None
            or explanation.message.priority > 4
            or "is a barrier" in explanation.detail
        )
        return explanation.why in ("ready", "turn") and is_for_it

    def compare(self) -> None:
        """Receive, and hold that against what is explained."""
        self.queue.sweep()  # what is due or was left by the dead is in target/ now
        self.break_off()
        explained = self.finish_barriers(list(self.queue.explain()))
        consumer = self.chance.choice(self.consumers)
        first = next((one for one in explained if self.takes(consumer, one)), None)
        expected = {first.message.id} if first is not None else set()
        if first is None or (first.why == "turn" and first.holders[0] != consumer.id):
            expected.add("")  # a subscription that did not ask before may be first
        for one in explained:
            routed_before = "it is a barrier" in one.detail and any(other.why == "route" for other in explained)
            shared = one.message.state == "processing" and one.why == "barrier" and consumer.id in one.holders
            if routed_before or shared:  # what is before it goes first; it may have its share already
                expected |= {one.message.id, ""}
        message = consumer.receive()
        says = "\n".join([self.told, *(f"  {one.message.name} {one.why}: {one.detail}" for one in explained)])
        assert ("" if message is None else message.id) in expected, f"{message} was delivered; {says}"
        if message is not None:
            self.held.append(message)


@pytest.mark.parametrize("seed", first_and_long(range(40), 12))
def test_what_is_called_ready_is_delivered_and_nothing_else(tmp_path: Path, seed: int) -> None:
    play = Play(tmp_path, seed)
    for _ in range(30):
        play.step()
        play.compare()


@pytest.mark.parametrize("seed", first_and_long(range(40), 12))
def test_routers_do_with_each_message_what_is_said_of_it(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    queue = make_queue(tmp_path, unroutable_after=0)
    root = queue.root
    root.create_queue("wide", durability="none")
    root.create_queue("narrow", durability="none", max_unprocessed=2, overflow="reject")
    for number in range(chance.randrange(1, 5)):
        op = chance.choice(["move", "move", "copy", "bounce"])
        queue.add_selector(
            f"s{number}",
            op=op,
            to="*" if op == "bounce" else chance.choice(["wide", "narrow"]),
            filter=chance.choice([None, f"n = {chance.randrange(3)}"]),
            credit=chance.choice([None, 1, 2]) if op == "move" else None,
        )
    if chance.random() < 0.5:
        queue.add_selector("last", to="wide", role="default")
    for number in range(12):
        reply = chance.choice(["wide", "nowhere", "q", "..", None])
        queue.send(str(number), properties={"n": chance.randrange(4)}, reply_to=reply)
        forecast = Forecast(queue.context)
        plans = [forecast.of(file) for file in listed(queue.context, "target")]
        expected = Counter(name for plan in plans if plan.why in ("move", "bounce", "copy") for name in plan.selectors)
        asides = sum(plan.why == "set-aside" for plan in plans)
        failed = queue.counts()["error"]
        assert Counter(Queue(queue.root, "q").route()) == expected, [plan.detail for plan in plans]
        assert queue.counts()["error"] == failed + asides, [plan.detail for plan in plans]


#: Why a message is in processing/.
WHY_HELD = ("held", "lease", "dead", "lapsed", "expired", "unleased", "script")


# -- claims --------------------------------------------------------------------------------------------------------


def put_claims(queue: Queue, chance: random.Random, clock: Clock, living: str) -> None:
    """Put what chance says into processing/: claims of the living, the dead and strangers, and what scripts took."""
    folder, processing = Path(queue.layout.consumers), Path(queue.layout.processing)
    signs = {"dead-0123456789": liveness.mark(str(folder)), "afar-0123456789": b"another mount\n"}
    for holder, content in signs.items():
        (folder / holder).write_bytes(content)
    for number in range(12):
        expires = chance.choice([None, None, "20s", "300s"])
        id = queue.send(str(number), expires_in=expires, priority=chance.choice([1, 7])).id
        (waiting,) = (message for message in queue.browse() if message.id == id)
        holder = chance.choice([living, *signs, "gone-0123456789", "router%-0123456789"])
        deadline = chance.choice([0, 0, clock.ms + 500_000, clock.ms - 70_000])
        claim = f"{holder}-{number:x},{deadline},{chance.choice([1, 1, 3])}~{waiting.file}"
        taken = chance.choice([claim, claim, claim, claim, waiting.file, f"somebody~{waiting.file}"])
        Path(waiting.path).rename(processing / taken)
    for name in ("report.csv", "upload.part", ".hidden", "a~b"):
        if chance.random() < 0.3:
            (processing / name).write_bytes(b"y")


@pytest.mark.parametrize("seed", first_and_long(range(25), 10))
def test_what_is_said_of_each_claim_is_what_a_sweep_then_does(tmp_path: Path, seed: int) -> None:
    chance, clock = random.Random(seed), Clock()
    clock.advance(200)  # what is put there now is that old
    limits: dict[str, Any] = {
        "max_deliveries": chance.choice([0, 0, 2]),
        "exhausted": chance.choice(["error", "expired"]),
    }
    queue = make_queue(tmp_path, clock=clock, expiration=chance.choice([None, None, "60s"]), **limits)
    with Queue(queue.root, "q").subscribe() as living:
        put_claims(queue, chance, clock, living.id)
        clock.advance(chance.choice([0, 30]))
        by_file = {explained.message.file: explained for explained in queue.explain("processing")}
        by_why = {why: {file for file, one in by_file.items() if one.why == why} for why in WHY_HELD}
        assert sum(map(len, by_why.values())) == len(by_file)
        found = {Path(finding.path).name: finding.kind for finding in queue.fsck()}
        assert {file for file, kind in found.items() if kind == "dead-holder"} == by_why["dead"], by_file
        unknown = {file for file in by_why["unleased"] if "another mount" not in by_file[file].detail}
        held_by_nobody = {file for file, kind in found.items() if kind == "unknown-holder"}
        assert unknown <= held_by_nobody <= unknown | by_why["expired"], by_file
        unwell = {reason.kind for reason in queue.health().reasons}
        assert ("dead-holder" in unwell, "lapsed-lease" in unwell) == (
            by_why["dead"] != set(),
            by_why["lapsed"] != set(),
        )
        stays = {"held", "lease", "unleased", "script"}
        sweeps: list[tuple[dict[str, Any], str]] = [
            ({}, ""), ({"unleased_older_than": 0}, "unleased"), ({"foreign_older_than": 0}, "script"),
        ]  # fmt: skip
        for asked, leaves in sweeps:
            stays.discard(leaves)
            queue.sweep(**asked)
            left = set(os.listdir(queue.layout.processing)) & by_file.keys()
            assert left == set().union(*(by_why[why] for why in stays)), (asked, by_file)
            for state in ("error", "expired"):
                ended = {message.id for message in queue.browse(state)}
                says = {one.message.id for one in by_file.values() if f"moves it to {state}/" in one.detail}
                assert says <= ended, (state, by_file)
                assert state == "expired" or asked or says == ended, (state, by_file)


# -- topics --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", first_and_long(range(25), 10))
def test_what_is_said_of_each_publication_is_what_a_sweep_then_does(tmp_path: Path, seed: int) -> None:
    chance, clock = random.Random(seed), Clock()
    make_queue(tmp_path, clock=clock, timing=FRESH)
    root = timed(Root(tmp_path, clock=clock), FRESH)
    root.create_topic("a", durability="none")
    topic = root.create_topic("a.b", durability="none", expiration=chance.choice([None, None, "20s"]))
    if chance.random() < 0.4:
        add_route(topic.queue, "big", "JMSPriority = 7")
    for number in range(chance.randrange(4)):
        options: dict[str, Any] = {"filter": chance.choice([None, HIGH, "n = 1"])}
        limit: dict[str, Any] = {"max_unprocessed": 2, "overflow": chance.choice(["discard", "block"])}
        options |= chance.choice([{}, {}, limit])
        if chance.random() < 0.3:
            root.create_queue(f"view{number}", underlying_topic="a.b", durability="none", **options)
        else:
            filter = options.pop("filter")
            to = chance.choice(["a", "a.b"])
            copies = root.topic(to).create_subscription(f"s{number}", client_id="c", filter=filter)
            with open(copies.layout.config_file, "a") as config:
                config.writelines(f"{key} = {value!r}\n" for key, value in options.items())
    receivers = [queue.name for queue in root.queues() if queue.name not in ("q", "a", "a.b")]
    before = {name: set[str]() for name in receivers}
    for number in range(8):
        name = f"{chance.choice([1, 4, 7])}.{clock.ms}000-{number:010d}.T"
        drop(topic.queue, chance.choice([f"{name}....nI=1", name, f"file{number}.csv"]), b"x")
        if chance.random() < 0.1:
            clock.advance(15)
        if chance.random() < 0.1:
            Path(topic.queue.layout.target, f"late{number}.part").write_bytes(b"y")
        if chance.random() < 0.1:
            (topic.queue.resume if topic.queue.paused else topic.queue.pause)()
        explained = [*timed(Root(tmp_path, clock=clock), FRESH).queue("a.b").explain("target")]
        timed(Root(tmp_path, clock=clock), FRESH).queue("a.b").sweep()
        says = "\n".join(f"  {one.message.file} {one.why}: {one.detail} {one.holders}" for one in explained)
        left = {message.file for message in topic.queue.browse()}
        stay = {one.message.file for one in explained if one.why in ("receiver", "paused", "settling")}
        assert left <= stay and (left == stay or topic.queue.paused), says  # a sweep ends what expires in a pause, too
        routed = set(os.listdir(Path(topic.queue.layout.routing, "big"))) if topic.queue.routed() else set[str]()
        assert {one.message.file for one in explained if one.why == "route"} <= routed, says
        for name in receivers:
            there = {message.file for message in root.queue(name).browse()}
            got, before[name] = there - before[name], there
            assert got == {one.message.file for one in explained if one.why == "ready" and name in one.holders}, (
                name,
                says,
            )


# -- sends ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", first_and_long(range(25), 10))
def test_a_send_is_refused_when_what_is_shown_says_so(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    overflow = chance.choice(["reject", "discard", "block"])
    queue = make_queue(tmp_path, timing=FRESH, max_unprocessed=chance.choice([None, 2, 4]), overflow=overflow)
    root = queue.root
    root.create_queue("other", durability="none")
    for number in range(chance.choice([0, 0, 1, 2])):
        to = chance.choice(["other", "other", "missing"])
        file = Path(queue.layout.selectors, f"s{number}.toml")
        file.parent.mkdir(exist_ok=True)
        file.write_text(chance.choice([f'to = "{to}"\nrole = "overflow"\n', 'role = "overflow"\nto = 1\n']))
    for number in range(chance.randrange(6)):
        state = chance.choice(["target", "target", "processing", "delayed"])
        Path(queue.layout.folder(state)).mkdir(exist_ok=True)
        Path(queue.layout.folder(state), f"f{number}{chance.choice(['', '', '.part'])}").write_bytes(b"x")
    if chance.random() < 0.5:
        says = chance.choice(["", "target-limit=2\n", "delay-milliseconds=0\n", "target-limit=x\n"])
        Path(queue.layout.write_lock).write_text(says)
    health = Queue(root, "q").health()
    notes = {note.kind: note.message for note in health.notes}
    (node,) = (node for node in root.graph().nodes if node.name == "q")
    assert ("full" in notes) == any(stuck.startswith("full") for stuck in node.stuck), (notes, node.stuck)
    assert ("write-lock" in notes) == any("write-lock" in stuck for stuck in node.stuck), (notes, node.stuck)
    outcome = kind = ""
    try:
        if not SendLimits("q", queue.context, waits=False).admit(1):
            outcome, kind = "what is sent is discarded", "full"
    except MustWait as error:
        outcome, kind = "senders wait", "write-lock" if "write-lock" in str(error) else "full"
    except QueueFull as error:
        is_there, kind = isinstance(error.overflow, Selector) and error.overflow.to == "other", "full"
        outcome = "takes what is sent to other" if is_there else "sends are refused"
    assert outcome in notes.get(kind, ""), notes
    assert kind == next((limit for limit in ("write-lock", "full") if limit in notes), ""), (outcome, notes)


# -- what crashes leave --------------------------------------------------------------------------------------------

#: What fsck says of what a sweep removes or finishes, without an option.
SWEPT = ("leftover", "orphan-reason", "unfinished-job", "unfinished-commit", "unfinished-join")
DAY = 86_400


class Wreck:
    """A queue in whose private folders chance leaves things of all ages."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.chance = random.Random(seed)
        self.clock = Clock()
        self.queue = make_queue(folder, clock=self.clock, timing=FRESH)
        self.count = 0
        self.planted: dict[str, int] = {}

    @property
    def there(self) -> set[str]:
        """What was planted and is there yet; a reason may be filed by the name of its message meanwhile."""
        filed = {entry.inode() for entry in reading.entries(f"{self.queue.layout.reasons}/error")}
        found = {
            path: os.path.lexists(path) or ("/reasons/" in path and inode in filed)
            for path, inode in self.planted.items()
        }
        self.planted = {path: inode for path, inode in self.planted.items() if found[path]}  # its inode is another's
        return set(self.planted)

    def write(self, path: str, body: bytes = b"x") -> Path:
        """Write a file in the private folder."""
        file = Path(self.queue.layout.private, path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(body)
        return file

    def plant(self) -> None:
        """Leave something, and let time pass."""
        self.count += 1
        plants = [self.in_held, self.in_private, self.reason, self.staged, self.join, self.job, self.credits]
        plant = self.chance.choice(plants)
        path = plant(f"{self.count:010}")
        self.planted[str(path)] = path.stat().st_ino
        self.clock.advance(self.chance.choice([0, 0, 30, 90, 4000, 90_000]))

    def in_held(self, word: str) -> Path:
        """What a dead consumer, or a claimed one, or somebody else has in held/."""
        who = self.chance.choice([f"gone-{word}-1", f"gone-{word}-1", f"claimed-{word}-1", f"notes-{self.count}"])
        file = self.write(f"held/{who}/4.x.B")
        if who.startswith("claimed"):
            Path(self.queue.layout.processing, f"{who},{self.clock.ms + 10**9},1~4.h{word}.B").write_bytes(b"x")
        how = self.chance.randrange(3)
        if how == 0:
            os.link(file, Path(self.queue.layout.processed, f"4.l{word}.B"))
        elif how == 1:
            file.unlink()
        return file.parent

    def in_private(self, word: str) -> Path:
        """What lies by itself in a folder."""
        paths = [f".gone-{word}", f"streams/{word}/1.json", f"consumers/.half-{word}", f"consumers/afar-{word}"]
        path = self.write(self.chance.choice(paths), b"another mount\n")
        if path.name.startswith("afar") and self.chance.random() < 0.5:
            claim = f"{path.name}-1,{self.clock.ms + 10**9},1~4.f{word}.B"
            Path(self.queue.layout.processing, claim).write_bytes(b"x")
        return path.parent if path.name == "1.json" else path

    def reason(self, word: str) -> Path:
        """A reason of a message that is there, or gone, filed in either way; or one that is damaged."""
        name, reasons = f"4.17953830{word[-8:]}000-{word}.B", self.queue.context.reasons
        message, folder = Path(self.queue.layout.folder("error"), name), Path(self.queue.layout.reasons, "error")
        message.write_bytes(b"x")
        before = set(folder.iterdir()) if folder.exists() else set()
        inode = message.stat().st_ino
        reasons.record("error", name, inode + self.chance.choice([0, 0, 1]), {"reason": "rejected"})
        path = reasons.path("error", name, inode)
        if self.chance.random() < 0.6 and os.path.exists(path):
            reasons.keep("error", name, inode)
        if self.chance.random() < 0.6:
            message.unlink()
        (newest,) = set(folder.iterdir()) - before
        if self.chance.random() < 0.2:
            newest.write_bytes(b"[")
        return newest

    def staged(self, word: str) -> Path:
        """A folder of a commit: with parts, empty, dropped or committed; its claim is there or not."""
        chance, name = self.chance, f"4.s{word}.B"
        folder = Path(self.queue.layout.staged, f"{word}-1.0123ab,unlink~{name}")
        folder.mkdir(parents=True)
        if chance.random() < 0.6:
            self.write(f"staged/{folder.name}/0,error~4.p{word}.B")
        how = chance.choice(["claimed", "dropped", "committed", "", "", "stray"])
        if how == "claimed":
            Path(self.queue.layout.processing, f"x-{word}-1,{self.clock.ms + 10**9},1~{name}").write_bytes(b"x")
        elif how == "dropped":
            self.write(f"staged/{folder.name}/whole", os.fsencode(folder.name))
        elif how == "committed":
            self.write(f"staged/{folder.name}/whole", b"body")
        elif how == "stray":
            return self.write(f"staged/{folder.name}/notes.txt")
        return folder

    def join(self, word: str) -> Path:
        """A folder in which parts are put together: before or after the commit, by a dead process or a live one."""
        folder = Path(self.queue.layout.reassembly, f"error,{word[-16:]:0>16}")
        self.write(f"reassembly/{folder.name}/4.j{word}.B.....JMS_dropq_firstI=2")
        if self.chance.random() < 0.7:
            self.write(f"reassembly/{folder.name}/.draft")
        return folder

    def job(self, word: str) -> Path:
        """A job that was begun, committed, dropped or sent before, or has a damaged manifest."""
        chance, started = self.chance, jobs.Job(self.queue.context, f"job{word}")
        started.begin()
        attempt = started.attempt("0")
        Path(attempt.folder, f"4.b{word}.B").write_bytes(b"x")
        how = chance.choice(["begun", "committed", "dropped", "sent", "damaged"])
        if how == "committed":
            listed = {"job": started.id, "attempts": {os.path.basename(attempt.folder): [f"4.b{word}.B"]}}
            Path(started.folder, jobs.MANIFEST).write_text(json.dumps(listed))
        elif how == "damaged":
            Path(started.folder, jobs.MANIFEST).write_bytes(b"{")
        elif how == "dropped":
            return Path(started.folder).rename(Path(self.queue.layout.working, f".drop-job{word}-0123456789ab"))
        elif how == "sent":
            self.write(f"ledger/job{word}.json", b"{}")
        return Path(started.folder)

    def credits(self, word: str) -> Path:
        """The folder of the credits of a selector that is gone."""
        return self.write(f"credits/{word[-6:]}/.last").parent


@pytest.mark.parametrize("seed", first_and_long(range(40), 12))
def test_what_fsck_leaves_to_sweeps_is_what_they_remove(tmp_path: Path, seed: int) -> None:
    wreck = Wreck(tmp_path, seed)
    for _ in range(6):
        for _ in range(3):
            wreck.plant()
        before = wreck.there
        found = {finding.path: finding for finding in wreck.queue.fsck()}
        says = "\n".join(f"  {one.kind} {path}: {one.detail}" for path, one in found.items())
        swept = [KINDS[kind].says.replace("QUEUE", "q") for kind in SWEPT]
        by_sweep = {path for path, one in found.items() if any(text in one.detail for text in swept)}
        by_sweep |= {path for path, one in found.items() if one.kind == "damaged-reason"}
        wreck.queue.sweep()
        gone = before - wreck.there
        assert gone <= by_sweep, (gone - by_sweep, says)
        for path in (by_sweep & before) - gone:
            one, age = found[path], wreck.clock.ms - reading.changed_ms(path)
            is_kept = age <= DAY * 1000 and "after a day" in one.detail
            is_fenced = "/staged/" in path and os.listdir(path) == ["whole"]  # from now on for a day
            assert one.kind in ("under-way", "damaged-reason") or is_kept or is_fenced, (path, says)
