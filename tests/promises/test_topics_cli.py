"""Topics from a shell: `dropq topic`, and every other command with the address of a topic or a subscription."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers import Run, add_route, arrive, until

from dropq import Queue, Root, Topic
from dropq.cli import completion
from dropq.cli import main as cli
from dropq.cli import topics as cli_topics

#: A subscription whose folder's name has what a shell and an address have to encode.
ODD = "sales.eu/st%2Eock.b+r%7E1.no-local"


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root.create(tmp_path / "root")


@pytest.fixture
def sales(root: Root) -> Topic:
    return root.create_topic("sales.eu", durability="none", redelivery_delay=0)


# -- topic create, publish, subscribe ----------------------------------------------------------------------------------


def test_a_topic_is_made_with_options_and_its_path_is_printed(run: Run, root: Root) -> None:
    made = run("topic", "create", "sales.eu", "--set", "expiration=1h", "--set", "max_deliveries=3")
    assert made == (0, f"{root.path}/topic-root/sales/eu\n", "")
    assert root.topic("sales.eu").queue.config.expiration == 3600
    assert run("topic", "create", "sales.eu").code == 73
    assert run("topic", "create", "sales..eu").code == 2


def test_a_topic_that_would_be_a_view_is_not_made(run: Run, root: Root) -> None:
    code, _, err = run("topic", "create", "sales", "--set", "underlying_topic=other")
    assert code == 78 and "only a queue can be a view" in err
    assert not root.topic("sales").exists()


def test_what_is_published_is_received_by_each_subscription_and_its_id_is_printed(run: Run, sales: Topic) -> None:
    addresses = [run("topic", "subscribe", "sales.eu", name, "--client-id", "hq").out.strip() for name in ("a", "b.c")]
    assert addresses == ["sales.eu/a.hq", "sales.eu/b%2Ec.hq"]
    code, out, err = run("topic", "publish", "sales.eu", "-p", "n:I=7", input="hello")
    assert (code, err) == (0, "")
    for address in addresses:
        assert run("browse", address).out.split("\t")[0] == out.strip()
        assert run("cat", address, out.strip()).out == "hello"


def test_the_name_of_a_subscription_leads_to_its_address(run: Run, root: Root, sales: Topic) -> None:
    sales.create_subscription("audit", client_id="hq")
    ends = "`dropq ls` shows which there are\n"  # and not how to create another
    for name in ("audit", "audit.hq"):
        code, _, err = run("work", name, "--until-empty", "--", "cat")
        assert (code, err.endswith(f"is it the subscription 'sales.eu/audit.hq'? {ends}")) == (66, True)
    sales.create_subscription("audit", client_id="lab")
    assert f"is it the subscription 'sales.eu/audit.hq' or 'sales.eu/audit.lab'? {ends}" in run("browse", "audit").err


def test_publish_takes_files_and_lines_as_send_does(run: Run, sales: Topic, tmp_path: Path) -> None:
    audit = sales.create_subscription("audit", client_id="hq")
    files = [tmp_path / name for name in ("1.txt", "2.txt")]
    for file in files:
        file.write_text(file.name)
    assert len(run("topic", "publish", "sales.eu", *map(str, files), "--move").out.split()) == 2
    assert not any(file.exists() for file in files)
    assert len(run("topic", "publish", "sales.eu", "--lines", input="3\n4\n").out.split()) == 2
    assert [message.text for message in audit.browse()] == ["1.txt", "2.txt", "3", "4"]


@pytest.mark.parametrize("command", [("send",), ("topic", "publish")])
def test_what_is_sent_and_not_distributed_is_reported(command: tuple[str, ...], run: Run, sales: Topic) -> None:
    audit = sales.create_subscription("audit", client_id="hq")
    distributed = run(*command, "sales.eu", "--json", input="1")
    assert json.loads(distributed.out)["distributed"] is True and distributed.err == ""
    sales.queue.pause()
    waits = run(*command, "sales.eu", "--json", input="2")
    assert waits.code == 0 and json.loads(waits.out)["distributed"] is False
    assert waits.err.startswith("not_distributed=1: ") and "do not send it again" in waits.err
    sales.queue.resume()
    assert run("sweep", "sales.eu").code == 0
    assert [message.text for message in audit.browse()] == ["1", "2"]


def test_a_send_to_a_queue_says_nothing_of_distribution(run: Run, root: Root) -> None:
    root.create_queue("orders")
    code, out, err = run("send", "orders", "--json", input="1")
    assert (code, err) == (0, "") and "distributed" not in json.loads(out)


def test_publish_waits_for_the_end_of_a_pause_if_it_is_told_to(run: Run, sales: Topic) -> None:
    audit = sales.create_subscription("audit", client_id="hq")
    sales.queue.pause()

    def resume_when_it_waits() -> None:
        until(lambda: sales.queue.counts()["target"] == 1, "the message waits in the topic")
        sales.queue.resume()

    with ThreadPoolExecutor() as beside:
        resumed = beside.submit(resume_when_it_waits)
        code, out, err = run("topic", "publish", "sales.eu", "--timeout", "1h", "--json", input="1")
        resumed.result()
    assert (code, err) == (0, "") and json.loads(out)["distributed"] is True
    assert audit.counts()["target"] == 1


def test_publish_and_subscribe_refuse_what_is_no_topic(run: Run, root: Root, sales: Topic) -> None:
    root.create_queue("orders")
    for argv in (["publish", "{}"], ["subscribe", "{}", "x", "--client-id", "hq"]):
        missing = run("topic", *(word.replace("{}", "sales.ue") for word in argv), input="1")
        assert missing.code == 66
        assert "no topic 'sales.ue'" in missing.err and "is it 'sales.eu'?" in missing.err
        assert "`dropq topic create sales.ue`" in missing.err
        queue = run("topic", *(word.replace("{}", "orders") for word in argv), input="1")
        assert queue.code == 66 and "'orders' is a queue, and no topic" in queue.err
    assert not any(root.queue("orders").counts().values())


def test_a_subscription_leaves_out_what_does_not_match_and_what_its_client_publishes(run: Run, sales: Topic) -> None:
    made = run("topic", "subscribe", "sales.eu", "big", "--client-id", "hq", "--filter", "n > 1", "--no-local")
    assert made.out == "sales.eu/big.hq.no-local\n"
    for n, publisher in (("1", ()), ("2", ()), ("3", ("--client-id", "hq")), ("4", ("--client-id", "till"))):
        assert run("topic", "publish", "sales.eu", "-p", f"n:I={n}", *publisher, input=n).code == 0
    big = sales.root.queue("sales.eu/big.hq.no-local")
    assert [message.text for message in big.browse()] == ["2", "4"]


def test_a_recovery_point_brings_what_the_topic_has_archived(run: Run, sales: Topic) -> None:
    sales.publish("before")
    made = run("topic", "subscribe", "sales.eu", "late", "--client-id", "hq", "--recovery-point", "epoch")
    assert [message.text for message in sales.root.queue(made.out.strip()).browse()] == ["before"]


def test_subscribing_again_leaves_the_subscription_as_it_is(run: Run, sales: Topic) -> None:
    again = ("topic", "subscribe", "sales.eu", "audit", "--client-id", "hq", "--filter", "n > 1")
    assert run(*again).code == 0
    sales.publish("kept", properties={"n": 2})
    assert run(*again).out == "sales.eu/audit.hq\n"
    assert run(*again, "--dry-run").err == "is there already: sales.eu/audit.hq\n"
    assert sales.root.queue("sales.eu/audit.hq").counts()["target"] == 1


def test_subscribing_again_asks_before_it_removes_messages(run: Run, sales: Topic) -> None:
    audit = sales.create_subscription("audit", client_id="hq")
    sales.publish("waits")
    changed = ("topic", "subscribe", "sales.eu", "audit", "--client-id", "hq", "--filter", "n > 1")
    refused = run(*changed)
    assert refused.code == 2 and "1 in target" in refused.err and "--yes" in refused.err
    assert "sales.eu/audit.hq is there already, with another filter. Subscribing again removes it" in refused.err
    shown = run(*changed, "--dry-run")
    assert shown.out == "sales.eu/audit.hq\n"
    assert shown.err.splitlines() == [
        "would be removed: sales.eu/audit.hq (1 in target), as it is there with another filter",
        "would be made: sales.eu/audit.hq",
    ]
    assert audit.counts()["target"] == 1
    assert run(*changed, "--yes").out == "sales.eu/audit.hq\n"
    assert sum(sales.root.queue("sales.eu/audit.hq").counts().values()) == 0


@pytest.mark.parametrize(
    ("topic", "options", "difference"),
    [
        ("sales.eu", ("--no-local",), "without --no-local"),
        ("stock", (), "in another topic"),
        ("stock", ("--no-local",), "in another topic"),
    ],
)
def test_subscribing_again_says_in_what_the_subscription_differs(
    topic: str, options: tuple[str, ...], difference: str, run: Run, sales: Topic
) -> None:
    sales.root.create_topic("stock")
    sales.create_subscription("audit", client_id="hq")
    sales.publish("waits")
    refused = run("topic", "subscribe", topic, "audit", "--client-id", "hq", *options)
    assert refused.code == 2 and f"sales.eu/audit.hq is there already, {difference}." in refused.err


@pytest.mark.parametrize("text", ["n >> 1", "", "/total >"])
def test_a_subscription_with_a_bad_filter_is_not_made(text: str, run: Run, sales: Topic) -> None:
    assert run("topic", "subscribe", "sales.eu", "audit", "--client-id", "hq", "--filter", text).code == 2
    assert sales.subscriptions() == []


def test_a_folder_that_somebody_made_among_the_subscriptions_is_no_subscription(run: Run, sales: Topic) -> None:
    Path(sales.queue.layout.home, ".subscriptions", "audit.hq").mkdir()
    code, _, err = run("topic", "subscribe", "sales.eu", "audit", "--client-id", "hq")
    assert code == 66 and "it has no folder target/" in err


def test_a_subscription_is_this_hosts_unless_a_client_is_named(
    run: Run, sales: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_topics, "gethostname", lambda: "mill-3.example.org")
    assert run("topic", "subscribe", "sales.eu", "audit").out == "sales.eu/audit.mill-3\n"
    assert run("topic", "subscribe", "sales.eu", "audit", "--client-id", "hq").out == "sales.eu/audit.hq\n"
    assert run("topic", "unsubscribe", "sales.eu", "audit").code == 0
    assert [queue.name for queue in sales.subscriptions()] == ["sales.eu/audit.hq"]
    gone = run("topic", "unsubscribe", "sales.eu", "audit")
    assert gone.code == 66 and "no subscription 'audit' of client 'mill-3'" in gone.err
    assert "name of this host by default" in " ".join(run("topic", "subscribe", "--help").out.split())


# -- topic unsubscribe -------------------------------------------------------------------------------------------------


def test_unsubscribe_removes_a_subscription_without_messages_unasked(run: Run, sales: Topic) -> None:
    sales.create_subscription("audit", client_id="hq")
    assert run("topic", "unsubscribe", "sales.eu", "audit", "--client-id", "hq").code == 0
    assert sales.subscriptions() == []


def test_unsubscribe_asks_where_messages_would_go(run: Run, sales: Topic) -> None:
    sales.create_subscription("audit", client_id="hq")
    sales.publish("waits")
    gone = ("topic", "unsubscribe", "sales.eu", "audit", "--client-id", "hq")
    assert run(*gone).code == 2
    assert run(*gone, "--dry-run") == (0, "sales.eu/audit.hq\n", "would be removed: sales.eu/audit.hq (1 in target)\n")
    assert len(sales.subscriptions()) == 1
    assert run(*gone, "--yes") == (0, "", "subscription sales.eu/audit.hq (1 in target) is removed\n")
    assert sales.subscriptions() == []
    assert run(*gone, "--yes").code == 66


@pytest.mark.parametrize(
    "removing",
    [
        ("unsubscribe", "sales.eu", "audit", "--client-id", "hq"),
        ("subscribe", "sales.eu", "audit", "--client-id", "hq", "--filter", "n > 1"),
    ],
)
def test_what_a_route_took_is_not_removed_unasked(removing: tuple[str, ...], run: Run, sales: Topic) -> None:
    audit = sales.create_subscription("audit", client_id="hq")
    add_route(audit, "u", "TRUE")
    sales.publish("routed")
    assert run("route", audit.name, "--once").out == "sales.eu/audit.hq\troute\tu\t1\n"
    refused = run("topic", *removing)
    assert refused.code == 2 and "1 in routing/u" in refused.err and "--yes" in refused.err
    shown = run("topic", *removing, "--dry-run")
    assert shown.err.startswith("would be removed: sales.eu/audit.hq (1 in routing/u)")
    assert audit.routed() == {"u": 1}
    assert run("topic", *removing, "--yes").code == 0
    assert not [queue for queue in sales.subscriptions() if queue.routed()]


def test_what_a_route_takes_after_the_question_is_not_removed(
    run: Run, sales: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit = sales.create_subscription("audit", client_id="hq")
    add_route(audit, "u", "TRUE")
    counted = cli_topics._contents

    def routed_next(queues: Iterable[Queue]) -> dict[str, dict[str, int]]:
        found = counted(queues)
        sales.publish("routed")
        assert audit.route() == {"u": 1}
        return found

    monkeypatch.setattr(cli_topics, "_contents", routed_next)
    code, _, err = run("topic", "unsubscribe", "sales.eu", "audit", "--client-id", "hq")
    assert code == 1 and "(1 in routing/u)" in err and "`dropq delete sales.eu/audit.hq --force`" in err
    assert audit.routed() == {"u": 1}
    assert run("delete", "sales.eu/audit.hq", "--force", "--yes").code == 0
    assert sales.subscriptions() == []


def test_unsubscribe_leaves_a_subscription_that_is_in_use(run: Run, sales: Topic) -> None:
    with sales.subscribe("audit", client_id="hq"):
        code, _, err = run("topic", "unsubscribe", "sales.eu", "audit", "--client-id", "hq")
        assert code == 75 and "is in use" in err
        assert len(sales.subscriptions()) == 1


# -- topic ls ----------------------------------------------------------------------------------------------------------


def test_topic_ls_shows_what_waits_and_what_subscriptions_get(run: Run, root: Root, sales: Topic) -> None:
    root.create_queue("orders")
    sales.create_subscription("big", client_id="hq", filter="n > 1", no_local=True)
    root.create_topic("sales").create_subscription("all", client_id="hq")
    with sales.subscribe("now", client_id="hq", durable=False):
        sales.publish("1", properties={"n": 1})
        sales.queue.pause()
        Path(sales.queue.layout.target, "report.csv").write_text("2")
        (now,) = (queue.name for queue in sales.subscriptions() if "/now-" in queue.name)
        rows = [line.split("\t") for line in run("topic", "ls").out.splitlines()]
        assert rows == [
            ["sales", "0", "0", "0", "0", "", ""],
            ["sales.eu", "1", "0", "0", "0", "paused", ""],
            ["sales.eu/big.hq.no-local", "0", "0", "0", "0", "no-local", "n > 1"],
            [now, "1", "0", "0", "0", "ephemeral", ""],
            ["sales/all.hq", "1", "0", "0", "0", "", ""],
        ]
        records = [json.loads(line) for line in run("topic", "ls", "sales.eu", "--json").out.splitlines()]
    assert [record["queue"] for record in records] == [row[0] for row in rows[1:4]]
    assert [record["kind"] for record in records] == ["topic", "subscription", "subscription"]
    assert [(record["no_local"], record["ephemeral"], record["filter"]) for record in records] == [
        (False, False, None), (True, False, "n > 1"), (False, True, None)
    ]  # fmt: skip


def test_topic_ls_shows_a_subscription_that_is_being_filled(run: Run, sales: Topic) -> None:
    audit = sales.create_subscription("audit", client_id="hq")
    Path(audit.layout.recovering).write_text("epoch")
    assert run("topic", "ls").out.splitlines()[1].split("\t")[5] == "recovering"


def test_a_sweep_reports_what_it_fills_a_subscription_with(run: Run, sales: Topic) -> None:
    sales.publish("archived")
    audit = sales.create_subscription("audit", client_id="hq")
    Path(audit.layout.recovering).write_text("epoch")
    assert run("sweep") == (0, "recovered\t1\n", "swept=1\n")
    assert [message.text for message in audit.browse()] == ["archived"]


def test_topic_ls_of_what_is_not_there(run: Run, sales: Topic) -> None:
    assert run("topic", "ls", "nope").code == 66


def test_topic_ls_of_a_root_without_topics_says_so(run: Run, root: Root) -> None:
    code, out, err = run("topic", "ls")
    assert (code, out) == (0, "") and "no topics" in err


# -- every other command, with both kinds of addresses -----------------------------------------------------------------

#: Command lines; `{}` is the address. Those that change something come last.
LINES = (
    "ls {}", "health {}", "browse {}", "browse {} --explain", "browse {} --state processed", "tail {}",
    "config show {}", "config show {} lease_period", "doctor {}", "fsck {}", "fsck {} --repair --yes",
    "prune {} --keep-count 5 --dry-run", "prune {} --keep-count 5 --yes", "pause {}", "ls {} --json", "resume {}",
    "requeue {} --state processed --all --dry-run", "requeue {} --state processed --all --yes",
    "replay {} --dry-run", "purge {} --state processed --all --yes", "sweep {}", "move {} orders --all --yes",
    "wait {} --empty --timeout 5s",
)  # fmt: skip


@pytest.mark.parametrize("address", ["sales.eu", "sales.eu/audit.hq", ODD])
def test_every_command_takes_the_address_of_a_topic_and_of_a_subscription(
    address: str, run: Run, root: Root, sales: Topic
) -> None:
    root.create_queue("orders")
    sales.create_subscription("audit", client_id="hq")
    sales.create_subscription("st.ock", client_id="b r~1", no_local=True)
    sales.publish("1")
    queue = root.queue(address)
    if queue.layout.is_subscription:
        with queue.receive() as message:  # type: ignore[union-attr]
            assert message is not None
    for line in LINES:
        code, _, err = run(*(word.replace("{}", address) for word in line.split()))
        assert code == 0 or (code == 1 and line.startswith(("doctor", "fsck"))), f"{line}: {code} {err}"


@pytest.mark.parametrize("address", ["sales.eu/audit.hq", ODD])
def test_a_subscription_is_worked_received_and_settled_by_its_address(address: str, run: Run, sales: Topic) -> None:
    sales.create_subscription("audit", client_id="hq")
    sales.create_subscription("st.ock", client_id="b r~1", no_local=True)
    for body in ("1", "2", "3"):
        sales.publish(body)
    receipt = run("receive", address).out.split("\t")[1]
    assert run("extend", address, receipt, "--by", "5m").code == 0
    assert run("nack", address, receipt).code == 0
    receipt = run("receive", address).out.split("\t")[1]
    assert run("reject", address, receipt, "--reason", "no").code == 0
    assert run("work", address, "--until-empty", "--", "true").code == 0
    assert run("requeue", address, "--all", "--yes").code == 0
    counts = sales.root.queue(address).counts()
    assert (counts["target"], counts["processed"], counts["error"]) == (1, 2, 0)


def test_work_serves_a_topics_subscription_beside_a_queue(run: Run, root: Root, sales: Topic) -> None:
    root.create_queue("orders").send("1")
    audit = sales.create_subscription("audit", client_id="hq")
    sales.publish("2")
    assert run("work", "orders", audit.name, "--until-empty", "--", "true").code == 0
    assert audit.counts()["processed"] == root.queue("orders").counts()["processed"] == 1


def test_a_sweep_and_a_work_distribute_what_a_script_published(run: Run, sales: Topic) -> None:
    audit = sales.create_subscription("audit", client_id="hq")
    for number, command in enumerate(("sweep sales.eu", f"work {audit.name} --until-empty -- true")):
        draft = Path(sales.queue.layout.working, f"report {number}.csv")
        draft.write_text("1,2")
        arrive(draft, Path(sales.queue.layout.target, draft.name))
        assert run(*command.split()).code == 0
    assert sales.queue.counts()["target"] == 0
    counts = audit.counts()
    assert counts["target"] + counts["processed"] == 2


def test_config_check_finds_what_is_wrong_in_the_files_of_topics_and_subscriptions(
    run: Run, root: Root, sales: Topic
) -> None:
    audit = sales.create_subscription("audit", client_id="hq")
    assert run("config", "check").code == 0
    files = [sales.queue.layout.config_file, audit.layout.config_file]
    for file, text in zip(files, ('underlying_topic = "x"\n', 'overflow = "reject"\n'), strict=True):
        Path(file).write_text(text)
    code, out, _ = run("config", "check")
    assert code == 78 and all(out.count(file) == 1 for file in files)
    assert run("config", "check", files[1]).code == 78


def test_config_check_reads_the_file_of_a_folder_above_topics_that_has_subscriptions(run: Run, root: Root) -> None:
    sales = root.create_topic("sales")
    sales.create_subscription("all", client_id="hq")
    os.rename(sales.queue.layout.base, root.path / "away")
    Path(f"{root.path}/topic-root/sales/queue.toml").write_text("max_deliveris = 3\n")
    assert run("config", "check").code == 78
    assert run("topic", "ls", "sales").code in (1, 78)


def test_config_show_names_the_file_of_the_topic_that_sets_a_subscriptions_default(run: Run, root: Root) -> None:
    topic = root.create_topic("news", max_deliveries=3)
    address = topic.create_subscription("audit", client_id="hq").name
    key, value, source = run("config", "show", address, "max_deliveries").out.rstrip("\n").split("\t")
    assert (key, value, source) == ("max_deliveries", "3", topic.queue.layout.config_file)


def test_a_queue_and_a_topic_of_one_name_exclude_each_other(run: Run, root: Root, sales: Topic) -> None:
    root.create_queue("news")
    assert run("create", "sales.eu").code == 73
    assert run("topic", "create", "news").code == 73


def test_delete_refuses_a_topic_with_subscriptions_before_it_asks(run: Run, root: Root, sales: Topic) -> None:
    sales.create_subscription("audit", client_id="hq")
    for option in ("--dry-run", "--yes", "--force"):
        code, _, err = run("delete", "sales.eu", option)
        assert code == 1 and "sales.eu/audit.hq" in err
    assert run("delete", "sales.eu/audit.hq", "--yes").code == 0
    assert run("delete", "sales.eu", "--yes").code == 0
    assert root.queues() == []


@pytest.mark.parametrize("name", ["/mnt/queues", "mnt/queues", ".", ".."])
def test_doctor_still_tells_a_folder_from_an_address(name: str, run: Run, sales: Topic) -> None:
    code, _, err = run("doctor", name)
    assert code == 2 and f"`dropq --root {name} doctor`" in err


def completed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """Return what zsh is offered for the last word."""
    with monkeypatch.context() as patch:
        patch.setenv("_DROPQ_COMPLETE", "complete_zsh")
        patch.setattr(sys, "argv", ["dropq", *words])
        completion.register()
        with pytest.raises(SystemExit):
            raise SystemExit(cli.main())
    return [line.removeprefix("plain\t") for line in capsys.readouterr().out.splitlines()]


def test_topics_subscriptions_and_addresses_are_completed(
    root: Root, sales: Topic, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root.create_queue("samples")
    sales.create_subscription("audit", client_id="hq")
    at = ("--root", str(root.path))
    assert completed(monkeypatch, capsys, *at, "topic", "publish", "sa") == ["sales.eu"]
    assert completed(monkeypatch, capsys, *at, "topic", "unsubscribe", "sales.eu", "") == ["audit"]
    assert completed(monkeypatch, capsys, *at, "topic", "subscribe", "sales.eu", "") == [""]
    assert completed(monkeypatch, capsys, *at, "work", "sa") == ["sales.eu", "sales.eu/audit.hq", "samples"]


# -- hints -------------------------------------------------------------------------------------------------------------


def test_a_send_to_what_is_not_there_names_the_makers_of_queues_and_of_topics(run: Run) -> None:
    dotted, plain = (run("send", name, input="x").err for name in ("sales.eu", "sales"))
    assert "`dropq create sales.eu` makes a queue, `dropq topic create sales.eu` a topic" in dotted
    assert "`dropq create sales` makes one" in plain and "topic create" not in plain


@pytest.mark.parametrize("command", [("receive",), ("work",)])
def test_whoever_consumes_a_topic_that_has_subscriptions_is_warned(
    command: tuple[str, ...], run: Run, sales: Topic
) -> None:
    def warnings(address: str) -> list[str]:
        rest = ("--until-empty", "-q" * quiet, "--", "true") if command == ("work",) else ()
        return [line for line in run(*command, address, *filter(None, rest)).err.splitlines() if "warning" in line]

    quiet = False
    assert warnings("sales.eu") == []
    sales.create_subscription("audit", client_id="hq")
    (warning,) = warnings("sales.eu")
    assert "no subscription of topic sales.eu gets what is taken here" in warning and "sales.eu/audit.hq?" in warning
    assert warnings("sales.eu/audit.hq") == []
    if command == ("work",):
        quiet = True
        assert warnings("sales.eu") == []


def test_health_and_browse_say_what_a_pause_and_a_route_mean_for_a_topic(run: Run, sales: Topic) -> None:
    sales.create_subscription("audit", client_id="hq")
    add_route(sales.queue, "u", "JMSPriority > 6")
    assert sales.publish("routed", priority=9).distributed
    sales.queue.pause()
    assert run("send", "sales.eu", input="waits").err.startswith("not_distributed=1")
    notes = run("health", "sales.eu").out
    assert "what is published is not distributed; it is paused" in notes
    layout = sales.queue.layout
    assert f"1 message in {layout.routing}/u, which no receiver of this topic gets" in notes
    assert f"move them to {shlex.quote(layout.target)} to have them distributed" in notes
    explained = run("browse", "sales.eu", "--explain").out
    assert f"{layout.read_lock} keeps what is published from being distributed: `dropq resume sales.eu`" in explained


def test_health_quotes_the_file_of_a_route_that_cannot_be_used(run: Run, root: Root) -> None:
    queue = root.create_queue("or ders")
    add_route(queue, "u", "TRUE", folder=False)
    assert f"or remove '{queue.layout.routing}/u.in-use'" in run("health", "or ders").out
