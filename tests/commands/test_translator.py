import os
import shutil
import sys

import pytest
import torch

import lsq.fairseq
from lsq import Translator
from lsq.commands import export
from lsq.commands.translator import load
from lsq.run.backends import backend
from lsq.serving import SearchOptions
from lsq.serving.engine import Engine
from lsq.serving.fairseq_steps import FairseqSteps
from lsq.text.corpus import read_items
from tests.commands.conftest import train_text_run

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
LINES = ["red cat five", "two dog"]


def test_a_run_says_how_it_translated(translator):
    assert translator.model.longest_source == 41
    assert translator.options == SearchOptions(beam=2, max_len_b=40)


def test_a_checkpoint_with_its_data(output, translator, tmp_path):
    checkpoint = shutil.copy(output / "int8" / "model" / "checkpoint_best.pt", tmp_path)
    with pytest.raises(ValueError, match="give the folder of its dictionaries .* --data"):
        load(tmp_path / "checkpoint_best.pt")
    subwords = output / "vocabulary" / "sentencepiece.model"
    other = Translator(checkpoint, data=output / "data", sentencepiece_model=subwords)
    options = SearchOptions(beam=2, max_len_b=40)
    assert other.translate(LINES, options) == translator.translate(LINES, options)
    assert other.options == SearchOptions() and other.model.longest_source == 1024


def test_a_checkpoint_without_subwords_takes_words_of_its_dictionaries(output, translator):
    other = Translator(output / "int8" / "model" / "checkpoint_best.pt", data=output / "data")
    pieces = " ".join(translator.model.subwords.processor.encode(LINES[0], out_type=str))
    (found,) = other.translate([pieces])
    text = found[0].text.replace(" ", "").replace("\u2581", " ").strip()
    assert text == translator.translate(LINES[:1])[0][0].text


def test_a_run_needs_fairseq_and_says_so(output, monkeypatch):
    for name in list(sys.modules):
        if name.partition(".")[0] == "fairseq":  # an import of what is None there finds nothing
            monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "lsq.fairseq.generator", raising=False)
    monkeypatch.delattr(lsq.fairseq, "generator", raising=False)
    said = "checkpoint_best.pt needs fairseq-fixed, which is not installed: pip install .*fairseq"
    with pytest.raises(ModuleNotFoundError, match=said):
        Translator(output)


def test_an_exported_file_is_the_same_model(output, translator, tmp_path):
    file = tmp_path / "model.safetensors"
    assert export.run([str(output), "--to", "lsq", "--output", str(file)]) == 0
    other = Translator(file)
    options = SearchOptions(beam=3, nbest=2, max_len_b=40)
    assert other.translate(LINES, options) == translator.translate(LINES, options)
    assert other.options == translator.options
    assert other.model.longest_source == translator.model.longest_source
    with pytest.raises(ValueError, match="has its words in it; leave --data"):
        load(file, data=output / "data")
    assert not other.model.changed()
    before = other.translate(LINES)
    with file.open("r+b") as damaged:
        damaged.write(bytes(file.stat().st_size))
    assert other.translate(LINES) == before  # it was read before
    os.utime(file, (1, 1))
    assert other.model.changed()
    file.unlink()
    assert other.model.changed()


def test_int8_is_decoded_by_the_engine_and_floats_by_their_own_steps(translator, tmp_path):
    assert isinstance(translator.model.steps, Engine)
    output = train_text_run(tmp_path, "--mode", "float", "--updates", "2")
    other = Translator(output)
    assert isinstance(other.model.steps, FairseqSteps)
    sources = read_items(output / "data" / "test.src")
    found = other.translate(sources, SearchOptions(beam=2, max_len_b=40))
    hypotheses = read_items(output / "float" / "translation" / "hypotheses.txt")
    assert [translations[0].text for translations in found] == hypotheses


def test_formats_that_no_gpu_decodes_are_told_before_the_model_is_read(
    output, tmp_path, monkeypatch
):
    path = tmp_path / "mixed.pt"
    state = torch.load(output / "int8/model/checkpoint_best.pt")
    state["cfg"]["model"].lsq_activation_format = "int8,*fc2*=nvfp4"
    torch.save(state, path)
    monkeypatch.setattr("lsq.commands.run_files.load", None)
    message = r"is translated on the CPU alone: .* activations in int8,\*fc2\*=nvfp4, "
    with pytest.raises(ValueError, match=message):
        load(path, output / "data", device=backend("reference"))


def test_what_is_not_there_is_named(output, tmp_path):
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "missing")
    with pytest.raises(ValueError, match="is no finished run of lsq train-text"):
        load(output / "data")
