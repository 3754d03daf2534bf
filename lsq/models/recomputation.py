"""Gradient checkpointing of transformers' models with inputs of layers as codes."""

import os

from torch import nn

from lsq.layers.layer_inputs import LayerInputs


def checkpoint_layers(model: nn.Module, folder: str | os.PathLike | None = None) -> LayerInputs:
    """Compute a model's layers again in the backward pass, and keep their inputs as int8 codes.

    `model.gradient_checkpointing_disable()` undoes it. Models that are not of transformers call the
    result's `checkpoint` in place of torch.utils.checkpoint.checkpoint.

    Args:
        model: of transformers, converted or not. Leave Trainer's own gradient_checkpointing off.
        folder: of scratch files that hold the inputs, on the CPU; None: in memory.

    Raises:
        ValueError: the model is not of transformers, or cannot checkpoint.
    """
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise ValueError(
            f"a {type(model).__name__} has no layers that transformers could compute again; call"
            " lsq.layers.LayerInputs().checkpoint(layer, x) in its forward"
        )
    inputs = LayerInputs(folder)
    run_again(model, inputs)
    return inputs


def run_again(model: nn.Module, inputs: LayerInputs) -> None:
    """Let a model of transformers run its layers by `inputs`."""
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)()
    for module in model.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            module._gradient_checkpointing_func = inputs.checkpoint
