"""Programs of every kind of layer, small, by name, which says "lsq" and "float" where they are."""

from dataclasses import replace

import torch

from lsq.config import Adapter, LayerConfig, QuantConfig, RelativeBias, Rotary
from lsq.layers import decoding, programs
from lsq.layers.blocks import PackedSequences
from lsq.layers.builder import Mode
from lsq.layers.linear import linear
from lsq.layers.programs import Table
from lsq.program.program import Program
from lsq.program.samples import border_tensors
from lsq.run.backends import Backend, backend
from lsq.run.executor import Execution, Hooks
from tests.layers.shapes import config_of

GATED = {"gated": True, "bias": False, "activation": "silu"}
VARIANTS = {
    "": {},
    " lsq": {"clip_gradient": "lsq"},
    " int8 backward": {"backward": "int8"},
    " pre-norm": {"pre_norm": True, "dropout": 0.1},
    " gelu": {"activation": "gelu", "dropout": 0.1, "backward": "int8"},
    " rms": {"norm": "rms", "pre_norm": True, "dropout": 0.1, "backward": "int8"},
    " gated": {**GATED, "dropout": 0.1, "backward": "int8"},
    " float": {"mode": "float"},
}
SENTENCES, SOURCE = PackedSequences(rows=17, count=3), PackedSequences(rows=23, count=3)
"""Three sentences of different lengths, and what they attend to."""
PADDING = 1
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
TABLE = {"vocabulary": 11, "positions": 20, "padding": PADDING, "scale": 2.0, "dropout": 0.1}
TRAINED = {
    "linear": lambda c, m, s, _: linear(c.quant, s.rows, c.hidden, 32, m, bias=True),
    "self-attention": lambda c, m, s, _: programs.self_attention(c, s, m, causal=True),
    "cross-attention": lambda c, m, s, source: programs.cross_attention(c, s, source, m),
    "feed-forward": lambda c, m, s, _: programs.feed_forward(c, s.rows, m),
    "encoder": lambda c, m, s, _: programs.encoder_layer(c, s, m, causal=c.pre_norm),
    "decoder": lambda c, m, s, source: programs.decoder_layer(c, s, source, m),
    "logits": lambda c, m, s, _: programs.vocabulary_logits(c.quant, s.rows, 91, c.hidden, m),
    "loss": lambda c, m, s, _: programs.vocabulary_loss(
        c.quant, s.rows, 91, c.hidden, m, padding=PADDING, smoothing=0.1
    ),
    "embedding": lambda c, m, s, _: programs.embedding(
        c.quant, s.rows, Table(**TABLE, hidden=c.hidden, learned=True), m
    ),
}
SERVING = {
    "decoder without backward": TRAINED["decoder"],
    "memory": lambda c, m, s, source: decoding.decoder_memory(c, source.rows, m),
    "step": lambda c, m, s, source: decoding.decoder_step(c, 4, source, m),
    "causal step": lambda c, m, s, source: decoding.encoder_step(c, 4, 3, m),
}
"""Kinds of programs for training and for inference, of a configuration, a mode and two sizes."""


def mode_on(
    where: Backend | str = "reference", *, training: bool = True, backward: bool = True
) -> Mode:
    """How a program runs on a backend, given itself or by name."""
    place = backend(where) if isinstance(where, str) else where
    return Mode(training=training, backward=backward, backend=place)


def program_of(
    kind: str, options: dict, where: Backend | str, sizes=(SENTENCES, SOURCE)
) -> Program:
    """A program for training, of config_of(**options)."""
    return TRAINED[kind](config_of(**options), mode_on(where), *sizes)


def drawn_for(program: Program, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random inputs, parameters and gradients of outputs, by name."""
    return {virtual.name: tensor for virtual, tensor in border_tensors(program, seed).items()}


def run(
    program: Program, where: Backend, given: dict[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """By name, on the CPU: outputs, gradients, and the integers of the forward pass."""
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
    for virtual, tensor in zip(program.outputs, outputs, strict=True):
        found[virtual.name] = tensor
    for virtual, tensor in zip(program.differentiable, gradients, strict=True):
        found["d_" + virtual.name] = tensor
    return {name: tensor.detach().cpu() for name, tensor in found.items()}


def _programs():
    sizes, training = (SENTENCES, SOURCE), mode_on("cpu")
    serving = mode_on("cpu", training=False, backward=False)
    for suffix, options in VARIANTS.items():
        config = config_of(**options)
        for kinds, mode in ((TRAINED, training), (SERVING, serving)):
            for kind, build in kinds.items():
                if kind != "embedding":
                    yield kind + suffix, lambda b=build, c=config, m=mode: b(c, m, *sizes)
    for suffix, options in {"": {"backward": "int8"}, " float": {"mode": "float"}}.items():
        turning = replace(
            config_of(**options),
            kv_heads=1,
            rotary=Rotary(positions=9),
            qk_norm=1e-6,
            window=5,
            relative_bias=RelativeBias(buckets=8, farthest=6),
        )
        rotary = TRAINED["self-attention"]
        yield "rotary self-attention" + suffix, lambda b=rotary, c=turning: b(c, training, *sizes)
    floats = config_of(mode="float")
    yield "embedding float", lambda: TRAINED["embedding"](floats, training, *sizes)
    wide = LayerConfig(
        hidden=512, heads=8, feed_forward=2048, dropout=0.1, quant=QuantConfig(backward="int8")
    )
    packed = PackedSequences(rows=512, count=16)
    yield "wide encoder", lambda: programs.encoder_layer(wide, packed, training)


PROGRAMS = dict(_programs())
