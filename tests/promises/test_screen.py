"""What a terminal shows: all that is needed, whole, at 60, 80 and 120 columns, and in colour what is wrong."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest
from rich.cells import cell_len
from test_cli import Ran, environment, failed, process

from dropq import Diagnosis, Message, Queue, Root
from dropq.cli import main as cli
from dropq.cli import output

#: Runs a command line without a terminal.
Piped = Callable[..., Ran]
#: Runs a command line on a terminal of so many columns; returns the exit code, and what both outputs showed.
Screen = Callable[..., tuple[int, str, str]]

widths = pytest.mark.parametrize("width", [60, 80, 120])
RED, YELLOW = "\x1b[31m", "\x1b[33m"


@pytest.fixture
def root(tmp_path: Path) -> Root:
    made = Root.create(tmp_path / "root")
    made.create_queue("q", durability="none", redelivery_delay=0)
    return made


@pytest.fixture
def q(root: Root) -> Iterator[Queue]:
    with root.queue("q") as queue:
        yield queue


@pytest.fixture
def piped(root: Root, capfd: pytest.CaptureFixture[str]) -> Piped:
    """Run a command line in this process, with each output in a file."""

    def piped(*argv: str) -> Ran:
        code = cli.main(["--root", str(root.path), *argv])
        out, err = capfd.readouterr()
        return Ran(code, out.encode(), err)

    return piped


@pytest.fixture
def screen(root: Root, monkeypatch: pytest.MonkeyPatch) -> Screen:
    """Run a command line in this process, with each output on a terminal of its own."""

    def screen(width: int, *argv: str, **more: str) -> tuple[int, str, str]:
        with monkeypatch.context() as patch:
            for name in ("NO_COLOR", "FORCE_COLOR"):
                patch.delenv(name, raising=False)
            for name, value in {"COLUMNS": str(width), "TERM": "xterm", **more}.items():
                patch.setenv(name, value)
            shown: dict[str, bytes] = {}
            readers = [_reader(patch, name, shown) for name in ("stdout", "stderr")]
            code = cli.main(["--root", str(root.path), *argv])
            for stream in (sys.stdout, sys.stderr):
                stream.close()
            for reader in readers:
                reader.join(60)
        out, err = (shown[name].decode().replace("\r\n", "\n") for name in ("stdout", "stderr"))
        return code, out, err

    return screen


def _reader(patch: pytest.MonkeyPatch, name: str, shown: dict[str, bytes]) -> Thread:
    """Put an output on a terminal; return the thread that reads what is shown there."""
    master, slave = pty.openpty()
    patch.setattr(sys, name, os.fdopen(slave, "w", encoding="utf-8"))
    reader = Thread(target=lambda: shown.update({name: _read_all(master)}))
    reader.start()
    return reader


def _read_all(master: int) -> bytes:
    found = b""
    try:
        while data := os.read(master, 4096):
            found += data
    except OSError:  # EIO: the other end is closed
        pass
    os.close(master)
    return found


def plain(text: str) -> str:
    """What was shown, without colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def second(message: Message, what: str = "timestamp") -> str:
    """A time of a message as tables show it."""
    return f"{getattr(message, what):%Y-%m-%d %H:%M:%SZ}"


def fits(text: str, width: int, *whole: str) -> bool:
    """Tell whether no line is longer than the terminal, apart from lines of a value that is never broken."""
    return all(cell_len(line) <= width or line in whole for line in plain(text).splitlines())


def words(text: str) -> str:
    """What was shown, as words on one line."""
    return " ".join(plain(text).split())


# -- tables ----------------------------------------------------------------------------------------------------------


@widths
def test_what_is_held_shows_its_holder_and_its_deadline_whole(screen: Screen, q: Queue, width: int) -> None:
    q.send(b"x")
    with q.subscribe(lease_period="1h") as subscription:
        message = subscription.receive()
        assert message is not None and message.owner is not None
        code, shown, _ = screen(width, "browse", "q", "--state", "processing")
        assert code == 0 and fits(shown, width)
        for value in (message.id, message.owner, second(message, "deadline")):
            assert value in plain(shown)


@widths
def test_what_failed_shows_its_reason_and_what_is_delayed_its_time(screen: Screen, q: Queue, width: int) -> None:
    reason = "there is no customer of this number in any of the four regions"
    (id,) = failed(q, b"x", reason=reason)
    code, shown, _ = screen(width, "browse", "q", "--state", "error")
    assert code == 0 and fits(shown, width) and id in plain(shown)
    assert all(word in plain(shown) for word in reason.split())
    q.send(b"later", delay="1h")
    (delayed,) = q.browse("delayed")
    code, shown, _ = screen(width, "browse", "q", "--state", "delayed")
    assert code == 0 and fits(shown, width)
    assert delayed.id in plain(shown) and second(delayed, "not_before") in plain(shown)


