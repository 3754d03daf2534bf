"""What models of ours are asked beside fairseq's, and decoding with a state beside decoding from
scratch."""

from dataclasses import dataclass

import torch
from fairseq.tasks import FairseqTask
from torch.testing import assert_close

from lsq.layers import module
from lsq.ops.vocabulary_loss import KeptInputGradient, KeptWeightGradient
from lsq.program.operation import Operation
from lsq.run.executor import Execution, Hooks


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


ADDED_TO = KeptInputGradient, KeptWeightGradient
"""Operations that share what they write with another one."""


class Steps:
    """What all operations of a model wrote, pass by pass, in one place: noted, then compared with
    another place's.

    In the other place each operation reads what those of the first wrote, so that what differs is
    its own doing: a gradient's code that falls to the other side of a border changes all that
    follows by more than any rounding of sums does.
    """

    def __init__(self):
        self.noted: dict[tuple, torch.Tensor] = {}
        self.found: dict[tuple, torch.Tensor] = {}
        self.following = False
        self.passes = 0

    def follow(self) -> None:
        """Begin anew, in the other place."""
        self.following, self.passes = True, 0

    def written(self, declared: Operation, operation: Operation) -> None:
        """An operation of a pass has run."""
        for virtual, tensor in zip(declared.outputs, operation.outputs, strict=True):
            self.note(virtual.name, tensor, declared.name if isinstance(declared, ADDED_TO) else "")

    def note(self, name: str, tensor: torch.Tensor, by: str = "") -> None:
        """Note a tensor of this pass, or find it and put the one that was noted in its place.

        `by`: the operation that wrote it, if it is one of ADDED_TO.
        """
        key = self.passes, name, tuple(tensor.shape), by
        if not self.following:
            self.noted[key] = tensor.clone()
        elif key in self.noted:
            self.found[key] = tensor.clone()
            tensor.copy_(self.noted[key])


class Followed(Execution):
    """Runs both passes operation by operation and shows their outputs to `steps`."""

    steps: Steps

    def __call__(self, tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        for name, codes in tensors.items():
            if codes.dtype == torch.int8:
                self.steps.note(name, codes)
        return super().__call__(tensors)

    def run_pass(self, indices: range, values: dict, frame) -> None:
        self.steps.passes += 1
        before = None if indices.start else self.hooks.before
        if indices.start:
            values.update({**frame.kept(self.program), **values})
        self.run(indices, values, frame, Hooks(before=before, after=self.steps.written))


def assert_same_steps(build, batch, arguments: str, where: str, monkeypatch) -> None:
    """Each operation of a model's first training step and of its evaluation does on the CPU what it
    does elsewhere.

    `where` are the options that say where. One code of ten thousand may fall to the other side of
    its border, where float sums went in another order.
    """
    monkeypatch.setattr(Followed, "steps", steps := Steps(), raising=False)
    monkeypatch.setattr(module, "Execution", Followed)
    results = []
    for place in ("", where):
        torch.manual_seed(1)
        task, model = build(f"{arguments} {place}")
        sample = batch(task)
        loss, *_ = model.train()(**sample["net_input"], target=sample["target"])
        loss.backward()
        with torch.no_grad():
            evaluated, *_ = model.eval()(**sample["net_input"], target=sample["target"])
        results.append(
            {
                "loss": loss,
                "evaluated": evaluated,
                **{
                    name: parameter.grad
                    for name, parameter in model.named_parameters()
                    if parameter.grad is not None
                },
            }
        )
        steps.follow()
    assert steps.found.keys() == steps.noted.keys()
    for key, expected in steps.noted.items():
        if expected.is_floating_point():
            assert_alike(steps.found[key], expected, key)
    codes = [key for key, tensor in steps.noted.items() if tensor.dtype == torch.int8]
    different = torch.cat(
        [(steps.found[key].int() - steps.noted[key].int()).flatten() for key in codes]
    )
    assert (
        len(codes) > 20
        and different.abs().max() <= 1
        and different.count_nonzero() < 1e-4 * different.numel()
    )
    expected, actual = results
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_alike(actual[name], tensor, name)


def assert_alike(actual: torch.Tensor, expected: torch.Tensor, what: object) -> None:
    """To 1e-4 of the largest value: what a value lost by rounding, of its step, is the least
    certain."""
    tolerance = 1e-4 * expected.abs().max().item() + 1e-9
    assert_close(actual, expected, rtol=0, atol=tolerance, msg=lambda text: f"{what}: {text}")
