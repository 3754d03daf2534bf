"""What holds for every architecture of transformers whose layers are fused."""

import copy
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import lsq
from lsq.config import QuantConfig
from lsq.layers import ProgramModule, weight_state
from lsq.models import float_state_dict
from lsq.optim import Adam
from tests.layers.shapes import decibels

sys.modules.setdefault("torchaudio", None)  # one that cannot be loaded would stop transformers
transformers = pytest.importorskip("transformers")

WORDS = 96
PADDING = 1
FLOAT = QuantConfig(mode="float")


def made(build, seed: int = 1) -> torch.nn.Module:
    """The model that `build` makes, in training mode; its norms and biases are not all the same."""
    torch.manual_seed(seed)
    model = build().train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def words(*shape: int, seed: int = 1) -> torch.Tensor:
    """int64, none of which is padding."""
    return torch.randint(PADDING + 1, WORDS, shape, generator=torch.Generator().manual_seed(seed))


def right_padded(lengths: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """A batch of sentences of these lengths, as a tokenizer makes it, with labels."""
    ids, present = (
        words(len(lengths), max(lengths)),
        torch.arange(max(lengths)) < torch.tensor(lengths)[:, None],
    )
    ids = ids.where(present, PADDING)
    return {"input_ids": ids, "attention_mask": present.long(), "labels": ids.where(present, -100)}


def left_padded(lengths: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """The same with padding before the sentences, as for decoding; without labels."""
    return {
        name: value.flip(1) for name, value in right_padded(lengths).items() if name != "labels"
    }


@contextmanager
def codes_are_kept(model: torch.nn.Module) -> Iterator[None]:
    """Within this context, a pass that rounds a weight again raises AssertionError."""

    def refuse(*_, **__):
        raise AssertionError("codes of a weight were made again")

    for module in model.modules():
        if isinstance(module, ProgramModule):
            for codes in module.weight_state._weights.values():
                codes.writers.clear()  # so that whatever rounds comes to _write_first
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(weight_state, "_write_first", refuse)
        yield


def without_dropout(model: torch.nn.Module) -> torch.nn.Module:
    """`model`, whose modules of dropout drop nothing any more, as TRL makes it of models."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def fused(
    model: torch.nn.Module, quant: QuantConfig | None = None, layers: int | None = None
) -> torch.nn.Module:
    """A copy of `model` whose layers are fused: all that are known, so many."""
    model = copy.deepcopy(model)
    report = lsq.convert(model, quant)
    assert len(report.fused) == len(report.whole) == (layers or model.config.num_hidden_layers), (
        report
    )
    return model


def assert_same_in_float(
    model: torch.nn.Module, batch: dict, present: torch.Tensor | None = None, layers=None
) -> None:
    """Fused in float mode, it computes and differentiates what it does without lsq, where `present`
    bool [B, T] is."""
    mine = fused(model, FLOAT, layers)
    expected, found = model(**batch, use_cache=False), mine(**batch, use_cache=False)
    chosen = slice(None) if present is None else present
    torch.testing.assert_close(found.logits[chosen], expected.logits[chosen], rtol=1e-4, atol=1e-5)
    model.zero_grad()
    _loss(expected, chosen).backward()
    _loss(found, chosen).backward()
    for (name, first), second in zip(model.named_parameters(), mine.parameters(), strict=True):
        assert (first.grad is None) == (second.grad is None), name
        if first.grad is not None:
            torch.testing.assert_close(
                second.grad, first.grad, rtol=1e-3, atol=1e-5, msg=lambda why, at=name: at + why
            )


def assert_same_alone(kind: str, **shape) -> None:
    """A layer by itself of that class, fused in float mode, gives what it gave."""
    config = getattr(transformers, kind.replace("Layer", "Config"))(
        **shape, attn_implementation="sdpa"
    )
    file = type(config).__module__.replace("configuration", "modeling")
    layer = made(lambda: getattr(importlib.import_module(file), kind)(config))
    mine, x = copy.deepcopy(layer), torch.randn(2, 7, config.hidden_size)
    assert lsq.convert(mine, FLOAT).fused == ("",)
    torch.testing.assert_close(mine(x), layer(x), rtol=1e-4, atol=1e-5)


def _loss(output, chosen) -> torch.Tensor:
    return output.loss if output.loss is not None else output.logits[chosen].square().mean()


def assert_trains_and_comes_back(
    model: torch.nn.Module, batch: dict, folder, layers=None, least: float = 25.0
) -> None:
    """In int8 it is near the float model, learns, and saves what the float model loads."""
    mine = fused(model, layers=layers)
    present = batch.get("attention_mask", torch.ones(())).bool().expand(batch["labels"].shape)
    assert decibels(model.eval()(**batch).logits[present], mine(**batch).logits[present]) > least
    optimizer, losses = Adam(mine.parameters(), lr=1e-2), []
    for _ in range(8):
        loss = mine(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5, losses
    state = float_state_dict(mine)
    assert state.keys() == model.state_dict().keys()
    lsq.revert(mine).save_pretrained(folder)
    again, information = type(model).from_pretrained(folder, output_loading_info=True)
    assert not any(information.values()), information
    for name, value in again.state_dict().items():
        assert torch.equal(value, state[name]), name
