"""Compiles every kernel that transformer base and big need, for each GPU architecture, and reports
what they take.

Needs NVRTC (`pip install '.[cuda13]'`), but no GPU and no driver. Prints a table, which
--markdown keeps. The exit status is 1 if a kernel spills registers to memory. Compiled kernels
are kept as always: where XDG_CACHE_HOME says. --nvrtc compares other versions of NVRTC: PyTorch's
builds for CUDA 12.8 bring 12.8 along, and drivers are newer than 13.0.
"""

import argparse
import ctypes
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import torch
from operations import (
    LENGTH,
    PADDING,
    POSITIONS,
    PROCESSES,
    Size,
    layer_config,
    others,
    sizes,
    table,
    words,
)
from tqdm import tqdm

from lsq import gemm
from lsq.config import LayerConfig, QuantConfig
from lsq.gemm.configuration import WGMMA_SM, default_tile
from lsq.gemm.product_key import ProductKey
from lsq.gemm.tuner import product_list
from lsq.gemm.tuner.ended import tiles
from lsq.layers import decoding, programs
from lsq.layers.blocks import PackedSequences
from lsq.layers.programs import Mode
from lsq.native import compiler
from lsq.native.compiler import Resources
from lsq.native.launch import Kernel, Launch
from lsq.ops.fake_quantize import FakeQuantize
from lsq.ops.gradient_messages import (
    MessageLayout,
    Messages,
    PackGradients,
    SumMessages,
    UnpackGradients,
)
from lsq.ops.next_words import NextWords
from lsq.ops.project import Project
from lsq.ops.representatives import OPERATIONS
from lsq.ops.rounding import RoundWeight
from lsq.ops.sparse_project import INPUTS, MOST_ROWS, OUTPUTS, SparseProject, SparseWeight
from lsq.ops.vocabulary_loss import VocabularyLoss, VocabularyLossGradient
from lsq.program.operation import Operation
from lsq.program.program import Program
from lsq.program.samples import placed
from lsq.program.tensor import VirtualTensor
from lsq.program.values import Coded, Weight
from lsq.quant import WEIGHT_FORMATS, Grain
from lsq.quant.stored import Fields
from lsq.run.cuda import AbsentGPU
from lsq.serving.architecture import Architecture, StackArchitecture
from lsq.serving.engine import FIELD_BITS
from lsq.serving.step_programs import encoder_program, step_program

TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
DTYPES = (torch.bfloat16, torch.float32)
OF_TABLES = ("lsq_adam_table", "lsq_adam_codes_table", "lsq_adam_poison_table", "lsq_gradient_norm")
"""Kernels of lsq.optim.Adam, which read many operations from a table in the GPU's memory; no shape
specialises them."""
TOKENS = 4096
"""Nothing is specialised for it."""
TILES = tuple(
    default_tile(ProductKey(op="project", m=rows, n=512, k=512), sm)
    for sm, many in ((None, (8192, 2047, 64)), (WGMMA_SM, (8192, 2048, 64)))
    for rows in many
)
"""What the rule for products makes of many rows, fewer and few, on GPUs without wgmma and with it.
"""
FEW_ROWS = tuple(
    default_tile(ProductKey(op="vocabulary_loss", m=64, n=32768, k=512), sm)
    for sm in (None, WGMMA_SM)
)
"""What it makes of few rows of logits."""
OF_LOGITS = (NextWords, VocabularyLoss, VocabularyLossGradient)
"""Those that take so many words that few rows fill a GPU."""
PACKED_ROWS = (32, 64)
"""Rows of steps of decoding for which packed weights have tiles of their own."""
NUMBERS = Size(
    name="numbers",
    hidden=256,
    feed_forward=1024,
    heads=4,
    vocabulary=60,
    padded=64,
    sentences=TOKENS // LENGTH,
)
"""The model of `lsq numbers`."""
TUNED = Path(__file__).with_name("gpu_tune.csv")
"""Products that gpu_round.sh tunes."""
MESSAGE_BLOCKS = (128, 1024)
"""Values that share a scale in a gradient's message: the default, and the most, which take the most
registers."""


