"""Other people's models in int8: `convert` makes their layers lsq's, `revert` undoes that."""

from typing import TYPE_CHECKING

from lsq.extras import lazily

if TYPE_CHECKING:
    from lsq.models.clips import average_clips, declare_formats, load_clips, save_clips
    from lsq.models.code_files import load_codes, save_codes
    from lsq.models.conversion import convert, float_state_dict, revert
    from lsq.models.frozen import CodesAlone, freeze
    from lsq.models.node_widths import set_node_bits
    from lsq.models.quantizer import LsqConfig
    from lsq.models.recomputation import checkpoint_layers
    from lsq.models.selection import Layer, Report
    from lsq.models.sparsity import Pruning, Sparsity, sparsify, sparsity_of
    from lsq.models.trained_codes import train_codes
    from lsq.models.trainer import LsqCallback

_FILES = {
    "LsqCallback": "trainer",
    "checkpoint_layers": "recomputation",
    "LsqConfig": "quantizer",
    **dict.fromkeys(("average_clips", "declare_formats", "load_clips", "save_clips"), "clips"),
    **dict.fromkeys(("load_codes", "save_codes"), "code_files"),
    **dict.fromkeys(("convert", "float_state_dict", "revert"), "conversion"),
    **dict.fromkeys(("CodesAlone", "freeze"), "frozen"),
    "set_node_bits": "node_widths",
    "train_codes": "trained_codes",
    **dict.fromkeys(("Layer", "Report"), "selection"),
    **dict.fromkeys(("Pruning", "Sparsity", "sparsify", "sparsity_of"), "sparsity"),
}
__all__ = [
    "CodesAlone",
    "Layer",
    "LsqCallback",
    "LsqConfig",
    "Pruning",
    "Report",
    "Sparsity",
    "average_clips",
    "checkpoint_layers",
    "convert",
    "declare_formats",
    "float_state_dict",
    "freeze",
    "load_clips",
    "load_codes",
    "revert",
    "save_clips",
    "save_codes",
    "set_node_bits",
    "sparsify",
    "sparsity_of",
    "train_codes",
]
__getattr__ = lazily(__name__, _FILES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
