import pytest

from lsq.text import vocabulary
from lsq.text.corpus import Corpus

LINES = ["the quick brown fox", "jumps over the lazy dog", "<pad> and <s> are words, a < b > c"] * 3


@pytest.fixture
def learnt(tmp_path):
    """A vocabulary of a few lines that hold fairseq's own symbols as text."""
    vocabulary.learn_vocabulary(Corpus.of(LINES, LINES), tmp_path, size=50, coverage=1.0)
    return vocabulary.load_vocabulary(tmp_path)
