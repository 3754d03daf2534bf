"""What 2:4 sparsity costs a small language model in int8, by how it is retrained.

    python benchmarks/sparse_training.py TEXT [--dense 400] [--sparse 150] [--seeds 2]

Trains a model of bytes on TEXT (a file, which may be compressed by xz), and goes on with a copy of
it in each way: dense; with masks that stay, by magnitude or by output; with masks that are
refreshed, under plain straight-through gradients and under SR-STE with several decays. Prints the
loss of held-out text, in nats a byte, after pruning and after retraining, and the share of values
that the last refresh exchanged; the last line is a JSON object.
Shape letters: B sequences, T bytes of a sequence.
"""

import argparse
import copy
import json
import lzma
from functools import partial
from pathlib import Path

import torch
from results_table import markdown_table
from torch import Tensor

from lsq.config import LayerConfig
from lsq.layers import TransformerLanguageModel
from lsq.models.sparsity import Pruning, sparsify
from lsq.optim import Adam

SEQUENCES, LENGTH = 16, 64
HELD_OUT = 60_000
"""Bytes at the end of the text."""
BATCHES = 12
"""Of held-out text."""
PADDING, WORDS = 0, 272
"""Bytes are counted from 1 on; the vocabulary is padded."""
WAYS: dict[str, Pruning | None] = {
    "dense": None,
    "masks stay, by magnitude": Pruning(every=0),
    "masks stay, by output": Pruning(every=0, measure="output"),
    "straight-through": Pruning(decay=0.0),
    "SR-STE, decay 0.1": Pruning(decay=0.1),
    "SR-STE, decay 1": Pruning(decay=1.0),
    "SR-STE, decay 10": Pruning(decay=10.0),
    "SR-STE, decay 1, every update": Pruning(decay=1.0, every=1),
}


def read(path: Path) -> tuple[Tensor, Tensor]:
    """Bytes to train on and held-out ones, int64.

    Raises:
        ValueError: the text is too short.
    """
    with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as file:
        text = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8).long() + 1
    if len(text) < 2 * HELD_OUT:
        raise ValueError(f"{path} has {len(text)} bytes; give a text of {2 * HELD_OUT} or more")
    return text[:-HELD_OUT], text[-HELD_OUT:]


def batch(text: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Bytes [B, T], and those that follow."""
    starts = torch.randint(len(text) - LENGTH, (SEQUENCES, 1), generator=generator)
    taken = text[starts + torch.arange(LENGTH + 1)]
    return taken[:, :-1].contiguous(), taken[:, 1:].contiguous()


def made(seed: int) -> TransformerLanguageModel:
    torch.manual_seed(seed)
    config = LayerConfig(hidden=64, heads=4, feed_forward=256, pre_norm=True)
    return TransformerLanguageModel(WORDS, config, layers=2, padding_idx=PADDING)


@torch.no_grad()
def loss_of(model: TransformerLanguageModel, text: Tensor) -> float:
    """Nats a byte."""
    generator = torch.Generator().manual_seed(99)
    model.eval()
    found = [model(*batch(text, generator))[1].item() for _ in range(BATCHES)]
    model.train()
    return sum(found) / (BATCHES * SEQUENCES * LENGTH)


def train(
    model: TransformerLanguageModel,
    text: Tensor,
    updates: int,
    rate: float,
    seed: int,
    sparsity=None,
) -> None:
    """Under a learning rate that falls to zero; `sparsity` follows the optimizer."""
    optimizer, generator = Adam(model.parameters(), lr=rate), torch.Generator().manual_seed(seed)
    if sparsity is not None:
        sparsity.follow(optimizer)
    for update in range(updates):
        optimizer.param_groups[0]["lr"] = rate * (1 - update / updates)
        loss, _ = model(*batch(text, generator))
        (loss / (SEQUENCES * LENGTH)).backward()
        optimizer.step()
        optimizer.zero_grad()


def compare(text: Tensor, held_out: Tensor, dense: int, sparse: int, seed: int) -> list[dict]:
    """A row for every way."""
    base, rows = made(seed), []
    train(base, text, dense, 3e-3, seed)
    for name, pruning in WAYS.items():
        model, sparsity = copy.deepcopy(base), None
        if pruning is not None:
            run = partial(model, *batch(text, torch.Generator().manual_seed(5)))
            sparsity = sparsify(model, pruning, run=run if pruning.measure == "output" else None)
        row = {"way": name, "seed": seed, "pruned": loss_of(model, held_out)}
        train(model, text, sparse, 1e-3, seed + 100, sparsity)
        changed = 0.0 if sparsity is None or not pruning.every else sparsity.changed
        rows.append({**row, "retrained": loss_of(model, held_out), "exchanged": changed})
    return rows


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("text", type=Path, help="a text file, or one compressed by xz")
    options.add_argument("--dense", type=int, default=400, help="updates before pruning")
    options.add_argument("--sparse", type=int, default=150, help="updates after it")
    options.add_argument("--seeds", type=int, default=2)
    given = options.parse_args()
    text, held_out = read(given.text)
    rows = [
        row
        for seed in range(1, given.seeds + 1)
        for row in compare(text, held_out, given.dense, given.sparse, seed)
    ]
    print("\n".join(markdown_table(rows)))
    print(
        json.dumps(
            {"dense": given.dense, "sparse": given.sparse, "torch": torch.__version__, "rows": rows}
        )
    )


if __name__ == "__main__":
    main()
