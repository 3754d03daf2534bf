"""Configuration: frozen, keyword-only dataclasses that are checked when they are made.

Every error is a ValueError that names the value that was given and the values that are allowed.
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
