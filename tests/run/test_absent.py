"""A GPU that is not here has the programs of one that is."""

import shutil

import pytest
import torch

from lsq.config import LayerConfig, QuantConfig
from lsq.layers import programs
from lsq.layers.blocks import PackedSequences
from lsq.layers.programs import Mode
from lsq.run.backends import backend
from lsq.run.cuda import AbsentGPU


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("activations", [torch.float32, torch.bfloat16])
def test_programs_are_those_of_a_gpu(activations):
    config = LayerConfig(hidden=32, heads=2, feed_forward=64, quant=QuantConfig(backward="int8"))
    absent, present = AbsentGPU(activations), backend("emulated", activations)
    modes = [Mode(training=True, backward=True, backend=one) for one in (absent, present)]
    found, wanted = (
        str(programs.encoder_layer(config, PackedSequences(rows=16, count=2), mode))
        for mode in modes
    )
    assert found == wanted and "StartScales" in found and "FinishSums" in found
    assert absent.few_sizes == present.few_sizes
