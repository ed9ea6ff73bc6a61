"""A bare Debian in which an ordinary user, without Java, runs both commands of the README.

Where packages come from, Debian's and Python's, is read from the host's own configuration. Mounts and processes are in
namespaces of their own, and end with them.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

from torture.table import NotRun, Options, Row

PROJECT = Path(__file__).parents[2]
#: The oldest and the newest release whose Python will do.
SUITES = ("bookworm", "trixie")
PACKAGES = ("python3", "python3-venv", "make")
TOOLS = ("debootstrap", "apt-get", "unshare", "chroot")
USER = "newcomer"
#: Settings of pip that name indexes; files lie beside those that are folders.
INDEXES = ("index-url", "extra-index-url")
#: These, and what else the host's pip may have to know to reach its index.
REACH = (
    *INDEXES,
    "find-links",
    "no-index",
    "trusted-host",
    "proxy",
    "cert",
    "client-cert",
    "timeout",
    "default-timeout",
)
#: What a set-up makes, which a newcomer's copy has not.
MADE = shutil.ignore_patterns(".git", ".venv", ".torture", ".hypothesis", ".*_cache", "__pycache__", "*.egg-info")
#: Runs `make` in the release at $1, with folders of the host that the others name.
INSIDE = """
release=$1 verb=$2
shift 2
mount --rbind /dev "$release/dev"
mount -t proc proc "$release/proc"
for shared; do
    mkdir -p "$release$shared"
    mount --bind "$shared" "$release$shared"
done
# The shell stays: it is the first process there, and has to reap what others leave behind, as make would not.
exec chroot --userspec="$0" "$release" sh -c 'cd ~/dropq && make "$0"; exit $?' "$verb"
"""


def run(options: Options) -> Iterable[Row]:
    """Run `make demo`, and where there is time `make test`, in each release; a case is a demo or a test that passed."""
    if os.geteuid() != 0:
        raise NotRun("to set up a Debian takes root")
    if missing := [tool for tool in TOOLS if not shutil.which(tool)]:
        raise NotRun(f"there is no {missing[0]}: on Debian, apt-get install debootstrap util-linux")
    for suite in SUITES:
        try:
            release = _set_up(suite, options.folder / suite)
        except NotRun as reason:
            yield Row(f"Debian {suite}", not_run=str(reason))
        else:
            yield from _both(suite, release, ("demo", "test") if options.long else ("demo",))
            shutil.rmtree(release)


def _set_up(suite: str, release: Path) -> Path:
    """Unpack a release, with a copy of the checkout in the home of a user.

    Raises:
        NotRun: none of the host's package archives has it.
    """
    sources = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"]
    said = "apt-get names no archive"
    for archive in dict.fromkeys(subprocess.run(sources, capture_output=True, text=True).stdout.split()):
        command = ["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", suite, str(release), archive]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode == 0:
            break
        said = (done.stdout + done.stderr).strip().rpartition("\n")[2]
        shutil.rmtree(release, ignore_errors=True)
    else:
        raise NotRun(f"the package archives of this host have no {suite} ({said}): name one in /etc/apt, or a network")
    inside = ["chroot", str(release)]
    subprocess.run([*inside, "useradd", "--create-home", "--user-group", "--shell", "/bin/sh", USER], check=True)
    for file in ("/etc/resolv.conf", "/etc/hosts"):
        if os.path.exists(file):
            shutil.copyfile(file, f"{release}{file}")
    shutil.copytree(PROJECT, release / "home" / USER / "dropq", ignore=MADE)
    _let_pip_reach(release)
    subprocess.run([*inside, "chown", "-R", f"{USER}:", f"/home/{USER}"], check=True)
    return release


def _settings() -> dict[str, str]:
    """Return what this host's pip is told of its index, by its files or by the environment, which counts more."""
    said = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    found: dict[str, str] = {}
    for line in sorted(said.stdout.splitlines(), key=lambda line: not line.startswith(":env:")):
        key, _, value = line.partition("=")
        name = key.rpartition(".")[2]
        if name in REACH:
            found.setdefault(name, ast.literal_eval(value))
    return found


def _places(name: str, value: str) -> Iterator[Path]:
    """Yield the files and folders of the host that a setting of pip's names."""
    for word in value.split():
        if word.startswith(("/", "file:")) and (path := Path(urlsplit(word).path)).exists():
            yield path.parent if name in INDEXES else path


def _let_pip_reach(release: Path) -> None:
    settings = _settings()
    home = release / "home" / USER
    (home / ".config" / "pip").mkdir(parents=True)
    lines = [f"{name} = {value}" for name, value in settings.items()]
    (home / ".config" / "pip" / "pip.conf").write_text("\n".join(["[global]", *lines, ""]))
    for file in (path for name, value in settings.items() for path in _places(name, value) if path.is_file()):
        (release / str(file)[1:]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, release / str(file)[1:])


def _shared() -> list[str]:
    return [str(path) for name, value in _settings().items() for path in _places(name, value) if path.is_dir()]


def _both(suite: str, release: Path, verbs: tuple[str, ...]) -> Iterator[Row]:
    """Run both commands one after the other, as the README tells people to."""
    for verb in verbs:
        begun = time.monotonic()
        done = _make(release, verb)
        lines = done.stdout.rstrip().splitlines()
        print(f"  {suite}, make {verb}: {lines[-1]} ({time.monotonic() - begun:.0f} s)", file=sys.stderr, flush=True)
        passed = re.search(r"(\d+) passed", lines[-1])
        row = Row(f"Debian {suite}: make {verb}", cases=int(passed[1]) if passed else 1)
        if done.returncode or (verb == "test" and not passed):
            row.wrong += [line for line in lines if line.startswith(("FAILED", "ERROR"))] or lines[-20:]
        yield row


def _make(release: Path, verb: str) -> subprocess.CompletedProcess[str]:
    proxies = {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}
    return subprocess.run(
        # With its namespaces, all mounts and all processes end.
        ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-ec", INSIDE, USER, release, verb, *_shared()],
        env={"HOME": f"/home/{USER}", "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "USER": USER, **proxies},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
