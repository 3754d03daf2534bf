"""Checkpoints of earlier versions."""

import functools
import logging
from collections.abc import Collection

import torch

logger = logging.getLogger(__name__)

OUTDATED_CLIPS = ("hidden_clip", "out_clip")
"""Of products before their bias."""
OUTDATED_COUNTS = ("calibrated", "passes")
"""Of inner modules."""


def upgrade(state_dict: dict[str, torch.Tensor], prefix: str, declared: Collection[str]) -> None:
    """Drop from the state of a module, whose names begin with `prefix`, what earlier versions kept.

    `declared`: its parameters, whose activations' clips are then measured again.
    """
    parts = {name.rpartition(".")[0] for name in declared} - {""}
    outdated = {f"{part}.{name}" for part in parts for name in (*OUTDATED_CLIPS, *OUTDATED_COUNTS)}
    outdated = {*outdated, *OUTDATED_CLIPS} - set(declared)
    found = [name for name in outdated if state_dict.pop(prefix + name, None) is not None]
    if found and prefix + "calibrated" in state_dict:
        _warn()
        state_dict[prefix + "calibrated"] = torch.tensor(False, device="cpu")


@functools.cache  # once, not for every layer
def _warn() -> None:
    logger.warning("a checkpoint of an older version; clips of activations are measured again")
