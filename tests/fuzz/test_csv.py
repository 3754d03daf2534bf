"""Comma-separated values: buffers for `lsq plan`, lists of products for `lsq tune --shapes`."""

import pytest

from lsq.commands import cli
from tests.fuzz import trial
from tests.fuzz.mutations import mutated_table

pytestmark = pytest.mark.thorough

BUFFERS = (
    b"id,lower,upper,size,alignment\na,0,3,100,\nb,1,4,64,64\n"
    b"c,2,9,4096,256\nd,3,5,0,1\ne,4,12,1000,16\n"
)
PRODUCTS = (
    b"op,m,n,k,dtype,out,layout\nproject,64,128,256,,,\nproject_weight_gradient,64,128,200,,,\n"
    b"project_input_gradient,8,16,24,,,\n"
)
EXACT = "plan given/file.csv --method exact --time-limit 0.1 --quiet"
COMMANDS = {
    "plan": (BUFFERS, "plan given/file.csv --output plan.csv --quiet"),
    "plan exact": (BUFFERS, EXACT),
    "tune": (PRODUCTS, "tune --shapes given/file.csv --list"),
}


@trial.counts(trial.QUICK)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_file_is_used_or_refused(tmp_path, monkeypatch, name, count):
    monkeypatch.chdir(tmp_path)
    content, command = COMMANDS[name]
    path = tmp_path / "given" / "file.csv"
    path.parent.mkdir()

    def attempt(chance):
        path.write_bytes(mutated_table(content, chance))
        found = trial.outcome(lambda: cli.main(command.split()), path.parent)
        of_all = found.refusal and "all buffers add up" in found.refusal
        if found.refusal and "file.csv" not in found.refusal and not of_all:
            return trial.Outcome(fault=f"a message that does not name the file: {found.refusal}")
        return found

    worked, refused = trial.survey(name, count, attempt)
    assert worked > 0.05 * count and refused > 0.5 * count, (worked, refused)
