"""Number formats in a whole model: which layer has which, and what is multiplied as decoded
values."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import nn

from lsq.config import Fitted, LayerConfig, QuantConfig
from lsq.layers.module import ProgramModule
from lsq.layers.programs import Mode
from lsq.layers.tensor_names import tensor_names
from lsq.program.program import Program
from lsq.program.tensor import Kind
from lsq.quant.numbers import ScaledFormat
from lsq.run.backends import backend


def config_at(
    config: LayerConfig,
    path: str,
    build: Callable[[Mode], Program],
    state_names: Callable[[str], Sequence[str]] = lambda name: [name],
) -> LayerConfig:
    """The configuration of a layer at a module path of a model, whose patterns may name formats.

    Args:
        config: of all such layers.
        path: of the layer.
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


def decoded_tensors(model: nn.Module) -> dict[str, Counter[str]]:
    """Names of formats -> how many "weights", "activations" and "gradients" of products of a model
    are decoded."""
    found: dict[str, Counter[str]] = {}
    for module in model.modules():
        if isinstance(module, ProgramModule) and module.quant.quantized and not module.quant.coded:
            weights = [
                name for name, declared in module.declared.items() if declared.kind is Kind.WEIGHT
            ]
            tensors = [("weights", module.quant.weight_form(name)) for name in weights]
            tensors += [
                ("activations", module.quant.activation_form(name))
                for name in module.tensor_names[1]
            ]
            tensors += [("gradients", module.quant.gradient_form(name)) for name in weights]
            for kind, form in tensors:
                if isinstance(form, ScaledFormat):
                    found.setdefault(form.name, Counter())[kind] += 1
    return found


def decoded_summary(model: nn.Module) -> str | None:
    """Summarise `decoded_tensors` in a line; None: nothing is decoded."""
    formats = []
    for form, counts in decoded_tensors(model).items():
        parts = [f"{count} {kind if count > 1 else kind[:-1]}" for kind, count in counts.items()]
        formats.append(f"{form} ({', '.join(parts)})")
    if not formats:
        return None
    return f"multiplied as decoded values, no faster than floats: {', '.join(formats)}"
