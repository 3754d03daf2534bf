"""The command line where fairseq is not installed; what works here does not wait for its import
either."""

import json
import os
import subprocess
import sys
from pathlib import Path

OF_FAIRSEQ = ("fairseq", "fairseq_cli", "omegaconf", "hydra")
CODE = """
import contextlib, io, json, sys
missing, lines = json.loads(sys.argv[1])
sys.modules.update(dict.fromkeys(missing))  # an import of what is None there finds nothing
from lsq.commands import cli
found = []
for words in lines:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = cli.main(words)
        except SystemExit as stopped:
            status = stopped.code
    found.append((status, out.getvalue(), err.getvalue()))
print(json.dumps(found))
"""


def run_lsq(
    lines: list[list[str]], missing: tuple[str, ...] = OF_FAIRSEQ
) -> list[tuple[int, str, str]]:
    """Run `lsq` with each of these command lines, in a process that cannot import some modules.

    Returns:
        Exit status, standard output and standard error of each.
    """
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", CODE, json.dumps([missing, lines])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [tuple(found) for found in json.loads(done.stdout)]


def refused(*lines: list[str]) -> list[str]:
    """What `lsq` says in one line about the mistake in each of these command lines."""
    found = run_lsq(list(lines))
    assert all((status, out, err.count("\n")) == (2, "", 1) for status, out, err in found), found
    return [err for _, _, err in found]
