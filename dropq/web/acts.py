"""What the page does: first a plan, which changes nothing, then a few seconds of doing, and again where more is left.

A plan holds the ids of its messages, or a filter, and its time: what came to the state later is not touched.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from dropq.errors import DropqError
from dropq.format.layout import STATES, WAITING
from dropq.lifecycle.context import QueueContext
from dropq.queue.browsing import excerpt, named
from dropq.storage.failures import describe
from dropq.upkeep import bulk
from dropq.upkeep.bulk import Outcome, Selection
from dropq.web.arguments import SHOWN, Arguments
from dropq.web.guard import Refused
from dropq.web.pages import FILTERING, Page, Site, command, quoted

#: The parameters of a form.
PARAMETERS = ("verb", "step", "which", "q", "state", "id", "filter", "until", "to_origin", "confirm")
#: Seconds of doing; messages that a plan shows; milliseconds by which one may be ahead of the file server's clock.
SLICE, LISTED, AHEAD = 4.0, 20, 2000
#: What each verb does to a message.
LOSES = {
    "requeue": "Its counters start again, and its own expiration is dropped. The reason goes; the log keeps it.",
    "to_origin": (
        "Each goes back to the queue that it came from, as a plain message; its counters start again. What is no dead "
        "letter stays, and so does a letter whose queue is missing."
    ),
    "held": (
        "It is taken from its holder, whose ack will be refused: the work may be done twice. Its counters start again. "
        "One whose lease was renewed since the list was shown stays."
    ),
    "purge": "Its body and properties are removed for good; nothing brings them back. The log keeps its id.",
}


def act(site: Site, args: Arguments, is_ending: Callable[[], bool]) -> Page:
    """Plan what a form asks for, or do it."""
    is_switch = args.verb in ("pause", "resume")
    if not (args.verb and args.queue and args.step and (args.state or is_switch)):
        raise Refused(400, "This form lacks a part: nothing was done.")
    if is_switch:
        return site.disk.ask(args.queue, lambda: _switch(site, args))
    args = replace(args, to_origin=args.to_origin and args.verb == "requeue")  # the tick is beside both buttons
    allowed = STATES if args.verb == "purge" else (*bulk.REQUEUED, *(WAITING if args.to_origin else ()))
    if args.state not in allowed:
        raise Refused(400, f"This is done to messages in {', '.join(allowed)}: nothing was done.")
    if (args.which == "all") == bool(args.ids):
        raise Refused(400, "No message was ticked: go back, and tick some. Nothing was done.")
    filter = site.compiled(args.filter)
    if args.step == "plan":
        return site.disk.ask(args.queue, lambda: _plan(site, args, filter))
    return site.disk.ask(args.queue, lambda: _do(site, args, filter, is_ending), 2 * (SLICE + 2))


def _switch(site: Site, args: Arguments) -> Page:
    queue = site.queue(args.queue)
    is_done = args.step != "plan"
    if is_done:
        (queue.pause if args.verb == "pause" else queue.resume)()
    shown = {"command": command(args.verb, [args.queue]), "is_done": is_done, "is_paused": queue.paused}
    return Page("switch.html", {**args.said, **shown})


def _plan(site: Site, args: Arguments, filter: str | None) -> Page:
    """Show which messages the verb would act on."""
    queue = site.queue(args.queue)
    now = queue.context.clock.now_ms()
    # What is ticked was shown with the list: a name may be another file's since. All are those that lie there now.
    until = now if args.which == "all" else min(args.until, now) or now
    shown = {**_shown(args), "until": until, "named": args.ids, "is_more": False, "is_misnamed": False}
    if args.which == "all":
        found = excerpt(queue.context, args.state, LISTED, filter=filter, letters=args.to_origin, seconds=FILTERING)
        chooses = filter is not None or args.to_origin
        count = found.matching if chooses else found.total
        names = [message.id for message in found.messages]
        shown["is_more"] = chooses and not found.is_whole
    else:
        there = list(named(queue.context, args.state, args.ids))  # a form may be forged, and a message has moved on
        there = [message for message in there if message.dead_letter_reason or not args.to_origin]
        names, count = [message.id for message in there[:LISTED]], len(there)
        shown["named"] = tuple(message.file for message in there)
    return Page("plan.html", {**shown, "names": names, "count": count})


def _shown(args: Arguments) -> dict[str, Any]:
    is_held = (args.verb, args.state) == ("requeue", "processing")
    kind = "to_origin" if args.to_origin else "held" if is_held else args.verb
    return {**args.said, "loses": LOSES[kind], "command": _command(args)}


def _command(args: Arguments) -> str:
    options = ["--to-origin"] if args.to_origin else []
    usual = "target" if args.verb == "purge" else bulk.requeued_from(None, to_origin=args.to_origin)
    if args.state != usual:
        options.append(f"--state {args.state}")
    if args.which == "all":
        return command(args.verb, [args.queue], *options, f"--filter {quoted(args.filter)}" if args.filter else "--all")
    return command(args.verb, [args.queue, *args.ids[:LISTED]], *options) + (" ..." if len(args.ids) > LISTED else "")


def _do(site: Site, args: Arguments, filter: str | None, is_ending: Callable[[], bool]) -> Page:
    """Act for some seconds; show what became of each message, and offer to go on."""
    queue = site.queue(args.queue)
    if args.verb == "purge" and args.confirm != args.queue.strip():
        plan = _plan(site, args, filter)
        return replace(plan, shown={**plan.shown, "is_misnamed": True}, status=400)
    if not args.until or args.until > queue.context.clock.now_ms() + AHEAD:
        raise Refused(400, "This form says a time that no plan was made at: nothing was done.")
    names = None if args.which == "all" else args.ids
    began, is_over = time.monotonic(), False

    def stop() -> bool:
        return time.monotonic() - began > SLICE or is_ending()

    matching = filter if names is None else None
    which = Selection((args.state,), names, matching, before=args.until, exact=True, stop=stop)
    outcomes = _outcomes(queue.context, args, which)
    done, failed, count = list[Outcome](), list[Outcome](), 0
    touched = set[str]()
    while not stop():
        try:
            outcome = next(outcomes, None)
        except (DropqError, OSError) as error:
            if not (done or failed):
                raise
            failed.insert(0, Outcome("", "", False, describe(error)))  # what was done before it is told
            break
        if outcome is None:
            is_over = not stop()
            break
        touched |= {outcome.id, outcome.name}
        count += outcome.ok
        (done if outcome.ok else failed).append(outcome)
        del done[SHOWN:], failed[SHOWN:]
    queue.close()  # the log gets the sums: this process may idle, or end
    left = () if is_over or names is None else tuple(name for name in names if name not in touched)
    shown = {
        **_shown(args),
        "done": done,
        "failed": failed,
        "count": count,
        "seconds": time.monotonic() - began,
        "is_over": is_over,
        "named": left,
        "most": SHOWN,
    }
    return Page("done.html", shown)


def _outcomes(context: QueueContext, args: Arguments, which: Selection) -> Iterator[Outcome]:
    if args.verb == "purge":
        return bulk.purge(context, which)
    return bulk.requeue(context, which, to_origin=args.to_origin)
