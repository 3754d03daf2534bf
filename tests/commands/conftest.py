"""A toy language pair, prepared once, and the smallest models for it."""

import json
import random
from pathlib import Path

import pytest
import torch

from lsq import Translator
from lsq.commands import cli, text_run, train, train_text
from lsq.commands.logs import logging_to
from lsq.commands.prepare import Prepared, prepare
from lsq.commands.text_run import RunFolder
from lsq.fairseq.checkpoint import LAST
from lsq.text.corpus import TextFiles
from tests.configurations import quick_configurations  # noqa: F401

WORDS = "red green blue black white one two three four five cat dog bird fish horse".split()
VOCABULARY = {"size": 60, "coverage": 1.0, "max_length": 40}
SIZES = ["--share-all-embeddings", "--dropout", "0.1"]
for side in ("encoder", "decoder"):
    SIZES += [f"--{side}-layers", "1", f"--{side}-embed-dim", "16"]
    SIZES += [f"--{side}-ffn-embed-dim", "32", f"--{side}-attention-heads", "2"]
TRAINING = [
    *SIZES,
    *"--optimizer adam --lr 0.001 --max-tokens 300 --no-epoch-checkpoints --num-workers 0".split(),
]
"""Options of `lsq train`: batches of about ten sentences."""
SMALL = (
    "--vocabulary-size 60 --character-coverage 1.0 --max-length 40 --layers 1 --hidden 16"
    " --feed-forward 32 --heads 2 "
    "--max-tokens 300 --warmup 4 --log-every 1 --validate-every 2 --beam 2 --quiet"
).split()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(
                pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
            )


def write_pairs(folder: Path, name: str, count: int, seed: int) -> tuple[Path, Path]:
    """Write folder/name.en and .de: random words, and the same backwards in capitals."""
    chance = random.Random(seed)
    sentences = [chance.choices(WORDS, k=chance.randint(2, 7)) for _ in range(count)]
    source, target = folder / f"{name}.en", folder / f"{name}.de"
    source.write_text("".join(" ".join(words) + "\n" for words in sentences))
    target.write_text("".join(" ".join(reversed(words)).upper() + "\n" for words in sentences))
    return source, target


@pytest.fixture(scope="session")
def files(tmp_path_factory) -> TextFiles:
    """Text of 200 pairs to train on, 12 to validate with and 9 to test with."""
    folder = tmp_path_factory.mktemp("text")
    counts = {"train": 200, "valid": 12, "test": 9}
    return {
        name: write_pairs(folder, name, count, seed)
        for seed, (name, count) in enumerate(counts.items(), 1)
    }


@pytest.fixture(scope="session")
def prepared(files, tmp_path_factory) -> Prepared:
    """The same as fairseq's data; shared, so not to be changed."""
    return prepare(Prepared(files=files, output=tmp_path_factory.mktemp("prepared"), **VOCABULARY))


@pytest.fixture
def lsq_train(prepared, tmp_path):
    """lsq_train(folder, *options) runs `lsq train` in this process, with its log there."""

    def lsq_train(folder: Path, *options: str) -> None:
        folder.mkdir(exist_ok=True)
        with logging_to(folder / "train.log"):
            train.run([str(prepared.data), "--save-dir", str(folder), "--cpu", *TRAINING, *options])

    return lsq_train


@pytest.fixture
def lsq(capsys):
    """lsq(*words) -> (exit status, standard output, standard error) of a command line."""

    def lsq(*words: object) -> tuple[int, str, str]:
        try:
            status = cli.main([*map(str, words)])
        except SystemExit as stopped:
            status = stopped.code
        return status, *capsys.readouterr()

    return lsq


@pytest.fixture
def refused(lsq):
    """refused(message, *words): the command line is a mistake, which is told in one line."""

    def refused(message: str, *words: object) -> None:
        status, out, err = lsq(*words)
        assert (status, out, err.count("\n")) == (2, "", 1), (status, out, err)
        assert err.startswith(f"lsq {words[0]}: error: ") and message in err, err

    return refused


def no_pictures(patch: pytest.MonkeyPatch) -> None:
    savefig = "matplotlib.figure.Figure.savefig"
    patch.setattr(savefig, lambda figure, path, **_: path.write_bytes(b""))


def text_options(files: TextFiles, output: Path) -> list[str]:
    given = [*SMALL, "--output", str(output)]
    for split, (source, target) in files.items():
        prefix = "" if split == "train" else f"{split}-"
        given += [f"--{prefix}src", str(source), f"--{prefix}tgt", str(target)]
    return given


@pytest.fixture
def command(files, tmp_path, monkeypatch):
    """command(*options): the command line of a small run of `lsq train-text` into tmp_path/out."""
    no_pictures(monkeypatch)
    return lambda *options: [*text_options(files, tmp_path / "out"), *options]


def train_text_run(folder: Path, *options: str) -> Path:
    counts = {"train": 200, "valid": 12, "test": 9}
    files = {name: write_pairs(folder, name, n, seed=n) for name, n in counts.items()}
    given = text_options(files, folder / "out")
    with pytest.MonkeyPatch.context() as patch:
        no_pictures(patch)
        train_text.run([*given, "--lr", "0.02", "--cpu", *options])
    return folder / "out"


@pytest.fixture(scope="session")
def output(tmp_path_factory) -> Path:
    """The output folder of a small translator of the toy language; shared, not to be changed."""
    return train_text_run(
        tmp_path_factory.mktemp("translator"), "--updates", "96", "--validate-every", "96"
    )


@pytest.fixture(scope="session")
def translator(output) -> Translator:
    return Translator(output)


# What a small run of `lsq train-text` leaves


def results_of(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text())


def begun(words: list[str], updates: int) -> None:
    """Leave what a training of `lsq train-text` leaves after so many updates."""
    prepared, options = train_text.parsed(words)
    folder = RunFolder(prepared=prepared, name=options.given.name)
    folder.claim(text_run.key_of(prepared, options), updates)
    folder.model.mark(text_run.key_of(prepared, options), finished=False)
    torch.save({"optimizer_history": [{"num_updates": updates}]}, folder.model.folder / LAST)


def files_in(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
