import numpy
import pytest
from fairseq.data import data_utils


def test_batch_beyond_max_tokens_names_both_numbers():
    sizes = numpy.array([3, 9, 5])
    with pytest.raises(ValueError, match="sentence 4 has 9 tokens, but a batch has at most 8"):
        data_utils.batch_by_size(numpy.array([7, 4, 2]), None, sizes, max_tokens=8)
    with pytest.raises(ValueError, match="sentence 2 has 20 tokens"):
        data_utils.batch_by_size([1, 2], lambda index: 10 * index, max_tokens=11)
    batches = data_utils.batch_by_size(
        numpy.array([7, 2, 4]), None, numpy.array([3, 5, 9]), max_tokens=10
    )
    assert [list(batch) for batch in batches] == [[7, 2], [4]]


def test_no_sentence_left():
    with pytest.raises(ValueError, match="no sentence is left"):
        data_utils.batch_by_size([], None, numpy.array([]), max_tokens=8)
