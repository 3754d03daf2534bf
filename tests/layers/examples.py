"""Programs of every kind of layer, small, by name; "lsq" and "float" in a name say what they
are."""

import torch

from lsq.commands import doctor
from lsq.config import Adapter, LayerConfig, QuantConfig
from lsq.layers import decoding, programs
from lsq.layers.blocks import PackedSequences
from lsq.layers.programs import Mode, Table, Vocabulary
from lsq.program.program import Program
from lsq.program.samples import border_tensors
from lsq.run.backends import Backend, backend
from lsq.run.executor import Execution, Hooks
from tests.layers.shapes import config_of

VARIANTS = {
    "": {},
    " lsq": {"clip_gradient": "lsq"},
    " int8 backward": {"backward": "int8"},
    " pre-norm": {"pre_norm": True, "dropout": 0.1},
    " gelu": {"activation": "gelu", "dropout": 0.1, "backward": "int8"},
    " rms": {"norm": "rms", "pre_norm": True, "dropout": 0.1, "backward": "int8"},
    " gated": {
        "gated": True,
        "bias": False,
        "activation": "silu",
        "dropout": 0.1,
        "backward": "int8",
    },
    " float": {"mode": "float"},
}
SENTENCES, SOURCE = PackedSequences(rows=17, count=3), PackedSequences(rows=23, count=3)
"""Three sentences of different lengths, and what they attend to."""


ADAPTERS = tuple(
    Adapter(weight=name + "_weight", rank=3, dropout=0.1)
    for name in (
        "self_attn.qkv",
        "self_attn.out",
        "encoder_attn.key_value",
        "feed_forward.fc1",
        "feed_forward.fc2",
        "feed_forward.gate",
        "feed_forward.up",
    )
)
"""Of layers with a gate and of others."""


def mode_on(
    where: Backend | str = "reference", *, training: bool = True, backward: bool = True
) -> Mode:
    """How a program runs on a backend, given itself or by name."""
    place = backend(where) if isinstance(where, str) else where
    return Mode(training=training, backward=backward, backend=place)


def drawn_for(program: Program, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random inputs, parameters and gradients of outputs, by name."""
    return {virtual.name: tensor for virtual, tensor in border_tensors(program, seed).items()}


def run(
    program: Program, where: Backend, given: dict[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """By name, on the CPU: outputs, gradients, and the integers of the forward pass, from what is
    given, or drawn."""
    drawn = {
        name: tensor.to(where.device) for name, tensor in (given or drawn_for(program)).items()
    }
    leaves = [drawn[virtual.name].requires_grad_() for virtual in program.differentiable]
    found = {}

    def note(declared, operation):
        for virtual, tensor in zip(declared.outputs, operation.outputs, strict=True):
            if not virtual.dtype.is_floating_point:
                found[virtual.name] = tensor.clone()

    outputs = Execution(program, where, hooks=Hooks(after=note))(drawn)
    upstream = [drawn[virtual.name] for virtual in program.output_gradients]
    gradients = torch.autograd.grad(outputs, leaves, upstream)
    found |= {
        virtual.name: tensor for virtual, tensor in zip(program.outputs, outputs, strict=True)
    }
    found |= {
        "d_" + virtual.name: one
        for virtual, one in zip(program.differentiable, gradients, strict=True)
    }
    return {name: tensor.detach().cpu() for name, tensor in found.items()}


def _programs():
    mode = mode_on("cpu")
    for suffix, options in VARIANTS.items():
        config = config_of(**options)
        quant = config.quant
        words = Vocabulary(words=91, hidden=48, padded=96 if quant.quantized else 91)
        yield "linear" + suffix, lambda q=quant: programs.linear(q, 21, 48, 32, mode, bias=True)
        yield (
            "self-attention" + suffix,
            lambda c=config: programs.self_attention(c, SENTENCES, mode, causal=True),
        )
        yield (
            "cross-attention" + suffix,
            lambda c=config: programs.cross_attention(c, SENTENCES, SOURCE, mode),
        )
        yield "feed-forward" + suffix, lambda c=config: programs.feed_forward(c, 21, mode)
        yield "encoder" + suffix, lambda c=config: programs.encoder_layer(c, SENTENCES, mode)
        yield (
            "decoder" + suffix,
            lambda c=config: programs.decoder_layer(c, SENTENCES, SOURCE, mode),
        )
        yield (
            "decoder without backward" + suffix,
            lambda c=config: programs.decoder_layer(
                c, SENTENCES, SOURCE, mode_on("cpu", training=False, backward=False)
            ),
        )
        yield "logits" + suffix, lambda q=quant, w=words: programs.vocabulary_logits(q, 21, w, mode)
        yield (
            "loss" + suffix,
            lambda q=quant, w=words: programs.vocabulary_loss(
                q, 21, w, mode, padding=1, smoothing=0.1
            ),
        )
        serving = mode_on("cpu", training=False, backward=False)
        yield "memory" + suffix, lambda c=config, m=serving: decoding.decoder_memory(c, 23, m)
        yield "step" + suffix, lambda c=config, m=serving: decoding.decoder_step(c, 4, SOURCE, m)
        yield "causal step" + suffix, lambda c=config, m=serving: decoding.encoder_step(c, 4, 3, m)
    for suffix, options in {"": {"backward": "int8"}, " float": {"mode": "float"}}.items():
        turning = doctor.turning(config_of(**options))
        yield (
            "rotary self-attention" + suffix,
            lambda c=turning: programs.self_attention(c, SENTENCES, mode, causal=True),
        )
    table = Table(
        vocabulary=13, hidden=48, positions=20, padding=1, scale=7.0, dropout=0.1, learned=True
    )
    yield "embedding float", lambda: programs.embedding(QuantConfig(mode="float"), 21, table, mode)
    wide = LayerConfig(
        hidden=512, heads=8, feed_forward=2048, dropout=0.1, quant=QuantConfig(backward="int8")
    )
    yield (
        "wide encoder",
        lambda: programs.encoder_layer(wide, PackedSequences(rows=512, count=16), mode),
    )


PROGRAMS = dict(_programs())
