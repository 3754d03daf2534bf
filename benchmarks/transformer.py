"""What the benchmarks of training steps train: fairseq's translation models and batches, made
without data files."""

import contextlib
import logging
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass

import torch
from fairseq import options
from fairseq.data import Dictionary
from fairseq.data.language_pair_dataset import collate
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.optim.adam import Adam as FairseqAdam
from fairseq.tasks.translation import TranslationTask

import lsq.fairseq  # noqa: F401  (registers lsq_transformer and its criterion)
from lsq.fairseq.memory import made_up_dictionary
from lsq.fairseq.model import LSQModel
from lsq.optim import Adam

# a task of fairseq's lets every library say everything
logging.getLogger().setLevel(logging.WARNING)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Size of the model and of a batch."""

    hidden: int = 512
    feed_forward: int = 2048
    layers: int = 6
    """Encoder layers, and as many decoder layers."""
    heads: int = 8
    vocabulary: int = 32000
    """Joined, with its special symbols."""
    sentences: int = 64
    length: int = 32
    """Tokens of the longest source and of the longest target, with the end symbol."""
    dropout: float = 0.1
    label_smoothing: float = 0.1


QUICK = Shape(hidden=32, feed_forward=64, layers=1, heads=2, vocabulary=64, sentences=4, length=8)


FAIRSEQ = ["--arch", "transformer", "--criterion", "label_smoothed_cross_entropy"]
"""fairseq-train's options for its own Transformer."""


def batch(shape: Shape, *, padded: bool, seed: int) -> dict:
    """Random sentences, put together by fairseq's own collater.

    Args:
        padded: draw each length between half of `shape.length` and all of it, instead of filling
            every place.
        seed: of the tokens and lengths.
    """
    generator = torch.Generator().manual_seed(seed)
    symbols = Dictionary()

    def sentence(first: bool) -> torch.Tensor:
        shortest = shape.length // 2 if padded and not first else shape.length
        length = int(torch.randint(shortest, shape.length + 1, (), generator=generator))
        words = torch.randint(
            symbols.nspecial, shape.vocabulary, (length - 1,), generator=generator
        )
        return torch.cat([words, torch.tensor([symbols.eos()])])

    samples = [
        {"id": number, "source": sentence(number == 0), "target": sentence(number == 0)}
        for number in range(shape.sentences)
    ]
    return collate(samples, symbols.pad(), symbols.eos())


class Side:
    """One way to train: a model, its criterion, its optimizer."""

    def __init__(
        self,
        shape: Shape,
        *,
        arguments: list[str],
        autocast: bool = False,
        change: Callable | None = None,
    ):
        """Build it.

        Args:
            arguments: fairseq-train's options --arch, --criterion and those of the model.
            autocast: run forward passes under torch.autocast in bfloat16.
            change: called with the model before the optimizer is made.
        """
        self.model, self.criterion = build(shape, parse(shape, arguments))
        if change is not None:
            change(self.model)
        # each as `lsq train` takes it by itself
        adam = Adam if isinstance(self.model, LSQModel) else FairseqAdam
        self.optimizer = adam(self.model.parameters(), lr=5e-4, betas=(0.9, 0.98))
        self.autocast = autocast

    def loss(self, sample: dict) -> torch.Tensor:
        """Label-smoothed loss, summed over the target's tokens."""
        context = (
            torch.autocast("cpu", torch.bfloat16) if self.autocast else contextlib.nullcontext()
        )
        with context:
            return self.criterion(self.model, sample)[0]

    def backward(self, sample: dict, loss: torch.Tensor) -> None:
        """Gradients of the mean loss per token."""
        (loss / sample["ntokens"]).backward()

    def update(self) -> None:
        """One update of Adam; drops the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, sample: dict) -> None:
        """Forward, loss, backward, update."""
        self.backward(sample, self.loss(sample))
        self.update()


def build(shape: Shape, chosen: Namespace) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The model and the criterion that these options of fairseq-train ask for."""
    symbols = made_up_dictionary(shape.vocabulary)
    task = TranslationTask(chosen, symbols, symbols)
    torch.manual_seed(1)
    model = ARCH_MODEL_REGISTRY[chosen.arch].build_model(chosen, task).train()
    return model, task.build_criterion(chosen)


def parse(shape: Shape, arguments: list[str]) -> Namespace:
    """fairseq-train's options for a model of this shape."""
    positions = str(max(1024, shape.length))
    given = [
        "unused-data-folder",
        *arguments,
        *(
            "--encoder-embed-dim",
            str(shape.hidden),
            "--encoder-ffn-embed-dim",
            str(shape.feed_forward),
        ),
        *(
            "--decoder-embed-dim",
            str(shape.hidden),
            "--decoder-ffn-embed-dim",
            str(shape.feed_forward),
        ),
        *("--encoder-layers", str(shape.layers), "--decoder-layers", str(shape.layers)),
        *(
            "--encoder-attention-heads",
            str(shape.heads),
            "--decoder-attention-heads",
            str(shape.heads),
        ),
        *("--dropout", str(shape.dropout), "--label-smoothing", str(shape.label_smoothing)),
        *(
            "--share-all-embeddings",
            "--max-source-positions",
            positions,
            "--max-target-positions",
            positions,
        ),
    ]
    return options.parse_args_and_arch(options.get_training_parser(), given)


def torchao_int8(model: torch.nn.Module) -> None:
    """Make every linear layer torchao's: int8 products forward and backward, scales from each row.

    torchao takes views of a layer's input and gradient, which fairseq does not always make
    contiguous.

    Raises:
        ImportError: torchao is not installed, or does not fit this torch.
    """
    from torchao.prototype.quantized_training import Int8MixedPrecisionTrainingConfig
    from torchao.quantization import quantize_

    quantize_(model, Int8MixedPrecisionTrainingConfig(module_swap=True))
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda module, inputs: (inputs[0].contiguous(),))
            module.register_forward_hook(_contiguous_gradient)
    call_projections(model)


def _contiguous_gradient(module: torch.nn.Module, inputs: tuple, output: torch.Tensor) -> None:
    if output.requires_grad:
        output.register_hook(lambda gradient: gradient.contiguous())


def call_projections(model: torch.nn.Module) -> None:
    """Let fairseq's attention call its linear layers, instead of passing bare weights to torch,
    past torchao."""
    for module in model.modules():
        if hasattr(module, "_set_skip_embed_dim_check"):
            module._set_skip_embed_dim_check()
