"""torch.compile runs layers beside its graph; all that would look into them is refused."""

import copy
import io
import logging

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from lsq.config import LayerConfig, QuantConfig
from lsq.layers import QuantizedLinear, TransformerEncoderLayer, VocabularyProjection
from lsq.layers.memory import plan_memory
from lsq.observe import observe
from tests.layers.toy import largest, losses, twins
from tests.sampling import first


@pytest.fixture(autouse=True)
def fresh_compiler():
    """What one test compiled is nothing to the next."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Around(torch.nn.Module):
    """A user's model: float layers, which are compiled, and one of ours between them."""

    def __init__(self):
        super().__init__()
        self.before = torch.nn.Linear(24, 32)
        self.ours = QuantizedLinear(32, 48, quant=QuantConfig(backward="int8"))
        self.after = torch.nn.Linear(48, 8)

    def forward(self, x):
        return self.after(torch.relu(self.ours(torch.tanh(self.before(x)))))


@pytest.mark.filterwarnings("error:Dynamo")
@pytest.mark.parametrize("planned", first([True, False], 0, 1))
def test_a_translator_trains_alike(planned, caplog):
    eager, compiled = twins(backward="int8")
    expected = losses(eager, 6)
    called = torch.compile(compiled, backend="eager")
    if planned:
        plan_memory(called, largest(called))
    with caplog.at_level(logging.WARNING):
        assert losses(called, 6) == expected
    assert all(map(torch.equal, eager.parameters(), compiled.parameters()))
    assert "recompile_limit" not in caplog.text


@pytest.mark.filterwarnings("error:Dynamo")
def test_the_rest_of_a_model_is_compiled():
    eager = Around()
    compiled = copy.deepcopy(eager)
    graphs = []

    def backend(graph, _):
        graphs.append(
            [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        )
        return graph.forward

    called = torch.compile(compiled, backend=backend)
    outputs = []
    for model in (eager, called):
        torch.manual_seed(2)
        for rows in (5, 5, 7):
            x = torch.randn(rows, 24, generator=torch.Generator().manual_seed(rows))
            loss = model(x).square().mean()
            loss.backward()
            outputs.append(loss.item())
    assert outputs[:3] == outputs[3:]
    for one, other in zip(eager.parameters(), compiled.parameters(), strict=True):
        assert not one.requires_grad or torch.equal(one.grad, other.grad)
    text = " ".join(name for graph in graphs[:2] for name in graph)
    assert "tanh" in text and "relu" in text
    with observe(called) as statistics:
        called(torch.randn(5, 24))
    assert any(name.endswith("ours.weight") for name in statistics)


@pytest.mark.slow
def test_compiled_by_inductor():
    """The default backend calls g++; float layers may then differ in their last bits."""
    eager = Around()
    compiled = torch.compile(copy.deepcopy(eager))
    x = torch.randn(5, 24)
    torch.manual_seed(2)
    expected = eager(x)
    torch.manual_seed(2)
    actual = compiled(x)
    torch.testing.assert_close(actual, expected)
    actual.sum().backward()


FULL = {
    "a model": (Around(), (torch.randn(5, 24),)),
    "a layer": (QuantizedLinear(32, 16), (torch.randn(5, 32),)),
    "a loss": (VocabularyProjection(30, 32).loss, (torch.randn(5, 32), torch.zeros(5).long())),
}


@pytest.mark.parametrize("name", FULL)
def test_a_full_graph_is_refused(name):
    called, inputs = FULL[name]
    with pytest.raises(torch._dynamo.exc.Unsupported, match="compile without fullgraph=True"):
        torch.compile(called, backend="eager", fullgraph=True)(*inputs)


def first_derivative(layer, x):
    return torch.func.grad(lambda given: torch.func.functional_call(layer, given, (x,)).sum())(
        dict(layer.named_parameters())
    )


def forward_mode(layer, x):
    with torch.autograd.forward_ad.dual_level():
        layer(torch.autograd.forward_ad.make_dual(x, x))


def fake(layer, x):
    with FakeTensorMode(allow_non_fake_inputs=True):
        layer(x)


def onnx(layer, x):
    torch.onnx.export(layer.eval(), (x,), io.BytesIO(), dynamo=False)


LOOKING_IN = {
    "torch.func.grad": first_derivative,
    "torch.func.vmap": lambda layer, x: torch.func.vmap(lambda row: layer(row[None]))(x),
    "torch.func.jvp": lambda layer, x: torch.func.jvp(layer, (x,), (x,)),
    "forward_ad": forward_mode,
    "torch.jit.trace": lambda layer, x: torch.jit.trace(layer.eval(), x),
    "torch.jit.script": lambda layer, x: torch.jit.script(torch.nn.Sequential(layer)),
    "torch.fx": lambda layer, x: torch.fx.symbolic_trace(layer),
    "make_fx": lambda layer, x: make_fx(layer)(x),
    "torch.export": lambda layer, x: torch.export.export(layer.eval(), (x,), strict=False),
    "torch.onnx": onnx,
    "FakeTensorMode": fake,
}


@pytest.mark.parametrize(
    "look",
    [
        pytest.param(look, marks=pytest.mark.thorough if look == "torch.onnx" else ())
        for look in LOOKING_IN
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_looks_into_a_layer_is_refused_in_one_line(look):
    layer = QuantizedLinear(32, 16)
    with pytest.raises(RuntimeError) as refused:
        LOOKING_IN[look](layer, torch.randn(5, 32))
    assert "lsq.revert(model)" in str(refused.value).splitlines()[0]


LAYERS = {
    "linear": lambda: QuantizedLinear(32, 16),
    "encoder": lambda: TransformerEncoderLayer(LayerConfig(hidden=32, heads=2, feed_forward=64)),
    "vocabulary": lambda: VocabularyProjection(50, 32),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_derivatives_of_torch_func_and_second_ones_are_refused(kind):
    """Of a penalty on gradients, and of a Hessian, what the layer adds would be zero in silence."""
    layer, x = LAYERS[kind](), torch.randn(3, 2, 32, requires_grad=True)
    with pytest.raises(
        RuntimeError, match=r"torch\.func cannot look into layers of lsq.*lsq\.revert"
    ):
        first_derivative(layer, x)
    for asked in (
        lambda: torch.autograd.grad(layer(x).sum(), x, create_graph=True),
        lambda: layer(x).sum().backward(create_graph=True),
        lambda: torch.autograd.functional.hessian(lambda z: layer(z).square().sum(), x.detach()),
        lambda: torch.autograd.functional.hvp(
            lambda z: layer(z).square().sum() + z.pow(3).sum(), x.detach(), x
        ),
    ):
        with pytest.raises(
            RuntimeError, match=r"no second derivatives.*skip=.*lsq\.revert\(model\)"
        ):
            asked()
    layer(x).sum().backward()  # nothing is left behind
