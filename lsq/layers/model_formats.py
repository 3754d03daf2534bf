"""Number formats of a model: the names that patterns match, and a count of decoded tensors."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import nn

from lsq.config import Fitted, LayerConfig, Names, QuantConfig
from lsq.layers.builder import Mode
from lsq.layers.clips import ClippedModule
from lsq.ops.project import Project
from lsq.program.program import Program
from lsq.program.tensor import Kind, VirtualTensor
from lsq.quant.numbers import ScaledFormat
from lsq.run.backends import backend


def tensor_names(
    program: Program, state_names: Callable[[str], Sequence[str]]
) -> tuple[Names, Names]:
    """Map weights and activations of a program to their names in the module's state dict.

    An activation has the name of its clip without _clip, and the names of weights that read it.
    """
    weights = {name: state_names(name) for name in program.weights}
    readers: defaultdict[VirtualTensor, list[str]] = defaultdict(list)
    for operation in program.operations[: program.forward_length]:
        if isinstance(operation, Project):
            readers[operation.x.tensor] += weights[operation.weight.values.name]
    activations = {
        name: [
            *(one.removesuffix("_clip") for one in state_names(name + "_clip")),
            *readers[tensor],
        ]
        for name, tensor in program.activations.items()
    }
    return weights, activations


def config_at(
    config: LayerConfig,
    path: str,
    build: Callable[[Mode], Program],
    state_names: Callable[[str], Sequence[str]] = lambda name: [name],
) -> LayerConfig:
    """Return the configuration of the layer at `path`, with the formats that patterns give it."""
    if not config.quant.formats_differ:
        return config
    program = build(Mode(training=True, backward=False, backend=backend("reference")))
    return replace(config, quant=config.quant.at(path, *tensor_names(program, state_names)))


def check_patterns(model: nn.Module, quant: QuantConfig) -> None:
    """Raise a ValueError for a pattern that gives no tensor of `model` its format."""
    if quant.formats_differ:
        fitted: Fitted = {}
        named = {"weight_format": [], "activation_format": []}
        for path, module in model.named_modules():
            if isinstance(module, ClippedModule):
                quant.at(path, *module.tensor_names, fitted)
                for found, names in zip(named.values(), module.tensor_names, strict=True):
                    found += [
                        f"{path}.{one}".lstrip(".") for each in names.values() for one in each
                    ]
        named["gradient_format"] = named["weight_format"]
        every = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        quant.check_fitted(fitted, named, every)


def decoded_summary(model: nn.Module) -> str | None:
    """Return a line that counts tensors multiplied as decoded values, by format, or None."""
    found: dict[str, Counter[str]] = {}
    for module in model.modules():
        if isinstance(module, ClippedModule) and module.quant.quantized and not module.quant.coded:
            quant = module.quant
            weights = [name for name, one in module.declared.items() if one.kind is Kind.WEIGHT]
            forms = [("weight", quant.weight_form(name)) for name in weights]
            forms += [
                ("activation", quant.activation_form(name)) for name in module.tensor_names[1]
            ]
            forms += [("gradient", quant.gradient_form(name)) for name in weights]
            for kind, form in forms:
                if isinstance(form, ScaledFormat):
                    found.setdefault(form.name, Counter())[kind] += 1
    formats = []
    for form, counts in found.items():
        parts = [f"{count} {kind}{'s' * (count > 1)}" for kind, count in counts.items()]
        formats.append(f"{form} ({', '.join(parts)})")
    if not formats:
        return None
    return f"multiplied as decoded values, no faster than floats: {', '.join(formats)}"
