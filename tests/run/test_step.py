"""Lifetimes across the programs of a step, against a plain replay of who reads what."""

import pytest

from lsq.run.rehearsal import rehearse
from lsq.run.step import (
    borrowed_in,
    buffers_of,
    crossing,
    is_placed,
    node_names,
    operations_of,
    plan_step,
    signature,
)
from tests.layers.toy import Translator, batch


def rehearsed(sentences=3, length=8, **options):
    model = Translator(**options)
    return model, rehearse(lambda: model(*batch(sentences, length, length)), model.parameters())


def names_of(model, rehearsal):
    return node_names(rehearsal.owners, {module: name for name, module in model.named_modules()})


def replay(passes):
    """(node, name) -> [first, last] moment at which an operation of the step touches a tensor that
    stays inside."""
    seen, moment = {}, 0
    for one in passes:
        for index in operations_of(one):
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
    buffers = buffers_of(rehearsal.passes, range(len(rehearsal.owners)))
    lent = borrowed_in(rehearsal.passes)
    found = {
        tuple(buffer.name.split("/", 1)): [buffer.first, buffer.last]
        for key, buffer in buffers.items()
        if key not in lent
    }
    assert found == {
        (str(node), name): life for (node, name), life in replay(rehearsal.passes).items()
    }


def test_passes_go_forth_and_back():
    model, rehearsal = rehearsed()
    order = [(one.node, one.backward) for one in rehearsal.passes]
    nodes = range(len(rehearsal.owners))
    assert order[: len(nodes)] == [(node, False) for node in nodes]
    assert sorted(order[len(nodes) :]) == [(node, True) for node in nodes]
    assert order[len(nodes)] == (nodes[-1], True)
    assert [type(owner).__name__ for owner in rehearsal.owners] == [
        "Embedding",
        *["TransformerEncoderLayer"] * 2,
        "Embedding",
        *["TransformerDecoderLayer"] * 2,
        "VocabularyProjection",
    ]
    assert names_of(model, rehearsal)[:4] == ("embedding", "encoder.0", "encoder.1", "embedding#2")


def test_saved_tensors_of_all_layers_are_alive_at_the_turn():
    _, rehearsal = rehearsed(backward="int8")
    buffers = buffers_of(rehearsal.passes, range(len(rehearsal.owners)))
    turn = sum(len(operations_of(one)) for one in rehearsal.passes if not one.backward)
    alive = sum(buffer.size for buffer in buffers.values() if buffer.first < turn <= buffer.last)
    assert alive == sum(one.program.saved_bytes for one in rehearsal.passes if one.backward)


def test_of_what_crosses_a_border_gradients_of_parameters_alone_are_placed():
    """The toy's layers are not connected by rows: views of the results go from one to the next."""
    _, rehearsal = rehearsed(backward="int8")
    lent = borrowed_in(rehearsal.passes)
    buffers = buffers_of(rehearsal.passes, range(len(rehearsal.owners)))
    assert lent.keys() < buffers.keys()
    for (node, index, number), buffer in buffers.items():
        program = next(one.program for one in rehearsal.passes if one.node == node)
        tensor = program.written(index)[number]
        borders = {*program.outputs, *program.gradients, *program.inputs, *program.parameters}
        assert (tensor in borders) == ((node, index, number) in lent) != is_placed(tensor)
        assert buffer.size == tensor.size
    assert len(lent) == sum(
        gradient is not None and parameter.role == "parameter"
        for one in rehearsal.passes
        if one.backward
        for parameter, gradient in zip(
            one.program.differentiable, one.program.gradients, strict=True
        )
    )


def test_what_is_lent_lives_to_the_end_of_a_pass():
    """The first gradient of a parameter, to the end of the step; what is added to it, to the end of
    its own pass."""
    _, rehearsal = rehearsed(backward="int8", twice=True)
    passes = rehearsal.passes
    buffers, lent = buffers_of(passes, range(len(rehearsal.owners))), borrowed_in(passes)
    ends = [
        sum(len(operations_of(one)) for one in passes[: position + 1]) - 1
        for position in range(len(passes))
    ]
    together = {}
    for position, one in enumerate(passes):
        for key, border, source in crossing(one) if one.backward else ():
            together.setdefault(source, []).append((position, border, lent[key]))
    # alone, of the layer run twice, the table
    assert sorted({len(group) for group in together.values()}) == [1, 2, 3]
    for group in together.values():
        own, borders, lendings = zip(*group, strict=True)
        assert [lending.keep for lending in lendings] == [False] + [True] * (len(group) - 1)
        assert [lending.leaf for lending in lendings] == [borders[0]] + [None] * (len(group) - 1)
        assert [lending.until for lending in lendings] == [len(passes) - 1, *own[1:]]
    assert all(buffers[key].last == ends[lending.until] for key, lending in lent.items())


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


def test_margins_are_kept_free():
    model, rehearsal = rehearsed()
    names = names_of(model, rehearsal)
    plain = plan_step(tuple(rehearsal.passes), names, margin=0)
    apart = plan_step(tuple(rehearsal.passes), names, margin=256)
    assert all(
        apart.buffers[key].size == buffer.size + 256 for key, buffer in plain.buffers.items()
    )
    assert apart.offsets.keys() == apart.buffers.keys()
    assert (
        max(offset + apart.buffers[key].size for key, offset in apart.offsets.items())
        == apart.plan.peak
    )


def test_a_pass_back_that_never_came_keeps_what_it_would_read():
    _, rehearsal = rehearsed(backward="int8")
    passes = [one for one in rehearsal.passes if not (one.backward and one.node == 1)]
    end = sum(len(operations_of(one)) for one in passes)
    buffers = buffers_of(passes, range(len(rehearsal.owners)))
    assert max(buffer.last for (node, *_), buffer in buffers.items() if node == 1) == end
