"""What stands in a .properties file is read as Java reads it; nothing that people write there is an error."""

from __future__ import annotations

import pytest

from dropq.format.java_properties import read_properties


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", {}),
        (b"a=1\nb:2\nc 3\nd\te\n", {"a": "1", "b": "2", "c": "3", "d": "e"}),
        (b"  a  =  1 2 \r\nb = : x\rc==d", {"a": "1 2 ", "b": ": x", "c": "=d"}),
        (b"# a=1\n ! b=2\n\n \t\f\nc=#3", {"c": "#3"}),
        (b"a=1,\\\n    2,\\\r\n\t3\nb=x\\\\\nc=y", {"a": "1,2,3", "b": "x\\", "c": "y"}),
        (b"a=1\\\n#b=2\n", {"a": "1#b=2"}),
        (b"a=1\\\n\nb=2\n", {"a": "1", "b": "2"}),
        (b"# not\\\na=1", {"a": "1"}),
        (b"a\\ b\\=c\\:d=1", {"a b=c:d": "1"}),
        (b"r.selector=JMSPriority \\= 4 AND x\\: > 2", {"r.selector": "JMSPriority = 4 AND x: > 2"}),
        (b"a=\\t\\n\\r\\f\\q\\\\", {"a": "\t\n\r\fq\\"}),
        (b"a=\\u00e9\\u20AC\\u12", {"a": "\u00e9\u20acu12"}),
        (b"alone\nempty=\n=value", {"alone": "", "empty": "", "": "value"}),
        (b"a=1\na=2", {"a": "2"}),
        ("k=h\u00e4".encode(), {"k": "h\u00e4"}),
        ("k=h\u00e4".encode("latin-1"), {"k": "h\u00e4"}),
        (b"\xef\xbb\xbfk=v", {"k": "v"}),
        (b"a=1\\", {"a": "1"}),
    ],
)
def test_a_file_is_read_as_java_reads_it(content: bytes, expected: dict[str, str]) -> None:
    assert read_properties(content) == expected
