"""Whole programs as one launch list: the same results as on the CPU, run after run, in graphs and on two streams."""

import pytest
import torch

from lsq.program import kernels, layers
from tests.layers.shapes import config_of
from tests.ops.cuda import ORDERS, current_device, set_order
from tests.program.replay import distance, on_the_cpu, replay_of

OPTIONS = [
    {"backward": "int8", "dropout": 0.1}, {"backward": "float", "activation": "gelu", "pre_norm": True},
    {"mode": "float", "dropout": 0.1}, {"backward": "int8", "clip_gradient": "lsq", "weight_granularity": "tensor"},
]  # fmt: skip


def programs(options):
    config = config_of(**options)
    quant, hidden = config.quant, config.hidden
    yield layers.encoder_layer(config, 3, 7, True, True, True)
    yield layers.decoder_layer(config, 2, 5, 9, True, True, True, True)
    yield layers.vocabulary_loss(quant, 41, hidden, 91, 96 if quant.quantized else 91, 1, 0.1, True, True)
    yield layers.embedding(quant, 3, 5, 11, hidden, 9, 1, 2.0, 0.1, True, True, True)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("number", range(4))
def test_a_program_gives_what_it_gives_on_the_cpu(options, number):
    program = list(programs(options))[number]
    wanted = on_the_cpu(program)
    for order in ORDERS:
        set_order(order)
        replayed = replay_of(program, current_device())
        replayed.work.run()
        found = replayed.results()
        assert found.keys() == wanted.keys()
        worst = {name: distance(found[name], wanted[name]) for name in wanted}
        # A code that rounds the other way, after a sum in another order, moves what follows by a step.
        assert max(worst.values()) < 0.02, worst


@pytest.mark.parametrize("dtype, limit", [(torch.bfloat16, 0.08), (torch.float16, 0.03)])
def test_half_precision_stays_near(dtype, limit):
    program = next(programs({"backward": "int8"}))
    replayed = replay_of(program, current_device(), dtype)
    replayed.work.run()
    found, wanted = replayed.results(), on_the_cpu(program)
    output = program.outputs[0].name
    assert distance(found[output], wanted[output]) < limit


def test_an_operation_without_kernels_is_named():
    program = next(programs({}))
    bare = program.operations[0].definition
    placed = kernels.tensors(program, torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(bare.__dict__, "cuda", None)
        with pytest.raises(ValueError, match=f"operation {bare.name} has no CUDA implementation"):
            list(kernels.entries(program, placed))
