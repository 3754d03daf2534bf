"""Parameters that are codes alone: they read as decoded values, and nothing writes to them."""

import copy
import pickle

import numpy
import pytest
import torch

from lsq.config import QuantConfig
from lsq.layers.coded_weight import CodedWeight, decode_all
from lsq.layers.weight_state import encoded, rounded_values
from lsq.quant import largest_clips
from lsq.run.backends import backend

SIZES = (64, 32, 32)


def parts(weight_format: str = "int8", *, in_out: bool = False, dtype: torch.dtype = torch.float32):
    """(values that products see, parameters of SIZES rows of codes, or one by inputs)."""
    torch.manual_seed(0)
    rows = torch.randn(sum(SIZES), 80)
    form = QuantConfig(weight_format=weight_format).weight_form("weight")
    clip, options = largest_clips(rows, torch.ones(len(rows))), {"in_out": in_out, "absmax": False}
    codes = encoded(rows.t() if in_out else rows, clip, form, backend("cpu"), rows=144, **options)
    seen, first, made = rounded_values(rows, clip, form, backend("cpu")).to(dtype), 0, []
    for size in (len(rows),) if in_out else SIZES:
        made.append(CodedWeight.parameter(codes, first, first + size, dtype))
        first += size
    return seen.t().contiguous() if in_out else seen, made


@pytest.mark.parametrize(
    "weight_format, in_out", [("int8", False), ("int8", True), ("int4", False)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reads_as_what_products_see(weight_format, in_out, dtype):
    seen, found = parts(weight_format, in_out=in_out, dtype=dtype)
    assert torch.equal(torch.cat(found), seen)
    for one, values in zip(found, seen.split([len(one) for one in found]), strict=True):
        assert isinstance(one, torch.nn.Parameter)
        assert (one.shape, one.dtype) == (values.shape, dtype)
        x = torch.randn(3, values.shape[1], dtype=dtype, requires_grad=True)
        y, expected = torch.nn.functional.linear(x, one), torch.nn.functional.linear(x, values)
        assert torch.equal(y, expected)
        gradients = (torch.autograd.grad(each.square().sum(), x)[0] for each in (y, expected))
        assert torch.equal(*gradients)
        assert torch.equal(one.contiguous(), values) and type(one.contiguous()) is torch.Tensor
        with torch.inference_mode():
            assert torch.equal(one[:2] + 0.0, values[:2])
            assert torch.equal(one.detach() + 0.0, values)
            assert torch.equal(torch.zeros(values.shape, dtype=dtype).copy_(one), values)


def test_parts_are_joined_if_they_are_all_of_it():
    seen, (q, k, v) = parts()
    whole = CodedWeight.joined([q, k, v])
    assert torch.equal(whole + 0.0, seen) and whole.codes is q.codes
    others = torch.nn.Parameter(torch.randn(32, 80))
    assert CodedWeight.joined([others]) is None
    for some in ([q, k], [k, q, v], [q, k, others], [others, k, v], [q, k, parts()[1][2]]):
        with pytest.raises(ValueError, match="no longer those that became codes"):
            CodedWeight.joined(some)


WRITES = {
    "in place": lambda one: one.data.add_(1.0),
    "copy_": lambda one: one.copy_(torch.zeros_like(one)),
    "out=": lambda one: torch.add(torch.ones(one.shape), 1.0, out=one),
    "a list": lambda one: torch._foreach_mul_([torch.ones(2), one], 2.0),
    "a row": lambda one: one[0].fill_(1.0),
    "a view of a view": lambda one: one.t()[:3].detach()[0].data.zero_(),
    "a part of several": lambda one: one.chunk(2)[1].mul_(2.0),
    "a value of a view": lambda one: one.t().__setitem__(0, 1.0),
    "data of a view": lambda one: setattr(one[0], "data", torch.zeros(80)),
    "data": lambda one: setattr(one, "data", torch.zeros(one.shape)),
    "a value": lambda one: one.__setitem__(0, 1.0),
    "an address": lambda one: one.data_ptr(),
    "another device": lambda one: one.to("meta"),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writes_are_refused(write):
    seen, (one, *_) = parts()
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"lsq.revert\(model\)"):
        write(one)
    assert torch.equal(one + 0.0, seen[:64])


def test_reading_is_no_writing():
    seen, (one, *_) = parts()
    found = torch.zeros(64, 80)
    assert torch.equal(found.copy_(one), seen[:64])
    found.add_(one)
    assert torch.equal(torch.mul(one, 1.0, out=found), seen[:64])


def test_what_others_take_of_it_is_theirs():
    seen, (one, *_) = parts()
    for copied in (
        one.t().clone(),
        one[0].double(),
        one.t().contiguous(),
        one.reshape(80, 64).bfloat16(),
        one + 0.0,
    ):
        assert type(copied) is torch.Tensor and copied.mul_(2.0).abs().sum() > 0
    with torch.inference_mode():
        assert type(torch.zeros(80, 64).reshape(-1).view_as(one).zero_()) is torch.Tensor
    assert one[0, 0].item() == seen[0, 0] and torch.equal(torch.stack(one.unbind()), seen[:64])
    assert repr(one[0]) == repr(seen[0])


def test_copies_have_the_same_codes():
    _, found = parts()
    one = found[0]
    for copied in (
        one.detach(),
        one.data,
        one.clone(),
        copy.deepcopy(one),
        one.float(),
        one.bfloat16().float(),
    ):
        assert copied.codes is one.codes and torch.equal(copied + 0.0, one + 0.0)
    assert type(one.long()) is CodedWeight and torch.equal(one.long() + 0, (one + 0.0).long())
    again = pickle.loads(pickle.dumps(found))
    assert torch.equal(CodedWeight.joined(again) + 0.0, CodedWeight.joined(found) + 0.0)
    assert "CodedWeight([64, 80], torch.float32, kept as int8)" in repr(one)


def test_each_has_a_storage_of_its_own():
    _, found = parts()
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in found}
    assert sorted(storages.values()) == sorted(80 * size for size in SIZES)


def test_modules_change_the_dtype_and_decode():
    seen, (one, *_) = parts()
    layer = torch.nn.Linear(80, 64)
    layer.weight = one
    assert (
        type(layer.to(torch.bfloat16).weight) is CodedWeight
        and layer.weight.dtype == torch.bfloat16
    )
    decode_all(layer.to(torch.float32))
    assert type(layer.weight) is torch.nn.Parameter and torch.equal(layer.weight, seen[:64])
    assert not layer.weight.requires_grad


@pytest.mark.parametrize("read", [numpy.from_dlpack, torch.from_dlpack, lambda one: one.storage()])
def test_no_memory_of_floats_is_given_away(read):
    _, (first, *_) = parts()
    for one in (first, first.detach(), first[0]):
        with pytest.raises(RuntimeError, match="no address of floats"):
            read(one)
