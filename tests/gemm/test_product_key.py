"""Keys of products: what they refuse, which stands for which, and those of tensors."""

import dataclasses

import pytest
import torch

from lsq.gemm.operations import LARGEST_INNER, inner_parts
from lsq.gemm.product_key import ProductKey, key_of, rounded_tokens
from tests.gemm.operands import asked, codes, matmul, product
from tests.gemm.tuned import key

PROJECT = {"op": "project"}


@pytest.mark.parametrize(
    ("tokens", "rounded"),
    [(1, 1), (511, 511), (512, 512), (513, 544), (544, 544), (545, 576), (4096, 4096)],
)
def test_rounded_tokens(tokens, rounded):
    assert rounded_tokens(tokens) == rounded
    assert key(tokens).rounded() == key(rounded)
    assert key(rounded).rounded() == key(rounded)


def test_the_tokens_of_a_weight_gradient_are_its_inner_dimension():
    gradient = asked("project_weight_gradient", 1000, 520, 4001)
    assert gradient.tokens == 4001
    assert gradient.rounded() == asked("project_weight_gradient", 1000, 520, 4032)
    assert gradient.family == gradient.with_tokens(7).family != key().family
    longest = asked("project_weight_gradient", 64, 64, LARGEST_INNER)
    assert longest.rounded() == longest


def test_a_product_by_itself_stands_for_itself_alone():
    assert matmul(m=1001).rounded() == matmul(m=1001)


def test_a_family_is_all_but_the_tokens():
    assert key(7).family == key(4096).family
    for changes in (dict(n=64), dict(k=64), dict(op="project_input_gradient"), dict(op="matmul")):
        assert key(**changes).family != key().family


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"op": "conv"}, "op is 'conv'; allowed: 'project', "),
        ({"m": 0}, "m is 0; it must be a whole number from 1 to 2147483647"),
        ({"m": 2**31}, "m is 2147483648; it must"),
        ({"m": True}, "m is True; it must"),
        ({"m": 2.0}, "m is 2.0; it must"),
        ({"n": "64"}, "n is '64'; it must"),
        (
            {"k": LARGEST_INNER + 1},
            f"k is {LARGEST_INNER + 1}; it must be a whole number from 1 to {LARGEST_INNER}",
        ),
        ({"dtype": "float64"}, "dtype is 'float64'; allowed: 'int8', 'bfloat16'"),
        (
            PROJECT | {"dtype": "bfloat16", "out": "float32"},
            "dtype is 'bfloat16'; project says that itself: leave it",
        ),
        (PROJECT | {"layout": "nn"}, "layout is 'nn'; project says that itself"),
        (PROJECT | {"leading_a": 64}, "leading_a is 64; project says that itself"),
        (
            {"op": "matmul", "dtype": "float32", "out": "int32"},
            "out is 'int32'; allowed: 'float32'",
        ),
        (
            {"dtype": "bfloat16", "out": "float16"},
            "out is 'float16'; allowed: 'bfloat16', 'float32'",
        ),
        ({"out": "int8"}, "out is 'int8'; allowed: 'int32'"),
        ({"leading_a": 31}, "leading_a is 31; it must be a whole number from 32"),
        ({"leading_out": 15}, "leading_out is 15; it must be a whole number from 16"),
        ({"layout": "kn"}, "layout is 'kn'; allowed: 'nt', 'nn', 'tt', 'tn'"),
        ({"layout": ["nt"]}, "layout is a list; allowed"),
    ],
)
def test_no_such_product(changes, message):
    with pytest.raises(ValueError) as raised:
        ProductKey(**{"op": "matmul", "m": 8, "n": 16, "k": 32} | changes)
    assert str(raised.value).startswith(message)


def test_text():
    assert str(key()) == "project 64 x 128 x 256 (int8 to int32, nt)"
    apart = matmul(leading_out=64)
    assert str(apart) == "matmul 41 x 48 x 64 (int8 to int32, nt, leading_out 64)"
    assert key().arithmetic == 2 * 64 * 128 * 256


