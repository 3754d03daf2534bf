"""A training step of an encoder layer, forward and backward, in formats that are decoded first,
beside float and int8.

Seconds of processor time of all threads: others may be at work on the machine. Clips are measured
    before.
"""

import time
from collections.abc import Callable
from functools import partial

import common
import torch

from lsq.config import LayerConfig, QuantConfig
from lsq.layers import TransformerEncoderLayer

SHAPES = {"small": (128, 4, 512, 64, 16), "base": (512, 8, 2048, 64, 16)}
"""Name -> hidden, heads, feed-forward, words, sentences."""
QUICK_SHAPES = {"tiny": (32, 2, 48, 5, 3)}
FORMATS = ("int6/row", "int4/group32", "vsquant4", "nvfp4", "mxfp8-e4m3", "log4.3/row")
BASELINE = "float32"


class MeasuredOnce(QuantConfig):
    calibration_passes = 1


def sides(
    hidden: int, heads: int, feed_forward: int, words: int, sentences: int
) -> dict[str, Callable[[], None]]:
    """Steps by name."""
    decoded = {name: MeasuredOnce(weight_format=name, activation_format=name) for name in FORMATS}
    quants = {BASELINE: QuantConfig(mode="float"), "int8": QuantConfig()} | decoded
    x = torch.randn(words, sentences, hidden, requires_grad=True)
    gradient = torch.randn(words, sentences, hidden)

    def step(layer: torch.nn.Module) -> None:
        trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
        torch.autograd.grad(layer(x), (x, *trained), gradient)

    found = {}
    for name, quant in quants.items():
        config = LayerConfig(hidden=hidden, heads=heads, feed_forward=feed_forward, quant=quant)
        layer = TransformerEncoderLayer(config)
        common.settle(partial(step, layer))
        found[name] = lambda layer=layer: step(layer)
    return found


def main(arguments: list[str] | None = None) -> None:
    options = common.parse(common.parser(__doc__), arguments)
    rows = []
    for shape, sizes in (QUICK_SHAPES if options.quick else SHAPES).items():
        timings = common.alternate(
            sides(*sizes), rounds=options.rounds, warm_up=1, clock=time.process_time
        )
        rows += [
            {
                "shape": shape,
                "side": name,
                "milliseconds": 1e3 * timing.median,
                "ratio": timings[BASELINE].median / timing.median,
            }
            for name, timing in timings.items()
        ]
    common.report(
        "decoded", rows, common.conditions(options, baseline=BASELINE, sizes=SHAPES), options
    )


if __name__ == "__main__":
    main()
