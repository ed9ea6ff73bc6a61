"""Whether a file system is fit for a root, and what this user may do there.

The doctor tries what dropq needs in a private folder of its own, and with a hidden file that goes through the folders
of each queue, but never through target/: DropboxMQ's consumers take hidden files, too. It removes both, and touches no
message.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dropq.config.load import has_dropboxmq
from dropq.diagnosis import topic_checks
from dropq.diagnosis.doctor_checks import Probe
from dropq.diagnosis.doctor_kinds import KINDS, LEVELS, Diagnosis, Kind
from dropq.diagnosis.doctor_permissions import folders, root_folders
from dropq.diagnosis.fsck import queues as all_queues
from dropq.errors import DropqError, NoSuchQueue
from dropq.format import names
from dropq.format.addresses import layouts
from dropq.format.layout import DOCTOR_PREFIX, PRIVATE
from dropq.lifecycle.context import QueueContext, RootContext
from dropq.lifecycle.open_queue import find_layout, open_queue
from dropq.storage import reading

__all__ = ["KINDS", "LEVELS", "Diagnosis", "Kind", "doctor"]


def doctor(root: RootContext, *, queues: Iterable[str] | None = None) -> list[Diagnosis]:
    """Try what dropq needs of a root's file systems, and what this user may do in its queues; see `Root.doctor`.

    The root may be any folder that may become one.
    """
    path = root.layout.path
    found = [Diagnosis("no-root", path, f"{path} has no dropq.toml")]
    if reading.exists(root.layout.config_file):
        found = [Diagnosis("root", path, f"{path} has a dropq.toml")]
    opened: list[QueueContext] = []
    # A temporary queue is made as the queue that is asked, and goes at any moment.
    lasting = (name for name in all_queues(root) if not names.is_temporary(name))
    for name in lasting if queues is None else queues:
        try:
            opened.append(open_queue(root, name))
        except NoSuchQueue:
            raise
        except DropqError as error:
            layout = find_layout(root.layout.path, name) or layouts(root.layout.path, name)[0]
            found.append(Diagnosis("unusable-queue", layout.home, "; ".join(str(error).splitlines()), name))
    probes = _probes(root, opened)
    for probe in probes.values():
        probe.run()
    if has_dropboxmq(root.layout.path):
        found += _shared(root, opened)
    if queues is None:
        found += topic_checks.diagnose(root)
        if root.config.peer:
            from dropq.diagnosis import peers  # few roots have any

            found += (Diagnosis(*each) for each in peers.examined(root))
    roles = set[str]()
    for context in opened:
        probe = probes[reading.device(context.layout.base)]
        with probe.reporting_errors("folders"):
            folders(probe, context, roles)
    for probe in probes.values():
        root_folders(probe, root, roles if opened else {"send", "receive"})
        found += probe.found
    return sorted(found, key=lambda diagnosis: diagnosis.kind == "no-room")  # a full file system is reported last


def _shared(root: RootContext, queues: Iterable[QueueContext]) -> Iterator[Diagnosis]:
    """Report what keeps a DropboxMQ and dropq apart in a root that both use."""
    if root.config.reply_to_style != "typed":
        path = root.layout.config_file
        yield Diagnosis("bare-replies", path, f'{path} has reply_to_style = "bare"; DropboxMQ writes and reads "typed"')
    flat = [context.name for context in queues if not context.layout.topic and not context.layout.shared]
    if flat:
        listed = " and ".join(filter(None, (", ".join(flat[:-1]), flat[-1])))
        yield Diagnosis("flat-queue", root.layout.path, f"{listed} have their folders beside queue.toml")


def _probes(root: RootContext, queues: Iterable[QueueContext]) -> dict[int, Probe]:
    """Return a probe for each file system that a root and its queues lie on, by device number."""
    probes: dict[int, Probe] = {}

    def probe_of(path: str, private: str) -> Probe:
        probe = probes.setdefault(reading.device(path), Probe(path))
        probe.scratch_stems += [f"{private}/{DOCTOR_PREFIX}", f"{path}/{PRIVATE}-{DOCTOR_PREFIX}"]
        return probe

    probe_of(root.layout.path, root.layout.private)
    for context in queues:
        probe = probe_of(context.layout.base, context.layout.private)
        probe.leased[context.name] = context.config.lease_period is not None
        if context.config.settle_time is None:
            probe.settling_briefly.append(context.name)
    return probes
