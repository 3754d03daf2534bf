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
from lsq.layers.head import Head
from lsq.layers.logits import Logits
from tests.constants import quant_with

WORDS, HIDDEN, ROWS = 53, 64, 15
TARGET = torch.arange(ROWS) % WORDS
TARGET[3] = -100


class Model(nn.Module):
    """A layer and a head."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, WORDS, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(x))


@pytest.fixture(scope="module")
def x() -> torch.Tensor:
    return torch.randn(3, 5, HIDDEN, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def measured(x) -> Model:
    torch.manual_seed(0)
    model = Model()
    report = lsq.convert(model, quant_with(backward="float", calibration_passes=0))
    assert [layer.name for layer in report.layers if layer.head] == ["head"]
    model(x).sum().backward()  # measures
    model.zero_grad()
    return model


@pytest.fixture
def model(measured) -> Model:
    return copy.deepcopy(measured)


def loss_of(logits: torch.Tensor, target: torch.Tensor = TARGET, **options) -> torch.Tensor:
    return functional.cross_entropy(logits.view(-1, WORDS), target, **options)


def gradients(model, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_what_they_know_needs_no_product(model, x, monkeypatch):
    monkeypatch.setattr(Head, "logits", None)
    logits = model(x)
    assert type(logits) is Logits and logits.shape == (3, 5, WORDS)
    assert (logits.size(-1), logits.dim(), len(logits)) == (WORDS, 3, 3)
    assert (logits.dtype, logits.device.type, logits.numel()) == (torch.float32, "cpu", 15 * WORDS)
    assert (logits.requires_grad, logits._base, logits.is_leaf) == (True, None, False)
    assert repr(logits) == "Logits((3, 5, 53), not computed)"


FOLLOWED = {
    "view": lambda logits: logits.view(-1, WORDS),
    "reshape": lambda logits: logits.reshape((15, WORDS)),
    "view by size": lambda logits: logits.view(-1, logits.size(-1)),
    "all but the last": lambda logits: logits[:, :-1],
    "an ellipsis": lambda logits: logits[..., 1:, :],
    "one position": lambda logits: logits[:, 2, :],
    "one sentence": lambda logits: logits[1],
    "some sentences": lambda logits: logits[torch.tensor([0, 2])],
    "a mask": lambda logits: logits[torch.ones(3, 5, dtype=torch.bool)],
    "the same": lambda logits: logits.float().contiguous(),
    "a dtype": lambda logits: logits.to(torch.bfloat16),
    "a bias of zeros": lambda logits: logits + torch.zeros(1, WORDS),
    "reshape to -1": lambda logits: logits.reshape(5, 3, -1),
    "shifted": lambda logits: logits[:, :2, :].contiguous().view(-1, WORDS),
}
REAL = {
    "one word": lambda logits: logits[..., 0],
    "some words": lambda logits: logits[:, :, :5],
    "flat": lambda logits: logits.view(-1),
    "one more dimension": lambda logits: logits.view(15, WORDS, 1),
    "softmax": lambda logits: logits.softmax(-1),
    "quotient": lambda logits: logits / 2,
    "a bias": lambda logits: logits + torch.ones(WORDS),
    "product": lambda logits: 2 * logits,
    "cat": lambda logits: torch.cat([logits, logits]),
    "log_softmax": lambda logits: functional.log_softmax(logits, 2),
    "argmax": lambda logits: logits.argmax(-1),
    "integers": lambda logits: logits.to(torch.int64),
    "transpose": lambda logits: logits.transpose(1, 2),
    "data": lambda logits: logits.data,
    "mT": lambda logits: logits.mT,
    "None": lambda logits: logits[:, None],
    "detach": lambda logits: logits.detach(),
    # what looks like something that is followed
    "a word by a tensor": lambda logits: logits[0, 0][torch.tensor(3)],
    "wide zeros": lambda logits: logits + torch.zeros(WORDS, dtype=torch.float64),
    "zeros of more dimensions": lambda logits: logits + torch.zeros(1, 1, 1, WORDS),
    "add by names": lambda logits: torch.add(input=logits, other=logits.clone()),
}


@pytest.mark.parametrize("name", [*FOLLOWED, *REAL])
def test_they_follow_or_get_real(model, x, name):
    change = FOLLOWED.get(name) or REAL[name]
    changed, expected = change(model(x)), change(model(x).clone())
    assert type(changed) is (Logits if name in FOLLOWED else torch.Tensor)
    assert type(expected) is torch.Tensor
    assert (changed.shape, changed.dtype) == (expected.shape, expected.dtype)
    torch.testing.assert_close(changed.clone(), expected)


def test_gradients_go_back_through_the_real_ones(model, x):
    found = []
    for change in (lambda logits: logits, torch.clone):
        torch.manual_seed(2)
        found.append(gradients(model, change(model(x)).square().sum()))
    for name, gradient in found[0].items():
        assert torch.equal(gradient, found[1][name]) and gradient.any()


def test_without_gradients_and_in_eval_mode_they_are_real(model, x):
    with torch.no_grad():
        expected = model(x)
    logits = model(x)
    with torch.no_grad():
        for copied in (pickle.loads(pickle.dumps(logits.detach())), copy.deepcopy(logits.detach())):
            torch.testing.assert_close(copied, expected)
    assert type(expected) is type(model.eval()(x)) is torch.Tensor


def test_a_change_in_place_is_kept_or_refused(model, x):
    for logits in (model(x), model(x).view(-1, WORDS)):
        logits[..., 0] = -5.0
        assert (logits[..., 0] == -5.0).all()
    for change in (
        lambda one: one.__setitem__((..., 0), 1.0),
        lambda one: one.__imul__(2),
        lambda one: one.div_(2),
    ):
        logits = model(x)
        viewed = logits.view(-1, WORDS)
        with pytest.raises(RuntimeError, match=r"take logits\.clone"):
            change(logits)
        del viewed
        logits = model(x)
        with torch.no_grad(), pytest.raises(RuntimeError, match=r"take logits\.clone"):
            change(logits)


def test_who_asks_after_a_step_is_warned(model, x):
    logits = model(x)
    loss_of(logits).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    with pytest.warns(UserWarning, match="before the optimizer's step"):
        logits.view(-1, WORDS).argmax(-1)


def test_hooks(model, x):
    """Those of FSDP2 wait for the real ones; others change the gradient."""
    logits, seen = model(x), []

    def waiting(gradient):
        seen.append(gradient.shape)

    waiting.__module__ = "torch.distributed.fsdp"
    logits.register_hook(waiting)
    loss_of(logits).backward()
    assert not seen
    logits = model(x)
    logits.register_hook(waiting)
    logits.sum().backward()
    assert seen == [(3, 5, WORDS)]
    logits = model(x)
    logits.register_hook(lambda gradient: gradient * 0)
    assert not gradients(model, loss_of(logits))["head.weight"].any()


class Double(torch.autograd.Function):
    """Passes by what Python sees."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


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
    expected, seen = gradients(model, loss_of(model(x))), []
    model.head.register_full_backward_hook(lambda _, into, of: seen.append((*into, *of)))
    found = gradients(model, loss_of(model(x)))
    ((*shapes,),) = ([tuple(one.shape) for one in every] for every in seen)
    assert shapes == [(3, 5, HIDDEN), (3, 5, WORDS)]
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-3)


def test_with_torch_compile(model, x):
    def loss(net):
        torch.manual_seed(3)
        return loss_of(net(x))

    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(loss(compiled), loss(model))
    whole = torch.compile(lambda: loss(model), backend="eager")
    torch.testing.assert_close(whole(), loss(model))


def test_the_loss_under_autocast_is_float32(model, x):
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(x)
        assert (logits.dtype, loss_of(logits).dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_make_logits_again(model, x, reentrant):
    found = []
    for run in (model, lambda given: checkpoint(model, given, use_reentrant=reentrant)):
        torch.manual_seed(3)
        loss = run(x.clone().requires_grad_()).square().sum()
        found.append(gradients(model, loss)["inner.weight"])
    assert (found[0] - found[1]).norm() <= 0.1 * found[0].norm()


LOSSES = {
    "cross-entropy": lambda logits: loss_of(logits, label_smoothing=0.1),
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
    of_view = functional.cross_entropy(view.reshape(-1, WORDS), TARGET[:12])
    (taken,) = torch.autograd.grad(of_view, view)
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
