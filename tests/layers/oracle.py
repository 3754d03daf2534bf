"""Runs a module and its float64 reference on the same inputs; compares codes, outputs and all gradients.

A value that lies on the border between two codes may fall to either side in float32. Inputs are therefore drawn until
the reference is nowhere within MARGIN of a border; after that, codes must be equal without exception.
"""

from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch

from lsq.layers.reference import ReferenceLayer
from lsq.ops.random import draw_key
from lsq.ops.random import dropout as drop
from lsq.quant import maximum_code, scale_of

MARGIN = 3e-5
"""Smallest distance of x / scale from a border between two codes; its float32 error is below this."""
FLOOR = 1e-6
"""Allowed beside twice the error of the float32 reference, relative to the largest magnitude (at least 1)."""


class Recorder(ReferenceLayer):
    """The reference, noting the codes of everything it rounds and how near a border the nearest value was."""

    def __init__(self, config, parameters, dropout=None):
        super().__init__(config, parameters, dropout)
        self.codes: dict[str, torch.Tensor] = {}
        self.margin = float("inf")

    def round(self, x, clip):
        rounded = super().round(x, clip)
        if self.config.quant.quantized:
            scale = row_scale(self.parameters[clip], x, self.config.quant.bits)
            self.codes[clip] = (rounded.detach() / scale).round().to(torch.int8)
            self.margin = min(self.margin, border_distance(x, scale, self.config.quant.bits).min().item())
        return rounded


@dataclass
class Outcome:
    """What one implementation computed."""

    values: dict[str, torch.Tensor]
    """"output", "gradient of input 0" and so on, "gradient of <parameter>"."""
    codes: dict[str, torch.Tensor] = field(default_factory=dict)
    """int8 codes by the name of their clip."""
    streams: list[int] = field(default_factory=list)
    """Streams of random numbers of the dropouts, in order."""


def only(quant):
    """A configuration for a ReferenceLayer that uses nothing but the quantiser's."""
    return SimpleNamespace(quant=quant)


def row_scale(clip, x, bits):
    """Scale [1] or [R] of a clip, to broadcast over x [R, ...]."""
    return scale_of(clip.detach(), bits).view(-1, *[1] * (x.dim() - 1))


def border_distance(x, scale, bits):
    """Distance of |x| / scale from the nearest border between codes, or from the clip."""
    scaled, largest = (x.detach() / scale).abs(), maximum_code(bits)
    half = (scaled - scaled.floor() - 0.5).abs()
    return torch.minimum(torch.where(scaled < largest, half, 1.0), (scaled - largest).abs())


@contextmanager
def recorded(module):
    """Yields an Outcome whose codes and streams the module's forward passes inside fill in."""
    outcome = Outcome({})

    def after(operation, values):
        clip = next((t for t in operation.inputs if t is not None and t.name.endswith("_clip")), None)
        codes = next((t for t in operation.outputs if t is not None and t.dtype == torch.int8), None)
        if clip is not None and codes is not None:
            outcome.codes[clip.name] = values[codes].clone()
        norm_alone = operation.name == "bias_dropout_residual_layer_norm" and operation.inputs[0] is None
        if "dropout" in operation.attributes and not norm_alone:
            outcome.streams.append(operation.attributes["stream"])

    previous, module._observer = module._observer, after
    try:
        yield outcome
    finally:
        module._observer = previous


def prepare(module, run, inputs, tighten=0.7):
    """Random biases and norms, calibrated clips made so narrow that much is clipped, no weight near a border.

    Returns the streams of the module's dropouts.
    """
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.2 * torch.randn_like(parameter))
    with recorded(module) as outcome:
        run(module, *inputs)
    narrow_clips(module, tighten)
    return outcome.streams


def narrow_clips(module, factor):
    """Multiply every clip, and move weights that then lie near a border."""
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    for name, clip in state.items():
        if not name.endswith("_clip"):
            continue
        clip.mul_(factor)
        weight = state.get(name.removesuffix("_clip"))
        if weight is not None:
            scale = row_scale(clip, weight, module.quant.bits)
            while (near := border_distance(weight, scale, module.quant.bits) < 10 * MARGIN).any():
                weight[near] *= 0.993
    module.load_state_dict(state)


