import pytest
import torch
from fairseq.data import Dictionary

from lsq.serving.translate.subwords import Subwords, Words, processor_of
from lsq.text.corpus import read_items
from lsq.text.vocabulary import dictionary_of, load_vocabulary

SMALL = Words(
    symbols=["<s>", "<pad>", "</s>", "<unk>", "red", "\u2581cat"], beginning=0, end=2, unknown=3
)


def test_words_are_those_that_the_training_was_given(output, translator):
    vocabulary = load_vocabulary(output / "vocabulary")
    _, index = dictionary_of(vocabulary)
    for line in (
        *read_items(output / "data" / "test.src"),
        "\u4f60 <s> </s> <unk>",
        "madeupword0000",
    ):
        expected = [*index[vocabulary.encode(line, out_type=int)].tolist(), 2]
        assert translator.model.subwords.source_words(line).tolist() == expected
        assert translator.model.subwords.target_words(line).tolist() == expected[:-1]


def test_text_is_what_fairseq_prints(output, translator):
    words = Dictionary.load(str(output / "data" / "dict.tgt.txt"))
    for _ in range(20):
        target = torch.randint(0, len(words), (12,))
        expected = (
            words.string(target, extra_symbols_to_ignore={2})
            .replace(" ", "")
            .replace("\u2581", " ")
            .strip()
        )
        assert translator.model.subwords.text(target) == expected


def test_without_sentencepiece_lines_are_words():
    subwords = Subwords(SMALL, SMALL, None)
    assert subwords.source_words("red  \u2581cat dog").tolist() == [4, 5, 3, 2]
    assert (
        subwords.target_words("").tolist() == [] and subwords.target_words("").dtype == torch.int64
    )
    assert subwords.text(torch.tensor([0, 4, 5, 3, 2])) == "red \u2581cat <unk>"


def test_what_says_nothing():
    symbols = ["<s>", "<pad>", "</s>", "<unk>", "red", "\u2581", "\u2581\u200e"]
    words = Words(symbols=symbols, beginning=0, end=2, unknown=3)
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
