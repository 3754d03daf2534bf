"""What models of ours are asked beside fairseq's, and decoding with a state beside decoding from scratch."""

from dataclasses import dataclass

import pytest
import torch
from torch.testing import assert_close

from lsq.layers import ProgramModule


@dataclass(frozen=True, kw_only=True)
class Beam:
    """Options of a generator."""

    beam: int = 4
    max_len_b: int = 12


def assert_equal_in_float(theirs, ours, sample: dict, words: torch.Tensor) -> None:
    """Logits where `words`, bool [B, T], and the gradient of the first table of words."""
    found = []
    for model in (theirs, ours):
        logits = model(**sample["net_input"])[0]
        model.zero_grad()
        model.get_normalized_probs((logits, None), log_probs=True)[words].square().mean().backward()
        table = getattr(model, "encoder", model.decoder).embed_tokens.weight
        found.append((logits, table.grad))
    (expected, gradient), (actual, ours_gradient) = found
    assert actual.shape == expected.shape
    assert_close(actual[words], expected[words], rtol=1e-5, atol=1e-5)
    assert_close(ours_gradient, gradient, rtol=0, atol=1e-4 * gradient.abs().max().item())


def assert_close_in_int8(theirs, ours, sample: dict, words: torch.Tensor) -> None:
    """Logits where `words`; ours is in int8, so that some error there must be."""
    expected, actual = (model.eval()(**sample["net_input"])[0][words] for model in (theirs, ours))
    error = (actual - expected).square().mean() / expected.square().mean()
    assert 0 < error < 1e-2


def decoded_alike(task, model, sample: dict, options: Beam, **prefix) -> list[list[dict]]:
    """Hypotheses of each sentence, by decoding with a state; AssertionError where decoding from scratch differs."""
    model.eval()
    model(**sample["net_input"])
    found = []
    for incremental in (True, False):
        generator = task.build_generator([model], options)
        generator.model.has_incremental = incremental
        found.append(task.inference_step(generator, [model], sample, **prefix))
    for with_state, without in zip(*found, strict=True):
        assert [list(h["tokens"]) for h in with_state] == [list(h["tokens"]) for h in without]
        scores = [torch.stack([h["score"] for h in sentence]) for sentence in (with_state, without)]
        assert_close(*scores, rtol=1e-5, atol=1e-4)
    return found[0]


class Codes:
    """Watches a model for the codes that its operations read and write in training passes, in their order."""

    def __init__(self, model):
        self.found: list[tuple[str, torch.Tensor]] = []
        for module in model.modules():
            if isinstance(module, ProgramModule):
                module._observer = self

    def __call__(self, declared, operation) -> None:
        self.found += [(declared.name, made.clone()) for made in operation.outputs if made.dtype == torch.int8]

    def weights(self, module, tensors) -> None:
        both = {name: codes for name, codes in tensors.items() if not name.endswith(".transposed")}  # on a GPU
        self.found += [(name, codes.clone()) for name, codes in both.items() if codes.dtype == torch.int8]


def assert_same_codes(build, batch, arguments: str, where: str) -> None:
    """The first training pass of a model and its evaluation are the same on the CPU and `where` some options say.

    One code may fall to the other side of its border where float sums went in another order, and few follow; one code
    of a gradient is 1/127 of the largest value of its row.
    """
    found = []
    for place in ("", where):
        torch.manual_seed(1)
        task, model = build(f"{arguments} {place}")
        codes, sample = Codes(model.train()), batch(task)
        loss, *_ = model(**sample["net_input"], target=sample["target"])
        loss.backward()
        with torch.no_grad():
            evaluated, *_ = model.eval()(**sample["net_input"], target=sample["target"])
        found.append((loss.item(), evaluated.item(), codes.found, dict(model.named_parameters())))
    (wanted_loss, wanted_evaluated, wanted, expected), (loss, evaluated, codes, parameters) = found
    assert [name for name, _ in codes] == [name for name, _ in wanted] and len(codes) > 20
    pairs = zip(codes, wanted, strict=True)
    different = torch.cat([(one.int() - other.int()).flatten() for (_, one), (_, other) in pairs])
    assert different.abs().max() <= 1 and different.count_nonzero() < 1e-4 * different.numel()
    assert (loss, evaluated) == pytest.approx((wanted_loss, wanted_evaluated), rel=1e-5)
    for name, parameter in expected.items():
        if parameter.grad is not None:
            tolerance = 5e-3 * parameter.grad.abs().max().item() + 1e-5
            assert_close(parameters[name].grad, parameter.grad, rtol=0, atol=tolerance)
