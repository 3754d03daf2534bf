"""`lsq generate`: every sentence is translated, and what is refused."""

from argparse import Namespace

import pytest
import torch

from lsq.commands import generate, train
from lsq.commands.logs import logging_to
from lsq.commands.prepare import Prepared, prepare
from lsq.text.corpus import TextFiles
from tests.commands.conftest import TRAINING, VOCABULARY, write_pairs
from tests.sampling import first


@pytest.fixture
def lsq_generate(prepared, tmp_path):
    """lsq_generate(checkpoint, *options): run `lsq generate`; returns the file that it writes."""

    def lsq_generate(checkpoint, *options):
        with logging_to(tmp_path / "generate.log"):
            given = [str(prepared.data), "--path", str(checkpoint), "--results-path", str(tmp_path)]
            generate.run([*given, *"--gen-subset test --cpu --num-workers 0".split(), *options])
        return tmp_path / "generate-test.txt"

    return lsq_generate


@pytest.mark.parametrize(
    "arch, by", [("transformer", "the models' own steps"), ("lsq_transformer", "its int8 engine")]
)
def test_every_sentence_is_translated_with_its_number(
    lsq_train, lsq_generate, prepared, tmp_path, arch, by
):
    """fairseq-generate drops sentences of the last batch beyond multiples of eight."""
    lsq_train(tmp_path / "model", "--arch", arch, "--max-update", "1")
    sentencepiece = ["--bpe", "sentencepiece", "--sentencepiece-model"]
    sentencepiece += [str(prepared.output / "vocabulary" / "sentencepiece.model")]
    options = ["--beam", "2", "--max-len-b", "8", *sentencepiece]
    path = lsq_generate(tmp_path / "model" / "checkpoint_last.pt", *options)
    assert f"generating by lsq's search and {by}\n" in (tmp_path / "generate.log").read_text()
    lines = path.read_text().splitlines()
    sources = {line.split("\t")[0]: line.split("\t")[1] for line in lines if line.startswith("S-")}
    expected = prepared.lines("test", "src")
    assert [sources[f"S-{number}"] for number in range(len(expected))] == expected
    assert len(generate.read_hypotheses(path, 9)) == 9
    with pytest.raises(ValueError, match="has no translation of 1 sentences, the first of them 9"):
        generate.read_hypotheses(path, 10)


def test_a_model_of_subwords_that_is_none(lsq_generate, tmp_path):
    path = tmp_path / "sentencepiece.model"
    message = "--sentencepiece-model .* is missing, damaged or no model of sentencepiece"
    for content in (None, b"", b"no model"):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            options = ["--bpe", "sentencepiece", "--sentencepiece-model", str(path)]
            lsq_generate(tmp_path / "x.pt", *options)


def test_the_task_is_that_of_the_checkpoint(tmp_path):
    for content, task in (
        ({"args": Namespace(task="translation")}, "translation"),
        ({"cfg": {"task": {"_name": "lsq_language_modeling"}}}, "lsq_language_modeling"),
        ({"cfg": {"task": Namespace(_name="language_modeling")}}, "language_modeling"),
        ({"cfg": {"task": {"_name": "of nobody"}}}, "lsq_translation"),
        ({"cfg": {"task": {"_name": ["translation"]}}}, "lsq_translation"),
        ({"cfg": {"task": 5}}, "lsq_translation"),
        ([], "lsq_translation"),
    ):
        torch.save(content, tmp_path / "x.pt")
        assert generate.task_of(tmp_path / "x.pt") == task
    for path in (tmp_path / "none.pt", tmp_path):
        assert generate.task_of(path) == "lsq_translation"


def test_scores_with_sacrebleu_and_empty_translations(lsq_train, lsq_generate, tmp_path):
    lsq_train(tmp_path / "model", "--arch", "transformer", "--max-update", "1")
    options = "--scoring sacrebleu --beam 1 --max-len-b 8 --remove-bpe sentencepiece".split()
    path = lsq_generate(tmp_path / "model" / "checkpoint_last.pt", *options)
    assert "Generate test with beam=1: " in path.read_text().splitlines()[-1]
    best = "S-0\tx\nH-0\t-1.0\ty\nD-0\t-1.0\t\nD-1\t-0.5\tone\u2028two\tthree\n"
    path.write_text(best + "D-1\t-0.7\tsecond best\n")
    assert generate.read_hypotheses(path, 2) == ["", "one\u2028two\tthree"]


def test_what_is_refused(prepared, lsq_generate, tmp_path):
    with pytest.raises(ValueError, match="give the checkpoint to translate with: --path"):
        generate.run([str(prepared.data)])
    with pytest.raises(OSError, match="Model file not found: .*nowhere.pt"):
        lsq_generate(tmp_path / "nowhere.pt")
    with pytest.raises(ValueError, match="--fp16 needs a GPU"):
        lsq_generate(tmp_path / "x.pt", "--fp16")
    torch.save({"weights": 1}, tmp_path / "x.pt")
    (tmp_path / "y.pt").write_text("not a checkpoint")
    (tmp_path / "empty.pt").touch()
    foreign = "is not a checkpoint of fairseq's"
    for name, message in (
        ("x.pt", foreign),
        ("y.pt", foreign),
        ("empty.pt", "is damaged: it is empty"),
    ):
        with pytest.raises(ValueError, match=f"{name} {message}"):
            lsq_generate(tmp_path / name)


@pytest.fixture
def prepared_otherwise(files, tmp_path):

    def prepared_otherwise(files: TextFiles, size: int) -> str:
        options = VOCABULARY | {"size": size, "output": tmp_path / f"other{size}"}
        return str(prepare(Prepared(files=files, **options)).data)

    return prepared_otherwise


@pytest.mark.parametrize("arch", first(["transformer", "lsq_transformer"], 1))
def test_data_of_another_vocabulary(
    lsq_train, lsq_generate, files, prepared_otherwise, tmp_path, arch
):
    """As large as the checkpoint's, or not; with a task that knows the words, or not."""
    lsq_train(tmp_path / "model", "--arch", arch, "--max-update", "1")
    path = str(tmp_path / "model" / "checkpoint_last.pt")
    reversed_words = {
        name: write_pairs(tmp_path, name, 60, seed=5) for name in ("train", "valid", "test")
    }
    for text in sum(reversed_words.values(), ()):
        text.write_text("".join(line[::-1] + "\n" for line in text.read_text().splitlines()))
    options = ["--path", path, "--cpu", "--gen-subset", "test"]
    words = "has another source and target dictionary than the checkpoint was trained with"
    others = ((files, 100), (reversed_words, VOCABULARY["size"]))
    for data in [prepared_otherwise(*given) for given in others]:
        with pytest.raises(ValueError, match=words):
            generate.run([data, *options])
    with pytest.raises(ValueError, match=words):  # nor does a training go on with them
        train.run([data, "--save-dir", str(tmp_path / "model"), "--cpu", *TRAINING, "--arch", arch])
    message = "last.pt does not fit .* dictionaries .dict.* of .*data describe;.* size mis"
    with pytest.raises(ValueError, match=message):
        generate.run([str(tmp_path / "other100" / "data"), *options, "--task", "translation"])
    for overrides, message in (
        (["--model-overrides", "{'encoder_layers': 2}"], "does not fit the model .*: Missing key"),
        (["--lm-path", path], "--lm-path is .*, which is of a .* and no language model"),
    ):
        with pytest.raises(ValueError, match=message):
            lsq_generate(path, *overrides)
