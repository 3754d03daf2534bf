import copy
import os
import pickle
import random
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler

import pytest
import torch

import lsq
from lsq import Translator, serving
from lsq.run.backends import backend
from lsq.serving import SearchOptions
from lsq.serving.engine import Engine
from lsq.serving.translator import (
    HYPOTHESIS_WORDS,
    PROBABILITIES,
    SHORT,
    BatchLimit,
    RefusedLine,
    TextTranslator,
    backend_of,
    batches,
)
from lsq.text.corpus import read_items

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
BEAM = SearchOptions(beam=2, max_len_b=40)


def best(found) -> list[str]:
    return [translations[0].text for translations in found]


def test_hypotheses_are_those_of_the_run(output, translator):
    found = translator.translate(read_items(output / "data" / "test.src"), BEAM)
    hypotheses = read_items(output / "int8" / "translation" / "hypotheses.txt")
    assert best(found) == hypotheses and len(set(hypotheses)) > 1
    assert len({translations[0].score for translations in found}) > 2
    # its own options are the default
    assert translator.translate(read_items(output / "data" / "test.src")) == found


def test_order_batches_threads_and_spaces_change_nothing(output, translator):
    lines = read_items(output / "data" / "test.src")[:4]
    counted = []
    whole = best(translator.translate(lines, BEAM, progress=counted.append))
    assert sum(counted) == len(lines)
    small = TextTranslator(translator.model, batch_tokens=1)
    assert best(small.translate(lines, BEAM)) == whole
    assert best(translator.translate(lines[::-1], BEAM)) == whole[::-1]
    with ThreadPoolExecutor(len(lines)) as threads:
        found = threads.map(lambda line: translator.translate([line], BEAM)[0], lines)
        assert best(found) == whole
    one, other = translator.translate(["red  \u2028cat\t five \r\n", "red cat five"], BEAM)
    assert one[0].text == other[0].text != ""


