"""Products are exact, however they lie and are configured; scratch memory is enough, and cut
without overlaps."""

import itertools

import pytest
import torch

from lsq import gemm
from lsq.gemm import cpu_product
from lsq.gemm.configuration import A_LAYOUTS, B_LAYOUTS, CpuConfiguration
from lsq.gemm.cpu_product import (
    carve,
    configured_blocks,
    fresh_scratch,
    scratch_bytes,
    tile_product,
)
from lsq.gemm.product_key import REQUESTS
from lsq.native import tiles
from tests.gemm.operands import asked, codes

SIZES = [(1, 16, 16), (7, 48, 64), (41, 16, 112), (130, 32, 48), (48, 64, 1), (48, 32, 41)]


def exact(a, b):
    return (a.long() @ b.long().t()).to(torch.int32)


@pytest.mark.parametrize("rows", [1, 7, 16, 41, 341])
@pytest.mark.parametrize("inner, columns", [(16, 16), (48, 112), (512, 32), (2048, 16)])
@pytest.mark.parametrize("transposed", ["neither", "first", "second", "both"])
def test_exact_in_every_layout(rows, inner, columns, transposed):
    a = codes(inner, rows).t() if transposed in ("first", "both") else codes(rows, inner)
    b = codes(inner, columns).t() if transposed in ("second", "both") else codes(columns, inner)
    wanted = exact(a, b)
    assert torch.equal(gemm.int8_product(a, b), wanted)
    assert torch.equal(gemm.reference(a, b), wanted)
    out = torch.full((rows, columns), 5, dtype=torch.int32)
    assert gemm.int8_product(a, b, out=out) is out
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("inner", [1, 3, 7, 41, 341])
def test_the_inner_dimension_may_be_odd(inner):
    """Gradients of weights sum over rows, of which there may be any number."""
    a, b = codes(inner, 48).t(), codes(inner, 32).t()
    assert torch.equal(gemm.int8_product(a, b), exact(a, b))


def test_the_largest_sums_fit():
    a = torch.full((1, gemm.LARGEST_INNER), 127, dtype=torch.int8)
    b = torch.full((16, gemm.LARGEST_INNER), -127, dtype=torch.int8)
    wanted = -gemm.LARGEST_INNER * 127**2
    assert wanted > -(2**31)
    assert (gemm.int8_product(a, b) == wanted).all()
    assert (gemm.reference(a, b) == wanted).all()


def test_what_could_overflow_is_refused():
    wide = torch.zeros(1, gemm.LARGEST_INNER + 1, dtype=torch.int8)
    with pytest.raises(ValueError, match=f"{gemm.LARGEST_INNER + 1} values.*{gemm.LARGEST_INNER}"):
        gemm.int8_product(wide, wide)


def configurations(key):
    """All sorts that can run a product."""
    choices = itertools.product(A_LAYOUTS, B_LAYOUTS, (0, 1, 48, 10_000))
    for a_layout, b_layout, rows in choices:
        made = CpuConfiguration(a_layout=a_layout, b_layout=b_layout, rows=rows)
        try:
            made.check_key(key)
        except ValueError:
            continue
        yield made


def operands(key):
    """a [M, K] and b [N, K], lying as the key says."""
    a = codes(key.k, key.m).t() if key.layout[0] == "t" else codes(key.m, key.k)
    b = codes(key.n, key.k) if key.layout[1] == "t" else codes(key.k, key.n).t()
    return a, b


def carved(key, configuration):
    """Scratch memory full of rubbish."""
    memory = torch.full((scratch_bytes(key, configuration),), 77, dtype=torch.int8)
    return carve(memory, key, configuration)


@pytest.mark.parametrize("m, n, k", SIZES)
@pytest.mark.parametrize("op", ["project", "project_input_gradient", "project_weight_gradient"])
def test_blocks_are_exact_however_configured(m, n, k, op):
    key = asked(op, m, n, k)
    a, b = operands(key)
    wanted = gemm.reference(a, b)
    for configuration in configurations(key):
        blocks = []
        for first, sums in configured_blocks(a, b, configuration, carved(key, configuration)):
            assert first == sum(map(len, blocks)) and len(sums) <= (configuration.rows or m)
            blocks.append(sums.clone())
        assert torch.equal(torch.cat(blocks), wanted), configuration


@pytest.mark.parametrize(
    ("op", "size", "served"),
    [
        ("project", (513, 48, 64), (544, 48, 64)),
        ("project_input_gradient", (513, 48, 64), (544, 48, 64)),
        ("project_weight_gradient", (48, 32, 513), (48, 32, 544)),
    ],
)
def test_scratch_of_a_larger_batch_will_do(op, size, served):
    """Products above 512 tokens run with the entry, and the scratch memory, of the next multiple of
    32."""
    a, b = operands(asked(op, *size))
    larger = asked(op, *served)
    for configuration in configurations(larger):
        if configuration.rows == 1:
            continue  # slow, and shown above
        memory = carved(larger, configuration)
        blocks = [sums.clone() for _, sums in configured_blocks(a, b, configuration, memory)]
        assert torch.equal(torch.cat(blocks), gemm.reference(a, b)), configuration


