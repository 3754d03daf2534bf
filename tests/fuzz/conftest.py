"""Data and checkpoints that are damaged, made once."""

from pathlib import Path

import pytest

from tests.commands.conftest import TRAINING, files, prepared, pytest_collection_modifyitems  # noqa: F401
from tests.configurations import quick_configurations  # noqa: F401

TINY = ["--save-interval-updates", "2", "--max-update", "4", "--disable-validation", "--cpu"]


@pytest.fixture(scope="session")
def trained(prepared, tmp_path_factory) -> Path:  # noqa: F811
    """A folder with lsq_transformer.pt and transformer.pt, of four updates on the prepared text."""
    from lsq.commands import cli

    folder = tmp_path_factory.mktemp("trained")
    for arch in ("lsq_transformer", "transformer"):
        save = folder / f"{arch}-run"
        options = ["--arch", arch, "--save-dir", str(save), "--no-progress-bar"]
        assert cli.main(["train", str(prepared.data), *TRAINING, *TINY, *options]) == 0
        (save / "checkpoint_last.pt").rename(folder / f"{arch}.pt")
    return folder
