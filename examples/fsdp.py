"""FSDP2: the GPT of train_gpt.py in shards over several processes, in int8, with a checkpoint that
it goes on from.

torchrun --standalone --nproc-per-node 2 examples/fsdp.py
torchrun --standalone --nproc-per-node 2 examples/fsdp.py --gradients --checkpoint run   # again: it
goes on
torchrun --standalone --nproc-per-node 2 examples/fsdp.py --codes --gradients  # all that travels is
codes
torchrun --standalone --nproc-per-node 2 examples/fsdp.py --float                        # and
bfloat16 beside it
"""

import argparse
import shutil
import time
from pathlib import Path

import torch
from torch import distributed
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from tqdm import tqdm
from train_gpt import GPT, Block, loss_of, read

import lsq
from lsq.dist.fsdp import compress_reduce_scatter
from lsq.optim import Adam


def train(side: str, given: argparse.Namespace) -> tuple[float, float]:
    """(mean loss of the last ten steps over all processes, seconds a step)."""
    rank = distributed.get_rank()
    torch.manual_seed(given.seed)  # the same weights in every process
    letters, text = read(given.text)
    model = GPT(
        len(letters), context=given.context, hidden=given.hidden, heads=4, layers=given.layers
    )
    if side == "int8":
        reports = [lsq.convert(model)]  # before fully_shard
        if given.codes:
            reports.append(lsq.train_codes(model))
        if rank == 0:
            print(*reports, sep="\n")
    for block in model.blocks:
        if isinstance(block, Block):
            fully_shard(block)
    fully_shard(model)
    if given.gradients:
        compress_reduce_scatter(model)
    optimizer = Adam(model.parameters(), lr=1e-3)
    if given.checkpoint and (given.checkpoint / side).exists():
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        checkpoint.load(state, checkpoint_id=given.checkpoint / side)
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
    torch.manual_seed(given.seed + rank)  # batches of its own
    losses, began = [], time.perf_counter()
    with tqdm(range(given.steps), desc=side, unit=" steps", disable=rank > 0) as bar:
        for _ in bar:
            loss = loss_of(model, text, given.rows)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            bar.set_postfix(loss=f"{loss.item():.2f}", refresh=False)
    seconds = (time.perf_counter() - began) / given.steps
    if given.checkpoint:
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        folder, partial = (given.checkpoint / name for name in (side, f"{side}.partial"))
        checkpoint.save(state, checkpoint_id=partial)  # a full disk leaves the one before
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
    mean = torch.stack(losses[-10:]).mean()
    distributed.all_reduce(mean)
    return mean.item() / distributed.get_world_size(), seconds


def main(words: list[str] | None = None) -> None:
    """Train in shards."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "text", nargs="?", type=Path, help="a text file; default: lsq's own documentation"
    )
    parser.add_argument(
        "--float", action="store_true", help="train without int8 as well, and compare"
    )
    parser.add_argument(
        "--gradients", action="store_true", help="let gradients travel in int8, too"
    )
    parser.add_argument(
        "--codes", action="store_true", help="train int8 codes, without float weights"
    )
    parser.add_argument(
        "--checkpoint", type=Path, help="a folder to go on from, if it is there, and to save to"
    )
    for name, default in {
        "steps": 200,
        "rows": 8,
        "context": 128,
        "hidden": 256,
        "layers": 4,
        "seed": 1,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    given = parser.parse_args(words)
    distributed.init_process_group("gloo")
    results = {
        side: train(side, given) for side in (("bfloat16", "int8") if given.float else ("int8",))
    }
    if distributed.get_rank() == 0:
        for side, (loss, seconds) in results.items():
            print(f"{side:8} loss {loss:.3f}, {1000 * seconds:.0f} ms a step")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
