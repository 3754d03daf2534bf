"""Keys of tuned products: what they refuse, and which stands for which."""

import pytest

from lsq import ops  # noqa: F401  registers the operations
from lsq.gemm.product import LARGEST_INNER
from lsq.gemm.product_key import LAYOUTS, OPERATIONS, ProductKey, rounded_tokens
from tests.gemm.tuned import key


@pytest.mark.parametrize(
    ("tokens", "rounded"), [(1, 1), (511, 511), (512, 512), (513, 544), (544, 544), (545, 576), (4096, 4096)]
)
def test_rounded_tokens(tokens, rounded):
    assert rounded_tokens(tokens) == rounded
    assert key(tokens).rounded() == key(rounded)
    assert key(rounded).rounded() == key(rounded)


def test_the_tokens_of_a_weight_gradient_are_its_inner_dimension():
    gradient = ProductKey.of("linear_weight_gradient", 1000, 520, 4001)
    assert gradient.tokens == 4001
    assert gradient.rounded() == ProductKey.of("linear_weight_gradient", 1000, 520, 4032)
    assert gradient.family == gradient.with_tokens(7).family != key().family
    longest = ProductKey.of("linear_weight_gradient", 64, 64, LARGEST_INNER)
    assert longest.rounded() == longest


def test_a_family_is_all_but_the_tokens():
    assert key(7).family == key(4096).family
    for changes in (dict(n=64), dict(k=64), dict(layout="nn"), dict(op="linear_int32")):
        assert key(**changes).family != key().family


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"op": "conv"}, "op is 'conv'; allowed: 'linear_int8', "),
        ({"m": 0}, "m is 0; it must be a whole number from 1 to 2147483647"),
        ({"m": 2**31}, "m is 2147483648; it must"),
        ({"m": True}, "m is True; it must"),
        ({"m": 2.0}, "m is 2.0; it must"),
        ({"n": "64"}, "n is '64'; it must"),
        ({"k": LARGEST_INNER + 1}, f"k is {LARGEST_INNER + 1}; it must be a whole number from 1 to {LARGEST_INNER}"),
        ({"dtype": "float64"}, "dtype is 'float64'; allowed: 'int8', 'bfloat16'"),
        ({"dtype": "bfloat16", "out": "float32"}, "dtype is 'bfloat16'; linear_int32 multiplies int8"),
        ({"op": "matmul", "dtype": "float32", "out": "int32"}, "out is 'int32'; allowed: 'float32'"),
        ({"alpha": "scalar"}, "alpha is 'scalar'; allowed: 'one'"),
        ({"layout": "kn"}, "layout is 'kn'; allowed: 'nt', 'nn', 'tt', 'tn'"),
        ({"layout": ["nt"]}, "layout is a list; allowed"),
    ],
)
def test_no_such_product(changes, message):
    with pytest.raises(ValueError) as raised:
        ProductKey(**{"op": "linear_int32", "m": 8, "n": 16, "k": 32} | changes)
    assert str(raised.value).startswith(message)


def test_no_such_operation():
    with pytest.raises(ValueError, match="op is 'softmax'; allowed"):
        ProductKey.of("softmax", 1, 1, 1)


def test_operations_have_their_keys():
    for op, operation in OPERATIONS.items():
        made = ProductKey.of(op, 8, 16, 32)
        assert (made.out, made.alpha, made.layout) == (operation.out, operation.alpha, operation.layout)
        assert {ProductKey.of(op, 8, 16, 32, layout).layout for layout in LAYOUTS} == set(LAYOUTS)


def test_text():
    assert str(key()) == "linear_int8 64 x 128 x 256 (int8 to int8, nt, alpha vector)"
    assert key().operations == 2 * 64 * 128 * 256
