"""The table of operations."""

import inspect

import pytest
import torch

from lsq.ops import registry


def test_names_are_unique():
    taken = registry.definition("add")
    with pytest.raises(ValueError, match="'add' is already registered"):
        registry.register(taken)
    assert registry.definition("add") is taken


def test_an_unknown_name():
    with pytest.raises(KeyError):
        registry.definition("no such operation")


@pytest.mark.parametrize("name", registry.names())
def test_implementations_take_the_same_arguments(name):
    """The device's implementation takes the inputs of the reference, then outputs, and the same attributes."""
    definition = registry.definition(name)
    assert definition.name == name

    def split(function):
        """(names of the inputs, names of the attributes); None where any are taken."""
        parameters = inspect.signature(function).parameters.values()
        kinds = {p.kind for p in parameters}
        inputs = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        attributes = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
        return (
            None if inspect.Parameter.VAR_POSITIONAL in kinds else inputs,
            None if inspect.Parameter.VAR_KEYWORD in kinds else attributes,
        )

    inputs, attributes = split(definition.reference)
    device_inputs, device_attributes = split(definition.cpu)
    assert attributes is None or attributes == device_attributes
    if inputs is not None and device_inputs is not None:
        assert device_inputs[: len(inputs)] == inputs and len(device_inputs) > len(inputs)
    if definition.unquantized:
        assert split(definition.unquantized)[0] == inputs


def test_what_is_rounded_can_be_measured():
    """Operations that write codes of an activation offer the values before the rounding."""
    with_values = {name for name in registry.names() if registry.definition(name).unquantized}
    assert with_values == {
        "quantize", "linear_int8", "merge_heads", "bias_activation_dropout", "bias_dropout_residual_layer_norm"
    }


def test_values_before_the_rounding_are_what_is_rounded():
    x, clip = torch.randn(7, 16), torch.tensor([1.3])
    quantize = registry.definition("quantize")
    assert quantize.unquantized(x, clip, bits=8) is x
    context = torch.randn(3, 2, 7, 8)
    merge = registry.definition("merge_heads")
    codes = quantize.reference(merge.unquantized(context, clip, bits=8), clip, bits=8)[0]
    assert torch.equal(codes, merge.reference(context, clip, bits=8)[0])