@widths
def test_no_key_of_the_configuration_is_broken(screen: Screen, q: Queue, width: int) -> None:
    code, shown, _ = screen(width, "config", "show", "q")
    assert code == 0 and fits(shown, width)
    assert re.search(r"^max_per_subscription_backlog\b", plain(shown), re.MULTILINE)


def test_a_narrow_terminal_leaves_out_what_matters_least_and_says_so(screen: Screen, q: Queue) -> None:
    sent = q.send(b"x", type="order")
    (message,) = q.browse()
    _, wide, silence = screen(120, "browse", "q")
    _, narrow, said = screen(60, "browse", "q")
    for text in (wide, narrow):
        assert sent.id in text and second(message) in text
    assert "bytes" in wide and "order" in wide and silence == ""
    assert "bytes" not in narrow
    assert words(said) == "left out: priority, bytes, type; --json or a wider terminal shows all"


@widths
def test_a_long_name_stays_whole_and_takes_no_room_from_the_others(screen: Screen, q: Queue, width: int) -> None:
    name = f"{'report of the north, ' * 6}.csv"
    Path(q.layout.target, name).touch()
    id = q.send(b"x").id
    (message,) = (message for message in q.browse() if message.id == id)
    code, shown, _ = screen(width, "browse", "q")
    lines = plain(shown).splitlines()
    assert code == 0 and fits(shown, width, name)
    assert re.match(rf"{re.escape(id)} .*{second(message)}", next(line for line in lines if line.startswith(id)))
    assert re.search(r"^ +.*Z", lines[lines.index(name) + 1])


@widths
def test_ls_keeps_what_waits_and_what_failed(screen: Screen, root: Root, q: Queue, width: int) -> None:
    failed(q, b"x", b"y")
    root.create_queue("a-queue-of-a-long-name-for-the-orders-of-the-north").pause()
    code, shown, _ = screen(width, "ls")
    assert code == 0 and fits(shown, width)
    for word in ("target", "delayed", "processing", "error", "paused", "total"):
        assert word in words(shown).split()
    assert f"{RED}2" in shown and f"{YELLOW}paused" in shown


def test_a_terminal_too_narrow_for_a_table_gets_a_line_for_each_value(screen: Screen, q: Queue) -> None:
    q.send(b"x")
    with q.subscribe(lease_period="1h") as subscription:
        message = subscription.receive()
        assert message is not None
        _, shown, _ = screen(30, "browse", "q", "--state", "processing")
        wanted = {f"id: {message.id}", f"owner: {message.owner}", f"deadline: {second(message, 'deadline')}"}
    assert wanted <= {words(line) for line in shown.splitlines()}


def test_the_width_is_that_of_the_terminal_where_columns_does_not_say_it(root: Root, q: Queue) -> None:
    q.send(b"x", type="order")
    for width, there in ((60, False), (120, True)):
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
        argv = ("--root", str(root.path), "browse", "q")
        with process(*argv, stdin=slave, stdout=slave, stderr=slave, env=environment()) as child:
            os.close(slave)
            shown = _read_all(master).decode()
            assert child.wait(60) == 0
        assert ("order" in shown) is there


@widths
def test_fsck_shows_the_path_whole_and_the_level_in_colour(screen: Screen, q: Queue, width: int) -> None:
    path = Path(q.layout.target, "a folder")
    path.mkdir()
    code, shown, _ = screen(width, "fsck", "q")
    assert code == 1 and fits(shown, width, str(path))
    assert str(path) in plain(shown) and f"{YELLOW}warning" in shown


def test_wide_characters_take_the_room_that_they_need(screen: Screen, q: Queue) -> None:
    failed(q, b"x", reason="\u9867\u5ba2\u756a\u53f7" * 20)
    code, shown, _ = screen(80, "browse", "q", "--state", "error")
    assert code == 0 and fits(shown, 80) and plain(shown).count("\u9867") == 20


# -- receive and tail ------------------------------------------------------------------------------------------------


def test_receive_shows_a_receipt_that_can_be_copied(screen: Screen, q: Queue, piped: Piped) -> None:
    q.send_many([b"x", b"y"])
    code, shown, _ = screen(80, "receive", "q", "-n", "2", "--lease", "1h")
    receipts = re.findall(r"^receipt: +(\S+)$", shown, re.MULTILINE)
    assert code == 0 and len(re.findall(r"^(?:id|path|deadline): +\S", shown, re.MULTILINE)) == 6
    assert piped("ack", "q", *receipts).code == 0
    assert q.counts()["processed"] == 2


