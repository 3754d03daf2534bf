"""What models of ours are asked beside fairseq's, and decoding with a state beside decoding from scratch."""

from dataclasses import dataclass

import torch
from torch.testing import assert_close


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
