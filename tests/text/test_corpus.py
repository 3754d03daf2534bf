import pytest

from lsq.text.corpus import Corpus, has_text, hold_out, read_lines, read_pairs, without_empty


def test_lines_end_at_line_feeds_only(tmp_path):
    path = tmp_path / "text"
    path.write_bytes("a\tb\u2028c \u00a0 d\r\n\ne\rf\x00g\x85h\n".encode())
    said = []
    assert read_lines(path, said.append) == ["a b c d", "", "e f g h"]
    assert said == [f"text: {path} has 1 NUL byte; spaces take their place"]


def test_files_that_are_no_text(tmp_path):
    path, other = tmp_path / "text", tmp_path / "other"
    path.write_bytes(b"\xef\xbb\xbfone\ntwo")  # with a byte-order mark, without a last line feed
    assert read_lines(path, print) == ["one", "two"]
    with pytest.raises(FileNotFoundError, match=r"there is no file .*nowhere\.en"):
        read_lines(tmp_path / "nowhere.en", print)
    with pytest.raises(ValueError, match="is not a file"):
        read_lines(tmp_path, print)
    for content in (b"", b"\n \n", b"\xef\xbb\xbf"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="text is empty"):
            read_lines(path, print)
    path.write_bytes(b"fine\nstill fine\nGr\xfc\xdfe\n")
    with pytest.raises(ValueError, match=r"line 3: byte 0xfc is not valid UTF-8"):
        read_lines(path, print)
    path.write_text("1\n2\n3\n")
    other.write_text("1\n2\n")
    with pytest.raises(ValueError, match=r"text has 3 lines but .*other has 2"):
        read_pairs(path, other, print)


def test_pairs_with_an_empty_side_are_dropped():
    corpus = Corpus.of(["", "b", "c"], ["A", "B", ""])
    assert without_empty(corpus) == Corpus(source=["b"], target=["B"], lines=[2])


BLANK = ["", " ", "\u3000", "\u200b", "\ufeff", "\u200e\u2028", "\x07", "\u00ad", "\u3164\ufe0f"]


@pytest.mark.parametrize("line", BLANK)
def test_a_line_without_a_visible_character_is_empty(line):
    assert not has_text(line) and has_text(f"{line}.{line}")
    assert not without_empty(Corpus.of([line, "b"], ["B", line])).lines


def test_held_out_sentences_do_not_remain():
    source = [str(number % 30) for number in range(100)]
    corpus = Corpus.of(source, [f"t{row}" for row in range(100)])
    remaining, held_out = hold_out(corpus, 7, seed=1)
    assert len(held_out) == len(set(held_out.source)) == 7
    assert not set(remaining.source) & set(held_out.source)
    assert set(remaining.source) | set(held_out.source) == set(source)
    rows = [int(sentence[1:]) for sentence in held_out.target]
    assert [source[row] for row in rows] == held_out.source  # pairs stay pairs
    assert [row + 1 for row in rows] == held_out.lines
    assert hold_out(corpus, 7, seed=1) == (remaining, held_out)
    assert hold_out(corpus, 7, seed=2)[1] != held_out


def test_files_hold_what_was_written(tmp_path):
    corpus = Corpus.of(["a b", "c", "d"], ["A B", "C", "D"]).select([0, 2])
    corpus.write(tmp_path, "train")
    assert {path.name for path in tmp_path.iterdir()} == {"train.src", "train.tgt", "train.lines"}
    assert Corpus.read(tmp_path, "train") == corpus and corpus.lines == [1, 3]


def test_too_few_sentences_to_hold_out():
    corpus = Corpus.of(["a", "a", "b"], ["1", "2", "3"])
    with pytest.raises(ValueError, match="2 different source sentences are too few to hold out 1"):
        hold_out(corpus, 1, seed=1)
