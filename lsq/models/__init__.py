"""Models of others in int8: `convert` turns their linear layers into lsq's, `revert` turns them
back."""

from lsq.models.convert import convert, float_state_dict, revert
from lsq.models.frozen import Frozen, freeze
from lsq.models.report import Layer, Report

__all__ = ["Frozen", "Layer", "Report", "convert", "float_state_dict", "freeze", "revert"]
