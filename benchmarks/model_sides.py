"""The ways to train a model of Hugging Face transformers that bench_models.py puts side by side."""

import contextlib
import copy
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import nn

import lsq
from lsq.config import QuantConfig
from lsq.layers.linear import Projection
from lsq.layers.module import ProgramModule
from lsq.optim import Adam

# one that cannot be loaded would stop transformers, which looks for it
sys.modules.setdefault("torchaudio", None)

QUICK = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
BASE = {"hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12}
HEADS = "lm_head", "classifier"
"""Layers that nobody multiplies in int8: what comes after a model's own layers."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a model is made, and a batch for it."""

    title: str
    make: Callable[[int, bool], nn.Module]
    """(layers, quick) -> the model in train mode; raises ImportError without transformers."""
    batch: Callable[[nn.Module, int], dict[str, torch.Tensor]]
    """(model, sentences or images) -> keyword arguments of its forward, labels among them."""
    length: int
    quick_length: int


def language_model_batch(length: int) -> Callable:
    """Sentences of random words, `length` or the model's longest; they are their own labels."""

    def batch(model: nn.Module, count: int) -> dict[str, torch.Tensor]:
        words = torch.randint(
            model.config.vocab_size, (count, min(length, model.config.max_position_embeddings))
        )
        return {"input_ids": words, "labels": words}

    return batch


def sentence_batch(length: int) -> Callable:

    def batch(model: nn.Module, count: int) -> dict[str, torch.Tensor]:
        words = language_model_batch(length)(model, count)["input_ids"]
        return {"input_ids": words, "labels": torch.randint(model.config.num_labels, (count,))}

    return batch


def image_batch(model: nn.Module, count: int) -> dict[str, torch.Tensor]:
    config = model.config
    pixels = torch.randn(count, config.num_channels, config.image_size, config.image_size)
    return {"pixel_values": pixels, "labels": torch.randint(config.num_labels, (count,))}


def gpt2(layers: int, quick: bool) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    small = {
        "n_embd": 64,
        "n_head": 2,
        "vocab_size": 256,
        "n_positions": 16,
        "bos_token_id": 1,
        "eos_token_id": 1,
    }
    return GPT2LMHeadModel(GPT2Config(n_layer=layers, **(small if quick else {})))


def llama(layers: int, quick: bool) -> nn.Module:
    """A Llama of GPT-2 small's size, 110 million weights with tied embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {**QUICK, "vocab_size": 256} if quick else {**BASE, "vocab_size": 32000}
    length = 16 if quick else 1024
    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=layers,
            max_position_embeddings=length,
            tie_word_embeddings=True,
            **size,
        )
    )


def bert(layers: int, quick: bool) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(num_hidden_layers=layers, **({**QUICK, "vocab_size": 256} if quick else {}))
    )


def vit(layers: int, quick: bool) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    size = {**QUICK, "image_size": 48, "num_labels": 10} if quick else {"num_labels": 1000}
    return ViTForImageClassification(ViTConfig(num_hidden_layers=layers, **size))


class Encoder(nn.Module):
    """torch.nn.TransformerEncoder that learns `labels`, floats of the shape of its inputs."""

    def __init__(self, layers: int, hidden: int, heads: int, feed_forward: int):
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            hidden, heads, feed_forward, activation="gelu", batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers)
        self.hidden = hidden

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        """`loss`: of inputs [sentences, tokens, hidden]."""
        return SimpleNamespace(loss=nn.functional.mse_loss(self.encoder(inputs), labels))


def encoder(layers: int, quick: bool) -> nn.Module:
    """PyTorch's own encoder of BERT base's size, by itself."""
    return Encoder(layers, *((64, 2, 128) if quick else (768, 12, 3072)))


def encoder_batch(model: nn.Module, count: int) -> dict[str, torch.Tensor]:
    inputs, labels = torch.randn(2, count, 128, model.hidden)
    return {"inputs": inputs, "labels": labels}


def with_adapters(model: nn.Module, rank: int) -> nn.Module:
    """Freeze a model and add LoRA adapters to its linear layers; ImportError without peft."""
    import peft

    targets = [
        name
        for name, module in model.named_modules()
        if (isinstance(module, nn.Linear) or is_conv1d(module)) and not name.endswith(HEADS)
    ]
    return peft.get_peft_model(
        model, peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets)
    )


RECIPES = {
    "gpt2": Recipe(
        title="GPT-2 small",
        make=gpt2,
        batch=language_model_batch(1024),
        length=1024,
        quick_length=16,
    ),
    "llama": Recipe(
        title="Llama 110M",
        make=llama,
        batch=language_model_batch(1024),
        length=1024,
        quick_length=16,
    ),
    "bert": Recipe(
        title="BERT base", make=bert, batch=sentence_batch(128), length=128, quick_length=128
    ),
    "vit": Recipe(title="ViT-B/16", make=vit, batch=image_batch, length=197, quick_length=10),
    "encoder": Recipe(
        title="nn.TransformerEncoder",
        make=encoder,
        batch=encoder_batch,
        length=128,
        quick_length=128,
    ),
}
"""By the names of --models."""


def sharing(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is a linear layer with a weight [inputs, outputs], as GPT-2 has them."""
    return type(module).__name__ == "Conv1D"


def with_linears(model: nn.Module) -> nn.Module:
    """Replace every Conv1D by a torch.nn.Linear, for torchao and SDNQ."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if is_conv1d(child):
                linear = nn.Linear(*child.weight.shape, dtype=child.weight.dtype)
                with torch.no_grad():
                    linear.weight.copy_(child.weight.t())
                    linear.bias.copy_(child.bias)
                setattr(parent, name, linear)
    return model


LEARNING_RATE, WEIGHT_DECAY = 1e-7, 0.01
"""So small a rate that the losses of all sides stay alike."""
LSQ = "lsq"
"""How the names of lsq's sides begin."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """How a side trains, whatever the model."""

    dtype: torch.dtype = torch.float32
    autocast: bool = False
    """Forward passes under torch.autocast in bfloat16."""
    compiled: bool = False
    change: Callable[[nn.Module], None] | None = None
    """Makes an int8 model of the float one, in place."""
    linears: bool = False
    """Whether `change` takes torch.nn.Linear alone."""
    own: bool = False
    """Whether it trains weights of its own, with lsq's optimizer where that takes them."""
    around: Callable[[], AbstractContextManager] = contextlib.nullcontext
    """Within which its steps run."""


class Contiguous(torch.autograd.Function):
    """The identity, whose gradient is made contiguous."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.contiguous()


def torchao(model: nn.Module) -> None:
    """torchao's int8 mixed-precision training, in all layers but heads."""
    from torchao.prototype.quantized_training import Int8MixedPrecisionTrainingConfig
    from torchao.quantization import quantize_

    chosen = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not name.endswith(HEADS)
    }
    quantize_(
        model,
        Int8MixedPrecisionTrainingConfig(module_swap=True),
        filter_fn=lambda _, name: name in chosen,
    )
    for module in chosen.values():
        module.register_forward_pre_hook(lambda _, inputs: (inputs[0].contiguous(),))
        module.register_forward_hook(lambda _, inputs, output: Contiguous.apply(output))


