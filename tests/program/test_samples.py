"""What is drawn for declared operations: values in the range of what they stand for, whatever
tensors are called."""

from __future__ import annotations

import pytest
import torch

from lsq.ops.gradient_layout import MessageLayout
from lsq.ops.gradient_messages import Messages, UnpackGradients
from lsq.program.declare import Activations, Bits, Codes, Floats, In, Indices, Offsets, Out
from lsq.program.operation import Operation
from lsq.program.samples import KEY, Sampler, placed
from lsq.program.values import Coded, Dropout, RoundedGradient, Weight
from lsq.quant import GRADIENT
from tests.ops.compare import KEY as ANOTHER
from tests.ops.compare import empty, format_of


class Everything(Operation):
    """Reads every kind of tensor."""

    x: In[Activations] | None
    statistics: In[Floats] | None
    flags: In[Bits] | None
    slopes: In[Codes] | None
    tokens: In[Indices] | None
    others: In[Indices] | None
    starts: In[Offsets] | None
    rounded: In[Coded] | None
    weight: In[Weight] | None
    upstream: In[RoundedGradient] | None
    dropout: In[Dropout] | None
    y: Out[Activations]

    more_starts: In[Offsets] | None

    def limits(self):
        return {"tokens": 1000, "starts": 40}


def sampled(**fields) -> Everything:
    return Sampler(activations=torch.bfloat16).operation(Everything(y=empty(40, 50), **fields))


def test_kinds():
    found = sampled(
        x=empty(40, 50),
        statistics=empty(40),
        flags=empty(4000, dtype=torch.uint8),
        slopes=empty(40, 50, dtype=torch.int8),
        tokens=empty(4000, dtype=torch.int64),
        others=empty(4000, dtype=torch.int64),
        starts=empty(4, dtype=torch.int32),
    )
    assert found.x.dtype == found.y.dtype == torch.bfloat16 and found.x.float().std() > 0.5
    assert found.statistics.dtype == torch.float32 and 0.5 <= found.statistics.min()
    assert found.flags.unique().numel() > 50 and found.slopes.abs().max() == 127
    assert found.tokens.min() >= 0 and 900 < found.tokens.max() < 1000 and found.others.max() == 4
    assert found.starts.tolist() == [0, 13, 26, 40]


@pytest.mark.parametrize("bits", [4, 8])
def test_values(bits):
    form = format_of(bits)
    codes = [empty(40, 50, dtype=torch.int8) for _ in range(3)]
    found = sampled(
        rounded=Coded(format=form, codes=codes[0], scale=empty(1), clip=empty(1)),
        weight=Weight(
            format=form, codes=codes[1], scale=empty(40), values=empty(40, 50), clip=empty(40)
        ),
        upstream=RoundedGradient(
            format=GRADIENT,
            codes=codes[2],
            scale=empty(40),
            weight_scale=empty(50),
            key=empty(1, dtype=torch.int64),
            subsequence=1,
        ),
        dropout=Dropout(key=ANOTHER, subsequence=2, probability=0.1),
    )
    assert found.rounded.codes.abs().max() == found.weight.codes.abs().max() == form.largest
    assert found.upstream.codes.abs().max() == 127
    assert 0 < found.weight.scale.min() and found.weight.scale.max() * form.largest < 1
    assert (
        found.rounded.clip == 1.5
        and found.weight.values.std() < 0.2
        and found.weight.clip.min() >= 0.1
    )
    assert torch.equal(found.upstream.key, KEY) and found.dropout.key is not None


def test_offsets_whose_end_nothing_tells_are_refused():
    with pytest.raises(ValueError, match="Everything.limits does not say where more_starts ends"):
        sampled(more_starts=empty(4, dtype=torch.int32))


def test_messages_are_finite():
    layout = MessageLayout.for_values(5000, 3)
    messages = Messages(layout=layout, data=empty(1, 3, layout.message_bytes, dtype=torch.uint8))
    for dtype in (torch.float32, torch.bfloat16):
        unpacking = UnpackGradients(messages=messages, x=empty(5000, dtype=dtype))
        operation = Sampler(activations=torch.bfloat16).operation(unpacking)
        assert operation.x.dtype == dtype and operation.reference()["x"].isfinite().all()


def test_placed_on_meta_takes_no_memory():
    everything = Everything(x=empty(40, 2**50), statistics=torch.ones(3), y=empty(40, 50))
    found = placed(everything, activations=torch.bfloat16)
    assert (
        found.x.device.type == found.statistics.device.type == "meta"
        and found.x.dtype == torch.bfloat16
    )


def test_a_tensor_in_two_fields_is_one_tensor_and_a_seed_draws_the_same():
    both = empty(40, 50)
    first, again, other = (
        Sampler(seed=seed).operation(Everything(x=both, y=both)) for seed in (1, 1, 2)
    )
    assert first.x is first.y and first.x.std() > 0.5
    assert torch.equal(first.x, again.x) and not torch.equal(first.x, other.x)