def configurations(size: Size) -> Iterator[LayerConfig]:
    """The layers of a model, in every mode that changes kernels."""
    for quant in (
        QuantConfig(backward="int8"),
        QuantConfig(backward="float"),
        QuantConfig(clip_gradient="lsq", backward="int8"),
        QuantConfig(mode="float"),
        QuantConfig(weight_format="nvfp4", activation_format="int6/row"),
        QuantConfig(weight_format="int4"),
    ):
        for options in (
            {"activation": "relu"},
            {"activation": "gelu", "pre_norm": True},
            {"activation": "squared_relu"},
            {"activation": "silu", "pre_norm": True, "norm": "rms", "gated": True, "bias": False},
        ):
            yield layer_config(size, quant, 0.1, **options)


def measured_configuration(size: Size) -> Iterator[LayerConfig]:
    """The layers that gpu_round.sh trains."""
    yield layer_config(size, QuantConfig(backward="int8"), 0.1)


def needed_programs(models: Iterable[Size], layers: Callable = configurations) -> Iterator[Program]:
    """Every program of a training run, of decoding by modules and by the engine."""
    for size in models:
        sentences = PackedSequences(rows=size.tokens, count=size.sentences)
        step = PackedSequences(rows=size.sentences, count=size.sentences)
        for config, training in itertools.product(layers(size), (True, False)):
            quant = config.quant
            mode = Mode(training=training, backward=training, backend=AbsentGPU(torch.float32))
            yield programs.encoder_layer(config, sentences, mode)
            if config.activation == "gelu":  # as GPT-2's
                yield programs.encoder_layer(
                    replace(config, in_out=True), sentences, mode, causal=True
                )
            yield programs.decoder_layer(config, sentences, sentences, mode)
            yield programs.vocabulary_loss(
                quant, size.tokens, *words(size), mode, padding=PADDING, smoothing=0.1
            )
            yield programs.embedding(quant, size.tokens, table(size, 0.1), mode)
            if not training:
                yield decoding.decoder_memory(config, size.tokens, mode)
                yield decoding.decoder_step(config, 7, sentences, mode)
                yield decoding.encoder_step(config, 7, sentences.count, mode)
                yield programs.vocabulary_logits(quant, step.rows, *words(size), mode)
                if quant.coded:
                    architecture = translation_model(size, config)
                    yield encoder_program(architecture, sentences, mode.backend)
                    for rows in (step.rows, *PACKED_ROWS):
                        yield step_program(architecture, rows, mode.backend)


def translation_model(size: Size, config: LayerConfig) -> Architecture:
    """An architecture for the decoding engine, with a layer on each side."""
    stack = StackArchitecture(
        config=config,
        layers=1,
        words=size.vocabulary,
        max_positions=POSITIONS,
        positions="sinusoidal",
        embedding_scale=size.hidden**0.5,
        embedding_norm=False,
        final_norm=config.pre_norm,
    )
    return Architecture(
        encoder=stack,
        decoder=stack,
        shared_words=True,
        tied_projection=True,
        padding=PADDING,
        bos=0,
        eos=2,
        unk=3,
    )


def messages(dtypes=DTYPES) -> Iterator[Operation]:
    """Packing, summing and unpacking of gradient messages, in every specialised way."""
    for block, rows, dtype in itertools.product(MESSAGE_BLOCKS, (1, PROCESSES), dtypes):
        layout = MessageLayout.for_values(TOKENS, 1, block=block)

        def tensor(*shape, dtype=torch.uint8):
            return VirtualTensor(name="any", shape=shape, dtype=dtype)

        def written(*copies, layout=layout, tensor=tensor):
            return Messages(layout=layout, data=tensor(*copies, layout.message_bytes))

        yield PackGradients(x=tensor(rows, TOKENS, dtype=dtype), messages=written(1))
        yield SumMessages(messages=written(rows), sum=written())
        yield UnpackGradients(messages=written(rows, 1), x=tensor(TOKENS, dtype=dtype))


def next_words(size: Size) -> Iterator[Operation]:
    """The operation that search and sampling ask of a decoding step; nothing specialises it."""

    def tensor(name, *shape, dtype=torch.float32):
        return VirtualTensor(name=name, shape=shape, dtype=dtype)

    rows, quant = size.sentences, QuantConfig()
    yield NextWords(
        x=Coded(
            format=quant.activations,
            codes=tensor("x", rows, size.hidden, dtype=torch.int8),
            scale=tensor("x_scale", 1),
        ),
        weight=Weight(
            format=quant.weights,
            codes=tensor("weight", size.padded, size.hidden, dtype=torch.int8),
            scale=tensor("scale", size.padded),
        ),
        vocabulary=size.vocabulary,
        words=tensor("words", rows, 8, dtype=torch.int64),
        scores=tensor("scores", rows, 8),
    )


