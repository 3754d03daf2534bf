"""A step that is rehearsed and planned: what is noted, and lifetimes against a plain replay."""

from collections import Counter

import pytest
import torch
from torch import nn

import lsq
from lsq.layers import Packing, TransformerEncoderLayer
from lsq.layers.memory import plan_memory, release_memory
from lsq.run.frames import active_rehearsal
from lsq.run.planned import described
from lsq.run.step import (
    borrowed_in,
    buffers_of,
    counting_kept,
    crossing,
    node_names,
    rehearse,
    rehearsing,
    signature,
)
from tests.layers.shapes import config_of
from tests.layers.toy import Translator, batch

ROWS, WIDTH = 5, 64
BYTES = ROWS * WIDTH * 4


def layer_and_input():
    torch.manual_seed(0)
    return TransformerEncoderLayer(config_of(dropout=0.1)), torch.ones(5, 2, 48)


def order(rehearsal) -> list[tuple[int, bool]]:
    return [(one.node, one.backward) for one in rehearsal.passes]


def test_results_are_zeros_without_memory():
    layer, x = layer_and_input()
    with rehearsing() as rehearsal:
        y = layer(x)
        with torch.no_grad():
            assert not layer(x).any()  # without a backward pass, it is not noted
    assert y.shape == x.shape and y.requires_grad and not y.any()
    assert order(rehearsal) == [(0, False)] and rehearsal.owners == [layer]
    assert layer(x).any(), "after the rehearsal the layer computes"
    with pytest.raises(ZeroDivisionError), rehearsing():
        raise ZeroDivisionError
    assert active_rehearsal.get() is None


def test_a_rehearsal_leaves_states_and_gradients_alone():
    layer, x = layer_and_input()
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    rehearse(lambda: layer(x).sum(), layer.parameters())
    assert not layer.schedule.calibrated and layer.schedule.passes == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())
    layer(x).sum().backward()
    gradients = [parameter.grad.clone() for parameter in layer.parameters()]
    rehearsal = rehearse(lambda: layer(x).sum(), layer.parameters())
    assert order(rehearsal) == [(0, False), (0, True)]
    assert all(map(torch.equal, (one.grad for one in layer.parameters()), gradients))


def test_tensors_at_borders_are_numbered_over_the_step():
    layer, x = layer_and_input()
    twin = TransformerEncoderLayer(config_of(dropout=0.1))
    twin.feed_forward.fc1_weight = layer.feed_forward.fc1_weight
    twin.feed_forward.fc2_weight.requires_grad_(False)
    packing, rows = Packing(shape=(2, 5)), x.view(10, 48)
    rehearsed = rehearse(
        lambda: twin.rows(layer.rows(rows, packing), packing).sum(), layer.parameters()
    )
    first, second = (
        {
            one.name: n
            for one, n in zip((*p.program.inputs, *p.program.parameters), p.reads, strict=True)
        }
        for p in rehearsed.passes[:2]
    )
    assert first["x"] is None and first["cu_seqlens"] is None
    assert second["x"] == rehearsed.passes[0].makes[0] != rehearsed.passes[1].makes[0]
    assert second["feed_forward.fc1_weight"] == first["feed_forward.fc1_weight"]
    assert second["feed_forward.fc2_weight"] is None
    assert second["feed_forward.fc2_bias"] not in first.values()
    assert [one.reads for one in rehearsed.passes[2:]] == [
        one.reads for one in rehearsed.passes[1::-1]
    ]


def test_every_storage_counts_once_with_the_module_that_keeps_it():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
    found = Counter()
    with counting_kept(model, found):
        model(torch.randn(ROWS, WIDTH)).square().sum()
    assert found == {"Linear": 2 * BYTES, "GELU": BYTES, "Tanh": BYTES}
    model(torch.randn(ROWS, WIDTH))
    assert sum(found.values()) == 4 * BYTES


def test_a_rehearsal_counts_what_is_not_of_lsq():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    lsq.convert(model)
    x = torch.randn(ROWS, WIDTH)
    memory = plan_memory(model, lambda: model(x).square().mean())
    release_memory(model)
    assert memory.outside == {"GELU": BYTES, "the loss": BYTES}
    assert repr(memory).startswith("<StepMemory: ") and "tensors of lsq's layers in 0." in str(
        memory
    )
    assert str(memory).endswith("not lsq's (GELU 0.0, the loss 0.0)")


def test_in_words():
    assert described({}) == "nothing is kept"
    many = {f"Module{number}": (number + 1) * 2**20 for number in range(7)}
    text = (
        "28.0 MiB are kept by modules that are not lsq's (Module6 7.0, Module5 6.0, Module4 5.0,"
        " Module3 4.0, "
    )
    assert described(many) == text + "Module2 3.0, 2 others)"


def rehearsed(sentences=3, length=8, **options):
    model = Translator(**options)
    return model, rehearse(lambda: model(*batch(sentences, length, length)), model.parameters())


def names_of(model, rehearsal):
    return node_names(rehearsal.owners, {module: name for name, module in model.named_modules()})


def buffers_in(rehearsal):
    return buffers_of(rehearsal.passes, range(len(rehearsal.owners)))


