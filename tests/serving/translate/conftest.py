"""A small translator of a toy language, trained once: words, and the same words backwards in
capitals."""

from pathlib import Path

import pytest

from lsq.commands import train_text
from lsq.serving.translate import Translator
from tests.commands.conftest import SMALL, write_pairs


def train(folder: Path, *options: str) -> Path:
    """Train in folder/out with `lsq train-text`; returns that."""
    given = ["--output", str(folder / "out"), *SMALL, "--lr", "0.02", "--cpu", *options]
    for option, name, count in (("", "train", 200), ("valid-", "valid", 12), ("test-", "test", 9)):
        source, target = write_pairs(folder, name, count, seed=count)
        given += [f"--{option}src", str(source), f"--{option}tgt", str(target)]
    with pytest.MonkeyPatch.context() as patch:  # pictures take as long as the training
        patch.setattr(
            "matplotlib.figure.Figure.savefig", lambda figure, path, **_: path.write_bytes(b"")
        )
        train_text.run(given)
    return folder / "out"


@pytest.fixture(scope="session")
def output(tmp_path_factory) -> Path:
    """What `lsq train-text` leaves; shared, so not to be changed."""
    return train(tmp_path_factory.mktemp("translator"), "--updates", "96", "--validate-every", "96")


@pytest.fixture(scope="session")
def translator(output) -> Translator:
    """It; shared."""
    return Translator(output)
