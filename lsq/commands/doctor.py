"""`lsq doctor`: what this machine can do, and what to install for more."""

import sys
from argparse import ArgumentParser

from tqdm import tqdm

from lsq.commands import emulation
from lsq.commands import machine as doctor
from lsq.commands.options import one_line_errors
from lsq.run.backends import backend


def run(arguments: list[str]) -> int:
    """The subcommand: print the report; the exit status is lsq.commands.machine's."""
    parser = ArgumentParser(
        prog="lsq doctor",
        description="Say what this machine can do, which int8 path runs here, and what to install"
        " for more.",
        allow_abbrev=False,
    )
    one_line_errors(parser)
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    parser.add_argument(
        "--emulate",
        action="store_true",
        help="run the CUDA kernels in an emulator on the CPU and compare them with their"
        " references, instead of the "
        "report; takes a C++ compiler, no GPU, and about half a minute the first time",
    )
    options = parser.parse_args(arguments)
    if not options.emulate:
        return doctor.run(as_json=options.json)
    if options.json:
        parser.error("--json is for the report; it does not go with --emulate")
    return emulate()


def emulate() -> int:
    """Check the CUDA operations in the emulator; the exit status: 0 if all agree with their
    references, else 1."""
    try:
        backend("emulated")
    except RuntimeError as error:  # no C++ compiler, or it fails
        print(f"lsq doctor: {error}", file=sys.stderr)
        return 1
    found = list(
        tqdm(emulation.checks(), desc="emulating", unit="operation", disable=None, leave=False)
    )
    names = sorted({check.operation for check in found})
    for name in names:
        calls = [check for check in found if check.operation == name]
        worst = max(check.floats for check in calls), max(check.integers for check in calls)
        verdict = "agrees" if all(check.agrees for check in calls) else "DIFFERS"
        print(
            f"{name:<42}{verdict:<9}floats {worst[0]:.1e}, codes {worst[1]:.1%}, {len(calls)} calls"
        )
    wrong = [check for check in found if not check.agrees]
    print(
        f"{len(names)} CUDA operations in {len(found)} calls; {len(wrong) or 'none'} differ from"
        " their references."
    )
    return 1 if wrong else 0