def replay(passes):
    """(node, name) -> [first, last] moment at which an operation of the step touches a tensor that
    stays inside."""
    seen, moment = {}, 0
    for one in passes:
        for index in one.operations:
            for tensor in (*one.program.operations[index].inputs, *one.program.written(index)):
                if tensor.role == "temporary":
                    seen.setdefault((one.node, tensor.name), [moment, moment])[1] = moment
            moment += 1
    return seen


@pytest.mark.parametrize(
    "options", [{"backward": "int8"}, {"backward": "float", "twice": True}, {"mode": "float"}]
)
def test_lives_are_those_of_a_replay(options):
    model, rehearsal = rehearsed(**options)
    buffers = buffers_in(rehearsal)
    borrowed = borrowed_in(rehearsal.passes)
    found = {
        tuple(buffer.name.split("/", 1)): [buffer.first, buffer.last]
        for key, buffer in buffers.items()
        if key not in borrowed
    }
    assert found == {
        (str(node), name): life for (node, name), life in replay(rehearsal.passes).items()
    }


def test_passes_go_forth_and_back():
    model, rehearsal = rehearsed()
    passes, nodes = order(rehearsal), range(len(rehearsal.owners))
    assert passes[: len(nodes)] == [(node, False) for node in nodes]
    assert sorted(passes[len(nodes) :]) == [(node, True) for node in nodes]
    assert passes[len(nodes)] == (nodes[-1], True)
    assert [type(owner).__name__ for owner in rehearsal.owners] == [
        "Embedding",
        *["TransformerEncoderLayer"] * 2,
        "Embedding",
        *["TransformerDecoderLayer"] * 2,
        "VocabularyProjection",
    ]
    assert names_of(model, rehearsal)[:4] == ("embedding", "encoder.0", "encoder.1", "embedding#2")


def test_of_what_crosses_a_border_gradients_of_parameters_alone_are_placed():
    """The toy's layers are not connected by rows: views of the results go from one to the next."""
    _, rehearsal = rehearsed(backward="int8")
    borrowed = borrowed_in(rehearsal.passes)
    buffers = buffers_in(rehearsal)
    assert borrowed.keys() < buffers.keys()
    for (node, index, number), buffer in buffers.items():
        program = next(one.program for one in rehearsal.passes if one.node == node)
        tensor = program.written(index)[number]
        borders = {*program.outputs, *program.gradients, *program.inputs, *program.parameters}
        assert (tensor in borders) == ((node, index, number) in borrowed) != tensor.is_temporary
        assert buffer.size == tensor.size
    assert len(borrowed) == sum(
        gradient is not None and parameter.role == "parameter"
        for one in rehearsal.passes
        if one.backward
        for parameter, gradient in zip(
            one.program.differentiable, one.program.gradients, strict=True
        )
    )


def test_what_is_borrowed_lives_to_the_end_of_a_pass():
    """The first gradient of a parameter, to the end of the step; what is added to it, to the end of
    its own pass."""
    _, rehearsal = rehearsed(backward="int8", twice=True)
    passes = rehearsal.passes
    buffers, borrowed = buffers_of(passes, range(len(rehearsal.owners))), borrowed_in(passes)
    ends = [
        sum(len(one.operations) for one in passes[: position + 1]) - 1
        for position in range(len(passes))
    ]
    together = {}
    for position, one in enumerate(passes):
        for key, border, source in crossing(one) if one.backward else ():
            together.setdefault(source, []).append((position, border, borrowed[key]))
    # alone, of the layer run twice, the table
    assert sorted({len(group) for group in together.values()}) == [1, 2, 3]
    for group in together.values():
        own, borders, lendings = zip(*group, strict=True)
        assert [lending.keep for lending in lendings] == [False] + [True] * (len(group) - 1)
        assert [lending.leaf for lending in lendings] == [borders[0]] + [None] * (len(group) - 1)
        assert [lending.until for lending in lendings] == [len(passes) - 1, *own[1:]]
    assert all(buffers[key].last == ends[lending.until] for key, lending in borrowed.items())


def test_signatures_are_equal_for_all_shapes_of_a_layer():
    (_, small), (_, large) = rehearsed(2, 5), rehearsed(4, 13)
    for one, other in zip(small.passes, large.passes, strict=True):
        assert signature(one.program) == signature(other.program)
    _, different = rehearsed(mode="float")
    assert signature(different.passes[1].program) != signature(small.passes[1].program)


@pytest.mark.parametrize(
    "small, large", [((1, 16), (4, 16)), ((3, 5), (2, 16)), ((7, 2), (1, 16)), ((2, 15), (2, 16))]
)
def test_no_tensor_of_a_smaller_batch_is_larger(small, large):
    """What dominates: as many rows and as long sentences."""
    (_, one), (_, other) = rehearsed(*small, backward="int8"), rehearsed(*large, backward="int8")
    little, much = (buffers_of(r.passes, range(len(r.owners))) for r in (one, other))
    assert all(little[key].size <= much[key].size for key in much)


def test_a_pass_back_that_never_came_keeps_what_it_would_read():
    _, rehearsal = rehearsed(backward="int8")
    passes = [one for one in rehearsal.passes if not (one.backward and one.node == 1)]
    end = sum(len(one.operations) for one in passes)
    buffers = buffers_of(passes, range(len(rehearsal.owners)))
    assert max(buffer.last for (node, *_), buffer in buffers.items() if node == 1) == end
