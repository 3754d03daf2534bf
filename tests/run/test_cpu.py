"""The CPU: consecutive loops in one foreign call, products between them, and what lives as long as
a prepared run."""

import gc

import pytest
import torch

from lsq.native import loader
from lsq.run.backends import backend
from tests.run.chains import chain, results

CALLED = ("lsq_run_sequence", "lsq_finish_vocabulary_loss")
"""What the chain calls of the library when it runs."""


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """The names of the functions of the library that are called from here on."""
    library, made = loader.library(), []

    class Listening:
        def __getattr__(self, name: str):
            function = getattr(library, name)
            if name not in CALLED:
                return function
            return lambda *arguments: (made.append(name), function(*arguments))

    monkeypatch.setattr(loader, "library", Listening)
    return made


def prepared(operations):
    where = backend("cpu")
    return where.prepare(
        [(one, [where.allocate(*wanted) for wanted in where.scratch(one)]) for one in operations]
    )


def test_consecutive_loops_are_one_foreign_call(calls):
    embed, norm, _ = chain(torch.device("cpu"))
    run = prepared([embed, norm, embed, norm])
    assert calls == []
    run()
    run()
    assert calls == ["lsq_run_sequence"] * 2
    assert torch.equal(embed.x, embed.reference()["x"]) and norm.out.isfinite().all()


def test_loops_before_and_after_a_product_are_one_call_each(calls):
    embed, norm, loss = chain(torch.device("cpu"))
    prepared([embed, norm, loss, norm, embed])()
    assert calls == ["lsq_run_sequence", "lsq_finish_vocabulary_loss", "lsq_run_sequence"]
    assert all(found.isfinite().all() for found in results((embed, norm, loss)))


def test_nothing_at_all():
    prepared([])()


def test_a_prepared_run_keeps_its_tensors():
    embed, norm, loss = chain(torch.device("cpu"))
    loss_of, total = prepared([embed, norm, loss]), loss.loss
    loss_of()
    wanted = total.clone()
    del embed, norm, loss
    gc.collect()
    rubbish = [torch.full((3, 48), float("nan")) for _ in range(100)]
    loss_of()
    assert torch.equal(total, wanted) and len(rubbish) == 100


def test_what_a_loop_cannot_take_is_refused_before_anything_runs(calls):
    embed, norm, _ = chain(torch.device("cpu"))
    norm.out = norm.out.double()
    with pytest.raises(ValueError, match="^ResidualNorm.out is torch.float64"):
        prepared([embed, norm])
    assert calls == [] and embed.x.isnan().all()
