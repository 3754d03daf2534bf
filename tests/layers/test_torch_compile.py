"""torch.compile around layers: they run beside its graph with the same numbers, and fullgraph=True is refused."""

import copy
import logging

import pytest
import torch

from lsq.config import QuantConfig
from lsq.layers import QuantizedLinear, VocabularyProjection, observe
from lsq.layers.memory import plan_memory
from tests.layers.toy import largest, losses, twins


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


def same_parameters(first, second) -> bool:
    return all(torch.equal(one, other) for one, other in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.thorough
@pytest.mark.filterwarnings("error:Dynamo")
@pytest.mark.parametrize("planned", [False, True])
def test_a_translator_trains_alike(planned, caplog):
    eager, compiled = twins(backward="int8")
    expected = losses(eager, 6)
    called = torch.compile(compiled, backend="eager")
    if planned:
        plan_memory(called, largest(called))
    with caplog.at_level(logging.WARNING):
        assert losses(called, 6) == expected
    assert same_parameters(eager, compiled)
    assert "recompile_limit" not in caplog.text


@pytest.mark.filterwarnings("error:Dynamo")
def test_the_rest_of_a_model_is_compiled():
    eager = Around()
    compiled = copy.deepcopy(eager)
    graphs = []

    def backend(graph, _):
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
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
        assert torch.equal(one.grad, other.grad)
    text = " ".join(name for graph in graphs[:2] for name in graph)
    assert "tanh" in text and "relu" in text
    with observe(called) as statistics:
        called(torch.randn(5, 24))
    assert any(name.endswith("ours.weight") for name in statistics)


@pytest.mark.slow
def test_compiled_by_inductor():
    """The default backend writes C++ and calls g++; float layers may then differ in their last bits."""
    eager = Around()
    compiled = torch.compile(copy.deepcopy(eager))
    x = torch.randn(5, 24)
    torch.manual_seed(2)
    expected = eager(x)
    torch.manual_seed(2)
    actual = compiled(x)
    torch.testing.assert_close(actual, expected)
    actual.sum().backward()


@pytest.mark.parametrize(
    ("module", "x"), [(Around(), torch.randn(5, 24)), (QuantizedLinear(32, 16), torch.randn(5, 32))]
)
def test_a_full_graph_is_refused(module, x):
    with pytest.raises(torch._dynamo.exc.Unsupported, match="compile without fullgraph=True"):
        torch.compile(module, backend="eager", fullgraph=True)(x)


def test_a_loss_in_a_full_graph_is_refused():
    projection = VocabularyProjection(30, 32)
    step = torch.compile(lambda x, target: projection.loss(x, target)[0], backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="compile without fullgraph=True"):
        step(torch.randn(5, 32), torch.zeros(5, dtype=torch.long))
