"""No kernel spills registers, compiled by NVRTC for several GPUs."""

import itertools

import pytest
import torch

from lsq.native.compiler import compile_kernels
from lsq.native.geometry import WIDEST, row_defines
from lsq.native.launch import Launch
from lsq.ops import cached_attention_cuda
from lsq.program.samples import placed
from tests.ops.attentions import attention, gradient_of
from tests.ops.cuda import DTYPES, in_dtype
from tests.sampling import first

ROWS = [row_defines(512), row_defines(1024)]
ROTATED = {"FLOAT": 1, "ROUNDED": 1, "ROTATED": 64, "WIDTH": 64}
KERNELS = {
    "aggregate.cu": [
        {**row_defines(columns), **kind, "ACTIVATION": 2}
        for columns in (256, 512, WIDEST)
        for kind in (
            {"FLOAT": 1, "ROUNDED": 1},
            {"FLOAT": 0, "ROUNDED": 1, "CODED": 0},
            {"FLOAT": 0, "ROUNDED": 0, "CODED": 0},
        )
    ],
    "attention_rows.cu": [{**row_defines(1536), "FLOAT": 1, "KEYS": 0, "ROUNDED": 1}],
    "bit_product.cu": [
        {"A_BITS": a, "B_BITS": b, "A_SIGNED": signed, "B_SIGNED": 1}
        for a, b, signed in ((1, 2, 0), (2, 2, 1), (3, 4, 1))
    ],
    "cached_attention.cu": [
        {"LEAST": cached_attention_cuda.LEAST, "STARTED": 1, "WIDTH": width}
        for width in (8, 40, 64, 120, 128)
    ],
    "calibration.cu": [{"FLOAT": 1, "WARPS": warps} for warps in (1, 2, 4, 8, 16)],
    "compact_adam.cu": [{}],
    "embedding.cu": [
        {**rows, **kept, "WINDOW": 16}
        for rows in ROWS
        for kept in ({"FLOAT": 1}, {"FLOAT": 0, "KEPT": 1})
    ],
    "fake_quantize.cu": [{"WHOLE": whole, "FLOAT": dtype} for whole in (0, 1) for dtype in (0, 1)],
    "fake_quantize_gradient.cu": [
        {"ACTIVATION": 2, "FLOAT": dtype, **row_defines(columns)}
        for columns in (512, 4096, WIDEST)
        for dtype in (0, 1)
    ],
    "int4.cu": [{}],
    "kept_gradient.cu": [{**rows, "FLOAT": 1} for rows in ROWS],
    "residual_norm.cu": [
        {**rows, **sums, "FLOAT": 1, "ROUNDED": 1}
        for rows in ROWS
        for sums in ({}, {"NORM_SUMS": 1})
    ],
    "rotation.cu": [
        {**ROTATED, **row_defines(columns), "HEADS": heads, "NORMED": normed}
        for columns, heads in ((1536, 16), (3072, 40))
        for normed in (0, 1)
    ],
    "rounding_gradient.cu": [
        {"FLOAT": 0, "ROUNDED": rounded, "SUMMED": 1 - rounded, **row_defines(WIDEST)}
        for rounded in (0, 1)
    ],
    "vocabulary_loss.cu": [{"FLOAT": 1, "ROW_THREADS": 512}],
    "vocabulary_sums.cu": [{}],
}
"""Sources -> what they are compiled with."""


@pytest.mark.parametrize("target", first(["sm_90a", "sm_80", "sm_100", "sm_120"], 0, 1))
@pytest.mark.parametrize("source", KERNELS)
def test_kernels_on_rows_and_heads(source, target):
    for defines in KERNELS[source]:
        assert_nothing_spills(source, tuple(sorted(defines.items())), target)


def operations():
    """Attention and its gradient."""
    for width, coded, dtype, biased in itertools.product(
        (64, 128), (False, True), DTYPES, (False, True)
    ):
        forward = attention((3,), width=width, coded=coded, biased=biased)
        for operation in (forward, gradient_of(forward)):
            yield in_dtype(operation, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_100"])
def test_kernels_of_operations(target):
    for operation in map(placed, operations()):
        scratch = [
            torch.empty(shape, dtype=dtype, device="meta")
            for shape, dtype in operation.cuda_scratch()
        ]
        for entry in operation.cuda(*scratch):
            if isinstance(entry, Launch):
                assert_nothing_spills(entry.kernel.source, entry.kernel.defines, target)


def assert_nothing_spills(source: str, defines: tuple, target: str) -> None:
    resources = compile_kernels(source, defines, target).resources
    assert resources
    for name, taken in resources.items():
        assert not taken.spill_bytes, f"{name} of {source}, {defines}, {target}"
