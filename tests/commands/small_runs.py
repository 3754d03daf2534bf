"""What a small run of `lsq train-text` leaves."""

import json
from pathlib import Path

import torch

from lsq.commands import text_run, train_text
from lsq.commands.text_run import RunFolder
from lsq.fairseq.checkpoint import LAST


def results_of(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text())


def begun(words: list[str], updates: int) -> None:
    """Leave what a training by these options of `lsq train-text` does that has made so many
    updates."""
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
