"""Bytes a parameter of full training: resident memory of a process that trains linear layers.

Each side is a process of its own, which first trains a small model, so that libraries are loaded.
"peak" is the largest resident memory while a large one is made and trained, above what there was
before; "after" is what is left when unused memory has been given back to the system. "ratio" is the
baseline's peak over the side's.
"""

import argparse
import ctypes
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import common
import torch
from torch import nn

import lsq
from lsq.optim import Adam

UPDATES, ROWS = 3, 32
WIDTH, LAYERS = 2048, 24
BASELINE = "float32 AdamW"


def of_codes(parameters) -> Adam:
    return Adam(parameters, 1e-3, moment_bits=8).step_in_backward()


def adam_of_torch(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-3, foreach=False)


def codes(model: nn.Module, *, remainder: bool) -> None:
    lsq.convert(model)
    lsq.train_codes(model, remainder=remainder)


SIDES = {
    BASELINE: (lambda model: None, adam_of_torch),
    "bfloat16 AdamW": (nn.Module.bfloat16, adam_of_torch),
    "lsq int8, float weights": (lsq.convert, partial(Adam, lr=1e-3)),
    "lsq codes and remainders": (partial(codes, remainder=True), of_codes),
    "lsq codes": (partial(codes, remainder=False), of_codes),
}


def train(side: str, layers: int, width: int) -> float:
    """Train from random weights; the last loss."""
    convert, optimizer_of = SIDES[side]
    torch.manual_seed(1)
    bare = torch.bfloat16 if "bfloat16" in side else torch.float32
    model = nn.Sequential(*(nn.Linear(width, width, bias=False, dtype=bare) for _ in range(layers)))
    convert(model)
    optimizer = optimizer_of(model.parameters())
    x = torch.randn(ROWS, width, dtype=bare)
    for _ in range(UPDATES):
        loss = (model(x.clone().requires_grad_()) - x.roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    kept.append((model, optimizer))
    return loss.item()


kept: list = []
"""What a process has trained, whose memory counts."""


def status(name: str) -> int:
    """A figure of this process in bytes."""
    text = Path("/proc/self/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in text.splitlines() if line.startswith(name))


def measured(side: str, options: argparse.Namespace) -> dict:
    """What a process finds."""
    train(side, 1, 256)
    kept.clear()
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    loss = train(side, options.layers, options.width)
    parameters = options.layers * options.width**2
    peak = (status("VmHWM") - before) / parameters
    ctypes.CDLL(None).malloc_trim(0)
    after = (status("VmRSS") - before) / parameters
    found = {"parameters": parameters, "peak": peak, "after": after, "loss": loss}
    return {"side": side, **found}


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.set_defaults(threads=1)
    parser.add_argument("--layers", type=common.positive, default=LAYERS, metavar="N")
    parser.add_argument("--width", type=common.positive, default=WIDTH, metavar="N")
    parser.add_argument("--side", choices=SIDES, help="this process is a side")
    options = common.parse(parser, arguments)
    if options.quick:
        options.layers, options.width = 2, 256
    if options.side is not None:
        print(json.dumps(measured(options.side, options)))
        return
    rows = []
    for side in SIDES:
        command = [sys.executable, __file__, "--side", side, "--threads", str(options.threads)]
        command += ["--layers", str(options.layers), "--width", str(options.width)]
        # else glibc keeps freed blocks of up to 32 MB, and a peak depends on the order of them
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20)}
        done = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, text=True, env=environment
        )
        row = json.loads(done.stdout.splitlines()[-1])
        rows.append({**row, "ratio": (rows or [row])[0]["peak"] / row["peak"]})
    conditions = common.conditions(options, baseline=BASELINE, rows=ROWS, updates=UPDATES)
    common.report("training_bytes", rows, conditions, options)


if __name__ == "__main__":
    main()
