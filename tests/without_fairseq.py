"""The command line where fairseq is not installed; what works here does not wait for its import either."""

import os
import subprocess
import sys
from pathlib import Path

CODE = """
import sys
for name in {missing!r}:
    sys.modules[name] = None  # an import finds nothing
from lsq import cli
sys.exit(cli.main(sys.argv[1:]))
"""
OF_FAIRSEQ = ("fairseq", "fairseq_cli", "omegaconf", "hydra")


def lsq(*arguments: object, missing: tuple[str, ...] = OF_FAIRSEQ) -> subprocess.CompletedProcess:
    """Run `lsq` in a process that cannot import these modules."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", CODE.format(missing=missing), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def refused(*arguments: object, missing: tuple[str, ...] = OF_FAIRSEQ) -> str:
    """What `lsq` says in one line about a mistake."""
    done = lsq(*arguments, missing=missing)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1, done
    return done.stderr
