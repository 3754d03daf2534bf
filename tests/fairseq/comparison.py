"""What models of ours are asked beside fairseq's, and decoding with a state beside decoding from
scratch."""

from dataclasses import dataclass
from pathlib import Path

import torch
from fairseq.criterions import build_criterion
from fairseq.tasks import FairseqTask
from torch.testing import assert_close


@dataclass(frozen=True, kw_only=True)
class Beam:
    """Options of a generator."""

    beam: int = 4
    max_len_b: int = 12


def assert_equal_states(one: dict, other: dict) -> None:
    """To the bit."""
    assert one.keys() == other.keys()
    different = [name for name, tensor in one.items() if not torch.equal(tensor, other[name])]
    assert not different


def assert_resumes_to_the_bit(train, folder: Path, given: str, updates: tuple[int, int]) -> None:
    """A training that is interrupted after the first of two numbers of updates."""
    part, whole = updates
    expected = train(folder / "whole", f"--max-update {whole} {given}")["model"]
    train(folder / "parts", f"--max-update {part} {given}")
    found = train(folder / "parts", f"--max-update {whole} {given}")["model"]
    assert_equal_states(found, expected)


def assert_same_loss(parse, build, batch, criterions: list[str], given: str) -> None:
    """Two criterions: their losses, sample sizes, logs, and gradients of the first table of
    words."""
    found = []
    for name in criterions:
        torch.manual_seed(5)
        options = f"{given} --criterion {name} --lsq-backward float"
        task, model = build(options)
        criterion, sample = build_criterion(parse(options), task), batch(task)
        model.eval()
        criterion(model, sample)
        loss, sample_size, logged = criterion(model, sample)
        loss.backward()
        table = getattr(model, "encoder", model.decoder).embed_tokens.weight
        found.append((loss.detach(), sample_size, logged, table.grad))
    (loss, size, logged, gradient), (ours, our_size, our_log, our_gradient) = found
    assert_close(ours, loss)
    assert our_size == size and logged.keys() <= our_log.keys()
    for key, value in logged.items():
        assert_close(torch.as_tensor(our_log[key]), torch.as_tensor(value))
    assert_close(our_gradient, gradient, rtol=0, atol=1e-4 * gradient.abs().max().item())


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
    """Hypotheses of each sentence, by fairseq's generator; AssertionError where decoding from
    scratch differs."""
    model.eval()
    model(**sample["net_input"])
    found = []
    for incremental in (True, False):
        generator = FairseqTask.build_generator(task, [model], options)
        generator.model.has_incremental = incremental
        found.append(task.inference_step(generator, [model], sample, **prefix))
    for with_state, without in zip(*found, strict=True):
        assert [list(h["tokens"]) for h in with_state] == [list(h["tokens"]) for h in without]
        scores = [torch.stack([h["score"] for h in sentence]) for sentence in (with_state, without)]
        assert_close(*scores, rtol=1e-5, atol=1e-4)
    return found[0]
