"""Scratch memory: enough, cut into tensors that do not overlap, and never less for more tokens."""

import itertools

import pytest
import torch

from lsq.gemm import scratch
from lsq.gemm.configuration import A_LAYOUTS, B_LAYOUTS, PATHS, CpuConfiguration
from lsq.gemm.product_key import LAYOUTS, OPERATIONS, ProductKey


def configurations(key):
    """All sorts that can run a product."""
    choices = itertools.product(A_LAYOUTS, B_LAYOUTS, (0, 1, 48, 10_000), PATHS)
    for a_layout, b_layout, rows, path in choices:
        made = CpuConfiguration(a_layout=a_layout, b_layout=b_layout, rows=rows, path=path)
        try:
            made.check_key(key)
        except ValueError:
            continue
        yield made


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_are_aligned_and_apart(op, layout):
    key = ProductKey.of(op, 100, 24, 40, layout)
    for configuration in configurations(key):
        size = scratch.size(key, configuration)
        memory = torch.zeros(size, dtype=torch.int8)
        carved = scratch.carve(memory, key, configuration)
        assert list(carved) == list(scratch.parts(key, configuration))
        for number, tensor in enumerate(carved.values(), 1):
            assert (tensor.data_ptr() - memory.data_ptr()) % scratch.ALIGNMENT == 0
            tensor.fill_(number)
        for number, tensor in enumerate(carved.values(), 1):
            assert (tensor == number).all()


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_more_tokens_never_need_less(op, layout):
    key = ProductKey.of(op, 8, 24, 8, layout)
    for configuration in configurations(key):
        sizes = [scratch.size(key.with_tokens(tokens), configuration) for tokens in range(1, 200)]
        assert sizes == sorted(sizes)


def test_untuned_products_need_what_they_did():
    for op, operation in OPERATIONS.items():
        key = ProductKey.of(op, 1000, 24, 40)
        parts = scratch.parts(key, CpuConfiguration.default(op))
        if operation.in_place:
            assert not parts
        else:
            assert {name: tuple(part)[:2] for name, part in parts.items()} == {
                "sums": ((min(1000, operation.rows), 24), torch.int32)
            }


@pytest.mark.parametrize(
    ("m", "rows", "expected"), [(100, 0, 100), (100, 48, 48), (10, 48, 10)],
)
def test_block_rows(m, rows, expected):
    key = ProductKey.of("linear_int8", m, 24, 40)
    assert scratch.block_rows(key, CpuConfiguration(rows=rows)) == expected


def test_too_little_memory():
    key = ProductKey.of("linear_int8", 100, 24, 40)
    with pytest.raises(ValueError, match=r"needs 9600 bytes of scratch memory .*, and has 9599; choose"):
        scratch.carve(torch.zeros(9599, dtype=torch.int8), key, CpuConfiguration())
