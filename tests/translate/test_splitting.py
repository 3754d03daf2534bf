import pytest

from lsq.translate.splitting import sentences


@pytest.mark.parametrize(("line", "expected"), [
    ("One. Two!  Three?", ["One.", "Two!", "Three?"]),
    ('He said "no." And (he went.) Then…  on', ['He said "no."', "And (he went.)", "Then…", "on"]),
    ("Version 3.11 is at example.org", ["Version 3.11 is at example.org"]),
    ("你好。你在哪？「这里。」好", ["你好。", "你在哪？", "「这里。」", "好"]),
    ("... ", ["..."]),
    ("What?! Yes", ["What?!", "Yes"]),
    ("!!!!x. y", ["!!!!x.", "y"]),
    ("no end", ["no end"]),
    ("", []),
])  # fmt: skip
def test_cut_at_ends(line, expected):
    assert sentences(line) == expected


@pytest.mark.parametrize("text", ["!", "! ", "!'", "。", "」", "...x", " ", "\""])
def test_long_lines_take_no_longer_than_their_length(text):
    """Half a million characters: where the time grew with the square of that, this would never end."""
    line = text * (500_000 // len(text))
    assert "".join(sentences(line)).replace(" ", "") == line.replace(" ", "")
