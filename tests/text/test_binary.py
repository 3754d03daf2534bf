from fairseq.data import Dictionary, data_utils

from lsq.text.binary import binarize
from lsq.text.corpus import Corpus
from lsq.text.vocabulary import dictionary_of


def test_binarised_text_reads_back(learnt, tmp_path):
    corpus = Corpus.of(["the fox", "<pad> jumps", "ж"], ["lazy dog", "<s>", "over"])
    kept, left_out = binarize(corpus, learnt, tmp_path, "train", max_length=20)
    dictionary_of(learnt)[0].save(str(tmp_path / "dict.src.txt"))
    assert kept == [0, 1, 2] and not left_out
    dictionary = Dictionary.load(str(tmp_path / "dict.src.txt"))
    sides = [
        data_utils.load_indexed_dataset(str(tmp_path / f"train.src-tgt.{side}"), dictionary)
        for side in ("src", "tgt")
    ]
    found = [dictionary.string(row, "sentencepiece") for row in sides[1]]
    assert found == ["lazy dog", "<s>", "over"]
    assert dictionary.string(sides[0][1], "sentencepiece") == "<pad> jumps"
    assert sides[0][2].tolist()[-2:] == [dictionary.unk(), dictionary.eos()]
    assert dictionary.pad() not in sides[0][1].tolist()


def test_long_pairs_are_left_out(learnt, tmp_path):
    corpus = Corpus.of(["a", "the quick brown fox jumps", "b", "x y z q"], ["a"] * 4)
    kept, left_out = binarize(corpus, learnt, tmp_path, "train", max_length=4)
    assert kept == [0, 2] and left_out.keys() == {1, 3} and min(left_out.values()) > 4