def test_lines_without_a_known_visible_character_are_empty(translator, caplog):
    translator = TextTranslator(translator.model)
    blank = ["", " \t \u3000\r\n", "\u200b", "\ufeff", "\u200e", "\x07", "\u00ad \u2060"]
    lines = [*blank, "\u200ered\u200b \u2028cat\r\n"]
    found = translator.translate(lines, BEAM, prefixes=["RED", *blank[1:], "\u200e"])
    assert not any(translations[0].text for translations in found[:-1])
    assert [len(translations) for translations in found] == [1] * len(lines)
    assert found[0][0].score == 0.0 and translator.translate([]) == []
    known = translator.source(0, lines[-1], "\u200e").parts
    assert len(known) == 1 and not len(known[0].prefix)
    for line in ("\u4f60\u597d", "\U0001f600", "\u4f60. \u597d. " * 20):
        assert translator.translate([line], BEAM)[0][0].text == ""
    (said,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert said.startswith("line 1: '\u4f60\u597d' has no character or word that the model knows")


def test_a_sentence_without_a_known_character_is_left_out_of_a_long_line(translator):
    line = "red cat. " * 8
    parts, mixed = (
        translator.source(0, text).parts for text in (line * 2, f"{line}\u4f60\u597d. {line}")
    )
    assert [part.words.tolist() for part in mixed] == [part.words.tolist() for part in parts]
    assert len(parts) == 16


def test_best_come_first(translator):
    (found,) = translator.translate(["red cat five"], SearchOptions(beam=4, nbest=3, max_len_b=40))
    assert len(found) == 3 and len({translation.text for translation in found}) > 1
    scores = [translation.score for translation in found]
    assert scores == sorted(scores, reverse=True)


def test_prefixes(translator, caplog):
    translator, lines = TextTranslator(translator.model), ["red cat five", "two dog", ""]
    found = translator.translate(lines, BEAM, prefixes=["GREEN BLUE", "", "RED"])
    assert found[0][0].text.startswith("GREEN BLUE")
    assert found[1][0].text == translator.translate(lines[1:2], BEAM)[0][0].text
    assert found[2][0].text == ""
    with pytest.raises(ValueError, match="there are 3 lines but 1 prefixes"):
        translator.translate(lines, prefixes=[""])
    with pytest.raises(
        RefusedLine, match=r"^line 2: its prefix has \d+ words or subwords, and a translation 40"
    ):
        translator.translate(["red", "red"], BEAM, prefixes=["", "GREEN " * 100])
    translator.translate(["red"] * 3, BEAM, prefixes=["GREEN", "\u4f60", "\u597d"])
    (record,) = (record for record in caplog.records if "does not know" in record.message)
    assert record.message.startswith("line 2: its prefix '\u4f60' has")


@pytest.mark.parametrize("normalize", [True, False])
def test_long_lines_are_cut_at_ends_of_sentences(translator, normalize):
    options = SearchOptions(beam=2, max_len_b=40, normalize_scores=normalize)
    (found,) = translator.translate([" ".join(["red cat."] * 30)], options, prefixes=["FIVE"])
    first = translator.translate(["red cat."], options, prefixes=["FIVE"])[0][0]
    (other,) = translator.translate(["red cat."], options)[0]
    assert found[0].text == " ".join(filter(None, [first.text, *[other.text] * 29]))
    if normalize:
        assert min(first.score, other.score) <= found[0].score <= max(first.score, other.score)
    else:
        assert found[0].score == pytest.approx(first.score + 29 * other.score, rel=1e-4)


def test_a_sentence_that_is_too_long_is_cut_between_words(translator):
    line = "Two. " + "red cat " * 100
    source, subwords = translator.source(0, line), translator.model.subwords
    symbols, piece_to_id = subwords.source.symbols, subwords.processor.piece_to_id
    numbers = [
        [piece_to_id(symbols[word]) for word in part.words[:-1].tolist()] for part in source.parts
    ]
    texts = subwords.processor.decode(numbers)
    assert " ".join(texts[1:]).split() == ["red", "cat"] * 100  # no word is cut in two
    assert len(texts) > 2 and all(len(part.words) <= 41 for part in source.parts)
    (found,) = translator.translate([line], BEAM)
    alone = [translator.translate([text], BEAM)[0][0].text for text in texts[1:]]
    assert found[0].text.endswith(" ".join(alone)) and found[0].too_long


def test_a_line_of_very_many_sentences_is_cut_without_regard_to_them(translator, monkeypatch):
    line = "red. " * 60
    assert len(translator.source(0, line).parts) == 60
    monkeypatch.setattr("lsq.serving.translator.SENTENCES", 59)
    parts = translator.source(0, line).parts
    assert 1 < len(parts) < 60 and all(len(part.words) <= 41 for part in parts)


def test_lines_that_are_too_long_may_be_skipped_copied_or_refused(translator):
    options, line = SearchOptions(beam=2, nbest=2, max_len_b=40), "red  cat. " * 30
    for long_lines, expected in (("skip", ""), ("copy", " ".join(["red cat."] * 30))):
        other = TextTranslator(translator.model, long_lines=long_lines)
        short, long = other.translate(["red cat.", line], options)
        assert short == translator.translate(["red cat."], options)[0]
        assert not short[0].too_long and [one.too_long for one in long] == [True]
        assert long[0].text == expected and long[0].score == 0.0
    said = r"^line 2: it has \d+ subwords, and the model takes 40 at most"
    with pytest.raises(RefusedLine, match=said) as refused:
        TextTranslator(translator.model, long_lines="refuse").translate(["red", line])
    assert refused.value.line == 1


def test_settings_are_checked_before_anything_is_read():
    assert lsq.Translator is Translator and issubclass(Translator, TextTranslator)
    said = "long_lines is 'split'; allowed: 'cut', 'skip', 'copy', 'refuse'"
    with pytest.raises(ValueError, match=said):
        Translator("missing", long_lines="split")
    with pytest.raises(ValueError, match="batch_tokens is 0; it must be at least 1"):
        Translator("missing", batch_tokens=0)


@pytest.mark.parametrize("text", ["a\0b", "a\ud800b"])
def test_what_is_no_text_is_refused(translator, text):
    with pytest.raises(RefusedLine, match="^line 2: .*remove it"):
        translator.translate(["red", text])
    with pytest.raises(RefusedLine, match="^line 1: .*remove it"):
        translator.translate(["red"], prefixes=[text])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no system with fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_process_does_not_wait_for_threads_that_it_has_not(translator, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    child = os.fork()
    if not child:
        try:
            translator.translate(["red"], BEAM)
        except RuntimeError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


@pytest.mark.parametrize("texts", ["a line", b"a line", [b"a line"], ["a line", None]])
def test_texts_are_a_list_of_strings(texts, translator):
    with pytest.raises(ValueError, match="lines must be a list of strings"):
        translator.translate(texts)
    with pytest.raises(ValueError, match="prefixes must be a list of strings"):
        translator.translate(["a"] * len(texts), prefixes=texts)


@pytest.mark.parametrize("take", [pickle.dumps, copy.copy, copy.deepcopy, ForkingPickler.dumps])
def test_it_is_neither_copied_nor_sent_to_a_process(translator, take):
    """multiprocessing moves the memory of tensors that it sends, which prepared steps point to."""
    before = translator.translate(["red cat"], BEAM)
    said = "is neither copied nor pickled; make one"
    with pytest.raises(TypeError, match=f"a Translator {said} in each process"):
        take(translator)
    assert isinstance(translator.model.steps, Engine)
    with pytest.raises(TypeError, match=f"a decoding engine {said} of its model"):
        take(translator.model.steps)
    assert translator.translate(["red cat"], BEAM) == before


def limit(tokens, vocabulary=100, **options):
    options = SearchOptions(**({"beam": 1, "max_len_b": SHORT - 1} | options))
    return BatchLimit(tokens=tokens, options=options, vocabulary=vocabulary, positions=1024)


@pytest.mark.parametrize("tokens", [1, 7, 40, 1000])
def test_every_sentence_once_and_no_batch_too_large(tokens):
    chance = random.Random(tokens)
    lengths = [chance.randint(1, 30) for _ in range(101)]
    found = list(batches(lengths, limit(tokens)))
    assert sorted(sentence for batch in found for sentence in batch) == list(range(101))
    for batch in found:
        longest = max(lengths[sentence] for sentence in batch)
        assert len(batch) == 1 or len(batch) * longest <= tokens
    in_order = [lengths[sentence] for batch in found for sentence in batch]
    assert in_order == sorted(lengths, reverse=True)


def test_batches_are_as_large_as_they_may_be():
    assert list(batches([4, 5, 4, 5, 3], limit(12))) == [[1, 3], [0, 2, 4]]
    assert list(batches([], limit(12))) == []
    found = batches([1] * 1024, limit(1024, beam=16, max_len_b=200))
    assert [len(batch) for batch in found] == [16] * 64


@pytest.mark.parametrize(
    "given, vocabulary, words, most",
    [
        ({}, 100, 1, 256),
        ({"beam": 16, "max_len_b": 5}, 100, 1, 16),
        # 1024 words of sources of 50 words
        ({"beam": 4, "max_len_a": 20.0, "max_len_b": 23}, 100, 50, 16),
        # probabilities of all words, and of few
        ({"beam": 5, "sampling": True}, 200_000, 9, PROBABILITIES * 1024 // (5 * 200_000)),
        ({"beam": 5, "temperature": 0.5}, 200_000, 9, 8),
        ({"beam": 5, "sampling": True, "sampling_topk": 10}, 200_000, 9, 51),
    ],
)
def test_hypotheses_and_probabilities_are_counted(given, vocabulary, words, most):
    allowed = limit(1024, vocabulary, **given)
    assert allowed.holds(most, words) and not allowed.holds(most + 1, words)
    assert HYPOTHESIS_WORDS * 1024 == 256 * SHORT


def test_devices_by_name(monkeypatch):
    assert backend_of("cpu") is backend("cpu") and backend_of("emulator") is backend("emulated")
    with pytest.raises(ValueError, match="device is 'gpu'; allowed: 'cpu', 'cuda', 'emulator'"):
        backend_of("gpu")
    monkeypatch.setattr(serving.translator, "gpu_fault", lambda: "there is none")
    with pytest.raises(ValueError, match="device cuda: there is none"):
        backend_of("cuda")


@pytest.mark.thorough
def test_translations_are_those_of_the_cpu(output, translator):
    lines = read_items(output / "data" / "test.src")[:2]
    options = SearchOptions(beam=2, max_len_b=4)
    found = Translator(output, device="emulator").translate(lines, options)
    for first, second in zip(translator.translate(lines, options), found, strict=True):
        assert [one.text for one in second] == [one.text for one in first]
        scores = [one.score for one in first]
        assert [one.score for one in second] == pytest.approx(scores, abs=1e-4)
