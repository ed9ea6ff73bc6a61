"""Small files of ours are read whole or refused, and what stands in them is what a path can have."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from dropq.storage.reading import find_below, parse_json, parse_toml, read_small


@pytest.mark.parametrize("size", [0, 99, 100, 101, 100_000])
def test_a_small_file_is_read_whole_or_refused(tmp_path: Path, size: int) -> None:
    path = str(tmp_path / "small")
    Path(path).write_bytes(b"x" * size)
    if size <= 100:
        assert read_small(path, 100) == b"x" * size
        return
    with pytest.raises(OSError, match="longer than 100 bytes") as raised:
        read_small(path, 100)
    assert isinstance(raised.value, ValueError) and (raised.value.errno, raised.value.filename) == (errno.EFBIG, path)


def test_a_file_of_the_kernel_which_says_that_it_is_empty_is_read() -> None:
    path = "/proc/sys/kernel/random/boot_id"
    assert os.stat(path).st_size == 0 and read_small(path) == Path(path).read_bytes()


@pytest.mark.parametrize("text", ["\0", "\ud800", "a\udfff"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-32"])
def test_text_that_no_path_can_have_is_refused_unless_any_will_do(text: str, encoding: str) -> None:
    escaped = "".join(f"\\u{ord(char):04x}" for char in text)
    for written in ('["a", {"b": "%s"}]', '[{"%s": 1}]'):
        data = (written % escaped).encode(encoding)
        with pytest.raises(ValueError, match="which no name can have"):
            parse_json(data)
        parse_json(data, any_text=True)
    raw = f'["{text}"]'.encode("utf-8", "surrogatepass")
    with pytest.raises(ValueError, match=r"no name can have|control character"):
        parse_json(raw)


def test_names_that_are_not_utf8_are_names() -> None:
    assert parse_json(b'["caf\\udce9", "\\u00e9", "a\\\\b"]') == [os.fsdecode(b"caf\xe9"), "é", "a\\b"]


@pytest.mark.parametrize("parse", [lambda deep: parse_json(deep.encode()), lambda deep: parse_toml(f"a = {deep}")])
def test_what_is_nested_deeply_is_a_wrong_value(parse: object) -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        parse("[" * 100_000 + "]" * 100_000)  # type: ignore[operator]


def test_a_folder_that_an_nfs_client_believes_to_be_missing_is_opened_to_ask_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    opens, asked = os.open, list[str]()

    def forgetful(path: str, flags: int, **options: int) -> int:
        if flags & os.O_PATH:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        asked.append(path)
        return opens(path, flags, **options)

    monkeypatch.setattr(os, "open", forgetful)
    found = find_below(str(tmp_path), "a", "b")
    assert found is not None and asked == [str(tmp_path), "a", "b"]
    assert os.fstat(found).st_ino == (tmp_path / "a" / "b").stat().st_ino
    os.close(found)


def test_a_folder_is_found_below_no_link(tmp_path: Path) -> None:
    (tmp_path / "there" / "b").mkdir(parents=True)
    (tmp_path / "a").symlink_to("there")
    assert find_below(str(tmp_path), "there", "b", "c") is None
    with pytest.raises(OSError, match=r"Not a directory|symbolic links"):
        find_below(str(tmp_path), "a", "b")
