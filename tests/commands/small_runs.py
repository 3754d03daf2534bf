"""What a small run of `lsq train-text` leaves."""

import json
from pathlib import Path


def results_of(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text())


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
