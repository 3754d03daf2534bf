"""What rounds of local updates cost in quality and save in bytes: four real workers train a small
Llama on Python's help texts, by gloo on one machine.

`minus_float` is the held-out loss in nats less that of rounds in floats of the same layers, the
mean over the seeds, and `most` the worst seed's; `nudged` weights differ by a millionth, so that
its row shows what luck does. `bytes` are those that a worker sends in the whole training, for each
parameter; `ratio` compares them with data parallel training in floats.
"""

import json
import math
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import common
import torch
from model_quality import Llama, Size, nudge, rate
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import lsq
from lsq.dist import LocalUpdates

PUBLISHED = {"mode": "float", "learning_rate": 0.7, "momentum": 0.9}
FLOAT, CONVERTED = "float", "int8 layers, float"
SIDES: dict[str, dict | None] = {
    "data parallel": None,
    "one worker": {},
    FLOAT: {"mode": "float"},
    "nudged": {"mode": "float"},
    "int8": {"mode": "int8"},
    "int4": {"mode": "int4"},
    "Nesterov 0.7, 0.9": PUBLISHED,
    CONVERTED: {"mode": "float"},
    "int8 layers, nudged": {"mode": "float"},
    "int8 layers, int8": {"mode": "int8"},
    "int8 layers, int4": {"mode": "int4"},
}
"""Name -> options of LocalUpdates; {}: no other worker; None: all in every step."""
SIZE = Size(
    **{"layers": 2, "hidden": 64, "heads": 4, "feed_forward": 192, "length": 64, "batch": 2},
    **{"updates": 300, "warmup": 30, "learning_rate": 2e-3, "weight_decay": 0.0},
)


def train(task: Llama, side: str, seed: int, every: int) -> dict:
    """Train once; every worker calls it. Return the held-out nats and the bytes a parameter."""
    options = SIDES[side]
    torch.manual_seed(seed)
    rank, workers, size = distributed.get_rank(), distributed.get_world_size(), task.size
    model = whole = task.model()
    if "nudged" in side:
        nudge(model)
    if "layers" in side:
        lsq.convert(model)
    local, values = None, sum(one.numel() for one in model.parameters())
    if options is None:
        whole = DistributedDataParallel(model)
    elif options:
        local = LocalUpdates(model, every=every, **options)
    optimizer = torch.optim.AdamW(model.parameters(), size.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(size, step))
    for _, batch in zip(range(size.updates), task.batches(1000 * seed + rank), strict=False):
        whole(**batch).loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if local is not None:
            local.step()
    sent = 0 if local is None else local.bytes_sent / values
    if options is None:
        sent = size.updates * 8 * (workers - 1) / workers
    with torch.no_grad():
        return {"nats": held_out(task, model.eval()), "bytes": sent}


def held_out(task: Llama, model: nn.Module) -> float:
    return task.scores(model, last=True)["bits"] * math.log(2)


def work(options) -> None:
    """What each worker does; rank 0 writes {side: a result for each seed}."""
    distributed.init_process_group("gloo")
    task = Llama(size_of(options))
    found = {
        side: [train(task, side, seed, options.every) for seed in range(options.seeds)]
        for side in SIDES
    }
    if distributed.get_rank() == 0:
        options.found.write_text(json.dumps(found))
    distributed.barrier()
    distributed.destroy_process_group()


def size_of(options) -> Size:
    if not options.quick:
        return SIZE
    return Size(**vars(SIZE) | {"updates": 4, "warmup": 1, "length": 16})


def rows(found: dict[str, list[dict]]) -> list[dict]:
    result, most = [], found["data parallel"][0]["bytes"]
    for side, of_seeds in found.items():
        base = found[CONVERTED if "layers" in side else FLOAT]
        off = [one["nats"] - other["nats"] for one, other in zip(of_seeds, base, strict=True)]
        sent = of_seeds[0]["bytes"]
        result.append(
            {
                "side": side,
                "nats": statistics.mean(one["nats"] for one in of_seeds),
                "minus_float": statistics.mean(off),
                "most": max(off),
                "bytes": sent,
                "ratio": most / sent if sent else None,
            }
        )
    return result


def main() -> None:
    parser = common.parser(__doc__)
    parser.set_defaults(threads=1)
    parser.add_argument("--workers", type=common.positive, default=4, metavar="N")
    parser.add_argument("--every", type=common.positive, default=10, metavar="K")
    parser.add_argument("--seeds", type=common.positive, default=5, metavar="N")
    parser.add_argument("--found", type=Path, metavar="FILE", help="this process is a worker")
    options = common.parse(parser)
    if options.quick:
        options.workers, options.every, options.seeds = 2, 2, 1
    if options.found is not None:
        work(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(options.workers), __file__, "--found", str(path)]
        command += ["--every", str(options.every), "--seeds", str(options.seeds)]
        command += ["--threads", str(options.threads), *(["--quick"] if options.quick else [])]
        subprocess.run(command, check=True)
        found = json.loads(path.read_text())
    conditions = common.conditions(
        options,
        packages=("transformers",),
        workers=options.workers,
        every=options.every,
        seeds=options.seeds,
        size=vars(size_of(options)),
        baseline="data parallel",
    )
    common.report("local_updates", rows(found), conditions, options)


if __name__ == "__main__":
    main()