def sdnq(model: nn.Module) -> None:
    """SDNQ's int8 products on float weights, its mode nearest to the others."""
    from sdnq.layers import SDNQLinear
    from sdnq.training import sdnq_training_post_load_quant

    sdnq_training_post_load_quant(
        model,
        weights_dtype="int8",
        quantized_matmul_dtype="int8",
        use_quantized_matmul=True,
        group_size=-1,
        use_static_quantization=False,
        use_grad_ckpt=False,
        quantization_device="cpu",
        return_device="cpu",
        modules_to_not_convert=list(HEADS),
    )
    if not any(isinstance(module, SDNQLinear) for module in model.modules()):
        raise ValueError(
            "SDNQ converts no layer of this model; it takes weights of at least 16,384 values"
        )


def sdnq_openvino(model: nn.Module) -> None:
    """SDNQ with OpenVINO's products, on as many threads as PyTorch has."""
    from sdnq import kernel_wrappers

    if kernel_wrappers.openvino_int_mm is None:
        raise ImportError("SDNQ finds no openvino")
    from sdnq.kernels.openvino_mm import get_ov_core

    core, _ = get_ov_core()
    core.set_property("CPU", {"INFERENCE_NUM_THREADS": torch.get_num_threads()})
    sdnq(model)


@contextlib.contextmanager
def without_openvino() -> Iterator[None]:
    """Within it SDNQ takes PyTorch's products, as without openvino."""
    from sdnq import kernel_wrappers

    found = kernel_wrappers.openvino_int_mm
    kernel_wrappers.openvino_int_mm = None
    try:
        yield
    finally:
        kernel_wrappers.openvino_int_mm = found


def lsq_linears(model: nn.Module) -> None:
    """Linear layers alone; clips are measured in the first passes."""
    alone = {"fused": False} if "fused" in inspect.signature(lsq.convert).parameters else {}
    lsq.convert(model, QuantConfig(), **alone)


