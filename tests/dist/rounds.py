"""A training by LocalUpdates on one of several machines, which torchrun starts again and again."""

import os
import sys
import time
from pathlib import Path

import torch
from torch import distributed

from lsq.dist import LocalUpdates
from lsq.dist.attempts import METHOD
from tests.dist.net import Net, batch


def main(folder: Path, rounds: int) -> None:
    """Train, go on from `folder`, and write a line for each round: round, workers, process id, sum
    of the weights."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=METHOD)
    rank, workers, saved = distributed.get_rank(), distributed.get_world_size(), folder / "saved"
    torch.manual_seed(rank)
    net = Net()
    optimizer, local = torch.optim.Adam(net.parameters()), LocalUpdates(net, every=2, mode="int4")
    states = torch.load(saved, weights_only=True) if saved.exists() else {}
    if states:
        net.load_state_dict(states["model"])
        optimizer.load_state_dict(states["optimizer"])
    local.load_state_dict(states.get("local"))
    while local.rounds < rounds:
        net(batch(rank, 2 * local.rounds + local.steps)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.05)
        if local.step():
            states = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(states | {"local": local.state_dict()}, folder / "partial")
            (folder / "partial").replace(saved)
            total = sum(one.double().sum().item() for one in net.parameters())
            with (folder / "log").open("a") as log:
                log.write(f"{local.rounds} {workers} {os.getpid()} {total.hex()}\n")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