def test_blocks_are_as_equal_as_can_be():
    key = asked("project", 100, 16, 16)
    configuration = CpuConfiguration(rows=48)
    firsts = [
        first
        for first, _ in configured_blocks(*operands(key), configuration, carved(key, configuration))
    ]
    assert firsts == [0, 48, 96]
    key, configuration = asked("project", 100, 16, 16), CpuConfiguration(rows=96)
    firsts = [
        first
        for first, _ in configured_blocks(*operands(key), configuration, carved(key, configuration))
    ]
    assert firsts == [0, 64]  # 50 rows each, in units of 32


@pytest.mark.parametrize("m, n, k", SIZES)
@pytest.mark.parametrize("op", REQUESTS)
@pytest.mark.parametrize("kernel", tiles.INSTRUCTIONS)
def test_tiles_are_exact(m, n, k, op, kernel):
    if kernel not in tiles.usable():
        pytest.skip(f"this processor has no {kernel}")
    key, a_b = asked(op, m, n, k), operands(asked(op, m, n, k))
    for rows in (0, 32, 64):
        configuration = CpuConfiguration(kernel=kernel, rows=rows)
        scratch = fresh_scratch(key, configuration)
        blocks = [sums.clone() for _, sums in configured_blocks(*a_b, configuration, scratch)]
        assert torch.equal(torch.cat(blocks), gemm.reference(*a_b)), configuration


def test_instructions_that_are_not_here_are_refused(monkeypatch):
    monkeypatch.setattr(tiles, "usable", lambda: ("plain",))
    key, configuration = asked("project", 4, 16, 16), CpuConfiguration(kernel="amx")
    with pytest.raises(ValueError, match="'amx' cannot run here; there are 'plain'"):
        tile_product(*operands(key), configuration, carved(key, configuration)["packed"])


def test_what_could_overflow_is_refused_however_configured():
    wide = torch.zeros(1, gemm.LARGEST_INNER + 1, dtype=torch.int8)
    sums = torch.zeros(1, 1, dtype=torch.int32)
    for configuration in (CpuConfiguration(), CpuConfiguration(rows=1)):
        with pytest.raises(ValueError, match=f"{gemm.LARGEST_INNER + 1} values"):
            next(configured_blocks(wide, wide, configuration, {"sums": sums}))


def test_copies_have_rows_an_odd_number_of_cache_lines_apart():
    for k, distance in [
        (16, 64),
        (64, 64),
        (65, 192),
        (512, 576),
        (576, 576),
        (1000, 1088),
        (4096, 4160),
    ]:
        key = asked("project", 8, 16, k)
        tensors = carved(key, CpuConfiguration(a_layout="padded", b_layout="padded"))
        assert tensors["a"].shape == (8, k) and tensors["a"].stride() == (distance, 1)
        assert tensors["b"].shape == (16, k) and tensors["b"].stride() == (distance, 1)
    turned = asked("project_weight_gradient", 512, 1024, 24)
    tensors = carved(turned, CpuConfiguration(a_layout="padded", b_layout="padded"))
    assert tensors["a"].shape == (512, 24) and tensors["a"].stride() == (1, 576)
    assert tensors["b"].shape == (1024, 24) and tensors["b"].stride() == (1, 1088)
    tensors = carved(turned, CpuConfiguration(a_layout="mk", b_layout="nk"))
    assert tensors["a"].stride() == (64, 1) and tensors["b"].stride() == (64, 1)


@pytest.mark.parametrize("op", REQUESTS)
def test_parts_are_aligned_and_apart(op):
    key = asked(op, 100, 24, 40)
    for configuration in configurations(key):
        size = scratch_bytes(key, configuration)
        memory = torch.zeros(size, dtype=torch.int8)
        carved = carve(memory, key, configuration)
        assert list(carved) == list(cpu_product.parts(key, configuration))
        for number, tensor in enumerate(carved.values(), 1):
            assert (tensor.data_ptr() - memory.data_ptr()) % cpu_product.ALIGNMENT == 0
            tensor.fill_(number)
        for number, tensor in enumerate(carved.values(), 1):
            assert (tensor == number).all()


@pytest.mark.parametrize("op", REQUESTS)
def test_more_tokens_never_need_less(op):
    key = asked(op, 8, 24, 8)
    for configuration in configurations(key):
        sizes = [scratch_bytes(key.with_tokens(tokens), configuration) for tokens in range(1, 200)]
        assert sizes == sorted(sizes)


def test_untuned_products_need_what_they_did(monkeypatch):
    monkeypatch.setattr(tiles, "usable", lambda: ())
    for op, request in REQUESTS.items():
        key = asked(op, 1000, 24, 40)
        parts = cpu_product.parts(key, CpuConfiguration.default(key))
        assert {name: tuple(part)[:2] for name, part in parts.items()} == {
            "sums": ((min(1000, request.rows), 24), torch.int32)
        }


def test_too_little_memory():
    key = asked("project", 100, 24, 40)
    with pytest.raises(
        ValueError, match=r"needs 9600 bytes of scratch memory .*, and has 9599; choose"
    ):
        carve(torch.zeros(9599, dtype=torch.int8), key, CpuConfiguration())
