"""Runs a module and its float64 reference on the same inputs; compares codes, outputs and
gradients.

A value between two codes may fall to either side in float32. Inputs are drawn until the reference
is nowhere within MARGIN of a border; then all codes must be equal.
"""

from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch

from lsq.ops.nonlinearity import SLOPE_UNIT
from lsq.quant import maximum_code, scale_of
from lsq.quant.random import draw_key, dropout_threshold, keep_factor, philox_of
from tests.layers.reference import ACTIVATIONS, ReferenceLayer, normalise, slope_of

MARGIN = 3e-5
"""Smallest distance of x / scale from a border between two codes; its float32 error is below this.
"""
SLOPE_MARGIN = 2e-4
"""The same of an activation's slope, in steps; it is computed from a float32 polynomial."""
FLOOR = 1e-6
"""Allowed beside twice the error of the float32 reference, relative to the largest magnitude (at
least 1)."""


class Recorder(ReferenceLayer):
    """The reference, noting the codes of what it rounds, and how near a border values come."""

    def __init__(self, config, parameters, dropout=None, masks=()):
        super().__init__(config, parameters, dropout)
        self.masks = [mask for mask in masks if mask is not None]
        self.codes: dict[str, torch.Tensor] = {}
        self.margin = float("inf")

    def round(self, x, clip):
        for mask in self.masks:
            if x.dim() == 3 and mask.shape == x.shape[:2]:
                return torch.zeros_like(x).masked_scatter(
                    ~mask[..., None], self.round_rows(x[~mask], clip)
                )
        return self.round_rows(x, clip)

    def round_rows(self, x, clip):
        rounded = super().round(x, clip)
        if self.config.quant.quantized:
            scale = row_scale(self.parameters[clip], x, self.config.quant.bits)
            self.codes[clip] = (rounded.detach() / scale).round().to(torch.int8)
            self.margin = min(
                self.margin, border_distance(x, scale, self.config.quant.bits).min().item()
            )
        return rounded

    def norm(self, x, name):
        if self.config.quant.quantized:
            rows = next((x[~mask] for mask in self.masks if mask.shape == x.shape[:-1]), x)
            values, _ = normalise(
                rows.detach(), self.config.layer_norm_epsilon, self.config.norm == "layer"
            )
            scaled = (127 * values / values.abs().amax(-1, keepdim=True)).abs()
            self.margin = min(
                self.margin, (scaled - scaled.floor() - 0.5).abs().nan_to_num(1.0).min().item()
            )
        return super().norm(x, name)

    def activate(self, x):
        if self.steps:
            scaled = slope_of(ACTIVATIONS[self.config.activation], x) * SLOPE_UNIT
            nearest = (scaled - scaled.floor() - 0.5).abs().min().item()
            self.margin = min(self.margin, nearest * MARGIN / SLOPE_MARGIN)
        return super().activate(x)


@dataclass
class Outcome:
    """What one implementation computed."""

    values: dict[str, torch.Tensor]
    """"output", "gradient of input 0" and so on, "gradient of <parameter>"."""
    codes: dict[str, torch.Tensor] = field(default_factory=dict)
    """int8 codes by the name of their clip."""
    subsequences: list[int] = field(default_factory=list)
    """Of the random numbers of the dropouts, in order."""


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


class Observer:
    """Fills an Outcome while a module runs."""

    def __init__(self, outcome):
        self.outcome = outcome

    def __call__(self, declared, operation):
        rounding = operation.rounding()
        if rounding is not None:
            self.outcome.codes[declared.rounding().clip.name] = rounding.codes.clone()
        self.outcome.subsequences += [
            value
            for name, value in operation.attributes().items()
            if name.endswith("dropout.subsequence")
        ]

    def weights(self, module, tensors):
        for name, declared in module.declared.items():
            if declared.clip is not None and name + ".codes" in tensors:
                self.outcome.codes[declared.clip] = tensors[name + ".codes"].clone()


@contextmanager
def recorded(module):
    """Yields an Outcome whose codes and subsequences the module's forward passes inside fill in."""
    outcome = Outcome({})

    previous, module._observer = module._observer, Observer(outcome)
    try:
        yield outcome
    finally:
        module._observer = previous


def prepare(module, run, inputs, tighten=0.7):
    """Vary biases and norms, calibrate and narrow clips; return the subsequences of dropouts."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.2 * torch.randn_like(parameter))
    with recorded(module) as outcome:
        run(module, *inputs)
    narrow_clips(module, tighten)
    return outcome.subsequences


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


def reference_of(config, module, key, subsequences, dtype, masks=()) -> Recorder:
    """The reference with the module's parameters in `dtype`, drawing the masks of `key`."""
    remaining = iter(subsequences)
    parameters = {
        name: p.detach().to(dtype).requires_grad_() for name, p in module.named_parameters()
    }

    def dropout(x, probability):
        return (
            drop(x, probability, key, next(remaining), masks[0] if masks else None)
            if probability
            else x
        )

    return Recorder(config, parameters, dropout, masks)


