"""Training steps: data parallel on CPUs, and errors that name the tensor that is not finite."""

import torch
from fairseq.trainer import Trainer
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lsq.fairseq.compatibility.checkpoints import not_finite

_fairseq_train_step = Trainer.train_step
_fairseq_clip_grad_norm = Trainer.clip_grad_norm


class CPUSafeDataParallel(DistributedDataParallel):
    """DistributedDataParallel that ignores fairseq's device for modules on CPUs."""

    def __init__(self, module: torch.nn.Module, device_ids=None, output_device=None, **options):
        if all(parameter.device.type == "cpu" for parameter in module.parameters()):
            device_ids = output_device = None
        super().__init__(module, device_ids=device_ids, output_device=output_device, **options)


class Diverged(FloatingPointError):
    """A parameter or a gradient holds NaN or infinity; the message names it."""


def clip_grad_norm(trainer: Trainer, *arguments: object) -> Tensor:
    """Replace Trainer.clip_grad_norm; Diverged if the norm is not finite because a parameter is
    not. The parameters are still those of this update."""
    norm = _fairseq_clip_grad_norm(trainer, *arguments)
    if not torch.isfinite(norm).all():
        _require_finite(trainer, dict(trainer.get_model().named_parameters()))
    return norm


def train_step(trainer: Trainer, samples: list, raise_oom: bool = False) -> dict | None:
    """Replace Trainer.train_step, whose errors do not name the tensor that is not finite."""
    try:
        return _fairseq_train_step(trainer, samples, raise_oom)
    except Diverged:
        raise
    except (FloatingPointError, ValueError) as error:  # a ValueError: a quantiser has met NaN
        parameters = dict(trainer.get_model().named_parameters())
        gradients = {f"the gradient of {name}": one.grad for name, one in parameters.items()}
        # gradients are of fairseq's second try
        _require_finite(trainer, parameters | gradients, error)
        raise


def _require_finite(
    trainer: Trainer, tensors: dict[str, Tensor | None], cause: Exception | None = None
) -> None:
    fault = not_finite(tensors)
    if fault is not None:
        raise Diverged(
            f"{fault}, after {trainer.get_num_updates()} updates; the training has diverged: lower"
            " --lr, or raise --warmup-updates, and go on from an earlier checkpoint"
        ) from cause
