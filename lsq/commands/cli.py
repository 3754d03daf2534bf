"""`lsq`: the command line."""

import argparse
import errno
import importlib
import io
import os
import re
import select
import signal
import sys
import traceback

import lsq
from lsq import extras
from lsq.commands import COMMANDS, EXTRAS, logs
from lsq.commands.interruption import name_of
from lsq.commands.options import HELP, near, shortened

FAIRSEQ = ("fairseq", "fairseq_cli", "omegaconf")

OUT_OF_MEMORY = re.compile("can't allocate memory|out of memory")

PATHS = {
    FileNotFoundError: "is not there; check the path",
    IsADirectoryError: "is a folder; name a file",
    NotADirectoryError: "leads through a file as if it were a folder; check the path",
    PermissionError: (
        "may not be read or written by this user; change its permissions, or name another"
    ),
}


def parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    listed = "\n".join(f"  {name:{width}}  {text}" for name, text in COMMANDS.items())
    made = argparse.ArgumentParser(
        prog="lsq",
        description="Train Transformers with 8-bit integers.",
        epilog=f"commands:\n{listed}\n\n`lsq COMMAND --help` shows the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--version", action="version", version=f"lsq {lsq.__version__}")
    traceback_help = "show where in the program an error was found, for bug reports"
    made.add_argument("--traceback", action="store_true", help=traceback_help)
    made.add_argument("command", metavar="COMMAND", help="see below")
    rest = {"nargs": argparse.REMAINDER, "metavar": "...", "help": "options of the command"}
    made.add_argument("arguments", **rest)
    return made


def main(arguments: list[str] | None = None) -> int:
    """Run a command line (default: the process's own) and return its exit status.

    0: done. 1: something failed while running. 2: the options or the files are wrong. 128 + n:
    stopped by signal n. Mistakes are reported in one line on standard error. If the reader of the
    output has gone, as `head` does, the command ends silently, with the status of SIGPIPE.
    """
    try:
        try:
            return _run(arguments)
        finally:
            # flush now: a broken pipe at the end of Python could not be caught
            print(end="", flush=True)
    except OSError as error:
        broken = isinstance(error, BrokenPipeError)
        if broken and not _reader_has_gone() or not broken and error.errno != errno.ENOSPC:
            raise
        # Python still flushes at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if broken:
            return 128 + signal.SIGPIPE
        print(f"lsq: error: standard output takes no more: {error.strerror}", file=sys.stderr)
        return 1


def _reader_has_gone() -> bool:
    poll = select.poll()
    poll.register(sys.__stdout__, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _run(arguments: list[str] | None) -> int:
    outer = parser()
    given = outer.parse_args(arguments)
    if given.command not in COMMANDS:
        meant = near(given.command, COMMANDS)
        hint = f"; did you mean {' or '.join(meant)}?" if meant else "."
        outer.error(
            f"there is no command {given.command!r}{hint} The commands are {', '.join(COMMANDS)}"
        )
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="surrogateescape")  # file names need not be UTF-8
    logs.configure()
    try:
        if not HELP & set(given.arguments):
            extras.require("this command", *EXTRAS.get(given.command, ()))
        module = importlib.import_module(f"lsq.commands.{given.command.replace('-', '_')}")
        return module.run(given.arguments)
    except (KeyboardInterrupt, SystemExit, Exception) as error:
        status, message = describe(error)
        wants_help = HELP & set(given.arguments)
        if wants_help and isinstance(error, ModuleNotFoundError) and message is not None:
            print(f"usage: lsq {given.command} ...\n\n{COMMANDS[given.command]}\n")
            print(f"Its options are not shown: {message.removeprefix('error: ')}")
            return 0
        if message is None or given.traceback:
            raise
        if isinstance(error, BrokenPipeError) and _reader_has_gone():
            raise
        print(f"lsq {given.command}: {message}", file=sys.stderr, flush=True)
        return status


def describe(error: BaseException) -> tuple[int, str | None]:
    """Return (exit status, message in one line); without a message the error shall be raised."""
    message = _line(error)
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT, f"stopped by {name_of(signal.SIGINT)}"
    if isinstance(error, SystemExit):
        return error.code, getattr(error, "message", None)
    if isinstance(error, tuple(PATHS)):
        if error.filename is not None and type(error) in PATHS:
            message = f"{shortened(str(error.filename))} {PATHS[type(error)]}"
        return 2, f"error: {message}"
    # the machine failed, or a training diverged
    if isinstance(error, (OSError, FloatingPointError)):
        return 1, f"error: {message}"
    # fairseq reports users' mistakes as Exception
    if isinstance(error, ValueError) or type(error) is Exception:
        cause = error.__context__
        detail = f" ({_line(cause)})" if type(error) is Exception and cause is not None else ""
        return 2, f"error: {message}{detail}"
    if isinstance(error, extras.MissingPackage):
        return 2, f"error: {message}"
    missing = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
    if missing.partition(".")[0] not in ("", "lsq"):
        return 2, f"error: this needs {extras.explanation(missing)}"
    if isinstance(error, MemoryError) or OUT_OF_MEMORY.search(message):
        return 1, f"error: not enough memory ({message}); use smaller batches or a smaller model"
    if isinstance(error, RuntimeError):
        # imported here: PyTorch takes seconds, and a RuntimeError comes after its import
        from lsq.dist.roll_call import ExchangeFailed
        from lsq.native.sources import LibraryError

        if isinstance(error, (ExchangeFailed, LibraryError)):
            return 1, f"error: {message}"
    return _of_fairseq(error, message)


def _line(error: BaseException) -> str:
    return shortened(" ".join(str(error).split()))


def _of_fairseq(error: BaseException, message: str) -> tuple[int, str | None]:
    """Describe an error from fairseq's own code, which refuses options by many kinds of errors."""
    frames = traceback.walk_tb(error.__traceback__)
    modules = [frame.f_globals["__name__"].partition(".")[0] for frame, _ in frames]
    modules = [module for module in modules if module != "ast"]  # fairseq parses options by ast
    if not modules or modules[-1] not in FAIRSEQ:
        return 1, None
    if isinstance(error, (AssertionError, ImportError, NotImplementedError)):
        return 2, f"error: {message or traceback.extract_tb(error.__traceback__)[-1].line}"
    reason = f"fairseq failed ({type(error).__name__}: {message})"
    return 1, f"error: {reason}; check the options, or see where with lsq --traceback"


if __name__ == "__main__":
    sys.exit(main())
