"""Products are the same, bit for bit, however they are configured."""

import pytest
import torch

from lsq import gemm
from lsq.gemm import scratch
from lsq.gemm.configuration import CpuConfiguration
from lsq.gemm.cpu_product import configured_blocks, multiply
from lsq.gemm.product_key import LAYOUTS, ProductKey
from tests.gemm.operands import codes
from tests.gemm.test_scratch import configurations

SIZES = [(1, 16, 16), (7, 48, 64), (41, 16, 112), (130, 32, 48), (48, 64, 1), (48, 32, 41)]


def operands(key):
    """a [M, K] and b [N, K], lying as the key says."""
    a = codes(key.k, key.m).t() if key.layout[0] == "t" else codes(key.m, key.k)
    b = codes(key.n, key.k) if key.layout[1] == "t" else codes(key.k, key.n).t()
    return a, b


def carved(key, configuration):
    """Scratch memory full of rubbish."""
    memory = torch.full((scratch.size(key, configuration),), 77, dtype=torch.int8)
    return scratch.carve(memory, key, configuration)


@pytest.mark.parametrize("m, n, k", SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_products_are_exact_however_configured(m, n, k, layout):
    key = ProductKey.of("matmul", m, n, k, layout)
    a, b = operands(key)
    wanted = gemm.reference(a, b)
    for configuration in configurations(key):
        out = torch.full((m, n), 5, dtype=torch.int32)
        multiply(a, b, out, configuration, carved(key, configuration))
        assert torch.equal(out, wanted), configuration


@pytest.mark.parametrize("m, n, k", SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_are_exact_however_configured(m, n, k, layout):
    key = ProductKey.of("linear_int8", m, n, k, layout)
    a, b = operands(key)
    wanted = gemm.reference(a, b)
    for configuration in configurations(key):
        blocks = []
        for first, sums in configured_blocks(a, b, configuration, carved(key, configuration)):
            assert first == sum(map(len, blocks)) and len(sums) <= (configuration.rows or m)
            blocks.append(sums.clone())
        assert torch.equal(torch.cat(blocks), wanted), configuration


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scratch_of_a_larger_batch_will_do(layout):
    """Products above 512 tokens run with the entry, and the scratch memory, of the next multiple of 32."""
    for op, asked, served in [
        ("linear_int8", (513, 48, 64), (544, 48, 64)),
        ("linear_weight_gradient", (48, 32, 513), (48, 32, 544)),
    ]:
        key = ProductKey.of(op, *asked, layout)
        a, b = operands(key)
        for configuration in configurations(ProductKey.of(op, *served, layout)):
            if configuration.rows == 1:
                continue  # slow, and shown above
            memory = carved(ProductKey.of(op, *served, layout), configuration)
            blocks = [sums.clone() for _, sums in configured_blocks(a, b, configuration, memory)]
            assert torch.equal(torch.cat(blocks), gemm.reference(a, b)), configuration


def test_blocks_are_as_equal_as_can_be():
    key = ProductKey.of("linear_int8", 100, 16, 16)
    configuration = CpuConfiguration(rows=48)
    firsts = [first for first, _ in configured_blocks(*operands(key), configuration, carved(key, configuration))]
    assert firsts == [0, 34, 68]


def test_what_could_overflow_is_refused():
    wide = torch.zeros(1, gemm.LARGEST_INNER + 1, dtype=torch.int8)
    out = torch.zeros(1, 1, dtype=torch.int32)
    for configuration in (CpuConfiguration(), CpuConfiguration(rows=1)):
        with pytest.raises(ValueError, match=f"{gemm.LARGEST_INNER + 1} values"):
            multiply(wide, wide, out, configuration)


def test_copies_have_rows_an_odd_number_of_cache_lines_apart():
    for k, distance in [(16, 64), (64, 64), (65, 192), (512, 576), (576, 576), (1000, 1088), (4096, 4160)]:
        key = ProductKey.of("matmul", 8, 16, k)
        tensors = carved(key, CpuConfiguration(a_layout="padded", b_layout="padded"))
        assert tensors["a"].shape == (8, k) and tensors["a"].stride() == (distance, 1)
        assert tensors["b"].shape == (16, k) and tensors["b"].stride() == (distance, 1)
    turned = ProductKey.of("matmul", 512, 1024, 24, "tn")
    tensors = carved(turned, CpuConfiguration(a_layout="padded", b_layout="padded"))
    assert tensors["a"].shape == (512, 24) and tensors["a"].stride() == (1, 576)
    assert tensors["b"].shape == (1024, 24) and tensors["b"].stride() == (1, 1088)
    tensors = carved(turned, CpuConfiguration(a_layout="mk", b_layout="nk"))
    assert tensors["a"].stride() == (64, 1) and tensors["b"].stride() == (64, 1)
