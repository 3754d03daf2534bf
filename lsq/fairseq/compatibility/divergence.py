"""A training whose numbers have become NaN or infinite: which tensor was the first."""

import torch
from fairseq.trainer import Trainer
from torch import Tensor

from lsq.fairseq.compatibility import soundness

_fairseq_train_step = Trainer.train_step
_fairseq_clip_grad_norm = Trainer.clip_grad_norm


class Diverged(FloatingPointError):
    """A parameter or a gradient holds NaN or infinity; the message has its name."""


def clip_grad_norm(trainer: Trainer, *arguments: object) -> Tensor:
    """Takes the place of Trainer.clip_grad_norm; looks at the parameters as long as they are those
    of this update.

    Raises:
        Diverged: the norm is not finite because a parameter is not.
    """
    norm = _fairseq_clip_grad_norm(trainer, *arguments)
    if not torch.isfinite(norm).all():
        _require_finite(trainer, dict(trainer.get_model().named_parameters()))
    return norm


def train_step(trainer: Trainer, samples: list, raise_oom: bool = False) -> dict | None:
    """Takes the place of Trainer.train_step, whose error names no tensor.

    Raises:
        Diverged: a parameter or a gradient holds NaN or infinity.
    """
    try:
        return _fairseq_train_step(trainer, samples, raise_oom)
    except Diverged:
        raise
    except (FloatingPointError, ValueError) as error:  # a ValueError: a quantiser has met NaN
        parameters = dict(trainer.get_model().named_parameters())
        _require_finite(trainer, parameters, error)
        gradients = {
            f"the gradient of {name}": parameter.grad for name, parameter in parameters.items()
        }
        _require_finite(trainer, gradients, error)  # of the second try that fairseq makes
        raise


def _require_finite(
    trainer: Trainer, tensors: dict[str, Tensor | None], cause: Exception | None = None
) -> None:
    found = soundness.not_finite(tensors)
    if found is not None:
        raise Diverged(
            f"{found}, after {trainer.get_num_updates()} updates; the training has diverged: lower"
            " --lr, or raise "
            "--warmup-updates, and go on from an earlier checkpoint"
        ) from cause
