"""What is stored of a sparse matrix, and the product with it."""

import pytest
import torch

from lsq.models.sparsity import Packed, choose, pack, product, unpack


def sparse(rows: int, columns: int, seed: int = 1) -> torch.Tensor:
    """int8 codes, also with groups of fewer than two values."""
    codes = torch.randint(
        -127, 128, (rows, columns), generator=torch.Generator().manual_seed(seed)
    ).to(torch.int8)
    codes = codes * choose(codes.int().abs())
    codes[:, ::3] = 0
    return codes


@pytest.mark.parametrize("shape", [(1, 4), (5, 8), (3, 12), (17, 44), (0, 16)])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float32, torch.bfloat16])
def test_comes_back(shape, dtype):
    matrix = sparse(*shape).to(dtype)
    packed = pack(matrix)
    assert packed.values.shape == (shape[0], shape[1] // 2) and packed.values.dtype == dtype
    assert (
        packed.indices.shape == (shape[0], -(-shape[1] // 8))
        and packed.indices.dtype == torch.uint8
    )
    assert torch.equal(unpack(packed), matrix)


def test_where_indices_lie():
    """The example of two groups: values at 1 and 3, and at 0 and 2, in one byte from its lowest
    bits on."""
    packed = pack(torch.tensor([[0, 5, 0, -6, 7, 0, 8, 0]], dtype=torch.int8))
    assert packed.values.tolist() == [[5, -6, 7, 8]]
    assert packed.indices.tolist() == [[0b10_00_11_01]]
    assert packed.columns().tolist() == [[1, 3, 4, 6]]


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"), [(1, 1, 4), (5, 300, 36), (3, 7, 256), (0, 4, 8), (4, 0, 8)]
)
def test_product_is_that_of_the_dense_matrix(rows, outputs, inputs):
    x = torch.randint(-127, 128, (rows, inputs), generator=torch.Generator().manual_seed(3)).to(
        torch.int8
    )
    weight = sparse(outputs, inputs)
    found = product(x, pack(weight))
    assert found.dtype == torch.int32
    assert torch.equal(found.double(), x.double() @ weight.double().t())


def test_the_most_negative_integer_counts_as_large():
    with pytest.raises(ValueError, match=r"row 0 holds \[1, -128, 2, 0\]"):
        pack(torch.tensor([[1, -128, 2, 0]], dtype=torch.int8))
    matrix = torch.tensor([[1, -128, 0, 0]], dtype=torch.int8)
    assert torch.equal(unpack(pack(matrix)), matrix)


def test_dense_matrices_are_refused():
    matrix = sparse(3, 12)
    matrix[2, 4:8] = torch.tensor([1, 2, 0, 3])
    with pytest.raises(
        ValueError,
        match=r"row 2 holds \[1, 2, 0, 3\] in columns 4 to 7; .*lsq.models.sparsity.choose first",
    ):
        pack(matrix)


@pytest.mark.parametrize(
    "x", [torch.zeros(2, 8, dtype=torch.int8), torch.zeros(2, 12), torch.zeros(12).char()]
)
def test_product_refuses_other_inputs(x):
    with pytest.raises(ValueError, match=r"x must be \[M, 12\]"):
        product(x, pack(sparse(3, 12)))


def test_product_refuses_other_weights():
    packed = pack(sparse(3, 12))
    with pytest.raises(ValueError, match=r"the weight torch.float32"):
        product(
            torch.zeros(2, 12).char(), Packed(values=packed.values.float(), indices=packed.indices)
        )
