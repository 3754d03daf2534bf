"""Where a layer stands in a model, for patterns of formats: what its tensors are called in the
model's state dict."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import nn

from lsq.config import Fitted, LayerConfig, QuantConfig
from lsq.layers.module import ProgramModule
from lsq.layers.programs import Mode
from lsq.layers.tensor_names import tensor_names
from lsq.program.program import Program
from lsq.run.backends import backend


def placed(
    config: LayerConfig,
    path: str,
    build: Callable[[Mode], Program],
    state_names: Callable[[str], Sequence[str]] = lambda name: [name],
) -> LayerConfig:
    """The configuration of a layer at a place in a model.

    Args:
        config: of all such layers.
        path: of the place.
        build: makes the layer's program for a batch of any size.
        state_names: what a declared parameter is called in the state dict of the layer.
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
    if quant.formats_differ:
        fitted: Fitted = {}
        called: tuple[list[str], list[str]] = [], []
        for path, module in model.named_modules():
            if isinstance(module, ProgramModule):
                quant.at(path, *module.tensor_names, fitted)
                for found, names in zip(called, module.tensor_names, strict=True):
                    found += [
                        f"{path}.{name}" if path else name
                        for every in names.values()
                        for name in every
                    ]
        weights, activations = called
        named = {
            "weight_format": weights,
            "activation_format": activations,
            "gradient_format": weights,
        }
        every = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        quant.check_fitted(fitted, named, every)
