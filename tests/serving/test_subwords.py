import pytest
import torch
from fairseq.data import Dictionary

from lsq.serving.subwords import Subwords, Words, pieces, processor_of, sentences
from lsq.text.corpus import read_items
from lsq.text.vocabulary import dictionary_of, load_vocabulary

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "red"]


def words_of(*symbols: str) -> Words:
    return Words(symbols=[*SPECIAL, *symbols], beginning=0, padding=1, end=2, unknown=3)


SMALL = words_of("\u2581cat")


@pytest.mark.thorough
def test_words_are_those_that_the_training_was_given(output, translator):
    vocabulary = load_vocabulary(output / "vocabulary")
    _, index = dictionary_of(vocabulary)
    lines = read_items(output / "data" / "test.src")
    for line in (*lines, "\u4f60 <s> </s> <unk>", "madeupword0000"):
        expected = [*index[vocabulary.encode(line, out_type=int)].tolist(), 2]
        assert translator.model.subwords.source_words(line).tolist() == expected
        assert translator.model.subwords.target_words(line).tolist() == expected[:-1]


def test_text_is_what_fairseq_prints(output, translator):
    words = Dictionary.load(str(output / "data" / "dict.tgt.txt"))
    for _ in range(20):
        target = torch.randint(0, len(words), (12,))
        pieces = words.string(target, extra_symbols_to_ignore={2}).replace(" ", "")
        assert translator.model.subwords.text(target) == pieces.replace("\u2581", " ").strip()


def test_without_sentencepiece_lines_are_words():
    subwords = Subwords(SMALL, SMALL, None)
    assert subwords.source_words("red  \u2581cat dog").tolist() == [4, 5, 3, 2]
    assert len(subwords.target_words("")) == 0 and subwords.target_words("").dtype == torch.int64
    assert subwords.text(torch.tensor([0, 4, 5, 3, 2])) == "red \u2581cat <unk>"


def test_what_says_nothing():
    words = words_of("\u2581", "\u2581\u200e")
    assert words.says_nothing([]) and words.says_nothing([0, 5, 3, 6, 2])
    assert not words.says_nothing([5, 4, 2]) and not SMALL.says_nothing([5, 2])


def test_what_is_no_model_of_sentencepieces_is_refused(tmp_path):
    path = tmp_path / "no.model"
    path.write_text("no model")
    with pytest.raises(ValueError, match=f"{path} is damaged or no model of sentencepiece's"):
        processor_of(path)
    with pytest.raises(ValueError, match="the model is damaged"):
        processor_of(b"no model")
    with pytest.raises(FileNotFoundError):
        processor_of(tmp_path / "missing")


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
    assert [word for piece in found for word in piece] == list(words)
    assert max(map(len, found)) <= 255
