"""A queue against a model of it, a dict: whatever is done in whatever order, each body lies where the model says."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from helpers import FRESH, Clock, base, drop, files, leave_claimed, make_queue, reopened, where
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dropq import LeaseLost, Message, Queue, Subscription

ATTEMPTS, DELIVERIES, CANCELS, DELAY = 1, 4, 2, 2_000
#: Milliseconds that a message waits after its first death, which is more than after anything else.
AFTER_DEATH = 3_000
KEPT = ("processed", "error", "expired")
VERBS = ("ack", "nack", "nack at once", "fail", "reject", "expire", "release")


@dataclass
class Model:
    """What is known of one body; times in ms, 0 for never."""

    body: bytes
    id: str
    foreign: bool
    priority: int
    expires: int
    state: str
    not_before: int = 0
    deliveries: int | None = 0  # None: what its name says now is not modelled
    cancels: int = 0
    deaths: int = 0
    number: int = 0
    deadline: int = 0
    holder: Message | None = None  # None in processing: a script's, or a dead process's
    dead: bool = False

    @property
    def claimed(self) -> bool:
        """Whether a consumer holds it, or one that is dead."""
        return self.holder is not None or self.dead

    def begin_anew(self) -> None:
        """Forget what was counted, as its name does."""
        self.deliveries = self.cancels = self.deaths = 0


class QueueMachine(RuleBasedStateMachine):
    """Two subscriptions, one with leases, a script, an administrator, and sweeps by somebody else."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.clock = Clock()
        self.queue: Queue = make_queue(
            Path(self.folder.name),
            clock=self.clock,
            timing=replace(FRESH, after_death=AFTER_DEATH / 1000),
            redelivery_attempts=ATTEMPTS,
            redelivery_delay="2s",
            redelivery_backoff=1,
            max_deliveries=DELIVERIES,
            max_cancels=CANCELS,
        )
        self.models: dict[bytes, Model] = {}
        self.messages: list[tuple[Message, Model]] = []  # all that was ever received, also what was lost since
        self.subscriptions: list[Subscription] = []

    def teardown(self) -> None:
        for subscription in self.subscriptions:
            subscription.close()
        self.folder.cleanup()

    @initialize()
    def subscribe(self) -> None:
        self.subscriptions = [
            self.queue.subscribe(max_backlog=None),
            self.queue.subscribe(max_backlog=None, lease_period="30s"),
        ]

    # -- what producers do --------------------------------------------------------------------------------------

    @rule(
        priority=st.sampled_from([4, 4, 9, -1]),
        delay=st.sampled_from([0, 0, 5]),
        lives=st.sampled_from([0, 0, 20]),
        long=st.booleans(),
    )
    def send(self, priority: int, delay: int, lives: int, long: bool) -> None:
        body = f"sent {len(self.models)}".encode()
        sent = self.queue.send(
            body, priority=priority, delay=delay, expires_in=lives, properties={"text": "x" * 200} if long else None
        )
        self.models[body] = Model(
            body,
            sent.id,
            foreign=False,
            priority=priority,
            expires=self.clock.ms + lives * 1000 if lives else 0,
            state="delayed" if delay else "target",
            not_before=self.clock.ms + delay * 1000,
        )

    @rule()
    def drop_a_file(self) -> None:
        body = f"dropped {len(self.models)}".encode()
        name = f"{len(self.models)}.csv"
        drop(self.queue, name, body)
        self.models[body] = Model(body, name, foreign=True, priority=4, expires=0, state="target")

    # -- what consumers do --------------------------------------------------------------------------------------

    @rule(which=st.integers(0, 1))
    def receive(self, which: int) -> None:
        self.sweep_on_the_way()
        waiting = self.in_state("target")
        message = self.subscriptions[which].receive()
        model = self.taken(message, waiting)
        if message is not None and model is not None:
            model.deadline = self.clock.ms + 30_000 if which else 0
            model.holder = message
            self.messages.append((message, model))

    @rule(times=st.integers(1, DELIVERIES))
    def holders_die(self, times: int) -> None:
        """So many times another process takes a message and dies of it; between two it waits, and not for less."""
        for _ in range(times):
            self.sweep()
            if not (waiting := self.in_state("target")):
                return
            leave_claimed(self.queue)
            held = {model.body for model in self.in_state("processing")}
            (message,) = (each for each in self.queue.browse("processing") if each.body not in held)
            model = self.taken(message, waiting)
            assert model is not None
            model.deadline, model.dead = 0, True
            if times > 1:
                self.sweep()
                self.wait_for(model)

    def wait_for(self, model: Model) -> None:
        """Let the time pass until a message is delivered again, and look just before."""
        if model.state == "delayed":
            self.clock.ms = model.not_before - 1
            self.sweep()
            self.each_body_is_in_exactly_the_state_of_the_model()
            self.clock.advance(0.001)

    def taken(self, message: Message | None, waiting: list[Model]) -> Model | None:
        """Compare what a consumer was given, or None, with what waited for it."""
        for model in waiting:
            if self.expired(model) and model.body in where(self.queue).get("expired", ()):
                self.set_aside(model, "expired")  # it stood before what was delivered
        live = [model for model in waiting if not self.expired(model)]
        if message is None:
            assert live == []
            return None
        (model,) = (model for model in live if model.body == message.body)
        self.assert_first(model, live)
        assert message.id == model.id
        if model.deliveries is not None:
            assert message.delivery_count == model.deliveries + 1
            assert (message.cancels, message.deaths) == (model.cancels, model.deaths)
        model.number, model.cancels, model.deaths = message.delivery_count, message.cancels, message.deaths
        model.state = "processing"
        return model

    @precondition(lambda self: self.messages)
    @rule(choice=st.integers(0, 10**6), verb=st.sampled_from(VERBS))
    def settle(self, choice: int, verb: str) -> None:
        message, model = self.messages[choice % len(self.messages)]
        verbs: dict[str, Callable[[], None]] = {
            "ack": message.ack,
            "nack": message.nack,
            "nack at once": lambda: message.nack(delay=0),
            "fail": lambda: message.fail("f"),
            "reject": lambda: message.reject("r"),
            "expire": message.expire,
            "release": lambda: message.release(counted=False),
        }
        act = verbs[verb]
        if model.holder is not message:
            with pytest.raises(LeaseLost):
                act()
            return
        act()
        model.holder, model.deliveries = None, model.number
        if verb == "ack":
            model.state, model.deliveries = "processed", None
            if model.foreign:
                model.begin_anew()
        elif verb == "release":
            model.state, model.deliveries = "target", model.number - 1
        elif verb.startswith("nack"):
            model.cancels += 1
            self.give_back(model, exhausted=model.cancels >= CANCELS, delay=DELAY if verb == "nack" else 0)
        elif verb == "fail" and model.number <= ATTEMPTS:
            self.give_back(model)
        else:
            self.set_aside(model, "expired" if verb == "expire" else "error")

    @precondition(lambda self: self.messages)
    @rule(choice=st.integers(0, 10**6), period=st.sampled_from([1, 60]))
    def extend(self, choice: int, period: int) -> None:
        message, model = self.messages[choice % len(self.messages)]
        if model.holder is not message:
            with pytest.raises(LeaseLost):
                message.extend(period)
            return
        message.extend(period)
        model.deadline = self.clock.ms + period * 1000

    @rule()
    def reopen(self) -> None:
        """Close everything, which gives back what is held, and open it anew."""
        for subscription in self.subscriptions:
            subscription.close()
        for model in self.in_state("processing"):
            if model.holder is not None:
                self.give_back(model)
        self.queue = reopened(self.queue)
        self.subscribe()

    # -- what time and sweeps do ------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.001, 1, 2, 6, 40]))
    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule()
    def sweep(self) -> None:
        reopened(self.queue).sweep()
        self.sweep_on_the_way()
        for model in self.models.values():
            if self.expired(model) and model.state == "target":
                self.set_aside(model, "expired")

    def sweep_on_the_way(self) -> None:
        """What a consumer sweeps: dead holders, leases that ran out, what expired meanwhile, delays that are over."""
        for model in self.in_state("processing"):
            if not model.claimed:
                continue
            if model.dead or 0 < model.deadline <= self.clock.ms:
                model.deaths += 1
                self.give_back(model, delay=max(DELAY, AFTER_DEATH * 2 ** (model.deaths - 1)))
            elif self.expired(model):
                self.set_aside(model, "expired")
        for model in self.in_state("delayed"):
            if model.not_before <= self.clock.ms:
                model.state = "target"

    # -- what administrators and scripts do ---------------------------------------------------------------------------

    @rule(state=st.sampled_from([*KEPT, "processing"]))
    def requeue(self, state: str) -> None:
        self.queue.requeue(state=state)
        for model in self.in_state(state):
            model.state, model.holder, model.dead, model.expires = "target", None, False, 0
            model.begin_anew()

    @rule(state=st.sampled_from(KEPT), choice=st.integers(0, 10**6))
    def mv_to_target(self, state: str, choice: int) -> None:
        if model := self.mv(state, "target", choice):
            model.state = "target"

    @rule(choice=st.integers(0, 10**6))
    def a_script_claims(self, choice: int) -> None:
        """A script claims a name as it stands; one that still has a claim's prefix it leaves to dropq's consumers."""
        if model := self.mv("target", "processing", choice, unclaimed=True):
            model.state, model.deadline, model.holder = "processing", 0, None

    @rule(choice=st.integers(0, 10**6), goal=st.sampled_from(["target", *KEPT]))
    def a_script_moves_what_it_or_somebody_else_holds(self, choice: int, goal: str) -> None:
        if model := self.mv("processing", goal, choice):
            model.state = goal
            if model.claimed:
                model.holder, model.dead, model.deliveries = (
                    None,
                    False,
                    model.number,
                )  # it still has the claim's prefix

    def mv(self, source: str, goal: str, choice: int, *, unclaimed: bool = False) -> Model | None:
        found = sorted(files(base(self.queue) / source).items())
        if unclaimed:
            found = [(name, body) for name, body in found if "~" not in name]
        if not found:
            return None
        name, body = found[choice % len(found)]
        os.rename(base(self.queue) / source / name, base(self.queue) / goal / name)
        return self.models[body]

    # -- the model's own arrows --------------------------------------------------------------------------------------

    def give_back(self, model: Model, *, exhausted: bool = False, delay: int = DELAY) -> None:
        model.holder, model.dead, model.deliveries = None, False, model.number
        if exhausted or model.number >= DELIVERIES:
            self.set_aside(model, "error")
        else:
            model.state, model.not_before = "delayed" if delay else "target", self.clock.ms + delay

    def set_aside(self, model: Model, state: str) -> None:
        if model.claimed:
            model.deliveries = model.number
        model.holder, model.dead, model.state = None, False, state
        if model.foreign:
            model.begin_anew()  # it has its own name again

    def in_state(self, state: str) -> list[Model]:
        return [model for model in self.models.values() if model.state == state]

    def expired(self, model: Model) -> bool:
        return 0 < model.expires <= self.clock.ms

    def assert_first(self, model: Model, live: list[Model]) -> None:
        """What is delivered has the highest priority and, among those that tell their time, the earliest id."""
        assert model.priority == max(other.priority for other in live)
        rivals = [other.id for other in live if other.priority == model.priority and not other.foreign]
        assert model.foreign or model.id == min(rivals)

    # -- what holds at all times ------------------------------------------------------------------------------------

    @invariant()
    def each_body_is_in_exactly_the_state_of_the_model(self) -> None:
        expected: dict[str, list[bytes]] = {}
        for model in self.models.values():
            expected.setdefault(model.state, []).append(model.body)
        assert where(self.queue) == {state: sorted(bodies) for state, bodies in expected.items()}

    @invariant()
    def nobody_holds_what_another_holds(self) -> None:
        held = [message.id for subscription in self.subscriptions for message in subscription.held]
        owned = [model.id for model in self.models.values() if model.holder is not None]
        assert len(owned) == len(set(owned))
        assert set(owned) <= set(held)

    @invariant()
    def no_name_is_longer_than_it_may_be(self) -> None:
        for folder in (base(self.queue) / state for state in ("target", "processing", *KEPT)):
            assert all(len(os.fsencode(name)) <= 255 for name in os.listdir(folder))


QueueMachine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestQueueAgainstAModel = QueueMachine.TestCase
