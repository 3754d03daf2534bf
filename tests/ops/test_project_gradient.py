"""What the gradient of a Project appends to a program, with a stub in the place of its builder."""

from types import SimpleNamespace

import pytest
import torch

from lsq.config import QuantConfig
from lsq.ops.input_gradient import ProjectInputGradient
from lsq.ops.nonlinearity import Activation, Nonlinearity
from lsq.ops.project import Project
from lsq.ops.rounding import RoundGradient
from lsq.ops.weight_gradient import ProjectWeightGradient
from lsq.program.values import RoundedGradient, Rows, Weight
from lsq.quant import GRADIENT
from tests.ops.compare import KEY, dropout_of, empty, gradient_to_round, refused, to_round


class StubBuilder:
    """Keeps operations and gradients in the open."""

    key = KEY

    def __init__(self, backward="int8"):
        self.quant = SimpleNamespace(backward=backward, clip_gradient="lsq")
        self.operations, self.filed, self.of_products, self.producers = [], {}, {}, {}

    def add(self, operation):
        self.operations.append(operation)

    def needs_gradient(self, tensor):
        return tensor is not None

    def producer(self, tensor):
        return self.producers.get(tensor)

    def gradient_of(self, tensor):
        return self.filed.get(tensor)

    def take_gradient(self, tensor):
        return self.filed.pop(tensor, None)

    def take_accumulated(self, tensor):
        """No two products join their gradients."""

    def accumulate(self, tensor, gradient):
        assert tensor not in self.filed
        self.filed[tensor] = gradient

    def product_gradient(self, tensor):
        self.of_products[tensor] = None, gradient_to_round(*tensor.shape)
        return self.of_products[tensor]

    def product_gradient_of(self, tensor):
        return self.of_products.get(tensor, (None, None))

    def bias_gradient(self, tensor):
        return self.parameter_gradient(self.producers[tensor].product_bias)

    def parameter_gradient(self, parameter):
        return None if parameter is None else ("gradient of", id(parameter))

    def tensor(self, name, shape, dtype=torch.float32):
        return empty(*shape, dtype=dtype)

    def rounded_gradient(self, name, shape, weight_scale):
        codes, scale = empty(*shape, dtype=torch.int8), empty(shape[0])
        return RoundedGradient(
            format=GRADIENT,
            codes=codes,
            scale=scale,
            weight_scale=weight_scale,
            key=KEY,
            subsequence=5,
        )

    def stored(self, weight):
        return weight

    def next_subsequence(self):
        return 9


def project(x=None, **ends):
    """A virtual product [7, 16] of 16 inputs."""
    weight = Weight(
        format=QuantConfig().weights,
        codes=empty(16, 16, dtype=torch.int8),
        scale=empty(16),
        values=empty(16, 16),
        clip=empty(16),
    )
    return Project(x=Rows(coded=x or to_round(7, 16, 1.0)), weight=weight, bias=empty(16), **ends)


def differentiated(operation, builder):
    """(gradient of the input, of the weight) that `operation` appends."""
    operation.gradient(builder)
    dx, dweight = builder.operations[-2:]
    assert isinstance(dx, ProjectInputGradient) and isinstance(dweight, ProjectWeightGradient)
    assert dweight.dweight == builder.parameter_gradient(operation.weight.values)
    assert dweight.dclip == builder.parameter_gradient(operation.weight.clip)
    assert dx.dclip == builder.parameter_gradient(operation.x.clip)
    return dx, dweight


def test_the_end_of_a_project_before_is_undone():
    builder = StubBuilder()
    hidden = to_round(7, 16, 1.0)
    end = Nonlinearity(
        activation=Activation.relu, dropout=dropout_of(0.1), positive=empty(14, dtype=torch.uint8)
    )
    first = project(rounded=hidden, nonlinearity=end)
    second = project(hidden, out=empty(7, 16))
    builder.producers[hidden.codes] = first
    builder.of_products[second.out] = None, gradient_to_round(7, 16)
    dx, dweight = differentiated(second, builder)
    assert dx.nonlinearity is end
    assert dx.rounded is builder.of_products[hidden.codes][1] and dx.dx is None and dx.added is None
    assert dx.sum == builder.parameter_gradient(first.bias)
    assert dweight.subsequence == 9 and dweight.key is KEY and dweight.learned_step
    before, _ = differentiated(first, builder)
    assert before.gradient is dx.rounded and before.nonlinearity is None


@pytest.mark.parametrize("earlier", [None, empty(7, 16)])
def test_a_gradient_that_is_there_is_added(earlier):
    builder, operation = StubBuilder(), project(out=empty(7, 16))
    builder.of_products[operation.out] = None, gradient_to_round(7, 16)
    if earlier is not None:
        builder.filed[operation.x.tensor] = earlier
    dx, _ = differentiated(operation, builder)
    assert dx.added is earlier and builder.filed[operation.x.tensor] is dx.dx


@pytest.mark.parametrize("backward", ["int8", "float"])
def test_a_product_at_the_end_of_a_program(backward):
    builder, operation = StubBuilder(backward), project(out=empty(7, 16))
    arrived = builder.filed[operation.out] = empty(7, 16)
    dx, _ = differentiated(operation, builder)
    rounding = builder.operations[0]
    assert isinstance(rounding, RoundGradient) and rounding.gradient is arrived
    assert rounding.sum == builder.parameter_gradient(operation.bias)
    assert dx.gradient is rounding.rounded and (dx.gradient is None) == (backward == "float")
    assert dx.floats is (arrived if backward == "float" else None)


def test_an_end_that_nothing_undoes_is_refused():
    builder = StubBuilder()
    operation = project(out=empty(7, 16), nonlinearity=Nonlinearity(activation=Activation.relu))
    builder.filed[operation.out] = empty(7, 16)
    with refused("output comes from outside"):
        operation.gradient(builder)


def test_nothing_reads_the_result():
    builder = StubBuilder()
    project(out=empty(7, 16)).gradient(builder)
    assert not builder.operations
