"""Sums over rows that operations leave in parts, and the operation that finishes those of a
pass."""

import pytest
import torch

from lsq.layers import programs
from lsq.ops.sums import TOGETHER, FinishSums, PartialSums, finish_together
from lsq.program.tensor import VirtualTensor
from lsq.run.backends import Reference
from tests.layers.examples import SENTENCES, SOURCE, mode_on, run
from tests.layers.shapes import config_of
from tests.ops.compare import empty, on_reference
from tests.ops.test_input_gradient import case


class Leaving(Reference):
    """The reference, with programs as a GPU has them."""

    leaves_sums = True


def parts(
    blocks: int,
    columns: int,
    sums: int,
    *,
    clip: bool = True,
    factor: float = 1.0,
    clip_parts: int = 1,
) -> PartialSums:
    """Of which the second sum, if any, is not wanted."""
    outs = [empty(columns), None, empty(columns)][:sums]
    width = sums * columns + clip_parts + 3
    found = PartialSums.of(
        torch.randn(blocks, width), columns, outs, empty(1) if clip else None, clip_parts=clip_parts
    )
    found.factor = factor
    return found


def virtual(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> VirtualTensor:
    """What a builder makes."""
    return VirtualTensor(name=name, shape=shape, dtype=dtype)


def test_totals():
    given = [
        parts(7, 24, 1, factor=0.5),
        parts(3, 16, 3, clip=False),
        parts(100, 0, 0, clip_parts=5),
    ]
    one, three, alone = on_reference(FinishSums.of(given)).found
    assert torch.equal(one.first, given[0].parts[:, :24].sum(dim=0))
    torch.testing.assert_close(one.clip, 0.5 * given[0].parts[:, 24:25].sum(dim=0))
    assert torch.equal(three.first, given[1].parts[:, :16].sum(dim=0)) and three.second is None
    assert torch.equal(three.third, given[1].parts[:, 32:48].sum(dim=0)) and three.clip is None
    torch.testing.assert_close(alone.clip, given[2].parts[:, :5].sum().view(1))


@pytest.mark.parametrize(
    "options",
    [
        {"backward": "int8", "dropout": 0.1},
        {"clip_gradient": "lsq", "weight_granularity": "tensor"},
        {"norm": "rms", "pre_norm": True, "activation": "gelu"},
        {"mode": "float"},
    ],
)
def test_a_pass_is_finished_at_its_end(options):
    """All gradients are what they are where each operation finishes its own sums."""
    config = config_of(**options)
    left, own = (
        programs.decoder_layer(config, SENTENCES, SOURCE, mode_on(where))
        for where in (Leaving(), Reference())
    )
    names = [operation.name for operation in left.operations]
    count = len(own.operations)
    assert names[:count] == [operation.name for operation in own.operations] and set(
        names[count:]
    ) == {"FinishSums"}
    found, expected = run(left, Leaving()), run(own, Reference())
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_programs_for_the_cpu_have_none():
    program = programs.decoder_layer(config_of(), SENTENCES, SOURCE, mode_on("cpu"))
    assert not any(isinstance(operation, FinishSums) for operation in program.operations)


def test_so_many_at_once():
    many = [case(7)[0] for _ in range(TOGETHER + 1)]
    found = finish_together(many, virtual)
    assert [len(one.found) for one in found] == [TOGETHER, 1]
    assert all(one.sum is None and one.dclip is None and one.parts is not None for one in many)


def test_what_nobody_wants_is_not_left():
    operation, _ = case(7)
    operation.sum = operation.dclip = None
    assert finish_together([operation], virtual) == [] and operation.parts is None
