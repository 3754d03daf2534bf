import pytest

from lsq.serving.translate.splitting import pieces, sentences


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("One. Two!  Three?", ["One.", "Two!", "Three?"]),
        (
            'He said "no." And (he went.) Then…  on',
            ['He said "no."', "And (he went.)", "Then…", "on"],
        ),
        ("Version 3.11 is at example.org", ["Version 3.11 is at example.org"]),
        ("你好。你在哪？「这里。」好", ["你好。", "你在哪？", "「这里。」", "好"]),
        ("... ", ["..."]),
        ("What?! Yes", ["What?!", "Yes"]),
        ("!!!!x. y", ["!!!!x.", "y"]),
        ("no end", ["no end"]),
        ("", []),
    ],
)
def test_cut_at_ends(line, expected):
    assert sentences(line) == expected


@pytest.mark.parametrize("text", ["!", "! ", "!'", "。", "」", "...x", " ", '"'])
def test_long_lines_take_no_longer_than_their_length(text):
    """Half a million characters: where the time grew with the square of that, this would never
    end."""
    line = text * (500_000 // len(text))
    assert "".join(sentences(line)).replace(" ", "") == line.replace(" ", "")


@pytest.mark.parametrize(
    ("begins", "expected"),
    [
        ("1111111", ["abc", "de", "fg"]),  # parts of like length, of three at most
        ("1010010", ["ab", "cde", "fg"]),  # before words
        ("1000000", ["abc", "de", "fg"]),  # one long word
        ("1100000", ["a", "bcd", "efg"]),
    ],
)
def test_pieces(begins, expected):
    begin = {letter for letter, digit in zip("abcdefg", begins, strict=True) if digit == "1"}
    assert list(pieces("abcdefg", 3, begin.__contains__)) == expected
    assert list(pieces("abcdefg", 7, begin.__contains__)) == ["abcdefg"]


def test_pieces_take_no_longer_than_their_length():
    words = range(500_000)
    found = list(pieces(words, 255, lambda word: word % 7 == 0))
    assert [word for piece in found for word in piece] == list(words) and max(
        map(len, found)
    ) <= 255