def of_packed_weights(project: Project) -> Iterator[Operation]:
    """A product of few rows with its weight as int4, as fields, and as 2:4 sparse."""
    inner, outputs = project.x.tensor.shape[1], project.columns

    def tensor(name, *shape, dtype=torch.int8):
        return VirtualTensor(name=name, shape=shape, dtype=dtype)

    scale, int4 = project.weight.scale, WEIGHT_FORMATS["int4"](8, Grain.ROW)
    codes = tensor("codes", outputs, int4.stored_columns(inner))
    yield replace(project, weight=Weight(format=int4, codes=codes, scale=scale))
    for bits in range(2, FIELD_BITS + 1):
        fields = Fields(name=f"int{bits}", bits=bits, grain=Grain.ROW)
        codes = tensor("codes", outputs, 1, fields.stored_columns(inner))
        yield replace(project, weight=Weight(format=fields, codes=codes, scale=scale))
    tiles = outputs // OUTPUTS, -(-inner // INPUTS), 32
    kept = tensor("kept", *tiles, 4, dtype=torch.uint8)
    yield SparseProject(
        x=project.x.bare(),
        bias=project.bias,
        out=project.out,
        rounded=project.rounded,
        nonlinearity=project.nonlinearity,
        weight=SparseWeight(
            values=tensor("values", *tiles, 16), kept=kept, scale=scale, inner=inner
        ),
    )


def kernels(operations: Iterable[Operation], dtypes=DTYPES, by=TILES) -> set[Kernel]:
    """Every specialised kernel that operations launch with activations of each dtype, found without
    a GPU or memory.

    Products are ended by every tile `by`, by default those that a GPU takes untuned, and by none.
    """
    found = set()
    for operation, dtype in itertools.product(operations, dtypes):
        on_meta = placed(operation, "meta", dtype)
        if hasattr(on_meta, "parts"):
            on_meta.parts = None  # planned for one of these ways
        for tile in (*by, *(FEW_ROWS if isinstance(operation, OF_LOGITS) else ()), None):
            with gemm.ended_by(tile):
                scratch = [
                    torch.empty(shape, dtype=kind, device="meta")
                    for shape, kind in on_meta.cuda_scratch()
                ]
                found |= {
                    entry.kernel for entry in on_meta.cuda(*scratch) if isinstance(entry, Launch)
                }
    return found


def of_program(program: Program) -> Iterator[Operation]:
    """A program's operations, with those that round its weights, and variants for decoding."""
    for weight in program.weights.values():
        if weight.codes is not None:
            yield RoundWeight(weight=weight)
        elif weight.decoded is not None:
            # both float32
            values, decoded = (replace(weight.values, shape=weight.decoded.shape) for _ in range(2))
            yield FakeQuantize(x=values, clip=weight.clip, out=decoded, form=weight.format)
    for operation in program.operations:
        yield operation
        if (
            isinstance(operation, Project)
            and operation.rows <= MOST_ROWS
            and operation.x.coded is not None
        ):
            yield from of_packed_weights(operation)


def needed(
    dtypes=DTYPES, models: Sequence[Size] = tuple(sizes(TOKENS)), layers: Callable = configurations
) -> list[Kernel]:
    """Kernels of every program and of operations outside programs, for these activations."""
    found = kernels(messages(dtypes), dtypes[:1]) | {
        Kernel(source="adam.cu", name=name) for name in OF_TABLES
    }
    outside = (operations(size) for size in models for operations in (others, next_words))
    for operations in (*map(of_program, needed_programs(models, layers)), *outside):
        found |= kernels(operations, dtypes)
    return sorted(found, key=str)


def of_round(sm: int) -> list[Kernel]:
    """Kernels that gpu_round.sh probes, trains and tunes on a GPU of that compute capability."""
    import gpu_probe  # takes seconds

    found = gpu_probe.kernels() | set(
        needed(DTYPES[:1], [*sizes(TOKENS), NUMBERS], measured_configuration)
    )
    for key in product_list.read(TUNED):
        found |= kernels([OPERATIONS[key.op](key)], DTYPES[:1], tiles(key, sm))
    return sorted(found, key=str)


