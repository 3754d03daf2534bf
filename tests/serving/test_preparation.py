"""What is kept of prepared programs, and how their temporary tensors share memory."""

import torch

from lsq.layers.blocks import PackedSequences
from lsq.models.sparsity import choose
from lsq.native import tiles
from lsq.ops.packed_project import PackedProject
from lsq.ops.project import Project
from lsq.ops.sparse_project import MOST_ROWS, SparseProject
from lsq.run.backends import backend
from lsq.serving.decoding_model import model_of
from lsq.serving.preparation import Blocks, Preparation, Recent
from lsq.serving.step_programs import encoder_program
from tests.serving.models import small_model


def test_what_was_used_last_is_kept():
    made, recent = [], Recent(2)

    def use(key):
        return recent.of(key, lambda: made.append(key) or key)

    assert [use(key) for key in "abacab"] == list("abacab") and made == list("abcb")
    recent.clear()
    use("a")
    assert made == list("abcba")


def test_weights_are_packed_once_and_temporary_tensors_share_memory():
    model, cpu = model_of(small_model(encoder_layers=4)), backend("cpu")
    preparation = Preparation(model, cpu)
    program = encoder_program(model.architecture, PackedSequences(rows=16, count=2), cpu)
    inputs = {
        one.name: cpu.allocate(one.shape, one.dtype)
        for one in program.inputs
        if one.name in ("tokens", "positions", "cu_seqlens")
    }
    found = [preparation.calls(program, inputs) for _ in range(2)]
    (first, tensors), (second, _) = found
    packed = [
        [call.weight for call, _ in calls if isinstance(call, PackedProject)]
        for calls in (first, second)
    ]
    assert len(packed[0]) == 4 * 4 + 2 and not any(isinstance(call, Project) for call, _ in first)
    assert all(one.tiles is other.tiles for one, other in zip(*packed, strict=True))
    temporary = [tensors[virtual] for virtual in tensors if virtual.role == "temporary"]
    assert len({one.untyped_storage().data_ptr() for one in temporary}) < len(temporary) / 2


def test_sparse_weights_are_packed_as_such():
    model = model_of(small_model())
    name = next(one for one in model.tensors if one.endswith(".codes")).removesuffix(".codes")
    codes = model.tensors[name + ".codes"]
    codes *= choose(codes.int().abs())
    preparation = Preparation(model, backend("cpu"))
    packed = preparation.weight(name, codes.shape[1])
    other = [one for one in model.tensors if one.endswith(".codes")][1].removesuffix(".codes")
    assert packed.sparse == tiles.vectorised() and torch.equal(packed.codes(), codes)
    assert not preparation.weight(other, model.tensors[other + ".codes"].shape[1]).sparse


def test_few_rows_read_sparse_weights_where_none_are_packed():
    model, place = model_of(small_model(encoder_layers=1)), backend("reference")
    sparse = [
        name
        for name in model.tensors
        if name.startswith("encoder") and name.endswith("1_weight.codes")
    ]
    for name in sparse:
        codes = model.tensors[name]
        codes *= choose(codes.int().abs())
    preparation = Preparation(model, place)
    for rows, wanted in ((MOST_ROWS, len(sparse)), (MOST_ROWS + 1, 0)):
        program = encoder_program(model.architecture, PackedSequences(rows=rows, count=2), place)
        inputs = {one.name: torch.zeros(one.shape, dtype=one.dtype) for one in program.inputs}
        calls, _ = preparation.calls(program, inputs)
        assert sum(isinstance(call, SparseProject) for call, _ in calls) == wanted, rows
    assert sparse


def test_programs_share_their_memory():
    blocks = Blocks(backend("cpu"))
    for _ in range(2):
        blocks.begin()
        first, second = blocks.take((3, 5), torch.float32), blocks.take((64,), torch.uint8)
        assert first.shape == (3, 5) and first.data_ptr() != second.data_ptr()
        blocks.give_back(first)
        third, fourth = blocks.take((8, 2), torch.int32), blocks.take((33,), torch.int8)
        assert third.data_ptr() == first.data_ptr() != fourth.data_ptr()
        assert blocks.bytes == 3 * 64
