"""Rights are not lent: what a stranger writes into a name or a folder leads nowhere that he may not write himself.

The stranger may send to `inbox` and to the dead-letter queue `dead`, and in some tests write in the private folders of
`inbox`. The programs run as root, who may write everywhere. `payments` is closed to the stranger.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers import Run, base, files, health
from test_security import PRODUCER, by

from dropq import ConfigError, Queue, Root
from dropq.diagnosis.doctor import doctor

ID = "1795515246781000-2859784151"

pytestmark = [
    pytest.mark.host,
    pytest.mark.skipif(os.geteuid() != 0, reason="to act as several users takes root"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture
def root() -> Iterator[Root]:
    top = Path(tempfile.mkdtemp(prefix="dropq-rights-"))  # tmp_path is closed to other users
    try:
        top.chmod(0o755)
        path = top / "root"
        Root.create(path)
        (path / "dropq.toml").write_text('format = 1\ndead_letter_queue = "dead"\n')
        made = Root(path)
        for name in ("inbox", "payments", "dead"):
            made.create_queue(name, durability="none")
        for name in ("inbox", "dead"):
            for folder in ("working", "target"):
                (path / name / folder).chmod(0o3777)
        (path / "payments").chmod(0o700)
        yield made
    finally:
        shutil.rmtree(top)


def plant(queue: Queue, name: str, body: bytes = b"pay mallory") -> None:
    """Send a file of some name as the stranger."""

    def send() -> None:
        draft = base(queue) / "working" / "draft"
        draft.write_bytes(body)
        os.utime(draft, (1_700_000_000,) * 2)
        draft.rename(base(queue) / "target" / name)

    by(PRODUCER, send)


def held(root: Root, name: str) -> list[bytes]:
    """The bodies in target/ of a queue."""
    return list(files(Path(root.path, name, "target")).values())


def test_the_stranger_may_not_write_to_payments_himself(root: Root) -> None:
    def write() -> None:
        Path(root.path, "payments", "target", "x").touch()

    with pytest.raises(PermissionError):
        by(PRODUCER, write)


# -- bounces -----------------------------------------------------------------------------------------------------------


def test_a_bounce_goes_to_temporary_queues_and_nowhere_else_unless_its_file_says_so(root: Root) -> None:
    inbox = root.queue("inbox")
    inbox.add_selector("back", op="bounce")
    root.create_queue("temp-1795515246781000-2859784159")
    plant(inbox, f"4.{ID}.B...payments")
    plant(inbox, f"4.{ID}.B.0..payments")
    plant(inbox, "4.1795515246781000-2859784152.B...temp-1795515246781000-2859784159", b"for a requester")
    inbox.route()
    assert held(root, "payments") == []
    assert held(root, "temp-1795515246781000-2859784159") == [b"for a requester"]
    assert [(letter.body, letter.dead_letter_reason) for letter in root.queue("dead").browse()] == [
        (b"pay mallory", "no_return_address")
    ] * 2


def test_the_reason_of_a_bounce_that_went_nowhere_says_what_to_add(root: Root) -> None:
    inbox = root.queue("inbox")
    inbox.add_selector("back", op="bounce")
    root.delete_queue("dead", force=True)
    plant(inbox, f"4.{ID}.B...payments")
    (waiting,) = inbox.explain(state="target")
    inbox.route()
    (message,) = inbox.browse("error")
    assert message.reason is not None
    path = f"{root.path}/inbox/selectors/back.toml"
    says = f"selector back returns nothing to payments: if it may, add that to `to` in {path}"
    assert str(message.reason["detail"]).startswith(says)
    assert waiting.detail == f"{says}: the next router makes a dead letter of it"


@pytest.mark.parametrize(
    ("to", "address", "goes"),
    [
        ("payments", "payments", True),
        (["answers", "pay*"], "payments", True),
        ("*", "payments", True),
        ("pay", "payments", False),
        ("*", "news/audit.hq", False),
        ("news/*", "news/audit.hq", True),
        ("payments/", "payments", False),
    ],
)
def test_a_star_at_the_end_of_a_return_address_stands_for_the_rest_of_one_name(
    root: Root, to: str | list[str], address: str, goes: bool
) -> None:
    inbox = root.queue("inbox")
    root.create_topic("news").create_subscription("audit", client_id="hq")
    try:
        inbox.add_selector("back", op="bounce", to=to)
    except ConfigError:
        assert to == "payments/"
        return
    plant(inbox, f"4.{ID}.B...{address.replace('/', '%2F').replace('.', '%2E')}")
    assert inbox.route() == ({"back": 1} if goes else {})
    assert [message.body for message in root.queue(address).browse()] == [b"pay mallory"] * goes


@pytest.mark.parametrize("to", ["", [], [1], "a*b", 7, ["../x"]])
def test_what_a_bounce_cannot_go_to_is_refused(root: Root, to: object) -> None:
    with pytest.raises(ConfigError, match="to: "):
        root.queue("inbox").add_selector("back", op="bounce", to=to)  # type: ignore[arg-type]


def test_a_bounce_by_the_shell_names_its_addresses_and_ls_shows_them(root: Root, run: Run) -> None:
    add = ("selector", "add", "inbox", "back", "--root", str(root.path), "--op", "bounce")
    assert run(*add, "--to", "answers", "--to", "pay*").code == 0
    (found,) = map(json.loads, run("selector", "ls", "inbox", "--root", str(root.path), "--json").out.splitlines())
    assert found["to"] == ["answers", "pay*"]
    (selector,) = root.queue("inbox").selectors()
    assert (selector.to, selector.returns_to) == (None, ("answers", "pay*"))


def test_the_doctor_warns_root_of_a_bounce_that_names_more_than_temporary_queues(root: Root) -> None:
    inbox = root.queue("inbox")
    inbox.add_selector("back", op="bounce")
    assert "wide-bounce" not in {found.kind for found in doctor(root.context, queues=["inbox"])}
    inbox.remove_selector("back")
    inbox.add_selector("back", op="bounce", to=["temp-*", "pay*"])
    (found,) = (each for each in doctor(root.context, queues=["inbox"]) if each.kind == "wide-bounce")
    assert found.path == f"{root.path}/inbox/selectors/back.toml"
    assert "pay*" in found.found


# -- dead letters ------------------------------------------------------------------------------------------------------


def letter(number: int, origin: str) -> str:
    return f"4.179551524678100{number}-2859784151.B.....JMS_dropq_originS={origin}&JMS_dropq_reasonS=unroutable"


def test_letters_go_back_only_to_queues_whose_letters_go_where_they_lie(root: Root, run: Run) -> None:
    Path(root.path, "payments", "queue.toml").write_text('durability = "none"\ndead_letter_queue = "lost-payments"\n')
    root.create_queue("lost-payments")
    plant(root.queue("dead"), letter(1, "payments"))
    plant(root.queue("dead"), letter(2, "inbox"), b"lost")
    plant(root.queue("dead"), letter(3, "missing"))
    command = ("requeue", "dead", "--root", str(root.path), "--to-origin", "--all")
    assert "1 to inbox, 2 stay" in run(*command, "--dry-run").err
    assert "each to its origin: 1 to inbox, 2 stay?" in run(*command).err
    code, out, _ = run(*command, "--yes")
    assert (held(root, "payments"), held(root, "inbox"), len(held(root, "dead"))) == ([], [b"lost"], 2)
    assert "it says that it came from payments, which has the dead-letter queue lost-payments" in out
    assert code == 1


def test_a_letter_that_was_moved_to_a_queue_is_put_back_from_there_by_nobody(root: Root) -> None:
    plant(root.queue("dead"), letter(1, "payments"))
    root.create_queue("shelf")
    root.queue("dead").move(root.queue("shelf"))
    (outcome,) = root.queue("shelf").requeue(state="target", to_origin=True)
    assert (outcome.ok, held(root, "payments")) == (False, [])


def test_what_a_stranger_says_of_its_origin_does_not_say_where_a_dead_letter_goes(root: Root) -> None:
    inbox = root.queue("inbox")
    inbox.add_selector("on", to="payments", filter="FALSE")
    Path(inbox.layout.config_file).write_text('durability = "none"\nunroutable_after = "0s"\n')
    plant(inbox, letter(1, "payments"))
    root.queue("inbox").route()
    assert held(root, "payments") == []


# -- routes ------------------------------------------------------------------------------------------------------------


def test_no_name_takes_a_message_to_a_route_that_the_queue_does_not_have(root: Root) -> None:
    inbox = root.queue("inbox")
    routing = base(inbox) / "routing"
    routing.mkdir(exist_ok=True)
    (routing / "aside").mkdir()
    (routing / "aside.in-use").touch()
    (base(inbox) / "routing.properties").write_text("aside.selector=route = 'aside'\n")
    plant(inbox, f"4.{ID}.B.....routeS=..%2F..%2Fpayments%2Ftarget")
    assert inbox.route() == {}
    assert held(root, "payments") == []


# -- staged parts ------------------------------------------------------------------------------------------------------


@pytest.fixture
def staging(root: Root) -> Callable[[str, str], Path]:
    """Stage a part for a queue as the stranger, who may write in the private folders of the queue that it lies in."""

    def stage(source: str, goal: str) -> Path:
        layout = root.queue(source).layout
        for folder in (layout.staged, layout.receivers):
            os.makedirs(folder, exist_ok=True)
            os.chmod(folder, 0o777)
        inode = os.stat(f"{root.path}/{goal}").st_ino
        word = Path(root.path, goal, ".dropq", "created")
        content = {"path": goal, "inode": inode, "word": word.read_text().strip() if word.exists() else ""}

        def write() -> Path:
            Path(layout.receivers, "0123456789abcdef").write_text(json.dumps(content))
            folder = Path(layout.staged, "0123456789-0000000.abcdef,processed~4.1.B")
            folder.mkdir()
            (folder / f"0123456789abcdef~4.{ID}.B").write_bytes(b"pay mallory")
            (folder / "whole").write_bytes(b"bait")
            return folder

        return by(PRODUCER, write)

    return stage


SWEEPS: dict[str, Callable[[Queue], object]] = {
    "sweep": lambda queue: queue.sweep(),
    "consumer": lambda queue: queue.receive(0),
    "router": lambda queue: queue.route(),
}


@pytest.mark.parametrize("sweep", SWEEPS)
def test_a_part_of_another_user_for_a_queue_that_no_configuration_names_stays(
    root: Root, staging: Callable[[str, str], Path], sweep: str
) -> None:
    folder = staging("inbox", "payments")
    SWEEPS[sweep](root.queue("inbox"))
    assert held(root, "payments") == []
    assert (folder / "whole").exists()
    reasons = [reason.message for reason in health(root.queue("inbox")).reasons if reason.kind == "unfinished-commit"]
    says = f"user {PRODUCER} staged it for payments, which no configuration names: only processes of that user move it"
    assert says in reasons[0]


def test_a_part_of_another_user_is_moved_to_a_queue_that_a_selector_names(
    root: Root, staging: Callable[[str, str], Path]
) -> None:
    root.queue("inbox").add_selector("on", to="payments", op="copy")
    staging("inbox", "payments")
    assert health(root.queue("inbox")).healthy
    root.queue("inbox").sweep()
    assert held(root, "payments") == [b"pay mallory"]


def test_a_part_goes_to_the_subscriptions_and_views_of_its_topic_and_to_no_other_queue(
    root: Root, staging: Callable[[str, str], Path]
) -> None:
    topic = root.create_topic("news.eu")
    audit = os.path.basename(root.create_topic("news").create_subscription("all", client_id="hq").layout.home)
    root.create_topic("sport").create_subscription("all", client_id="eu")
    root.create_queue("view", underlying_topic="news.*", durability="none", default_publish_target="news.eu")
    goals = {
        f"topic-root/news/.subscriptions/{audit}": True,
        "topic-root/sport/.subscriptions/all.eu": False,
        "topic-root/news/.incoming": False,
        "view": True,
        "payments": False,
    }
    for goal, goes in goals.items():
        folder = staging(topic.queue.name, goal)
        topic.queue.sweep()
        assert bool(held(root, goal)) == goes, goal
        shutil.rmtree(folder, ignore_errors=True)


def test_what_one_s_own_process_staged_is_moved_wherever_it_is_for(
    root: Root, staging: Callable[[str, str], Path]
) -> None:
    folder = staging("inbox", "payments")
    for path in (folder, *folder.iterdir()):
        os.chown(path, 0, 0)
    root.queue("inbox").sweep()
    assert held(root, "payments") == [b"pay mallory"]
