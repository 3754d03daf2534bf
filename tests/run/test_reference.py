"""The reference: plain PyTorch, whatever strides tensors have."""

import torch

from lsq.run.backends import backend
from tests.run.chains import chain


def test_it_needs_no_scratch_memory_and_no_library(monkeypatch):
    monkeypatch.setattr("lsq.native.loader.library", lambda: None)
    embed, norm, loss = chain(torch.device("cpu"))
    where = backend("reference")
    assert [list(where.scratch(one)) for one in (embed, norm, loss)] == [[], [], []]
    embed.weight = embed.weight.t().contiguous().t()
    where.prepare([(one, ()) for one in (embed, norm, loss)])()
    assert torch.equal(embed.x, embed.weight[embed.tokens] * 2.0 + embed.table[embed.tokens])
    assert loss.loss.isfinite().all() and loss.nll.isfinite().all()
