"""2:4 sparsity: of each four neighbouring inputs in a row of a weight, two count (docs/numbers.md).

`sparsify`: masks are chosen while a model trains, and pruned values are drawn to zero. `pack`: a
sparse matrix is stored as its kept values and their indices, as NVIDIA's mma.sp takes them. An
index has 2 bits; the smaller index of a group comes first, in the lower bits. N rows and K columns
of a weight.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.optim.optimizer import Optimizer

from lsq.layers import ProgramModule
from lsq.layers.weight_masks import WeightMasks, check_whole
from lsq.models.clips import keep_apart
from lsq.models.selection import Skip, skipping
from lsq.observe.statistics import InputSquares, observing, program_modules
from lsq.quant.pruning import GROUP, KEPT, Pruning, check_width

Weights = dict[str, tuple[ProgramModule, str]]
"""Path of a weight in a model -> its module, and its name in the module."""


def sparsify(
    model: nn.Module,
    pruning: Pruning | None = None,
    *,
    skip: Skip = (),
    run: Callable[[], object] | None = None,
) -> "Sparsity":
    """Make the weights of all products in `model` 2:4 sparse, except projections onto a vocabulary.

    This works in place, on lsq's own and on converted layers, in every mode. Weights keep their
    names, shapes and all their values. Beside each weight lies its mask, a buffer "<weight>_kept"
    with a bit for each value; all passes read the masked weight.

    Args:
        model: after lsq.convert, before DistributedDataParallel.
        pruning: how masks are chosen, and when.
        skip: weights to leave dense: names, ends of names after a dot ("qkv_weight"), names of
            modules around them, patterns with * and ?, or a function of (module, weight's name).
        run: computes a batch, without dropout, for measure="output"; the same in all processes.

    Returns:
        The Sparsity that chooses the masks from now on: call its `follow(optimizer)`.

    Raises:
        ValueError: there is no weight; a weight's width is no multiple of 4, or it is sparse
            already, on the meta device or a shard; a pattern fits nothing; `run` does not fit
            `pruning`, or does not use a weight.
    """
    pruning, every = Pruning() if pruning is None else pruning, _weights(model)
    if (run is None) == (pruning.measure == "output"):
        raise ValueError(
            f"measure is {pruning.measure!r} and run is {run!r}; give run=<a function that computes"
            ' a batch> with measure="output", and with it alone'
        )
    skips = skipping(skip, every)
    weights = {path: weight for path, weight in every.items() if not skips(weight[0], path)}
    if not weights:
        if every:
            reason = f"skip leaves none of {len(every)}: skip less"
        elif program_modules(model):
            reason = "its layers of lsq stay dense: projections onto a vocabulary, graph layers"
        else:
            reason = "none of its layers is lsq's: call lsq.convert(model) first"
        raise ValueError(f"{type(model).__name__} has no weight to prune; {reason}")
    for path, (module, name) in weights.items():
        _check(path, module, name)
    sparsity = Sparsity(model, pruning, weights)
    if run is not None:
        sparsity.measure(run)
    for module, name in weights.values():
        if module.weight_masks is None:
            module.weight_masks = WeightMasks(straight_through=pruning.every > 0)
        module.weight_masks.add(module, name)
    keep_apart(model)
    sparsity.begin()
    return sparsity


def wants_sparsity(model: nn.Module) -> bool:
    """Whether layers of `model` were made with QuantConfig(sparsity=...), and still have masks."""
    return any(
        module.quant.sparsity and module.weight_masks is not None
        for module, _ in _weights(model).values()
    )


def sparsity_of(model: nn.Module, *, updates: int = 0) -> "Sparsity":
    """Return the Sparsity of layers made with QuantConfig(sparsity=...); call its `follow`.

    Args:
        model: bare or in DistributedDataParallel; to resume a training, with its state loaded.
        updates: the number of updates that this training has made.

    Raises:
        ValueError: no layer is to be sparse, layers differ in `sparsity`, or a weight is a shard
            of FSDP2.
    """
    weights = {
        path: (module, name)
        for path, (module, name) in _weights(model).items()
        if module.weight_masks is not None
    }
    asked = {module.quant.sparsity for module, _ in weights.values()}
    if len(asked) != 1 or "" in asked:
        listed = ", ".join(map(repr, sorted(asked)))
        wanted = (
            f"its layers ask for sparsity {listed}" if asked else "no layer of it is to be sparse"
        )
        raise ValueError(
            f"{type(model).__name__} has no sparsity of its configuration to follow: {wanted}; make"
            " them with one QuantConfig(sparsity='2:4'), or call"
            " lsq.models.sparsity.sparsify(model)"
        )
    for module, name in weights.values():
        check_whole(module, name)
    sparsity = Sparsity(model, Pruning.read(asked.pop()), weights)
    sparsity.begin(updates)
    return sparsity


class Sparsity:
    """The masks of a model during a training.

    `pruning`: how masks are chosen, and when. `updates`: of the optimizer, so far. `weights`: the
    weights with masks.
    """

    def __init__(self, model: nn.Module, pruning: Pruning, weights: Weights):
        self.pruning, self.weights, self.updates = pruning, weights, 0
        self._model = model
        self._squares: dict[str, torch.Tensor] = {}
        self._changed: list[torch.Tensor] = []
        self._hooks: list[Any] = []

    def __repr__(self) -> str:
        state = "sparse" if self.pruning.sparse(self.updates) else "dense"
        return (
            f"Sparsity({len(self.weights)} weights, {state} after {self.updates} updates,"
            f" {self.pruning})"
        )

    def begin(self, updates: int = 0) -> None:
        """Go on after `updates` updates, with the masks of a checkpoint or with new ones."""
        self.updates = updates
        modules = self._modules()
        for module in modules:
            module.weight_masks.followed = True
        if not self.pruning.sparse(updates):
            self._make_dense()
        elif not any(module.weight_masks.active for module in modules):
            self.choose()

    def follow(self, optimizer: Optimizer) -> None:
        """Call `draw` before and `step` after every step of `optimizer`, lsq's or another.

        Call both yourself if an optimizer has no step hooks, or around the steps of several
        optimizers. Raises ValueError if it follows an optimizer already.
        """
        if self._hooks:
            raise ValueError(
                "it follows an optimizer already, and updates would count twice; call leave()"
                " first, or, with several optimizers, draw() before all of their steps and step()"
                " after them"
            )
        self._hooks += [
            optimizer.register_step_pre_hook(lambda *_: self.draw()),
            optimizer.register_step_post_hook(lambda *_: self.step()),
        ]

    @torch.no_grad()
    def draw(self) -> None:
        """Add a share of pruned values, scaled by the gradient's norm, to gradients (SR-STE)."""
        if not (self.pruning.decay and self.pruning.every and self.pruning.sparse(self.updates)):
            return
        drawn = set()
        for module, name in self.weights.values():
            for part, kept in module.weight_masks.parts(module, name):
                if part.grad is not None and id(part) not in drawn:
                    direction = part / part.norm().clamp_min(torch.finfo(part.dtype).tiny)
                    part.grad.add_(direction * ~kept * (self.pruning.decay * part.grad.norm()))
                    drawn.add(id(part))

    def step(self) -> None:
        """Count an update; choose masks, or make the model dense again, if that is due."""
        self.updates += 1
        if self.pruning.due(self.updates):
            self.choose()
        elif not self.pruning.sparse(self.updates):
            self._make_dense()

    @torch.no_grad()
    def choose(self) -> None:
        """Choose all masks anew; raises ValueError for shards of FSDP2."""
        self._changed = []
        for path, (module, name) in self.weights.items():
            check_whole(module, name)
            values, in_out = module.own_parameter(name), module.declared[name].in_out
            scores = (values.t() if in_out else values).float().abs()
            if path in self._squares:
                # roots, since squares of small weights would vanish
                scores = scores * self._squares[path].to(scores.device).sqrt()
            mask = choose(scores)
            mask = mask.t() if in_out else mask
            self._changed.append((mask != module.weight_masks.mask(module, name)).float().mean())
            module.weight_masks.put(module, name, mask)

    @torch.no_grad()
    def measure(self, run: Callable[[], object]) -> None:
        """Measure mean squares of inputs for the next choice; ValueError for an unused weight."""
        squares = {module: InputSquares() for module in self._modules()}
        with observing(squares):
            run()
        missing = [
            path
            for path, (module, name) in self.weights.items()
            if name not in squares[module].sums
        ]
        if missing:
            raise ValueError(
                f"{missing[0]} was not used in this batch, and {len(missing) - 1} others; skip them"
            )
        # a parameter of several layers has one mask
        owners = {
            path: tuple(map(id, module.sources(name)))
            for path, (module, name) in self.weights.items()
        }
        shared: dict[tuple[int, ...], torch.Tensor] = {}
        for path, (module, name) in self.weights.items():
            shared[owners[path]] = shared.get(owners[path], 0) + squares[module].mean(name)
        self._squares = {path: shared[owner] for path, owner in owners.items()}

    @property
    def changed(self) -> float:
        """Share of mask values that the last choice changed: the flip rate.

        Hu et al. 2024 (arXiv:2404.01847) judge by it whether `decay` is large enough.
        """
        return torch.stack(self._changed).mean().item() if self._changed else 0.0

    def finish(self) -> None:
        """Write zeros into the weights if masks are active, and remove the masks."""
        self.leave()
        for module in self._modules():
            module.weight_masks.remove(module)
        keep_apart(self._model)
        self.weights = {}

    def write_zeros(self) -> None:
        """Write zeros into the weights if masks are active, and keep the masks."""
        for module in self._modules():
            if module.weight_masks.active:
                module.weight_masks.write_zeros(module)

    def leave(self) -> None:
        """Follow no optimizer any more; masks stay."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for module in self._modules():
            module.weight_masks.followed = False

    def state_dict(self) -> dict[str, Any]:
        """Return updates and mean squares of inputs; the model's state dict has the masks."""
        return {"updates": self.updates, "squares": dict(self._squares)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`, beside the model's masks; ValueError for other weights."""
        measured = self.weights.keys() if self.pruning.measure == "output" else set()
        if strange := state["squares"].keys() ^ measured:
            raise ValueError(
                f"the state is of other weights or another measure: {min(strange)} is in one of"
                " both alone; sparsify with the same Pruning and skip"
            )
        self.updates, self._squares = state["updates"], dict(state["squares"])

    def _modules(self) -> set[ProgramModule]:
        return {module for module, _ in self.weights.values()}

    def _make_dense(self) -> None:
        self.write_zeros()
        for module in self._modules():
            if module.weight_masks.active:
                module.weight_masks.fill(module)


def _weights(model: nn.Module) -> Weights:
    return {
        f"{path}.{name}" if path else name: (module, name)
        for path, module in program_modules(model).items()
        for name in module.prunable()
    }


def _check(path: str, module: ProgramModule, name: str) -> None:
    check_whole(module, name)
    values = module.own_parameter(name)
    if values.is_meta:
        raise ValueError(
            f"{path} is on the meta device and has no values; load or initialise the model first"
        )
    if module.weight_masks is not None:
        raise ValueError(
            f"{path} is sparse already; call finish() of its Sparsity"
            " (lsq.models.sparsity.sparsity_of, if QuantConfig asked for it) before it is"
            " sparsified again"
        )
    check_width(path, values.shape[0 if module.declared[name].in_out else 1])


def choose(scores: torch.Tensor) -> torch.Tensor:
    """Return a mask, bool [N, K], of the two largest scores [N, K] in each group of four.

    Scores are floats or ints. Of equal scores the first are kept; NaN counts as the largest. Raises
    ValueError unless 4 divides K.
    """
    check_width("a matrix of scores", scores.shape[1])
    scores = (
        scores.nan_to_num(nan=math.inf, posinf=math.inf) if scores.is_floating_point() else scores
    )
    four = scores.unflatten(1, (-1, GROUP)).unbind(2)
    wins = [torch.zeros_like(one, dtype=torch.int8) for one in four]
    for first in range(GROUP):
        for later in range(first + 1, GROUP):
            won = four[first] >= four[later]
            wins[first] += won
            wins[later] += ~won
    return torch.stack([count >= GROUP - KEPT for count in wins], dim=2).flatten(1)


def is_sparse(matrix: torch.Tensor) -> bool:
    """Whether each group of four in [N, K] holds at most two values that are not 0."""
    return matrix.shape[1] % GROUP == 0 and bool(
        ((matrix.unflatten(1, (-1, GROUP)) != 0).sum(2) <= KEPT).all()
    )


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A matrix [N, K] with at most two values in each group of four; a code takes 5/8 of a byte."""

    values: torch.Tensor
    """[N, K / 2], any dtype: two of each group in their order, zeros where a group has fewer."""
    indices: torch.Tensor
    """uint8 [N, ceil(K / 8)]: indices of two groups in a byte, of the first in the lower half."""

    def columns(self) -> torch.Tensor:
        """Return the column of each value, int64 [N, K / 2]."""
        groups = self.values.shape[1] // KEPT
        shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=self.indices.device)
        positions = (self.indices[:, :, None] >> shifts & 3).flatten(1)[:, : groups * KEPT]
        first = torch.arange(groups, device=positions.device).repeat_interleave(KEPT) * GROUP
        return positions + first


def pack(matrix: torch.Tensor) -> Packed:
    """Pack a sparse matrix [N, K] of any dtype; raises ValueError if it is not sparse."""
    mask = choose(matrix.double().abs())  # int8 has no 128
    left = ((matrix != 0) & ~mask).nonzero()
    if len(left):
        row, column = left[0].tolist()
        first = column - column % GROUP
        raise ValueError(
            f"row {row} holds {matrix[row, first : first + GROUP].tolist()} in columns {first} to"
            f" {first + 3}; 2:4 sparsity stores two of four: multiply the matrix by a mask of"
            " lsq.models.sparsity.choose first"
        )
    rows, columns = matrix.shape
    positions = (
        mask.view(-1, GROUP).nonzero()[:, 1].to(torch.uint8).view(rows, columns // GROUP, KEPT)
    )
    halves = positions[:, :, 0] | positions[:, :, 1] << 2
    low, high = functional.pad(halves, (0, halves.shape[1] % 2)).unflatten(1, (-1, 2)).unbind(2)
    return Packed(values=matrix[mask].view(rows, columns // GROUP * KEPT), indices=low | high << 4)


def unpack(packed: Packed) -> torch.Tensor:
    """Return the matrix [N, K] that was packed."""
    rows, kept = packed.values.shape
    return packed.values.new_zeros(rows, kept // KEPT * GROUP).scatter_(
        1, packed.columns(), packed.values
    )
