"""Compiles every kernel that transformer base and big need, for each GPU architecture, and reports what they take.

Needs NVRTC (`pip install 'lsq[cuda13]'`), but no GPU and no driver. Prints a table; --json and --markdown keep it. The
exit status is 1 if a kernel spills registers to memory.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from tqdm import tqdm

from lsq.config import LayerConfig, QuantConfig
from lsq.csrc import compiler
from lsq.csrc.compiler import Resources
from lsq.csrc.launch import Kernel
from lsq.ops import gradient_layout, registry
from lsq.ops.gradient_layout import MessageLayout
from lsq.program import layers
from lsq.program.kernels import kernels
from lsq.program.program import Program

TARGETS = ("sm_80", "sm_90a", "sm_100")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SIZES = {"base": (512, 2048, 8), "big": (1024, 4096, 16)}
"""Hidden size, inner size of the feed-forward block, heads."""
VOCABULARY, PADDED = 32764, 32768
SENTENCES, LENGTH = 128, 32
"""Nothing is specialised for these, except for lengths that are no multiple of 8, which are compiled as well."""
MESSAGE_BLOCKS = (128, 1024)
"""Values that share a scale in a gradient's message: the default, and the most, which take the most registers."""


def configurations() -> Iterator[LayerConfig]:
    """The layers of both models, in every mode that changes kernels."""
    for hidden, inner, heads in SIZES.values():
        for quant in (
            QuantConfig(backward="int8"), QuantConfig(backward="float", backward_dtype="bfloat16"),
            QuantConfig(clip_gradient="lsq", backward="int8"), QuantConfig(mode="float"),
        ):  # fmt: skip
            for activation, pre_norm in (("relu", False), ("gelu", True)):
                yield LayerConfig(
                    hidden=hidden, heads=heads, feed_forward=inner, dropout=0.1, attention_dropout=0.1,
                    activation_dropout=0.1, activation=activation, pre_norm=pre_norm, quant=quant,
                )  # fmt: skip


def programs() -> Iterator[Program]:
    """Every program of a training run and of decoding."""
    for config in configurations():
        quant, hidden = config.quant, config.hidden
        for training in (True, False):
            for length in (LENGTH, LENGTH + 1):
                shape = (config, SENTENCES, length)
                yield layers.encoder_layer(*shape, True, training, training)
                yield layers.decoder_layer(*shape, length, True, True, training, training)
            loss = (SENTENCES * LENGTH, hidden, VOCABULARY, PADDED, 1, 0.1)
            yield layers.vocabulary_loss(quant, *loss, training, training)
            table = (SENTENCES, LENGTH, VOCABULARY, hidden, 1024, 1, hidden**0.5, 0.1, True)
            yield layers.embedding(quant, *table, training, training)
        yield layers.decoder_memory(config, SENTENCES, LENGTH)
        yield layers.decoder_step(config, SENTENCES, 7, LENGTH, True)
        yield layers.vocabulary_logits(quant, SENTENCES, hidden, VOCABULARY, PADDED, False, False)


def gradient_kernels(dtypes=DTYPES) -> Iterator[Kernel]:
    """What packs gradients of each dtype into messages, adds messages up and unpacks them."""
    pack, add, unpack = (registry.definition(f"gradient_{name}").cuda for name in ("pack", "sum", "unpack"))
    key, values = torch.empty(1, dtype=torch.int64, device="meta"), SENTENCES * LENGTH
    kinds = itertools.product(MESSAGE_BLOCKS, gradient_layout.BITS, (False, True), (1, 2))
    for block, bits, stochastic, rows in kinds:
        layout = MessageLayout.of_shard(values, block=block, bits=bits)
        messages = torch.empty(1, layout.message_bytes, dtype=torch.uint8, device="meta")
        cut = {"length": values, "bits": bits, "block": block}
        entries = add(messages, key, messages, **cut, stochastic=stochastic)
        for dtype in dtypes:
            x = torch.empty(rows, values, dtype=dtype, device="meta")
            entries += pack(x, key, messages, None, shards=1, **cut, stochastic=stochastic)
            entries += unpack(messages.expand(rows, 1, -1), x[0], values=values, **cut)
        yield from (entry.kernel for entry in entries)


def needed(dtypes=DTYPES) -> list[Kernel]:
    """Every kernel of every program and of gradient messages, for activations of each dtype."""
    found = {kernel for program in programs() for dtype in dtypes for kernel in kernels(program, dtype)}
    return sorted({*found, *gradient_kernels(dtypes)}, key=str)


def report(wanted: list[Kernel], targets=TARGETS) -> dict[tuple[str, str], Resources]:
    """(kernel, target) -> what it takes.

    Raises:
        RuntimeError: a kernel does not compile.
    """
    found = {}
    pairs = [(kernel, target) for kernel in wanted for target in targets]
    for kernel, target in tqdm(pairs, desc="compiling", unit="kernel", disable=None):
        compiled = compiler.compile_kernels(kernel.source, kernel.defines, target)
        found[str(kernel), target] = compiled.resources[kernel.name]
    return found


def spills(found: dict[tuple[str, str], Resources]) -> list[str]:
    """What each kernel that spills registers spills, in words."""
    return [
        f"{kernel} spills {taken.spill_bytes} bytes on {target}"
        for (kernel, target), taken in found.items()
        if taken.spill_bytes
    ]


def markdown(found: dict[tuple[str, str], Resources], version: str) -> str:
    """A table: kernels down, targets across."""
    targets = sorted({target for _, target in found})
    lines = [
        f"Registers per thread, static shared memory per block in bytes, spilled bytes; NVRTC {version}.", "",
        f"| kernel | {' | '.join(targets)} |", "|---|" + "---|" * len(targets),
    ]  # fmt: skip
    for kernel in sorted({kernel for kernel, _ in found}):
        cells = (found[kernel, target] for target in targets)
        sizes = (f"{taken.registers}, {taken.shared_bytes}, {taken.spill_bytes}" for taken in cells)
        lines.append(f"| {kernel.replace('-D', '')} | {' | '.join(sizes)} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report to FILE as JSON")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the report to FILE as a table")
    options = parser.parse_args(arguments)
    found = report(needed())
    version = compiler.version()
    print(markdown(found, version), end="")
    if options.json:
        rows = [{"kernel": kernel, "target": target, **vars(taken)} for (kernel, target), taken in found.items()]
        options.json.write_text(json.dumps({"nvrtc": version, "kernels": rows}) + "\n")
    if options.markdown:
        options.markdown.write_text(markdown(found, version))
    for line in spills(found):
        print(line, file=sys.stderr)
    return 1 if spills(found) else 0


if __name__ == "__main__":
    sys.exit(main())
