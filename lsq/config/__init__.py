"""Configuration: frozen, keyword-only dataclasses that check their fields when they are made.

An error is a ValueError that names the given value and the allowed ones.
"""

from lsq.config.checks import (
    DIMENSION_MULTIPLE,
    check_dimension,
    documentation,
    require_choice,
    require_model,
    require_positive,
    require_whole,
)
from lsq.config.layer import ACTIVATIONS, Adapter, LayerConfig, RelativeBias, Rotary
from lsq.config.quantization import MODES, Fitted, Names, QuantConfig

__all__ = [
    "ACTIVATIONS",
    "Adapter",
    "DIMENSION_MULTIPLE",
    "MODES",
    "Fitted",
    "LayerConfig",
    "Names",
    "QuantConfig",
    "RelativeBias",
    "Rotary",
    "check_dimension",
    "documentation",
    "require_choice",
    "require_model",
    "require_positive",
    "require_whole",
]
