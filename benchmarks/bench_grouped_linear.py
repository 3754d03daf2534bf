"""A linear layer in eval mode: int8 products of codes with scales of groups, beside decoded values
and floats.

Seconds of processor time of all threads of whole calls, encoding included: others may be at work on
the machine. "decoded" multiplies the values of the format as float32, "grouped" their codes
(lsq.ops.grouped_weight). Ratios are to "decoded".
"""

import time
from collections.abc import Callable

import common
import torch

from lsq.config import QuantConfig
from lsq.layers import QuantizedLinear
from lsq.run.backends import CPU

ROWS, INPUTS, OUTPUTS = (1, 8, 32, 512), 512, 2048
QUICK = (1, 3), 40, 33
FORMATS = ("nvfp4", "vsquant4", "mxfp4", "mxint8", "int8/group64", "int6/row")
BASELINE = "decoded"


class Decoding(CPU):
    """The CPU as if it had no products of codes with scales of groups."""

    multiplies_groups = False


def sides(rows: int, inputs: int, outputs: int, form: str) -> dict[str, Callable[[], object]]:
    """Calls of the same layer by name."""
    x, quant = torch.randn(rows, inputs), QuantConfig(weight_format=form, activation_format=form)
    plain, found = torch.nn.Linear(inputs, outputs).eval(), {}
    for name, backend in ((BASELINE, Decoding()), ("grouped", None)):
        layer = QuantizedLinear(inputs, outputs, quant=quant)
        layer.load_state_dict(layer.state_dict() | plain.state_dict())
        layer(x)  # measures clips
        layer.eval().backend = backend
        found[name] = lambda layer=layer: layer(x)
    return {**found, "float32": lambda: plain(x)}


def main(arguments: list[str] | None = None) -> None:
    options = common.parse(common.parser(__doc__), arguments)
    table = []
    all_rows, *widths = QUICK if options.quick else (ROWS, INPUTS, OUTPUTS)
    for form in FORMATS:
        for rows in all_rows:
            with torch.no_grad():
                given = sides(rows, *widths, form)
                timings = common.alternate(given, rounds=options.rounds, clock=time.process_time)
            table += [
                {
                    "format": form,
                    "rows": rows,
                    "side": side,
                    "milliseconds": 1e3 * timing.median,
                    "ratio": timings[BASELINE].median / timing.median,
                }
                for side, timing in timings.items()
            ]
    common.report(
        "grouped_linear",
        table,
        common.conditions(options, baseline=BASELINE, sizes=widths),
        options,
    )


if __name__ == "__main__":
    main()