def test_tail_shows_a_table_whose_heading_comes_once(
    screen: Screen,
    q: Queue,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rounds = iter([b"two", b"three", None])
    q.send(b"one")

    def comes(seconds: float) -> None:
        body = next(rounds)
        if body is None:
            raise KeyboardInterrupt
        q.send(body)

    # Only there: a call that has to wait for another reason, or another thread, sends and ends nothing.
    monkeypatch.setattr("dropq.cli.look.time", SimpleNamespace(sleep=comes))
    code, shown, _ = screen(80, "tail", "q", "-f")
    assert code == 130 and plain(shown).count("timestamp") == 1
    assert [message.id for message in q.browse()] == re.findall(r"^\d{16}-\d{10}", plain(shown), re.MULTILINE)


# -- explain ---------------------------------------------------------------------------------------------------------


def test_explain_has_a_line_for_each_message_at_80_columns(screen: Screen, q: Queue) -> None:
    ids = [q.send(b"x").id for _ in range(3)]
    code, shown, _ = screen(80, "browse", "q", "--explain")
    assert code == 0 and fits(shown, 80)
    rows = dict(line.split("  ", 1) for line in plain(shown).splitlines()[1:])
    assert {id: rows[id].strip().split("  ")[-1] for id in ids} == dict.fromkeys(ids, "ready: no consumer is running")


def test_explain_says_once_what_can_be_done(screen: Screen, q: Queue) -> None:
    ids = [q.send(b"x").id for _ in range(3)]
    q.pause()
    _, shown, _ = screen(80, "browse", "q", "--explain")
    assert re.search(rf"^{ids[0]} .*paused: no consumer gets it$", plain(shown), re.MULTILINE)
    assert plain(shown).count("`dropq resume q` removes it") == 1


@widths
def test_explain_shows_the_holder_and_its_lease_whole(screen: Screen, q: Queue, width: int) -> None:
    q.send(b"x")
    with q.subscribe(lease_period="1h") as subscription:
        message = subscription.receive()
        assert message is not None
        code, shown, _ = screen(width, "browse", "q", "--explain")
        assert code == 0 and fits(shown, width, message.id)
        assert f"lease: {subscription.id}" in plain(shown) and second(message, "deadline") in plain(shown)


def test_every_reason_has_its_words(screen: Screen, root: Root) -> None:
    queue = root.create_queue("full", max_backlog=1, durability="none")
    queue.send_many([b"x", b"y"])
    with root.queue("full") as other, other.subscribe() as subscription:
        message = subscription.receive()
        assert message is not None
        _, shown, _ = screen(120, "browse", "full", "--explain")
        assert "backlog: the limit is reached" in shown and f"held: {subscription.id}" in shown
        assert f"backlog: 1 held, as many as max_backlog allows ({subscription.id})" in shown


@widths
def test_the_graph_is_a_tree_that_shows_a_queue_once_and_ends_a_circle(screen: Screen, root: Root, width: int) -> None:
    for name in ("a", "b", "c", "start", "audit"):
        root.create_queue(name, durability="none")
    root.queue("a").add_selector("on", to="b", filter="region = 'eu'", credit=2)
    root.queue("b").add_selector("on", to="c")
    root.queue("b").add_selector("copy", op="copy", to="audit")
    Path(root.queue("c").layout.selectors).mkdir()
    Path(root.queue("c").layout.selectors, "back.toml").write_text("""to = "a"\nfilter = "n = '\\u001b[31m'"\n""")
    root.queue("start").add_selector("on", to="b")
    root.queue("a").send("x", properties={"region": "eu"})
    root.queue("audit").pause()
    code, shown, _ = screen(width, "graph")
    assert code == 0 and fits(shown, width)
    lines = [line.rstrip() for line in plain(shown).splitlines()]
    assert lines == [
        "start  empty",
        "└── move on → b  empty",
        "    1 of 1 credit free",
        "    messages would go round: b -> c -> a -> b",
        "    ├── copy copy → audit  empty",
        "    │   paused",
        "    └── move on → c  empty",
        "        1 of 1 credit free",
        "        messages would go round: c -> a -> b -> c",
        "        └── move back → a  1 waiting",
        "            1 of 1 credit free, n = '\\x1b[31m'",
        "            messages would go round: a -> b -> c -> a",
        "            └── move on → b  empty  (see above)",
        "                2 of 2 credits free, region = 'eu'",
        "                messages would go round: b -> c -> a -> b",
        "q  empty",
    ]
    assert RED in shown


# -- colours ---------------------------------------------------------------------------------------------------------


def test_what_is_wrong_is_coloured_unless_that_is_not_wanted(screen: Screen, q: Queue) -> None:
    failed(q, b"x")
    argv = ("health", "q", "--max-error", "0")
    assert f"{RED}unhealthy" in screen(80, *argv)[1]
    assert f"{RED}unhealthy" in screen(80, *argv, NO_COLOR="")[1]
    for off in ({"NO_COLOR": "1"}, {"NO_COLOR": "false"}, {"TERM": "dumb"}):
        code, shown, _ = screen(80, *argv, **off)
        assert code == 1 and "unhealthy" in shown and RED not in shown


def test_doctor_colours_how_bad_it_is(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Root, "doctor", lambda self, queues: [Diagnosis("no-locks", "/srv", "no flock")])
    code, shown, _ = screen(80, "doctor")
    assert code == 1 and shown.startswith(f"{YELLOW}warning\x1b[0m  locks")


def test_errors_are_coloured_unless_that_is_not_wanted(screen: Screen, piped: Piped) -> None:
    _, _, said = screen(80, "ls", "nosuch")
    assert said.startswith(f"{RED}error\x1b[0m: ")
    for off in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        assert screen(80, "ls", "nosuch", **off)[2].startswith("error: ")
    assert piped("ls", "nosuch").err.startswith("error: ")


def test_a_pipe_gets_lines_without_colours_or_headings(piped: Piped, q: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    failed(q, b"x", reason="the reason")
    assert piped("health", "q", "--max-error", "0").rows[0][:3] == ["q", "unhealthy", "many-errors"]
    (row,) = piped("browse", "q", "--state", "error").rows
    assert len(row) == 7 and row[-1] == "rejected: the reason"
    assert "\x1b" not in piped("ls").out


# -- bulk verbs ------------------------------------------------------------------------------------------------------


def test_quiet_leaves_out_what_went_well(piped: Piped, q: Queue) -> None:
    (id, *_) = failed(q, b"x", b"y", b"z")
    done = piped("requeue", "q", id, "nosuch", "-q")
    assert (done.code, done.err) == (1, "requeued=1 failed=1\n")
    assert [row[:2] for row in done.rows] == [["nosuch", "failed"]]
    for argv, total in (
        (("requeue", "q", "--all", "--yes"), "requeued=2 failed=0\n"),
        (("purge", "q", "--state", "target", "--all", "--yes"), "removed=3 failed=0\n"),
        (("prune", "--state", "error", "--keep-count", "0", "--yes"), "removed=0 failed=0\n"),
        (("replay", "q", "--yes"), "replayed=0 failed=0\n"),
    ):
        done = piped(*argv, "--quiet")
        assert (done.code, done.out, done.err) == (0, "", total)


def test_quiet_sends_and_settles_without_a_line_for_each(piped: Piped, q: Queue, tmp_path: Path) -> None:
    file = tmp_path / "lines"
    file.write_bytes(b"one\ntwo\nthree\nfour\n")
    done = piped("send", "q", "--lines", "-q", str(file))
    assert (done.code, done.out, done.err) == (0, "", "sent=4\n")
    for verb in ("ack", "nack", "fail", "reject"):
        receipt = piped("receive", "q").rows[0][1]
        done = piped(verb, "q", receipt, "--json", "-q")
        assert (done.code, done.out) == (0, "")


@widths
def test_a_bar_shows_the_time_left_if_it_is_known(screen: Screen, root: Root, q: Queue, width: int) -> None:
    q.send_many([b"x"] * 150)
    root.create_queue("other")
    _, _, said = screen(width, "move", "q", "other", "--all", "--yes", "--quiet")
    assert said == "moved=150 failed=0\n"
    code, _, said = screen(width, "move", "other", "q", "--all", "--yes")
    assert code == 0 and re.search(r"150/150 \S+ left \S+", plain(said))
    _, _, said = screen(width, "move", "q", "other", "--filter", "JMSPriority = 4", "--yes")
    assert "150/?" in plain(said) and " left " not in said


def test_the_bar_of_lines_counts_the_bytes_of_their_file(screen: Screen, q: Queue, tmp_path: Path) -> None:
    file = tmp_path / "lines"
    file.write_bytes(b"a line\n" * 1000)
    code, _, said = screen(80, "send", "q", "--lines", str(file))
    assert code == 0 and re.search(r"7\.0/7\.0 kB \S+ left \S+", plain(said))
    assert q.counts()["target"] == 1000


def test_only_the_first_words_of_lines_are_coloured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    master, slave = pty.openpty()
    with os.fdopen(master, "rb"), os.fdopen(slave, "w") as stream:
        assert output.coloured("usage\nerror: an error", stream) == f"usage\n{RED}error\x1b[0m: an error"
        assert output.coloured("errors=1", stream) == "errors=1"
