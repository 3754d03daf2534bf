"""`lsq tune --device cpu`: for which rows registers or tiles multiply packed fields faster here."""

import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import torch
from tqdm import tqdm

from lsq.commands.options import check_writable
from lsq.gemm import registers
from lsq.gemm.registers import BY_RULE, KINDS, MOST, Tuned
from lsq.native import tiles
from lsq.ops.packed_project import PackedProject
from lsq.ops.packed_weight import PackedWeight
from lsq.program.values import Coded
from lsq.quant.formats import Format, Grain
from lsq.quant.stored import Decode, StoredType
from lsq.run.backends import backend

CODES, INPUTS = 2**20, 1024
"""Codes of a weight, which stay in the caches, and its inputs."""
ROUNDS, SECONDS = 5, 1e-3
TRIED = (*range(1, 11), 12, MOST)
"""Rows that are timed."""


def run(quiet: bool) -> int:
    """Measure and write the file; ValueError where nothing can be tuned. Ctrl-C writes nothing."""
    where, instructions = registers.path(), tiles.fastest()
    if where is None:
        raise ValueError("there is no home folder to write to; set HOME or XDG_CONFIG_HOME")
    if instructions == tiles.PLAIN:
        raise ValueError(
            "nothing can be tuned here: without VNNI or AMX, or without lsq's C++ library, codes"
            " are multiplied in one way"
        )
    check_writable(where, "XDG_CONFIG_HOME", makes_folders=True)
    before, found = torch.get_num_threads(), []
    torch.set_num_threads(1)
    try:
        bar = tqdm(KINDS, desc="tuning", unit="type", disable=quiet or None, file=sys.stderr)
        found = [_tuned(kind, instructions) for kind in bar]
    finally:
        torch.set_num_threads(before)
    registers.write(where, found)
    print(_report(found, where))
    return 0


def _report(found: list[Tuned], where) -> str:
    gains = [one.gain for one in found]
    lines = [f"file       {where}", f"tuned      {len(found)} stored types"]
    lines += [f"faster     {statistics.geometric_mean(gains):.3f} times on average,"]
    lines[-1] += f" {max(gains):.2f} at best, for 1 to {MOST} rows"
    return "\n".join(lines)


def _tuned(kind: str, instructions: str) -> Tuned:
    """Time a stored type. Raises RuntimeError: the two ways differ."""
    times = {rows: _times(kind, instructions, rows) for rows in TRIED}

    def total(most: int) -> float:
        return sum(times[rows][MOST if rows <= most else 0] for rows in TRIED)

    best = min((0, *TRIED), key=total)
    rule = sum(times[rows][BY_RULE] for rows in TRIED)
    gain = max(1.0, rule / total(best))
    return Tuned(kind=kind, instructions=instructions, rows=best, gain=round(gain, 3))


def _times(kind: str, instructions: str, rows: int) -> dict[int, float]:
    """Return seconds of a product with registers for up to MOST rows, for none, and by the rule."""
    weight = _weight(kind, instructions)
    codes = torch.randint(-127, 128, (rows, INPUTS), dtype=torch.int8)
    given = Coded(format=_INT8, codes=codes, scale=torch.ones(1))
    sides, outs = {}, {}
    for most in (MOST, 0, BY_RULE):
        outs[most] = torch.empty(rows, weight.columns)
        operation = PackedProject(x=given, weight=replace(weight, registers=most), out=outs[most])
        sides[most] = backend("cpu").prepare([(operation, [])])
        sides[most]()
    if not all(torch.equal(one, outs[MOST]) for one in outs.values()):
        raise RuntimeError(f"{kind} bits: registers and tiles differ for {rows} rows")
    found = {most: list(_seconds(side)) for most, side in sides.items()}
    return {most: statistics.median(each) for most, each in found.items()}


def _seconds(side) -> Iterator[float]:
    begin = time.perf_counter()
    side()
    repeats = max(1, round(SECONDS / max(time.perf_counter() - begin, 1e-7)))
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for _ in range(repeats):
            side()
        yield (time.perf_counter() - begin) / repeats


def _weight(kind: str, instructions: str) -> PackedWeight:
    bits, _, table = kind.partition(" ")
    count, decode = 2 ** int(bits), Decode(table or "affine")
    stored = StoredType(bits=int(bits), decode=decode, table=tuple(range(count)) if table else ())
    codes = torch.randint(0, count, (CODES // INPUTS, INPUTS), dtype=torch.uint8)
    scale = torch.ones(len(codes))
    return PackedWeight.of_stored(codes, scale, stored, instructions=instructions)


_INT8 = Format(name="activation", bits=8, grain=Grain.TENSOR)
