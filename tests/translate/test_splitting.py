import pytest

from lsq.translate.splitting import sentences


@pytest.mark.parametrize(("line", "expected"), [
    ("One. Two!  Three?", ["One.", "Two!", "Three?"]),
    ('He said "no." And (he went.) Then…  on', ['He said "no."', "And (he went.)", "Then…", "on"]),
    ("Version 3.11 is at example.org", ["Version 3.11 is at example.org"]),
    ("你好。你在哪？「这里。」好", ["你好。", "你在哪？", "「这里。」", "好"]),
    ("... ", ["..."]),
    ("no end", ["no end"]),
    ("", []),
])  # fmt: skip
def test_cut_at_ends(line, expected):
    assert sentences(line) == expected
