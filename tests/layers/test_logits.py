"""Logits that are computed when somebody asks for them."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import lsq
from lsq.config import QuantConfig
from lsq.layers.head import Head
from lsq.layers.logits import Logits

WORDS, HIDDEN = 53, 64


class Model(nn.Module):
    """An embedding and a head."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, WORDS, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(x))


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    model = Model()
    report = lsq.convert(model, QuantConfig(backward="float", calibration_passes=0))
    assert [layer.name for layer in report.layers if layer.head] == ["head"]
    model(batch()).sum().backward()  # measures
    model.zero_grad()
    return model


def batch() -> torch.Tensor:
    return torch.randn(3, 5, HIDDEN, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def x() -> torch.Tensor:
    return batch()


def test_what_they_know_needs_no_product(model, x, monkeypatch):
    monkeypatch.setattr(Head, "logits", None)
    logits = model(x)
    assert type(logits) is Logits
    assert (logits.shape, logits.size(-1), logits.dim(), len(logits)) == (
        (3, 5, WORDS),
        WORDS,
        3,
        3,
    )
    assert (logits.dtype, logits.device.type, logits.numel()) == (torch.float32, "cpu", 15 * WORDS)
    assert logits.requires_grad
    assert (logits._base, logits.is_leaf) == (None, False)
    assert repr(logits) == "Logits((3, 5, 53), not computed)"


@pytest.mark.parametrize(
    "change",
    [
        lambda logits: logits.view(-1, WORDS),
        lambda logits: logits.reshape((15, WORDS)),
        lambda logits: logits.view(-1, logits.size(-1)),
        lambda logits: logits[:, :-1],
        lambda logits: logits[..., 1:, :],
        lambda logits: logits[:, 2, :],
        lambda logits: logits[1],
        lambda logits: logits[torch.tensor([0, 2])],
        lambda logits: logits[torch.ones(3, 5, dtype=torch.bool)],
        lambda logits: logits.float().contiguous(),
        lambda logits: logits.to(torch.bfloat16),
        lambda logits: logits + torch.zeros(1, WORDS),
        lambda logits: logits.reshape(5, 3, -1),
        lambda logits: logits[:, :2, :].contiguous().view(-1, WORDS),
    ],
)
def test_they_follow(model, x, change):
    logits = model(x)
    changed, expected = change(logits), change(logits.clone())
    assert type(changed) is Logits
    assert type(expected) is torch.Tensor
    assert (changed.shape, changed.dtype) == (expected.shape, expected.dtype)
    torch.testing.assert_close(changed.clone(), expected)


@pytest.mark.parametrize(
    "change",
    [
        lambda logits: logits[..., 0],
        lambda logits: logits[:, :, :5],
        lambda logits: logits.view(-1),
        lambda logits: logits.view(15, WORDS, 1),
        lambda logits: logits.softmax(-1),
        lambda logits: logits / 2,
        lambda logits: logits + torch.ones(WORDS),
        lambda logits: 2 * logits,
        lambda logits: torch.cat([logits, logits]),
        lambda logits: functional.log_softmax(logits, 2),
        lambda logits: logits.argmax(-1),
        lambda logits: logits.to(torch.int64),
        lambda logits: logits.transpose(1, 2),
        lambda logits: logits.data,
        lambda logits: logits.mT,
        lambda logits: logits[:, None],
        lambda logits: logits.detach(),
    ],
)
def test_anything_else_gets_the_real_ones(model, x, change):
    logits = model(x)
    found = change(logits)
    assert type(found) is torch.Tensor
    torch.testing.assert_close(found, change(model(x).clone()))


def test_gradients_go_back_through_the_real_ones(model, x):
    for make in (lambda: model(x).square().sum(), lambda: model(x).clone().square().sum()):
        torch.manual_seed(2)
        model.zero_grad()
        make().backward()
        found = [parameter.grad.clone() for parameter in model.parameters()]
    for first, second in zip(
        found, (parameter.grad for parameter in model.parameters()), strict=True
    ):
        assert torch.equal(first, second)
        assert first.any()


def test_without_gradients_and_in_eval_mode_they_are_real(model, x):
    model(x).sum().backward()
    with torch.no_grad():
        assert type(model(x)) is torch.Tensor
    assert type(model.eval()(x)) is torch.Tensor


def test_a_change_in_place_is_kept_or_refused(model, x):
    logits = model(x)
    logits[:, 0] = -5.0
    assert (logits[:, 0] == -5.0).all()
    logits = model(x)
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"take logits\.clone"):
        logits.div_(2)


