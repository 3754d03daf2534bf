"""Table of the runs of run.sh: quality of each format before and after its updates, size, speed."""

import argparse
import json
import time
from pathlib import Path

from tabulate import tabulate

from lsq import Translator

TITLES = ("weights", "bits", "loss before", "loss", "BLEU before", "BLEU", "MB", "sentences/s")


def rows(output: Path, sentences: list[str]) -> list[list[str]]:
    """A row for each format, float first."""
    found = []
    names = ["float-again", *(path.stem for path in sorted(output.glob("*.safetensors")))]
    for name in names:
        now = results(output / name)
        before = results(output / ("float" if name == "float-again" else f"{name}-before"))
        row = [name, bits(output, name)]
        row += [f"{one['best_validation_loss']:.3f}" for one in (before, now)]
        row += [f"{one['bleu']:.2f}" for one in (before, now)]
        file = output / f"{name}.safetensors"
        if file.exists():
            row += [f"{file.stat().st_size / 1e6:.2f}", f"{speed(file, sentences):.0f}"]
        found.append(row)
    return found


def results(run: Path) -> dict:
    return json.loads((run / "results.json").read_text(encoding="utf-8"))


def bits(output: Path, name: str) -> str:
    """Mean bits of the weights that were measured; of a uniform format from any allocation."""
    mixes = [json.loads(path.read_text()) for path in sorted(output.glob("mix-*/allocation.json"))]
    for mix, path in zip(mixes, sorted(output.glob("mix-*")), strict=True):
        if name == path.name.replace("mix-", "of-"):
            return f"{mix['bits']:.2f}"
    uniform = mixes[0]["uniform"].get(f"{name}/row") if mixes else None
    return f"{uniform[0]:.2f}" if uniform else "32"


def speed(file: Path, sentences: list[str]) -> float:
    """Sentences that the exported model translates in a second, one after the other."""
    translator = Translator(file)
    translator.translate(sentences[:2])
    begin = time.perf_counter()
    for sentence in sentences:
        translator.translate([sentence])
    return len(sentences) / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--test", type=Path, required=True, help="sentences to time")
    given = parser.parse_args()
    sentences = given.test.read_text(encoding="utf-8").splitlines()[:100]
    print(tabulate(rows(given.output, sentences), TITLES, "github", disable_numparse=True))


if __name__ == "__main__":
    main()
