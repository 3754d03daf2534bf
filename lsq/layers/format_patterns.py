"""Patterns of formats: which decide about the tensors of a layer, by its path in a model."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import nn

from lsq.config import Fitted, LayerConfig, QuantConfig
from lsq.layers.module import ProgramModule
from lsq.layers.programs import Mode
from lsq.layers.tensor_names import tensor_names
from lsq.program.program import Program
from lsq.run.backends import backend


def config_at(
    config: LayerConfig,
    path: str,
    build: Callable[[Mode], Program],
    state_names: Callable[[str], Sequence[str]] = lambda name: [name],
) -> LayerConfig:
    """Return the configuration of the layer at a path in a model.

    Args:
        config: of all such layers.
        path: as in named_modules.
        build: makes the layer's program for a batch of any size.
        state_names: names of a declared parameter in the state dict of the layer.
    """
    if not config.quant.formats_differ:
        return config
    program = build(Mode(training=True, backward=False, backend=backend("reference")))
    return replace(config, quant=config.quant.at(path, *tensor_names(program, state_names)))


def check_patterns(model: nn.Module, quant: QuantConfig) -> None:
    """Refuse patterns that decide nothing in a model.

    Raises:
        ValueError: names one.
    """
    if not quant.formats_differ:
        return
    fitted: Fitted = {}
    weights: list[str] = []
    activations: list[str] = []
    for path, module in model.named_modules():
        if isinstance(module, ProgramModule):
            quant.at(path, *module.tensor_names, fitted)
            for called, names in zip((weights, activations), module.tensor_names, strict=True):
                every = (name for names_of_tensor in names.values() for name in names_of_tensor)
                called += [f"{path}.{name}" if path else name for name in every]
    named = {"weight_format": weights, "activation_format": activations, "gradient_format": weights}
    quant.check_fitted(
        fitted, named, [name for name, _ in model.named_parameters(remove_duplicate=False)]
    )
