"""Prepared passes: the same bits as operation by operation, prepared once, nothing held in
between."""

import gc
import weakref
from itertools import groupby

import pytest
import torch

from lsq.layers import TransformerEncoderLayer
from lsq.layers.memory import plan_memory
from lsq.native import loader
from lsq.ops.rounding import RoundWeight
from lsq.program.operation import Operation
from lsq.run import planned
from lsq.run.backends import backend
from lsq.run.executor import profile
from tests.layers.shapes import config_of
from tests.layers.toy import batch, largest, twins


@pytest.fixture
def layer() -> TransformerEncoderLayer:
    """A layer with memory for batches up to 5 x 2, that measures its clips in the first pass
    alone."""
    torch.manual_seed(0)
    found = TransformerEncoderLayer(config_of(backward="int8", dropout=0.1, calibration_passes=0))
    plan_memory(found, lambda: found(torch.ones(5, 2, 48)).sum())
    return found


@pytest.fixture
def prepared(monkeypatch) -> list[list[str]]:
    """The names of the operations that are prepared together from here on, without those of
    weights."""
    where, found = backend("cpu"), []
    original = where.prepare

    def prepare(calls):
        names = [operation.name for operation, _ in calls]
        if names != [RoundWeight.__name__]:
            found.append(names)
        return original(calls)

    monkeypatch.setattr(where, "prepare", prepare)
    return found


def run(layer, x: torch.Tensor, seed: int = 1) -> list[torch.Tensor]:
    """Result and gradients of one pass there and back; none is left on the layer."""
    torch.manual_seed(seed)
    x = x.clone().requires_grad_()
    y = layer(x)
    y.square().sum().backward()
    found = [y.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())]
    layer.zero_grad()
    return found


def equal(found, expected) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    "options", [{"backward": "int8"}, {"backward": "float", "pre_norm": True}, {"mode": "float"}]
)
def test_a_training_that_repeats_its_batches_gives_the_same_gradients(options):
    planned, naive = twins(**options)
    memory = plan_memory(planned, largest(planned))
    for step in range(4):
        results = []
        for model in (planned, naive):
            torch.manual_seed(step)
            model.zero_grad(set_to_none=step % 2 == 0)
            loss = model(*batch(3, 7, 9, seed=3))
            loss.backward()
            results.append([loss, *(parameter.grad for parameter in model.parameters())])
        assert equal(*results)
    assert len(memory.prepared) == len(memory.step.passes)


def test_a_pass_is_prepared_when_it_comes_again_and_then_never(layer, prepared):
    x = torch.randn(4, 2, 48)
    layer(torch.randn(3, 2, 48))  # measures clips
    first = run(layer, x)
    program = next(iter(layer.step_memory._fitting[0]))
    names = [operation.name for operation in program.operations]
    prepared.clear()
    second = run(layer, x)
    assert prepared == [names[: program.forward_length], names[program.forward_length :]]
    layer.train()
    layer.weight_state.clear()  # codes of weights lie elsewhere from now on
    third = run(layer, x)
    assert len(prepared) == 2 and equal(second, third) and equal(second, first)
    run(layer, torch.randn(5, 2, 48))
    assert len(prepared) == 2 + len(names)


def test_loops_side_by_side_are_one_foreign_call(layer, monkeypatch):
    x = torch.randn(4, 2, 48)
    run(layer, x)
    library, counts = loader.library(), []

    class Listening:
        def __getattr__(self, name: str):
            function = getattr(library, name)
            if name != "lsq_run_sequence":
                return function
            return lambda loops, structs, count: (
                counts.append(count.value),
                function(loops, structs, count),
            )

    monkeypatch.setattr(loader, "library", Listening)
    run(layer, x)  # prepares its passes
    program = next(iter(layer.step_memory.prepared))[0]
    kinds = [
        [
            type(operation).cpu is Operation.cpu
            for operation in program.operations[indices.start : indices.stop]
        ]
        for indices in (range(program.forward_length), program.backward_range)
    ]
    wanted = [len(list(group)) for one in kinds for is_loop, group in groupby(one) if is_loop]
    assert counts[-len(wanted) :] == wanted  # before them, weights are rounded


def test_nothing_that_crossed_a_border_is_held(layer):
    x = torch.randn(4, 2, 48)
    for _ in range(2):
        run(layer, x)
    found = [weakref.ref(tensor) for tensor in run(layer, x)]
    gc.collect()
    assert all(one() is None for one in found)


def test_other_inputs_and_parameters_elsewhere(layer):
    x, other = torch.randn(4, 2, 48), torch.randn(4, 2, 48)
    layer(x)
    expected = run(layer, other)
    for _ in range(2):
        run(layer, x)
    for parameter in layer.parameters():
        parameter.data = parameter.data.clone()
    assert equal(run(layer, other), expected)


def test_whoever_looks_on_sees_every_operation(layer):
    x = torch.randn(4, 2, 48)
    layer(x)
    for _ in range(3):
        expected = run(layer, x)
    seen = []
    layer._observer = lambda declared, operation: seen.append(declared.name)
    layer._observer.weights = lambda module, tensors: None
    assert equal(run(layer, x), expected) and len(seen) == 8
    layer._observer = None
    with profile() as seconds:
        assert equal(run(layer, x), expected)
    assert {"Attention", "AttentionGradient"} <= seconds.keys()
    torch.manual_seed(1)
    x = x.clone().requires_grad_()
    y = layer(x)
    with profile() as seconds:  # from here on the pass goes operation by operation
        y.square().sum().backward()
    assert seconds and torch.equal(x.grad, expected[1])


def test_a_run_that_fails_holds_nothing_and_the_next_one_is_right(layer, monkeypatch):
    x = torch.randn(4, 2, 48)
    layer(x)
    for _ in range(2):
        expected = run(layer, x)
    passes = list(layer.step_memory.prepared.values())

    def fail():
        raise KeyboardInterrupt

    original, passes[1]._run = passes[1]._run, fail
    with pytest.raises(KeyboardInterrupt):
        run(layer, x)
    passes[1]._run = original
    layer.zero_grad()
    assert equal(run(layer, x), expected)


def test_passes_used_last_are_kept(layer, monkeypatch):
    monkeypatch.setattr(planned, "PREPARED_KEPT", 4)
    for _ in range(2):
        for length in (2, 3, 4):
            run(layer, torch.randn(length, 2, 48))
    programs = {key[0] for key in layer.step_memory.prepared}
    assert len(layer.step_memory.prepared) == 4 and {
        program.inputs[1].shape[0] for program in programs
    } == {6, 8}