def collect(run, target, inputs, parameters, dtype) -> dict[str, torch.Tensor]:
    """Output and gradients of run(target, *inputs) for a fixed upstream gradient."""
    leaves = [tensor.to(dtype).clone().requires_grad_() for tensor in inputs]
    for parameter in parameters.values():
        parameter.grad = None
    output = run(target, *leaves)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(7))
    (output * upstream.to(dtype)).sum().backward()
    values = {"output": output.detach()}
    values.update((f"gradient of input {i}", leaf.grad) for i, leaf in enumerate(leaves))
    values.update((f"gradient of {name}", parameter.grad) for name, parameter in parameters.items())
    return values


def reference_of(config, module, key, streams, dtype) -> Recorder:
    """The reference with the module's parameters in `dtype`, drawing the masks of `key`."""
    remaining = iter(streams)
    parameters = {name: p.detach().to(dtype).requires_grad_() for name, p in module.named_parameters()}
    return Recorder(config, parameters, lambda x, probability: drop(x, probability, key, next(remaining)))


def reference_outcome(reference, run, inputs, dtype) -> Outcome:
    """Output, gradients and codes."""
    return Outcome(collect(run, reference, inputs, reference.parameters, dtype), reference.codes)


@torch.no_grad()
def margin_of(reference, run, inputs) -> float:
    """Smallest distance of any rounded value from a border between codes."""
    run(reference, *(tensor.double() for tensor in inputs))
    return reference.margin


def find_inputs(module, config, run, run_reference, draw, tighten):
    """(seed, key, inputs, streams of dropout) for which no value is near a border.

    With few bits the sums of a product take few values, all of which may be near one: then other clips are tried.
    """
    streams = prepare(module, run, draw(), tighten)
    for _ in range(5):
        for seed in range(30):
            torch.manual_seed(seed)
            key, inputs = draw_key(), draw()
            reference = reference_of(config, module, key, streams, torch.float64)
            if margin_of(reference, run_reference, inputs) > MARGIN:
                return seed, key, inputs, streams
        narrow_clips(module, 0.97)
    raise AssertionError("no inputs without a value near a border between codes were found")


def compare_with_reference(module, config, run, run_reference, draw, tighten=0.7) -> Outcome:
    """Check everything; returns the module's outcome.

    Args:
        module: freshly made, in the mode to test.
        config: for the ReferenceLayer.
        run: (module, *inputs) -> output.
        run_reference: (reference, *inputs) -> output.
        draw: () -> float inputs at random.
        tighten: factor of the measured clips.
    """
    seed, key, inputs, streams = find_inputs(module, config, run, run_reference, draw, tighten)
    exact, single = (
        reference_outcome(reference_of(config, module, key, streams, dtype), run_reference, inputs, dtype)
        for dtype in (torch.float64, torch.float32)
    )
    torch.manual_seed(seed)  # the module draws the same key
    with recorded(module) as outcome:
        outcome.values = collect(run, module, inputs, dict(module.named_parameters()), torch.float32)
    assert outcome.streams == streams
    assert_same_codes(outcome.codes, exact.codes)
    assert_accurate(outcome.values, exact.values, single.values)
    return outcome


def assert_same_codes(codes, expected):
    """Every rounded tensor is there and its integers are equal; padded rows hold zeros."""
    assert codes.keys() == expected.keys()
    for name, wanted in expected.items():
        found = codes[name].view(-1, wanted.shape[-1])
        wanted = wanted.view(-1, wanted.shape[-1])
        assert torch.equal(found[: len(wanted)], wanted), f"{name}: {(found[: len(wanted)] != wanted).sum()} differ"
        assert not found[len(wanted) :].any(), f"{name}: the padding holds codes"


def assert_accurate(values, exact, single):
    """Errors against float64 are at most twice those of the float32 reference, plus FLOOR.

    The error of one number is luck: tensors of one element (the clips of activations) share their reference's largest.
    """
    assert values.keys() == exact.keys()
    errors = {name: (single[name].double() - wanted).abs().max().item() for name, wanted in exact.items()}
    shared = max((errors[name] for name, wanted in exact.items() if wanted.numel() == 1), default=0.0)
    for name, wanted in exact.items():
        assert values[name] is not None and values[name].shape == wanted.shape, name
        error = (values[name].double() - wanted).abs().max().item()
        allowed = 2 * (shared if wanted.numel() == 1 else errors[name]) + FLOOR * max(1.0, wanted.abs().max().item())
        assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}"
