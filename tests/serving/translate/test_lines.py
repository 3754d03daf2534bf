import io

import pytest

from lsq.serving.translate import lines
from lsq.serving.translate.lines import read_lines


def read(content: bytes) -> list[str]:
    return list(read_lines(io.BytesIO(content), "in.txt"))


def test_lines_end_at_line_feeds_only():
    assert read("a\r\n\u2028b\n\nc".encode()) == ["a\r\n", "\u2028b\n", "\n", "c"]
    assert read(b"") == []


def test_byte_order_mark_is_no_text():
    assert read(b"\xef\xbb\xbfa\n\xef\xbb\xbfb") == ["a\n", "\ufeffb"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b"a\nb\xffc\n",
            "in.txt, line 2: byte 0xff is not valid UTF-8; convert the file first, e.g. with iconv",
        ),
        (b"a\n\n\xe4\xbd", "in.txt, line 3: byte 0xe4 is not valid UTF-8"),
        (b"\xff\xfea\0\n", "in.txt, line 1: a NUL byte is no text; remove it"),
    ],
)
def test_what_is_no_text_is_refused_with_its_line(content, message):
    with pytest.raises(ValueError) as refused:
        read(content)
    assert str(refused.value).startswith(message)


def test_lines_before_a_mistake_are_read():
    found = read_lines(io.BytesIO(b"a\n\xff"), "in.txt")
    assert next(found) == "a\n"


def test_endless_lines_are_refused(monkeypatch):
    monkeypatch.setattr(lines, "LONGEST", 4)
    assert read(b"abc\nabcd") == ["abc\n", "abcd"]
    with pytest.raises(ValueError, match="in.txt, line 2 has more than 4 bytes"):
        read(b"abc\nabcde")
