"""The names that messages get as their state changes; a change that only one move makes is in that move's code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dropq.format import names
from dropq.format.claims import Claim
from dropq.format.message_file import MessageFile
from dropq.format.names import Name
from dropq.lifecycle.context import QueueContext
from dropq.storage import reading

#: The largest count that a name can hold.
LARGEST = 2**31 - 1


def counted(context: QueueContext, claim: Claim, *, cancel: bool = False, counted: bool = True) -> Name:
    """Return the name of a claimed message with this delivery, and a cancel, if they count."""
    name = context.sidecars.parse(claim.own_name).unmarked
    number = claim.number if counted else claim.number - 1
    cancels, died = min(name.cancels + cancel, LARGEST), min(name.died + claim.died, LARGEST)
    return replace(name, delivery_count=min(number, LARGEST), cancels=cancels, died=died)


def next_delivery(context: QueueContext, file: MessageFile, *, again: bool = False) -> tuple[int, str]:
    """Return the number of a file's next delivery, and its name without a claim prefix that was left by hand."""
    name, own_name = file.name, file.own_name
    if problems := file.problems:
        context.sidecars.warn(own_name, problems)
    count = file.delivery_count
    unmark = name.lapsed and not again  # only the stream whose lease ran out needs the mark
    if unmark or len(own_name) > context.layout.name_budget or not own_name.isascii():
        name = name.unmarked if unmark else name
        own_name = context.sidecars.fit(replace(name, delivery_count=count, not_before=0))
    return count + 1, own_name


def unique(name: Name, *, chosen: bool = False) -> Name:
    """Return a name that no other file has: a generated id is unique, any other name gets a random mark.

    Where a sender has `chosen` the id, perhaps twice, the name gets a mark even if the id looks generated.
    """
    if name.generated and not chosen:
        return name
    is_unique = name.lapsed or name.via  # each by itself
    return replace(name, foreign=False, copy="" if is_unique else names.copy_mark(name))


def marked(name: Name) -> Name:
    return replace(name, foreign=False, copy=names.copy_mark(name))


def kept_names(context: QueueContext, name: Name) -> Iterator[str]:
    """Yield the names to try in processed/, expired/ and error/: a foreign file's own first, a unique name last.

    The own name of a foreign file could not say of a dead letter where it comes from, and why.
    """
    own = None if name.reason else context.sidecars.full(name).born_foreign if name.meta else name.born_foreign
    if own is not None and not context.sidecars.ignored(own):
        yield own
    elif not name.foreign:
        yield context.sidecars.fit(replace(name, not_before=0))
    yield copy_name(context, replace(name, not_before=0))


def names_at_the_end(context: QueueContext, own_name: str) -> Iterator[str]:
    if not names.may_be_marked(own_name):
        yield own_name
    yield from kept_names(context, context.sidecars.parse(own_name).unmarked)


def copy_name(context: QueueContext, name: Name) -> str:
    """Return a file name for a message whose own name is taken: with a mark that no other has."""
    return context.sidecars.fit(marked(name))


def coded(context: QueueContext, file: str, arrival: int) -> str:
    """Return a foreign file's name in dropq's own form, which no queue ignores; its arrival keeps its place."""
    name = context.sidecars.parse(file)
    return copy_name(context, replace(name, since=name.since or arrival))


def restarted(context: QueueContext, file: MessageFile, to: QueueContext, *, is_replay: bool = False) -> Name:
    """Return the name of a message that starts again in a queue: without counters, expiration and early ack.

    In another queue it is no dead letter any more, unless this is a replay.
    """
    keeps = is_replay or to.layout.home == context.layout.home
    name = file.name if keeps else without_envelope(context, file.name)
    if name.generated:
        with to.error_context("the message stays where it was"):
            to.storage.unlink(f"{to.layout.acks}/{name.id}")  # an early ack was for the delivery before
    name = replace(uncounted(name), via="", hops=0, expiration=0, lapsed="")
    return replace(name, since=to.root.ids.moment(name.id), copied=stays_copied(context, name, to))


def without_envelope(context: QueueContext, name: Name) -> Name:
    """Return a name that does not say where its message could not be delivered, and why."""
    return replace(context.sidecars.whole(name), origin="", reason="") if name.reason else name


def without_sender(context: QueueContext, name: Name) -> Name:
    """Return a name that does not say which client published its message."""
    full = context.sidecars.full(name)
    return replace(full, from_client="") if full.from_client else name


def stays_copied(context: QueueContext, name: Name, to: QueueContext) -> str:
    """Return the mark for copies that were made, for a message that goes to a queue: "" unless it is this queue."""
    return name.copied if to.layout.home == context.layout.home else ""


def name_at(context: QueueContext, to: QueueContext, name: Name) -> Name:
    """Return a name as another queue can have it: without a sidecar of this root, if that queue is in another."""
    if name.owned and to.layout.home != context.layout.home:
        name = replace(name, owned=False)
    if to.layout.home != context.layout.home and not name.via:  # which makes it unique
        with to.error_context("the message stays where it was"):
            alone = to.storage.refuses_to_replace(to.layout.private)
        name = name if alone else unique(name, chosen=True)  # a copy of the message may be there
    if to.sidecars.folder != context.sidecars.folder:
        name = context.sidecars.whole(name)  # another root has sidecars of its own
    elif name.meta:
        with to.error_context("the message stays where it was"):
            to.sidecars.make_known()
    return name


def name_of_copy(context: QueueContext, given: str, name: Name, to: QueueContext, *, owned: bool = False) -> str:
    """Return the file name that the copy of a message, at the path `given`, gets in its queue.

    `owned` says that the root of that queue owns the message from now on, though its initial_owner is another.
    """
    if not name.generated and not name.since:
        name = replace(name, since=reading.changed_ms(given))
    return to.sidecars.fit(replace(unique(name_at(context, to, name)), owned=owned))


def name_of_whole(
    context: QueueContext, filename: str, bundle: str, first: int, *, keep_expiration: bool = False
) -> str:
    """Return the file name of the new message that parts of a bundle become; `filename` is that of the first part."""
    file = context.sidecars.file(filename)
    name = context.sidecars.whole(restarted(context, file, context))
    expiration = file.name.expiration if keep_expiration else 0
    name = replace(name, id=bundle, first=first, record=0, records=0, expiration=expiration)
    return copy_name(context, name)


def uncounted(name: Name) -> Name:
    """Return a name without its message's counts; a part of a bundle stays that part."""
    return replace(name, delivery_count=0, cancels=0, died=0, not_before=0, cut=0, replayed=False)
