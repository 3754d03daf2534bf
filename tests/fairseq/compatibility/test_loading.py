import argparse
import io

import numpy
import omegaconf
import pytest
import torch
from fairseq.distributed.utils import _split_tensors_from_obj
from torch import nn


def reloaded(content):
    """`content` after a save and a strict load."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize(
    "content",
    [
        argparse.Namespace(arch="x", lr=[0.1]),
        numpy.float64(1.5),
        numpy.int64(3),
        numpy.array([1.0, 2.0], dtype=numpy.float32),
        omegaconf.OmegaConf.create({"task": {"data": "x", "n": 1}, "lr": [0.1, None], "flag": True}),
        omegaconf.OmegaConf.create({"args": argparse.Namespace(a=1)}, flags={"allow_objects": True}),
        _split_tensors_from_obj({"weights": torch.ones(2), "step": 1}, []),
    ],
    ids=lambda content: type(content).__name__,
)
def test_what_fairseq_saves_loads_strictly(content):
    found = reloaded({"content": content})["content"]
    assert numpy.all(found == content) and type(found) is type(content)


def test_other_types_are_still_refused():
    with pytest.raises(Exception, match="Weights only load failed"):
        reloaded({"content": nn.Linear(1, 1)})
