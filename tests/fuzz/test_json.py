"""JSON that users hand in or edit: files of tuned products and of measured costs, markers."""

from pathlib import Path

import pytest

from lsq.commands import stages
from lsq.commands.stages import Stage
from lsq.gemm import configuration_file
from lsq.study.costs import read_costs, write_costs
from tests.fuzz import trial
from tests.fuzz.mutations import mutated_json
from tests.gemm.tuned import cublas_entry, entry, file
from tests.study.test_costs import COSTS

pytestmark = pytest.mark.thorough

TUNED = file(entry(8), cublas_entry(), cublas_entry(m=4096, n=1024, k=1024))


KINDS = {
    "products of a GPU": (configuration_file.write, configuration_file.read, TUNED),
    "costs": (write_costs, read_costs, COSTS),
}
"""Functions that write and read a file, and a sound content."""


@trial.quick_counts
@pytest.mark.parametrize("name", KINDS)
def test_a_file_is_refused_or_means_what_it_says(tmp_path, name, count):
    (write, read, sound), path = KINDS[name], tmp_path / "given" / "file.json"
    path.parent.mkdir()
    write(path, sound)
    content = path.read_bytes()

    def attempt(chance):
        path.write_bytes(mutated_json(content, chance))
        found = trial.outcome(lambda: read(path), path.parent)
        if found.refusal and not found.refusal.removeprefix("error: ").startswith(str(path)):
            return trial.Outcome(fault=f"a message that does not name the file: {found.refusal}")
        if found.refusal is None and not found.fault:
            write(tmp_path / "again.json", found.result)
            assert read(tmp_path / "again.json") == found.result
        return found

    worked, refused = trial.survey(name, count, attempt)
    assert worked > 0.02 * count and refused > 0.5 * count, (worked, refused)


@trial.counts(200)
def test_a_marker_of_a_stage_is_refused_or_the_stage_done_again(tmp_path, count):
    """And a file that the stage did not make stays, whatever the marker says."""
    folder = tmp_path / "text"
    stage = Stage(name="text", folder=folder, makes=("*.src",))
    key = {"--seed": 1, "--src": {"file": "a", "sha256": "b"}}

    def work(partial: Path) -> None:
        (partial / "train.src").write_text("made")

    stages.run_stage(stage, key, work, lambda said: None)
    (folder / "thesis.txt").write_text("years of work")
    content = (folder / stages.MARKER).read_bytes()

    def attempt(chance):
        (folder / stages.MARKER).write_bytes(mutated_json(content, chance))
        before = trial.digests(tmp_path)
        found = trial.outcome(lambda: stages.run_stage(stage, key, work, lambda said: None))
        after = trial.digests(tmp_path)
        if found.refusal and after != before:
            return trial.Outcome(fault=f"{found.refusal}, but left {sorted(after)}")
        changed = dict(before.items() ^ after.items()).keys() - {f"text/{stages.MARKER}"}
        if found.refusal is None and (changed or not stage.is_done(key)):
            return trial.Outcome(fault=f"left {sorted(after)}")
        return found

    worked, refused = trial.survey("marker", count, attempt)
    assert worked > 0 and refused > count / 2, (worked, refused)