def report(wanted: list[Kernel], targets=TARGETS) -> dict[tuple[str, str], Resources]:
    """(kernel, target) -> what it takes. Those that multiply by wgmma are for sm_90a alone.

    Raises:
        RuntimeError: a kernel does not compile.
    """
    found = {}
    pairs = [
        (kernel, target)
        for kernel in wanted
        for target in targets
        if target == "sm_90a" or "WGMMA" not in dict(kernel.defines)
    ]
    for kernel, target in tqdm(pairs, desc="compiling", unit="kernel", disable=None):
        compiled = compiler.compile_kernels(kernel.source, kernel.defines, target)
        found[str(kernel), target] = compiled.resources[kernel.name]
    return found


def spills(found: dict[tuple[str, str], Resources]) -> list[str]:
    """Kernels that spill registers, in words."""
    return [
        f"{kernel} spills {taken.spill_bytes} bytes on {target}"
        for (kernel, target), taken in found.items()
        if taken.spill_bytes
    ]


def markdown(found: dict[tuple[str, str], Resources], version: str) -> str:
    """A table: kernels down, targets across."""
    targets = sorted({target for _, target in found})
    lines = [
        "Registers per thread, static shared memory per block in bytes, spilled bytes; NVRTC"
        f" {version}.",
        "",
        f"| kernel | {' | '.join(targets)} |",
        "|---|" + "---|" * len(targets),
    ]
    for kernel in sorted({kernel for kernel, _ in found}):
        cells = (found.get((kernel, target)) for target in targets)
        sizes = (
            f"{taken.registers}, {taken.shared_bytes}, {taken.spill_bytes}" if taken else ""
            for taken in cells
        )
        lines.append(f"| {kernel.replace('-D', '')} | {' | '.join(sizes)} |")
    return "\n".join(lines) + "\n"


def by_library(library: Path | None, targets: Sequence[str]) -> tuple[list[str], list[str]]:
    """Compile kernels that gpu_round.sh trains by a libnvrtc.so, None: by the installed one, in a
    process that has loaded none.

    Returns:
        Rows of a table, and the kernels that spill, in words.
    """
    if library is not None:
        ctypes.CDLL(str(library))  # cuda.bindings takes the one that is there
    wanted, rows, spilling = needed(DTYPES[:1], layers=measured_configuration), [], []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        for target in targets:
            begun = time.process_time()
            found = report(wanted, [target])
            seconds = time.process_time() - begun
            registers = max(taken.registers for taken in found.values())
            rows.append(
                f"| {compiler.version()} | {target} | {len(found)} | {len(spills(found))} |"
                f" {registers} | {seconds:.0f} |"
            )
            spilling += [f"{line} by NVRTC {compiler.version()}" for line in spills(found)]
    return rows, spilling


def compare(libraries: Sequence[Path], targets: Sequence[str]) -> tuple[str, list[str]]:
    """Compile by the installed NVRTC and by others: a table, and the kernels that spill."""
    spawn = get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as pool:
        done = list(pool.map(by_library, [None, *libraries], itertools.repeat(targets)))
    head = "| NVRTC | target | kernels | that spill | most registers | CPU seconds |"
    lines = [head, "|---" * 6 + "|", *(row for rows, _ in done for row in rows)]
    return "\n".join(lines) + "\n", [line for _, spilling in done for line in spilling]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--target", choices=TARGETS, help="compile for that GPU alone")
    parser.add_argument(
        "--round",
        action="store_true",
        help="what gpu_round.sh runs on --target, to be carried there",
    )
    parser.add_argument(
        "--nvrtc",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="compile kernels of training and decoding by these libnvrtc.so, too, and compare",
    )
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="write the report to FILE as a table"
    )
    options = parser.parse_args(arguments)
    if options.round and options.target is None:
        parser.error("--round needs --target: a round runs on one GPU")
    targets = [options.target] if options.target else TARGETS
    if options.nvrtc:
        text, spilling = compare(options.nvrtc, targets)
    else:
        wanted = of_round(int(options.target.strip("sm_a"))) if options.round else needed()
        found = report(wanted, targets)
        text, spilling = markdown(found, compiler.version()), spills(found)
    print(text, end="")
    if options.markdown:
        options.markdown.write_text(text)
    for line in spilling:
        print(line, file=sys.stderr)
    return 1 if spilling else 0


if __name__ == "__main__":
    sys.exit(main())