def drop(x, probability, key, subsequence, padding):
    """x [B, T, F], or probabilities [B, N, T, S], after the dropout of packed rows."""
    batch, time = x.shape[0], x.shape[-2]
    present = torch.ones(batch, time, dtype=torch.bool) if padding is None else ~padding
    row = (present.flatten().cumsum(0) - 1).clamp(min=0).view(batch, time)
    if x.dim() == 3:
        element = row[..., None] * x.shape[2] + torch.arange(x.shape[2])
    else:
        heads = x.shape[1]
        head = torch.arange(heads)[:, None]
        element = ((row[:, None] * heads + head)[..., None]) * 2**31 + torch.arange(x.shape[3])
    words = philox_of(int(key), subsequence, element)
    return torch.where(
        words >= dropout_threshold(probability), x * keep_factor(probability), torch.zeros_like(x)
    )


def reference_outcome(reference, run, inputs, dtype) -> Outcome:
    """Output, gradients and codes."""
    return Outcome(collect(run, reference, inputs, reference.parameters, dtype), reference.codes)


@torch.no_grad()
def margin_of(reference, run, inputs) -> float:
    """Smallest distance of any rounded value from a border between codes."""
    run(reference, *(tensor.double() for tensor in inputs))
    return reference.margin


def find_inputs(module, config, run, run_reference, draw, tighten, masks):
    """(seed, key, inputs, subsequences of dropout) with no value near a border, or under other
    clips."""
    subsequences = prepare(module, run, draw(), tighten)
    for _ in range(5):
        for seed in range(30):
            torch.manual_seed(seed)
            key, inputs = draw_key(), draw()
            reference = reference_of(config, module, key, subsequences, torch.float64, masks)
            if margin_of(reference, run_reference, inputs) > MARGIN:
                return seed, key, inputs, subsequences
        narrow_clips(module, 0.97)
    raise AssertionError("no inputs without a value near a border between codes were found")


def compare_with_reference(
    module, config, run, run_reference, draw, tighten=0.7, padding=None, memory_padding=None
) -> Outcome:
    """Check a fresh module against ReferenceLayer(config); returns the module's outcome.

    `run`, `run_reference`: (module or reference, *inputs) -> output. `draw`: () -> inputs.
    `tighten`: factor of the measured clips. `padding`: bool [B, T] of the rows that the module
    packs, where results are zero; `memory_padding`: bool [B, S], S other than T.
    """
    run_reference = masked(run_reference, padding)
    masks = padding, memory_padding
    seed, key, inputs, subsequences = find_inputs(
        module, config, run, run_reference, draw, tighten, masks
    )
    exact, single = (
        reference_outcome(
            reference_of(config, module, key, subsequences, dtype, masks),
            run_reference,
            inputs,
            dtype,
        )
        for dtype in (torch.float64, torch.float32)
    )
    torch.manual_seed(seed)  # the module draws the same key
    with recorded(module) as outcome:
        outcome.values = collect(
            run, module, inputs, dict(module.named_parameters()), torch.float32
        )
    assert outcome.subsequences == subsequences
    assert_same_codes(outcome.codes, exact.codes)
    assert_accurate(outcome.values, exact.values, single.values)
    return outcome


def masked(run_reference, padding):
    """`run_reference` with zeros where there is padding in its result [T, B, H]."""
    if padding is None:
        return run_reference
    return lambda *arguments: run_reference(*arguments).masked_fill(padding.t()[..., None], 0.0)


def assert_same_codes(codes, expected):
    """All integers are equal; rows beyond a vocabulary hold zeros."""
    assert codes.keys() == expected.keys()
    for name, wanted in expected.items():
        found = codes[name].reshape(-1, wanted.shape[-1])
        wanted = wanted.reshape(-1, wanted.shape[-1])
        assert torch.equal(found[: len(wanted)], wanted), (
            f"{name}: {(found[: len(wanted)] != wanted).sum()} differ"
        )
        assert not found[len(wanted) :].any(), f"{name}: the padding holds codes"


def assert_accurate(values, exact, single):
    """Errors against float64 are at most twice those of the float32 reference, plus FLOOR; of
    tensors of one element, whose errors are luck, twice the largest of these."""
    assert values.keys() == exact.keys()
    errors = {
        name: (single[name].double() - wanted).abs().max().item() for name, wanted in exact.items()
    }
    shared = max(
        (errors[name] for name, wanted in exact.items() if wanted.numel() == 1), default=0.0
    )
    for name, wanted in exact.items():
        assert values[name] is not None and values[name].shape == wanted.shape, name
        error = (values[name].double() - wanted).abs().max().item()
        allowed = 2 * (shared if wanted.numel() == 1 else errors[name]) + FLOOR * max(
            1.0, wanted.abs().max().item()
        )
        assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}"
