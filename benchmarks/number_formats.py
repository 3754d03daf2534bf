"""Print what number formats cost on sources of three kinds: bits with scales, and signal-to-noise
in decibels.

    python benchmarks/number_formats.py [--clip mse] [FORMAT ...]

A table in Markdown, for 256 rows of 1,024 values of each source (seed 0), all of variance 1 but for
the last.
"""

import argparse

import torch

from lsq.quant.numbers import METHODS, PRESETS, scaled_format, signal_to_noise

FORMATS = (
    *PRESETS,
    *(
        "int6/row",
        "int4/row",
        "int4/group32",
        "int4/block16x16",
        "fp8-e4m3/row",
        "log4.3/row",
        "log5.2/row",
    ),
    *("lloyd4-gaussian/row", "lloyd4-laplacian/row", "ternary/row"),
)
SHAPE = (256, 1024)


def sources() -> dict[str, torch.Tensor]:
    """Gaussian, Laplacian, and Student's t of 2 degrees of freedom, whose tails are heavy;
    float32."""
    random = torch.Generator().manual_seed(0)
    gaussian, other = (torch.randn(SHAPE, generator=random) for _ in range(2))
    exponential = torch.empty(SHAPE).exponential_(generator=random)
    heavy = gaussian / (torch.randn(2, *SHAPE, generator=random) ** 2).mean(0).sqrt()
    return {
        "Gaussian": gaussian,
        "Laplacian": exponential * other.sign() / 2**0.5,
        "heavy tails": heavy,
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "formats",
        nargs="*",
        default=FORMATS,
        metavar="FORMAT",
        help="default: the table of the docs",
    )
    parser.add_argument(
        "--clip", choices=METHODS, nargs="+", default=["absmax", "mse"], help="default: absmax mse"
    )
    options = parser.parse_args()
    found = sources()
    columns = [f"{name}, {clip}" for name in found for clip in options.clip]
    print("| format | bits |", *(f"{column} |" for column in columns))
    print("|---|" + "--:|" * (1 + len(columns)))
    for name in options.formats:
        form = scaled_format(name)
        row = [
            f"{signal_to_noise(x, form.decode(form.encode(x, clip))):.1f} |"
            for x in found.values()
            for clip in options.clip
        ]
        print(f"| {name} | {form.bits_per_value(SHAPE):.2f} |", *row, flush=True)


if __name__ == "__main__":
    main()