def test_what_is_packed_need_not_be_said():
    assert matmul() == matmul(leading_a=64, leading_b=64, leading_out=48)
    assert hash(matmul()) == hash(matmul(leading_a=64))
    assert matmul().fields() == {"m": 41, "n": 48, "k": 64}
    apart = matmul(dtype="float32", out="float32", layout="tn", leading_a=80)
    assert apart.fields().keys() == {"m", "n", "k", "dtype", "out", "layout", "leading_a"}
    assert ProductKey(**apart.fields()) == apart


def test_leading_and_lengths():
    apart = matmul(layout="tn", leading_a=80)
    assert apart.matrices == {"a": (64, 41), "b": (64, 48), "out": (41, 48)}
    assert apart.leading == {"leading_a": 80, "leading_b": 48, "leading_out": 48}
    assert apart.lengths == {"a": 63 * 80 + 41, "b": 64 * 48, "out": 41 * 48}
    assert matmul().bytes == 41 * 64 + 48 * 64 + 4 * 41 * 48


@pytest.mark.parametrize("place", ["cpu", "meta"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", ["nt", "nn", "tt", "tn"])
def test_keys_of_tensors(place, dtype, layout):
    a = torch.empty((56, 41) if layout[0] == "t" else (41, 56), dtype=dtype, device=place)
    b = torch.empty((56, 24) if layout[1] == "n" else (24, 56), dtype=dtype, device=place)
    out = torch.empty(41, 32, dtype=torch.float32, device=place)[:, :24]
    found = key_of(product(a, b, out, transpose_a=layout[0] == "t", transpose_b=layout[1] == "n"))
    name = str(dtype).removeprefix("torch.")
    wanted = ProductKey(m=41, n=24, k=56, dtype=name, out="float32", layout=layout, leading_out=32)
    assert found == wanted and found.leading_a is None


def test_keys_of_codes():
    sums = torch.empty(41, 48, dtype=torch.int32)
    assert key_of(product(codes(41, 64), codes(48, 64), sums)) == matmul()


def test_keys_of_operations_on_a_gpu():
    sums = torch.empty(41, 48, dtype=torch.int32)
    of_gradient = product(codes(41, 64), codes(48, 64), sums, op="project_input_gradient")
    assert key_of(of_gradient) == asked("project_input_gradient", 41, 48, 64)
    assert key_of(of_gradient).by_itself == matmul() == matmul().by_itself
    with pytest.raises(
        ValueError, match="project_input_gradient multiplies matmul .* on a GPU, not .*leading_a 80"
    ):
        key_of(dataclasses.replace(of_gradient, a=codes(41, 80)[:, :64]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"a": codes(41, 80)},
            r"a \[41, 80\], b \[48, 64\], out \[41, 48\] do not fit.*a \[M, K\] and b \[N, K\]",
        ),
        ({"b": codes(64, 48)}, "do not fit"),
        ({"out": torch.empty(41, 47, dtype=torch.int32)}, "do not fit"),
        ({"a": codes(2, 41, 64)}, r"a product are matrices, not a \[2, 41, 64\]"),
        ({"a": codes(64)}, "a product are matrices"),
        ({"b": torch.randn(48, 64)}, "a is torch.int8 and b is torch.float32"),
        ({"a": codes(64, 41).t()}, "rows of a are contiguous, not strided by 41"),
        (
            {"a": codes(41, 64).short(), "b": codes(48, 64).short()},
            "dtype is 'int16'; allowed: 'int8', 'bfloat16'",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(changes, message):
    tensors = {
        "a": codes(41, 64),
        "b": codes(48, 64),
        "out": torch.empty(41, 48, dtype=torch.int32),
    }
    with pytest.raises(ValueError, match=message):
        key_of(product(**tensors | changes))


@pytest.mark.parametrize(
    "k", [0, 1, 63, LARGEST_INNER, LARGEST_INNER + 1, 151_936, 2 * LARGEST_INNER, 10**6 + 7]
)
def test_parts_of_an_inner_dimension(k):
    parts = inner_parts(k)
    assert [index for part in parts for index in range(k)[part]] == list(range(k))
    assert all(part.stop - part.start <= LARGEST_INNER and part.start % 64 == 0 for part in parts)
    assert len(parts) == (1 if k <= LARGEST_INNER else -(-k // (LARGEST_INNER // 64 * 64)))
