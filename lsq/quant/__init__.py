"""Number formats, rounding to codes and back, and measurement of clips."""

from lsq.quant.arithmetic import (
    CLIP_GRADIENTS,
    LARGEST_CLIP,
    SMALLEST_CLIP,
    Quantized,
    check_clip,
    largest_clips,
    maximum_code,
    mean_clips,
    pack_bits,
    quantize,
    scale_of,
    unpack_bits,
)
from lsq.quant.calibration import (
    CALIBRATIONS,
    calibrate,
    check_not_empty,
    check_usable,
    fill_empty,
    octav_clip,
    sample_stride,
)
from lsq.quant.formats import GRADIENT, NORMALISED, WEIGHT_FORMATS, Format, Grain, WeightFormat
from lsq.quant.pruning import Pruning

__all__ = [
    "CALIBRATIONS",
    "CLIP_GRADIENTS",
    "GRADIENT",
    "NORMALISED",
    "LARGEST_CLIP",
    "SMALLEST_CLIP",
    "WEIGHT_FORMATS",
    "Format",
    "Grain",
    "Pruning",
    "Quantized",
    "WeightFormat",
    "calibrate",
    "check_clip",
    "check_not_empty",
    "check_usable",
    "fill_empty",
    "largest_clips",
    "mean_clips",
    "maximum_code",
    "octav_clip",
    "pack_bits",
    "quantize",
    "sample_stride",
    "scale_of",
    "unpack_bits",
]