def lsq_fused(model: nn.Module, weight_format: str = "int8") -> None:
    lsq.convert(model, QuantConfig(weight_format=weight_format))
    modules = [module for module in model.modules() if isinstance(module, ProgramModule)]
    if all(isinstance(module, Projection) for module in modules):
        raise NotImplementedError(f"lsq.convert fuses no layer of {type(model).__name__}")


HALF = {"autocast": Kind(autocast=True), "bfloat16": Kind(dtype=torch.bfloat16)}
"""bfloat16 by autocast over float32 parameters, and in parameters as well."""
ALL = {"float32": Kind(), **HALF}


def _variants(prefix: str, kinds: dict[str, Kind], **changes) -> dict[str, Kind]:
    return {f"{prefix} {name}": Kind(**{**vars(kind), **changes}) for name, kind in kinds.items()}


NARROW = ("int4/row", "int3/row", "int2/row", "ternary/row")
"""Formats of weights, beside int8."""
PYTORCH = "PyTorch"
SIDES: dict[str, Kind] = {
    **_variants(PYTORCH, ALL),
    **_variants(f"{PYTORCH} compiled", HALF, compiled=True),
    **_variants("torchao int8", HALF, change=torchao, linears=True),
    **_variants("torchao int8 compiled", HALF, change=torchao, linears=True, compiled=True),
    **_variants("SDNQ int8", HALF, change=sdnq, linears=True, around=without_openvino),
    **_variants("SDNQ int8 OpenVINO", HALF, change=sdnq_openvino, linears=True),
    **_variants(f"{LSQ} linears", ALL, change=lsq_linears, own=True),
    **_variants(f"{LSQ} fused", ALL, change=lsq_fused, own=True),
    **{
        f"{LSQ} fused {form}": Kind(
            change=functools.partial(lsq_fused, weight_format=form), own=True
        )
        for form in NARROW
    },
}
OPPONENTS = tuple(name for name in SIDES if name.startswith(PYTORCH) and "float32" not in name)
"""bfloat16 of PyTorch; the fastest of them is the baseline."""


class Bases:
    """A model's weights in each form that a side trains, with their optimizers.

    Sides take turns with one set of weights and moments, without which a dozen of them would not
    fit into memory.
    """

    def __init__(self, original: nn.Module):
        """`original`: the model in float32."""
        self.original = original
        self.made: dict[tuple[torch.dtype, bool], nn.Module] = {}
        self.optimizers: dict[tuple[torch.dtype, bool], torch.optim.Optimizer] = {}

    def copied(self, kind: Kind) -> tuple[nn.Module, torch.optim.Optimizer | None]:
        """A model for a side, and the optimizer of the weights in it where they are not its own.

        With kind.linears, weights of a Conv1D are in a torch.nn.Linear.
        """
        key = kind.dtype, kind.linears and any(map(is_conv1d, self.original.modules()))
        if key not in self.made:
            half = kind.dtype is not torch.float32
            model = copy.deepcopy(self.original).to(kind.dtype) if half else self.original
            self.made[key] = with_linears(sharing(model)) if key[1] else model
            self.optimizers[key] = adamw(
                [p for p in self.made[key].parameters() if p.requires_grad]
            )
        base = self.made[key]
        return (copy.deepcopy(base), None) if kind.own else (sharing(base), self.optimizers[key])


class Side:
    """A model that trains in one way, on one batch."""

    def __init__(self, kind: Kind, bases: Bases, batch: dict, *, backend: str = "inductor"):
        """Make it.

        Args:
            kind: how it trains.
            bases: whose weights.
            batch: its forward's arguments.
            backend: of torch.compile.

        Raises:
            ImportError: what it needs is not installed.
        """
        self.kind = kind
        self.model, shared = bases.copied(kind)
        if kind.change is not None:
            kind.change(self.model)
        if kind.compiled:
            self.model.compile(backend=backend)
        self.optimizer = shared or own_optimizer(self.model)
        self.batch = {
            name: value.to(kind.dtype) if value.is_floating_point() else value
            for name, value in batch.items()
        }

    def loss(self) -> torch.Tensor:
        """The loss of the batch, float []."""
        with self.kind.around(), torch.autocast("cpu", torch.bfloat16, enabled=self.kind.autocast):
            return self.model(**self.batch).loss

    def gradients(self) -> float:
        """Forward and backward; the loss."""
        loss = self.loss()
        with self.kind.around():
            loss.backward()
        return loss.item()

    def step(self) -> None:
        self.gradients()
        self.update()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


adamw = functools.partial(
    torch.optim.AdamW, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True
)


def own_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """lsq's AdamW where all parameters that train are float32, else PyTorch's."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if any(parameter.dtype is not torch.float32 for parameter in trained):
        return adamw(trained)
    return Adam(trained, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
