"""What fairseq's code takes for granted in a checkpoint: files of other programs may have something
else there."""

import argparse
import types

import omegaconf
import torch

from lsq.fairseq.compatibility import soundness

PARTS = {
    "args": (argparse.Namespace, types.NoneType),
    "cfg": (dict, omegaconf.DictConfig, types.NoneType),
    "model": dict,
    "optimizer_history": list,
    "extra_state": dict,
    "task_state": (dict, types.NoneType),
    "last_optimizer_state": (dict, types.NoneType),
}
"""Of which types the parts of a checkpoint are, where it has them."""
NUMBERS = {"params", "lr", "betas", "eps", "weight_decay", "momentum"}
"""Settings of optimizers that are numbers; those of other optimizers than fairseq's may be
anything."""
SEVERAL = {"params", "betas", "eps"}
"""Those that may be several numbers."""
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
"""What Adam keeps of each parameter."""
LARGEST_COUNT = 2**40
"""Of updates and such: beyond any training."""


def check(state: dict) -> None:
    """Look at the types, shapes and counts in a checkpoint.

    Raises:
        TypeError, ValueError: one of them is not as fairseq writes it; names it.
    """
    for name, kind in PARTS.items():
        if name in state and not isinstance(state[name], kind):
            raise TypeError(f"{name} is of type {type(state[name]).__name__}")
    for name, tensor in state["model"].items():
        # PyTorch's own exception
        if not isinstance(tensor, torch.Tensor) and not name.endswith("_extra_state"):
            raise TypeError(f"{name} is of type {type(tensor).__name__} and no tensor")
    optimizer = state.get("last_optimizer_state") or {}
    for name, tensor in soundness.tensors({"model": state["model"], "optimizer": optimizer}, ""):
        if tensor.layout is not torch.strided:
            raise TypeError(f"{name} is a sparse tensor")
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise ValueError(f"{name} has fewer values than its shape {list(tensor.shape)}")
    place = state.get("extra_state", {}).get("train_iterator", {})
    counts = [(name, place[name]) for name in ("epoch", "iterations_in_epoch") if name in place]
    history = state.get("optimizer_history", [])
    counts += [("num_updates", each["num_updates"]) for each in history if "num_updates" in each]
    for name, count in counts:
        if type(count) is not int or not 0 <= count <= LARGEST_COUNT:
            raise ValueError(f"{name} is {str(count)[:40]}")
    _check_optimizer(optimizer)


def _check_optimizer(optimizer: dict) -> None:
    for number, moments in optimizer.get("state", {}).items():
        shapes = {getattr(moments[name], "shape", None) for name in MOMENTS if name in moments}
        if None in shapes or len(shapes) > 1:
            raise ValueError(
                f"the moments of parameter {number} have other types or shapes than one another"
            )
    for group in optimizer.get("param_groups", []):
        for name in NUMBERS & group.keys():
            value = group[name]
            numbers = value if name in SEVERAL and isinstance(value, (list, tuple)) else [value]
            largest = 1 if name == "betas" else 1e6  # beyond them Python cannot compute with floats
            if not all(_is_number(number, largest) for number in numbers):
                raise ValueError(f"{name} of the optimizer is {str(value)[:40]}")


def _is_number(value: object, largest: float) -> bool:
    """Whether a setting may stay as it is: a number up to `largest`, a tensor or None."""
    if isinstance(value, (int, float)):
        return abs(value) <= largest
    return value is None or isinstance(value, torch.Tensor)