def test_who_asks_after_a_step_is_warned(model, x):
    logits = model(x)
    functional.cross_entropy(logits.view(-1, WORDS), torch.arange(15)).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    with pytest.warns(UserWarning, match="before the optimizer's step"):
        logits.view(-1, WORDS).argmax(-1)


def test_copies_are_real(model, x):
    with torch.no_grad():
        expected = model(x)
    with torch.enable_grad():
        logits = model(x)
    with torch.no_grad():
        torch.testing.assert_close(pickle.loads(pickle.dumps(logits.detach())), expected)
        torch.testing.assert_close(copy.deepcopy(logits.detach()), expected)


def test_hooks_wait_for_the_real_ones(model, x):
    logits, seen = model(x), []

    def waiting(gradient):
        seen.append(gradient.shape)

    waiting.__module__ = "torch.distributed.fsdp"
    logits.register_hook(waiting)
    functional.cross_entropy(logits.view(-1, WORDS), torch.arange(15)).backward()
    assert not seen
    logits = model(x)
    logits.register_hook(waiting)
    logits.sum().backward()
    assert seen == [(3, 5, WORDS)]


class Double(torch.autograd.Function):
    """Passes by what Python sees."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


def gradients(model, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_functions_of_autograd_get_the_real_ones(model, x):
    expected = gradients(model, (2 * model(x)).square().sum())
    for change in (
        lambda logits: logits,
        lambda logits: logits.view(-1, WORDS),
        lambda logits: logits.to(x.dtype),
    ):
        doubled = Double.apply(change(model(x)))
        assert type(doubled) is torch.Tensor
        torch.testing.assert_close(gradients(model, doubled.square().sum()), expected)
    model.requires_grad_(False)
    model.head.weight.requires_grad_(True)
    Double.apply(model(x)).square().sum().backward()
    torch.testing.assert_close(model.head.weight.grad, 2 * expected["head.weight"])


def test_backward_hooks_of_the_head_see_gradients(model, x):
    def loss() -> torch.Tensor:
        return functional.cross_entropy(model(x).view(-1, WORDS), torch.arange(15))

    model(x).sum().backward()
    expected, seen = gradients(model, loss()), []
    model.head.register_full_backward_hook(
        lambda module, inputs, outputs: seen.append((*inputs, *outputs))
    )
    found = gradients(model, loss())
    assert [tuple(one.shape) for one in seen[0]] == [(3, 5, HIDDEN), (3, 5, WORDS)] and len(
        seen
    ) == 1
    for name, gradient in expected.items():
        torch.testing.assert_close(
            found[name], gradient, rtol=1e-2, atol=1e-3, msg=lambda why, at=name: at + why
        )


def test_with_torch_compile(model, x):
    compiled = torch.compile(model, backend="eager")
    target = torch.arange(15) % WORDS

    def loss(net):
        torch.manual_seed(3)
        return functional.cross_entropy(net(x).view(-1, WORDS), target)

    torch.testing.assert_close(loss(compiled), loss(model))
    whole = torch.compile(lambda: loss(model), backend="eager")
    torch.testing.assert_close(whole(), loss(model))


def test_changes_in_place_are_not_lost(model, x):
    for change in (
        lambda one: one.__setitem__((..., 0), 1.0),
        lambda one: one.__imul__(2),
        lambda one: one.mul_(2),
    ):
        with pytest.raises(RuntimeError, match="take logits.clone"):
            logits = model(x)
            viewed = logits.view(-1, WORDS)
            change(logits)
        del viewed
        logits = model(x)
        with torch.no_grad(), pytest.raises(RuntimeError, match="take logits.clone"):
            change(logits)
    logits = model(x).view(-1, WORDS)
    logits[:, 0] = -9.0
    assert bool((logits[:, 0] == -9.0).all())


def test_a_hook_changes_the_gradient(model, x):
    logits = model(x)
    logits.register_hook(lambda gradient: gradient * 0)
    functional.cross_entropy(logits.view(-1, WORDS), torch.zeros(15, dtype=torch.int64)).backward()
    assert not model.head.weight.grad.any()


def test_what_looks_alike_is_computed(model, x):
    logits = model(x)
    real = logits.clone()
    word = torch.tensor(3)
    torch.testing.assert_close(logits[0, 0][word], real[0, 0][word])
    for other in (torch.zeros(WORDS, dtype=torch.float64), torch.zeros(1, 1, 1, WORDS)):
        added = logits + other
        assert (added.dtype, added.shape) == ((real + other).dtype, (real + other).shape)
    torch.testing.assert_close(torch.add(input=logits, other=real), real + real)


def test_the_loss_under_autocast_is_float32(model, x):
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(x).view(-1, WORDS)
        assert logits.dtype == torch.bfloat16
        assert (
            functional.cross_entropy(logits, torch.zeros(15, dtype=torch.int64)).dtype
            == torch.float32
        )


def test_checkpoints_of_either_kind_make_logits_again(model, x):
    def gradient(run) -> torch.Tensor:
        torch.manual_seed(3)
        model.zero_grad()
        run(x.clone().requires_grad_()).square().sum().backward()
        return model.inner.weight.grad

    model(x).sum().backward()  # measures
    expected = gradient(model)
    for reentrant in (True, False):
        found = gradient(
            lambda given, reentrant=reentrant: checkpoint(model, given, use_reentrant=reentrant)
        )
        assert (found - expected).norm() <= 0.1 * expected.norm()


TARGET = torch.arange(15) % WORDS
TARGET[3] = -100
LOSSES = {
    "cross-entropy": lambda logits: functional.cross_entropy(
        logits.view(-1, WORDS), TARGET, label_smoothing=0.1
    ),
    "shifted": lambda logits: (
        3 * functional.cross_entropy(logits[:, :-1].reshape(-1, WORDS), TARGET[:12])
    ),
    "two": lambda logits: sum(
        functional.cross_entropy(logits[n].float(), TARGET[:5], reduction="sum") for n in (0, 2)
    ),
    "real": lambda logits: logits.square().mean(),
    "view": lambda logits: logits.view(-1, WORDS).softmax(-1)[:, 3].sum(),
    "both": lambda logits: LOSSES["shifted"](logits) + LOSSES["real"](logits),
}


def dense_gradient(model, x, loss) -> torch.Tensor:
    """By torch.autograd from logits that are there."""
    with torch.no_grad():
        real = model(x)
    real.requires_grad_()
    return torch.autograd.grad(loss(real), real)[0]


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_their_own_gradient(model, x, loss):
    expected = dense_gradient(model, x, loss)
    before, after = model(x), model(x)
    before.retain_grad()
    loss(before).backward(retain_graph=True)
    found = loss(after)
    after.retain_grad()
    found.backward()
    hidden = model.inner(x)
    asked = model.head(hidden)
    taken, of_hidden = torch.autograd.grad(loss(asked), (asked, hidden))
    for gradient in (before.grad, after.grad, taken):
        assert type(gradient) is torch.Tensor
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)
    right = expected @ model.head.weight
    assert (of_hidden - right).norm() < 0.1 * right.norm()


def test_their_gradients_add_up_and_may_be_none(model, x):
    loss = LOSSES["shifted"]
    logits, seen = model(x), []
    expected = dense_gradient(model, x, loss)
    found = loss(logits)
    logits.retain_grad()
    logits.register_hook(seen.append)
    for _ in range(2):
        found.backward(retain_graph=True)
    torch.testing.assert_close(logits.grad, 2 * expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(seen, [expected, expected], rtol=1e-4, atol=1e-6)
    view = logits[:, :-1]
    (taken,) = torch.autograd.grad(
        functional.cross_entropy(view.reshape(-1, WORDS), TARGET[:12]), view
    )
    torch.testing.assert_close(3 * taken, expected[:, :-1], rtol=1e-4, atol=1e-6)
    other = model(x)
    with pytest.raises(RuntimeError, match="not have been used"):
        torch.autograd.grad(loss(logits), other)
    assert torch.autograd.grad(loss(logits), other, allow_unused=True) == (None,)


def test_they_are_let_go(model, x):
    """Without a collection of garbage: they hold what the whole pass has saved."""
    gc.disable()
    try:
        logits = model(x)
        logits.retain_grad()
        LOSSES["both"](logits).backward()
        gone = weakref.ref(logits.hidden)
        del logits
        assert gone() is None
    finally:
        gc.enable()
