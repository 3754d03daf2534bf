"""Somebody who copies the blocks of a page from top to bottom, in an empty folder, with nothing
else."""

import contextlib
import gc
import io
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from torch import distributed

from tests.docs.pages import ROOT, Block

STAND_IN = """#!/usr/bin/env bash
# Hands its command line to the test, which runs or checks it, and waits for that.
{first}
printf '%s\\0' '{name}' "$@" > "$COMMANDS/$$"
echo $$ >&$REQUESTS
read -r status <&$ANSWERS && exit "$status"
"""
USER_DIR = (
    """[ "$*" = user-dir ] && exec '{python}' -c 'from lsq.commands.user_dir import run; run([])'"""
)
Follow = Callable[["Reader", list[str]], None]


class Reader:
    """Works through a page in `folder`.

    Blocks of Python share a namespace. A block whose first line is a comment with a file's name, `#
    train.py`, is also saved under that name. bash runs the other blocks as they are printed, with
    stand-ins for `programs`, which hand their command lines to `follow` and wait.

    Args:
        folder: empty, and the current folder while blocks run.
        programs: names that bash shall find, or paths of scripts in the repository.
        follow: follow(reader, command line) runs or checks one command; what it prints counts as
            printed.

    Attributes:
        block: the one that is read.
        printed: what the last block printed.
    """

    def __init__(self, folder: Path, programs: Iterable[str], follow: Follow):
        self.folder, self.follow = folder, follow
        self.namespace: dict = {"__name__": "__main__"}
        self.printed = ""
        self._bin = folder / ".stand-ins"
        for name in programs:
            path = folder / name if "/" in name else self._bin / name
            path.parent.mkdir(parents=True, exist_ok=True)
            first = USER_DIR.format(python=sys.executable) if name == "lsq" else ""
            path.write_text(STAND_IN.format(name=name, first=first))
            path.chmod(0o755)

    def read(self, block: Block) -> None:
        """Do what the block says; AssertionError or the block's own error if that fails."""
        self.block = block
        if block.kind == "output":
            assert_printed(block.text, self.printed)
        elif block.kind in ("python", "bash"):
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed), contextlib.chdir(self.folder):
                self._python(block) if block.kind == "python" else self._bash(block)
            self.printed = printed.getvalue()

    def _python(self, block: Block) -> None:
        name = re.match(r"# (\w+\.py)\n", block.text)
        if name:
            (self.folder / name[1]).write_text(block.text)
        code = compile("\n" * (block.line - 1) + block.text, str(block.page), "exec")
        with as_torchrun_starts_it():
            exec(code, self.namespace)

    def _bash(self, block: Block) -> None:
        self.run(["bash", "-euo", "pipefail", "-c", block.text], self.follow)

    def run(self, command: list[str], follow: Follow) -> None:
        """Run a command, and follow those that reach stand-ins. What it prints is printed.

        Raises:
            AssertionError: it fails.
        """
        asked, asking = os.pipe()
        heard, answering = os.pipe()
        path = os.pathsep.join([str(self._bin), os.environ["PATH"]])
        environment = os.environ | {
            "PATH": path,
            "PYTHONPATH": str(ROOT),
            "COMMANDS": str(self._bin),
        }
        environment |= {"REQUESTS": str(asking), "ANSWERS": str(heard)}
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=environment,
                pass_fds=(asking, heard),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=errors,
            )
            os.close(asking)
            os.close(heard)
            try:
                with open(asked) as requests, open(answering, "wb", buffering=0) as answers:
                    for number in requests:
                        follow(self, (self._bin / number.strip()).read_text().split("\0")[:-1])
                        answers.write(b"0\n")
            except BaseException:
                process.kill()  # processes that a command has forked may hold its pipes open
                raise
            finally:
                status = process.wait()
            out.seek(0)
            errors.seek(0)
            assert status == 0, f"{shlex.join(command)}: status {status}: {errors.read()}"
            print(out.read(), end="")


@contextlib.contextmanager
def as_torchrun_starts_it() -> Iterator[None]:
    """Within this context the environment is that of the only process of a torchrun."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    given = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
    given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in given.items():
            patch.setenv(name, str(value))
        yield


def assert_printed(expected: str, printed: str) -> None:
    """Each line of `expected` is in `printed`, in this order; `...` stands for anything."""
    place = 0
    for line in expected.strip("\n").split("\n"):
        pattern = ".*".join(re.escape(part) for part in line.strip().split("..."))
        match = re.compile(rf"^[ ]*{pattern}[ ]*$", re.MULTILINE).search(printed, place)
        assert match, f"{line!r} is not printed, or not in this place; printed: {printed[place:]}"
        place = match.end()


@contextlib.contextmanager
def page_left_behind(reader: Reader) -> Iterator[None]:
    """Within this context a page may make process groups. They are gone afterwards: a forked
    process, such as one that loads data, would wait for their threads when it collects them."""
    try:
        yield
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()
        reader.namespace.clear()
        gc.collect()
