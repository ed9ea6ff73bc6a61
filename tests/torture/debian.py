"""A bare Debian, with a copy of the checkout in the home of an ordinary user, and programs that run there.

Where packages come from, Debian's and Python's, is read from the host's own configuration. Mounts and processes are in
namespaces of their own, and end with them.

    python -m torture.debian trixie --folder 'a checkout' 'make test'

runs commands there, after a `make setup`. It exits with what they exit with, or with 69 if there can be no such Debian.
With `--release PATH` the Debian is made at that path, unless it is there, and stays.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from torture.table import NotRun

PROJECT = Path(__file__).parents[2]
PACKAGES = ("python3", "python3-venv", "make")
TOOLS = ("debootstrap", "apt-get", "unshare", "chroot")
USER = "newcomer"
#: Where releases are kept as they were unpacked; it is root's alone.
KEPT = Path(tempfile.gettempdir(), "dropq-debian")
#: What this program exits with if there can be no such Debian here.
UNAVAILABLE = 69
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
#: What a set-up makes, which a newcomer's copy has not; nor has it the link that lint makes.
MADE = shutil.ignore_patterns(".git", ".venv", ".torture", ".hypothesis", ".*_cache", "__pycache__", "*.egg-info")
#: Runs the commands $2 in the folder $1 of the user's home, in the release $0, with the host's folders $3 and further.
INSIDE = """
folder=$1 commands=$2
shift 2
mount --rbind /dev "$0/dev"
mount -t proc proc "$0/proc"
# In memory, as Debian has it since trixie; where that is short, on the disk.
[ "$(awk '/^MemAvailable/ { print $2 }' /proc/meminfo)" -lt 10000000 ] || mount -t tmpfs -o mode=1777 tmpfs "$0/tmp"
for shared; do
    mkdir -p "$0$shared"
    mount --bind "$shared" "$0$shared"
done
# The shell stays: it is the first process there, and has to reap what others leave behind, as make would not.
exec chroot --userspec="$USER" "$0" sh -c 'cd "$HOME/$0" && eval "$1"; exit $?' "$folder" "$commands"
"""


def set_up(suite: str, release: Path, folder: str = "dropq") -> None:
    """Make a release at a path, with a copy of the checkout in a folder of the user's home.

    Raises:
        NotRun: none of the host's package archives has it, or this machine cannot unpack it.
    """
    if os.geteuid() != 0:
        raise NotRun("to set up a Debian takes root")
    if missing := [tool for tool in TOOLS if not shutil.which(tool)]:
        raise NotRun(f"there is no {missing[0]}: on Debian, apt-get install debootstrap util-linux")
    subprocess.run(["cp", "--archive", "--reflink=auto", _unpacked(suite), release], check=True)
    inside = ["chroot", str(release)]
    subprocess.run([*inside, "useradd", "--create-home", "--user-group", "--shell", "/bin/sh", USER], check=True)
    for file in ("/etc/resolv.conf", "/etc/hosts"):
        if os.path.exists(file):
            shutil.copyfile(file, f"{release}{file}")
    shutil.copytree(PROJECT, release / "home" / USER / folder, ignore=_made)
    _let_pip_reach(release)
    subprocess.run([*inside, "chown", "-R", f"{USER}:", f"/home/{USER}"], check=True)


def run(release: Path, commands: str, folder: str = "dropq", **how: Any) -> subprocess.CompletedProcess[str]:
    """Run commands in a folder of the user's home; `how` is for `subprocess.run`."""
    proxies = {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}
    # With its namespaces, all mounts and all processes end.
    apart = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-ec", INSIDE]
    return subprocess.run(
        [*apart, str(release), folder, commands, *_shared()],
        env={"HOME": f"/home/{USER}", "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "USER": USER, **proxies},
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        **how,
    )


def _made(folder: str, names: list[str]) -> set[str]:
    return {*MADE(folder, names), *(["cli"] if folder == f"{PROJECT}/dropq" else [])}


def _unpacked(suite: str) -> Path:
    """Return the folder of a release as debootstrap unpacks it, which is done once."""
    KEPT.mkdir(mode=0o700, exist_ok=True)
    owner = KEPT.lstat()
    if KEPT.is_symlink() or owner.st_uid != os.geteuid() or owner.st_mode & 0o022:
        raise NotRun(f"{KEPT} is not root's alone")
    kept = KEPT / suite
    if kept.exists():
        return kept
    sources = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"]
    said = "apt-get names no archive"
    for archive in dict.fromkeys(subprocess.run(sources, capture_output=True, text=True).stdout.split()):
        with tempfile.TemporaryDirectory(dir=KEPT, prefix=f".{suite}-") as begun:
            made = Path(begun, "release")
            command = ["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", suite, str(made), archive]
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
            if done.returncode == 0:
                made.rename(kept)
                return kept
        said = (done.stdout + done.stderr).strip().rpartition("\n")[2]
    raise NotRun(f"the package archives of this host have no {suite} ({said}): name one in /etc/apt, or a network")


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


def _paths(name: str, value: str) -> Iterator[Path]:
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
    for file in (path for name, value in settings.items() for path in _paths(name, value) if path.is_file()):
        (release / str(file)[1:]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, release / str(file)[1:])


def _shared() -> list[str]:
    return [str(path) for name, value in _settings().items() for path in _paths(name, value) if path.is_dir()]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m torture.debian", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("suite")
    parser.add_argument("commands", help="what a shell is to run in the copy of the checkout")
    parser.add_argument("--folder", default="dropq", help="the name of the copy")
    parser.add_argument("--release", type=Path, help="the path of the Debian")
    asked = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="debian-") as folder:
        release = asked.release or Path(folder, asked.suite)
        try:
            if not release.exists():
                _set_up_all(asked.suite, release, asked.folder)
        except NotRun as reason:
            print(reason, file=sys.stderr)
            return UNAVAILABLE
        return run(release, asked.commands, asked.folder).returncode


def _set_up_all(suite: str, release: Path, folder: str) -> None:
    """Make a release at a path with `make setup` done, or leave nothing there."""
    with tempfile.TemporaryDirectory(dir=release.parent) as begun:
        draft = Path(begun, suite)
        set_up(suite, draft, folder)
        if run(draft, "make setup", folder).returncode:
            raise NotRun(f"make setup failed in {suite}")
        draft.rename(release)


if __name__ == "__main__":
    sys.exit(main())
