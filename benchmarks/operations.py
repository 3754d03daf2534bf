"""Times fused operations: what lsq's loops take, what plain PyTorch takes, and what copying the same bytes takes.

The operations and their inputs are those of a training step of one encoder layer, one decoder layer, one linear
layer, embedding and vocabulary, recorded while it runs. The plain PyTorch side is the operation's reference, with
torch._int_mm in place of its exact float64 products. It draws the same random numbers as the fused loops, with torch's
integer operations, and these take most of its time where something is dropped or rounded at random: see --dropout 0.
With --device cuda, the operations' CUDA implementations are measured instead, see gpu_operations.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

import common
import gpu
import gpu_operations
import torch

from lsq import gemm, layers
from lsq.config import LayerConfig, QuantConfig
from lsq.csrc import loader
from lsq.program import executor, frames
from lsq.program.tensor import Operation

SHAPE = {"hidden": 512, "feed_forward": 2048, "heads": 8, "vocabulary": 32000, "sentences": 64, "length": 32}
QUICK_SHAPE = {"hidden": 32, "feed_forward": 64, "heads": 2, "vocabulary": 50, "sentences": 3, "length": 5}
PADDING = 1


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of an operation, with the tensors that it got."""

    operation: Operation
    inputs: tuple[torch.Tensor | None, ...]
    backward: str
    """The backward mode of the step in which it was found."""

    @property
    def signature(self) -> tuple:
        """Equal for calls that do the same work."""
        attributes = {name: value for name, value in self.operation.attributes.items() if "stream" not in name}
        shapes = tuple(None if t is None else (tuple(t.shape), t.dtype) for t in self.inputs)
        outputs = tuple(None if t is None else (t.shape, t.dtype) for t in self.operation.outputs)
        return self.operation.name, shapes, outputs, str(attributes)


def step(shape: dict[str, int], dropout: float, backward: str):
    """A function that runs forward and backward of a Transformer with one layer on each side."""
    quant = QuantConfig(backward=backward)
    config = LayerConfig(
        hidden=shape["hidden"], heads=shape["heads"], feed_forward=shape["feed_forward"], dropout=dropout,
        attention_dropout=dropout, activation_dropout=dropout, quant=quant,
    )  # fmt: skip
    vocabulary, hidden = shape["vocabulary"], shape["hidden"]
    embedding = layers.Embedding(vocabulary, hidden, PADDING, dropout=dropout)
    encoder, decoder = layers.TransformerEncoderLayer(config), layers.TransformerDecoderLayer(config)
    linear = layers.QuantizedLinear(hidden, hidden, quant=quant)
    projection = layers.VocabularyProjection(
        vocabulary, hidden, quant=quant, weight=embedding.weight, padding_idx=PADDING
    )
    tokens = torch.randint(PADDING + 1, vocabulary, (shape["sentences"], shape["length"]))
    tokens[1:, -2:] = PADDING

    def run() -> None:
        mask = tokens == PADDING
        memory = linear(encoder(embedding(tokens), mask))
        x = decoder(embedding(tokens), memory, mask, self_padding_mask=mask)
        loss, _ = projection.loss(x, tokens.t(), 0.1)
        (loss / tokens.numel()).backward()

    return run


def calls(names: tuple[str, ...], shape: dict[str, int], dropout: float) -> Iterator[Call]:
    """Every call of the named operations that does different work, in both backward modes.

    Raises:
        ValueError: the step does not run an operation of that name.
    """
    seen = set()
    missing = set(names)
    for backward in ("float", "int8"):
        run = step(shape, dropout, backward)
        run()  # measures the clips
        recorded: list[Call] = []

        def record(operation: Operation, values: dict, recorded=recorded, backward=backward) -> None:
            if operation.name in names:
                inputs = tuple(None if tensor is None else values[tensor] for tensor in operation.inputs)
                recorded.append(Call(operation=operation, inputs=inputs, backward=backward))

        original = executor.run

        def recording(program, start, stop, values, hooks, frame, original=original, record=record) -> None:
            original(program, start, stop, values, executor.Hooks(before=record), frame)

        with mock.patch.object(executor, "run", recording):
            run()
        for call in sorted(recorded, key=lambda call: names.index(call.operation.name)):
            if call.signature not in seen:
                seen.add(call.signature)
                missing.discard(call.operation.name)
                yield call
    if missing:
        raise ValueError(f"no step of training runs {', '.join(sorted(missing))}")


def rows(call: Call, rounds: int) -> Iterator[dict]:
    """Rows of the table for one call."""
    definition, attributes = call.operation.definition, call.operation.attributes
    written = frames.FreshFrame().tensors_for(0, call.operation)
    outputs = written[: len(call.operation.outputs)]
    moved = sum(t.numel() * t.element_size() for t in (*call.inputs, *outputs) if t is not None)
    source = torch.zeros(max(1, moved // 2), dtype=torch.uint8)
    target = torch.zeros_like(source)
    sides = {
        "plain": lambda: definition.reference(*call.inputs, **attributes),
        "fused": lambda: definition.cpu(*call.inputs, *written, **attributes),
        "copy": lambda: target.copy_(source),
    }
    if not loader.available():
        del sides["fused"]
    with mock.patch.object(gemm, "reference", gemm.int8_product), torch.no_grad():
        timings = common.alternate(sides, rounds=rounds)
    result = next(tensor for tensor in call.operation.outputs if tensor is not None)
    for columns in common.beside_a_copy(timings, moved):
        yield {
            "operation": call.operation.name,
            "backward": call.backward,
            "result": repr(result),
            **columns,
        }


def main(
    name: str, description: str, operations: tuple[str, ...], arguments: list[str] | None = None,
    *, on_gpu: tuple[str, ...] = (),
) -> int:
    """Run the benchmark called `name` for these operations, and on a GPU for those `on_gpu`, too; the exit status."""
    parser = common.parser(description)
    gpu.add_options(parser, gpu.CPU, gpu.CUDA, gpu.EMULATOR)
    parser.add_argument("--dropout", type=float, default=0.1, help="probability, in every place of a layer")
    options = common.parse(parser, arguments)
    if options.device != gpu.CPU:
        return gpu_operations.main(name, (*operations, *on_gpu), options)
    shape = QUICK_SHAPE if options.quick else SHAPE
    table = [row for call in calls(operations, shape, options.dropout) for row in rows(call, options.rounds)]
    conditions = common.conditions(
        options,
        baseline="plain PyTorch: the operation's reference",
        shape=shape,
        dropout=options.dropout,
        library=loader.description(),
        dtypes=["float32", "int8"],
    )
    common.report(name, table, conditions, options)
    return 0
