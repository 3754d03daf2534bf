"""What modules of others keep for the backward pass, beside planned memory."""

from collections import Counter

import torch
from torch import nn

import lsq
from lsq.layers.memory import plan_memory, release_memory
from lsq.run.rehearsal import counting_kept, described

ROWS, WIDTH = 5, 64
BYTES = ROWS * WIDTH * 4


def test_every_storage_counts_once_with_the_module_that_keeps_it():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
    found = Counter()
    with counting_kept(model, found):
        model(torch.randn(ROWS, WIDTH)).square().sum()
    assert found == {"Linear": 2 * BYTES, "GELU": BYTES, "Tanh": BYTES}
    model(torch.randn(ROWS, WIDTH))
    assert sum(found.values()) == 4 * BYTES


def test_a_rehearsal_counts_what_is_not_of_lsq():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    lsq.convert(model)
    x = torch.randn(ROWS, WIDTH)
    memory = plan_memory(model, lambda: model(x).square().mean())
    release_memory(model)
    assert memory.outside == {"GELU": BYTES, "the loss": BYTES}
    assert repr(memory).startswith("<StepMemory: ") and "tensors of lsq's layers in 0." in str(
        memory
    )
    assert str(memory).endswith("not lsq's (GELU 0.0, the loss 0.0)")


def test_in_words():
    assert described({}) == "nothing is kept"
    many = {f"Module{number}": (number + 1) * 2**20 for number in range(7)}
    text = (
        "28.0 MiB are kept by modules that are not lsq's (Module6 7.0, Module5 6.0, Module4"
        " 5.0,"
        " Module3 4.0, "
    )
    assert described(many) == text + "Module2 3.0, 2 others)"
