import pytest

from lsq.text import vocabulary
from lsq.text.corpus import Corpus
from tests.text.conftest import LINES


def test_dictionary_has_every_piece_and_a_padded_size(learnt):
    dictionary, index = vocabulary.dictionary_of(learnt)
    assert len(dictionary) == 64  # 50 padded to a multiple of 16
    assert len(set(index.tolist())) == len(index) == 50
    assert all(dictionary[index[piece]] == learnt.id_to_piece(piece) for piece in range(4, 50))
    assert index[learnt.unk_id()] == dictionary.unk()


TOO_LONG = "every line of this text is longer than 4192 bytes, or there is none; split it"


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        (LINES, {"size": 5000}, r"--vocabulary-size 5000 is too large for this text; use at most "),
        (LINES, {"size": 9}, "--vocabulary-size 9 is too small for the characters of this text; u"),
        (LINES, {"size": 1}, "--vocabulary-size is 1; it must be from 5 to 16777216"),
        (LINES, {"coverage": 0.0}, "--character-coverage is 0.0; it must be from 0.98 to 1"),
        (LINES, {"coverage": 2.0}, "--character-coverage is 2.0; it must be from 0.98 to 1"),
        (LINES, {"coverage": float("nan")}, "--character-coverage is nan"),
        (["a"], {}, "--vocabulary-size 50 is too large for this text; use at most 7"),
        (["ab" * 5000], {}, TOO_LONG),
        (["\u200b", "\u2581"], {}, "the text has no characters to learn from, only white space"),
    ],
)
def test_what_cannot_be_learnt_is_told_without_the_librarys_own_words(
    tmp_path, lines, options, message
):
    options = {"size": 50, "coverage": 1.0, **options}
    with pytest.raises(ValueError) as refused:
        vocabulary.learn_vocabulary(Corpus.of(lines, lines), tmp_path, **options)
    assert str(refused.value).startswith(message) and "INTERNAL" not in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_the_smallest_that_is_allowed_is_learnt(tmp_path):
    vocabulary.learn_vocabulary(Corpus.of(["a"] * 9, ["a"] * 9), tmp_path, size=6, coverage=0.98)
    assert vocabulary.load_vocabulary(tmp_path).get_piece_size() == 6
