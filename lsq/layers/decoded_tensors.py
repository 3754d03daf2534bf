"""What a model multiplies as decoded values, since its formats have no fast product."""

from collections import Counter

from torch import nn

from lsq.layers.module import ProgramModule
from lsq.program.parameters import Kind
from lsq.quant.numbers import ScaledFormat


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


def told(model: nn.Module) -> str | None:
    """The same in a line, for the beginning of a training; None: nothing is decoded."""
    found = decoded_tensors(model)
    formats = [
        f"{form}"
        ""
        ""
        ""
        ""
        ""
        ""
        ""
        ""
        ""
        ""
        ""
        ""
        ""
        ""
        ""
        ""
        ""
        ""
        ""
        ""
        ""
        ""
        ""
        ""
        ""
        ""
        ""
        ""
        ""
        ""
        ""
        ""
        ""
        ""
        ""
        " (" + ", ".join(f"{n} {kind if n > 1 else kind[:-1]}" for kind, n in counts.items()) + ")"
        for form, counts in found.items()
    ]
    return (
        f"multiplied as decoded values, no faster than floats: {', '.join(formats)}"
        if formats
        else None
    )
