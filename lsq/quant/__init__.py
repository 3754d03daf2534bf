"""Number formats, rounding to codes and back, and how clips are measured."""

from lsq.quant.calibration import calibrate, octav_clip, sample_stride
from lsq.quant.formats import GRADIENT, Format, Grain, activation_format, weight_format
from lsq.quant.rounding import (
    LARGEST_CLIP,
    SMALLEST_CLIP,
    Quantized,
    check_clip,
    dequantize,
    fake_quantize,
    maximum_code,
    pack_bits,
    quantize,
    scale_of,
    unpack_bits,
)

__all__ = [
    "GRADIENT",
    "LARGEST_CLIP",
    "SMALLEST_CLIP",
    "Format",
    "Grain",
    "Quantized",
    "activation_format",
    "calibrate",
    "check_clip",
    "dequantize",
    "fake_quantize",
    "maximum_code",
    "octav_clip",
    "pack_bits",
    "quantize",
    "sample_stride",
    "scale_of",
    "unpack_bits",
    "weight_format",
]
