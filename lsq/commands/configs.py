"""`lsq configs`: list, show and verify files of tuned products."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from tqdm import tqdm

from lsq.commands.options import command_parser, one_line_errors
from lsq.commands.tune import gpu_trials
from lsq.gemm import configuration_file
from lsq.gemm.configuration import CublasConfiguration, Entry, TileConfiguration
from lsq.gemm.configuration_file import ConfigurationFile, Validators, difference
from lsq.gemm.tuner.trial import entry_fault
from lsq.study.tables import fitted

OTHER = {TileConfiguration: "cuBLASLt and a kernel", CublasConfiguration: "the best tile"}
"""Type of the chosen configuration -> the other way to run the product."""
HEAD = "op m n k layout types chosen default float gain spread date".split() + ["run as"]
TEXTS = ("op", "layout", "types", "date", "run as")


ACTIONS = {
    "list": "all files, and whether they are used here",
    "show": "the content of a file",
    "verify": "run every entry of a GPU's file once, and compare with exact arithmetic",
}


class Options(Namespace):
    """Files that say how each matrix product runs fastest on one device; `lsq tune` makes them."""


def parser() -> ArgumentParser:
    result = command_parser("configs", Options)
    actions = result.add_subparsers(dest="action", required=True, metavar="ACTION")
    made = {name: actions.add_parser(name, help=text) for name, text in ACTIONS.items()}
    for action in made.values():
        one_line_errors(action)
    for name in ("show", "verify"):
        made[name].add_argument("file", type=Path, metavar="FILE.json")
    made["verify"].add_argument("--quiet", action="store_true", help="no progress bar")
    return result


def run(arguments: list[str]) -> int:
    """Run an action; return 1 if `verify` found a wrong entry, else 0."""
    given = parser().parse_args(arguments)
    if given.action == "verify":
        return verify(given.file, quiet=given.quiet)
    print(list_files() if given.action == "list" else show(configuration_file.read(given.file)))
    return 0


def _gpu() -> Validators | str:
    try:
        return configuration_file.here()
    except RuntimeError as error:
        return str(error)


def list_files() -> str:
    files = configuration_file.search(_gpu())
    if not files:
        folder = configuration_file.user_folder()
        return f"There are no files in {folder}. `lsq tune` makes one."
    lines = []
    for each in files:
        if each.file is None:
            lines.append(f"{each.path}: damaged: {each.refusal}")
            continue
        verdict = "used" if each.refusal is None else f"not used: {each.refusal}"
        name, count = each.file.validators.device, len(each.file.entries)
        lines.append(f"{each.path}: {name}, {count} entries; {verdict}")
    return "\n".join(lines)


def show(file: ConfigurationFile) -> str:
    """Format a file: its device and a table of its entries."""
    validators = file.validators
    words = [
        f"{name} {value}"
        for name, value in vars(validators).items()
        if name not in ("device", "format")
    ]
    lines = [
        f"{validators.device}: {', '.join(words)}",
        f"{len(file.entries)} entries; times in microseconds",
    ]
    if file.entries:
        sides = ["left" if title in TEXTS else "right" for title in HEAD]
        lines.append(
            fitted([_row(entry) for entry in file.entries], HEAD, sides, style="plain", keys=4)
        )
    return "\n".join(lines)


def _row(entry: Entry) -> tuple[str, ...]:
    key, times = entry.key, entry.times
    types = f"{key.dtype} {key.out}"
    numbers = [f"{time:.1f}" for time in (times.chosen, times.default, times.float)]
    measured = (*numbers, f"{entry.gain:.2f}", f"{entry.spread:.1%}", entry.date[:10])
    run_as = str(entry.configuration)
    if times.other is not None:
        other = OTHER.get(type(entry.configuration), "others")
        run_as += f"; {times.other / times.chosen:.2f} times as fast as {other}"
    return (key.op, str(key.m), str(key.n), str(key.k), key.layout, types, *measured, run_as)


def verify(path: Path, *, quiet: bool) -> int:
    """Check every entry and print the wrong ones; ValueError if the file is of another device."""
    file = configuration_file.read(path)
    here = _gpu()
    refusal = here if isinstance(here, str) else difference(file.validators, here)
    if refusal is not None:
        raise ValueError(f"{path}: {refusal}; verify it on the device that it was made on")
    faults = 0
    trials = gpu_trials(cache=0)  # one set of operands: nothing is timed
    hidden = quiet or None  # None: hidden unless there is a terminal
    with tqdm(file.entries, desc="verifying", unit="entry", disable=hidden, leave=False) as bar:
        for entry in bar:
            fault = entry_fault(entry, trials)
            if fault is not None:
                faults += 1
                bar.write(f"{entry.key}: {fault}")
    print(f"{len(file.entries)} entries checked; {faults or 'none'} wrong.")
    return 1 if faults else 0
