"""Clips of inputs in several processes."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lsq
from lsq.config import QuantConfig
from lsq.models.huggingface import average_clips
from tests.dist.processes import run
from tests.models.models import Model, loss_of, model, tokens

STEPS = 5


def trained(rank: int, averaging: bool) -> tuple[dict[str, torch.Tensor], int]:
    made: Model = model()
    lsq.convert(made, QuantConfig(clips="learned"))
    handle = average_clips(made) if averaging else None
    passes = []
    made.words.register_forward_hook(lambda *arguments: passes.append(torch.is_grad_enabled()))
    made.score.requires_grad_(False)  # which no batch reaches
    parallel = DistributedDataParallel(made)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(parallel(tokens(10 * rank + step))).backward()
        optimizer.step()
    if handle is not None:
        handle.remove()
    return {
        name: clip.detach() for name, clip in made.named_parameters() if name.endswith("input_clip")
    }, len(passes)


def test_clips_of_inputs_stay_equal():
    """Also without a word, and by no pass more."""
    for averaging in (True, False):
        (first, passes), (second, _) = run(trained, 2, averaging)
        assert first and all(torch.equal(first[name], second[name]) for name in first)
        assert passes == STEPS


def test_one_process_is_told():
    made = nn.Sequential(nn.Linear(64, 64))
    lsq.convert(made)
    with pytest.raises(ValueError, match="there is one process; average_clips is for several"):
        average_clips(made)
