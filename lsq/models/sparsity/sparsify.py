"""Models whose weights are sparse, while they train: masks are chosen, and what is pruned is drawn
to zero."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from lsq.config import require_model
from lsq.layers import ProgramModule
from lsq.layers.weight_masks import WeightMasks, check_whole
from lsq.models.clip_state import keep_apart
from lsq.models.selection import Skip, skipping
from lsq.models.sparsity.inputs import mean_squares
from lsq.models.sparsity.pattern import choose
from lsq.quant.pruning import Pruning, check_width


def sparsify(
    model: nn.Module,
    pruning: Pruning | None = None,
    *,
    skip: Skip = (),
    run: Callable[[], object] | None = None,
) -> "Sparsity":
    """Let the weights of all products in `model` be 2:4 sparse, but for projections onto a
    vocabulary.

    Works in place, on lsq's own layers and on those of lsq.convert, in every mode. Weights keep
    their names, shapes and all their values; beside each lies its mask, a buffer "<weight>_kept" of
    one bit for each value. All passes, in training and in eval mode, read what the mask leaves.

    Args:
        model: after lsq.convert, before DistributedDataParallel.
        pruning: how, and when; the default is Pruning().
        skip: weights to leave dense: names, their ends from a dot on ("qkv_weight"), names of
            modules around them, patterns with * and ?, or a function of (module, name of the
            weight).
        run: computes a batch of the model, for measure="output"; put dropout off before. In
            DistributedDataParallel all processes need the same batch.

    Returns:
        What goes on with it: call `follow(optimizer)`.

    Raises:
        TypeError: `model` is no torch.nn.Module.
        ValueError: there is no weight, its width is no multiple of 4, it is sparse already, on the
            meta device or a shard of FSDP2; a pattern in `skip` fits nothing; `run` is missing, is
            not needed, or leaves a weight out.
    """
    require_model(model)
    pruning = Pruning() if pruning is None else pruning
    if (run is None) == (pruning.measure == "output"):
        raise ValueError(
            f"measure is {pruning.measure!r} and run is {run!r}; give run=<a function that computes"
            " a batch> with "
            'measure="output", and with it alone'
        )
    weights = _chosen(model, skip)
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
    """Whether layers of `model` were made with QuantConfig(sparsity=...), and have their masks
    still."""
    return any(
        module.quant.sparsity and module.weight_masks is not None
        for _, (module, _) in _weights(model)
    )


def sparsity_of(model: nn.Module, *, updates: int = 0) -> "Sparsity":
    """The Sparsity of a model whose layers were made with QuantConfig(sparsity=...): what goes on
    with their masks.

    Args:
        model: before or after DistributedDataParallel; with its state dict, where a training goes
            on.
        updates: that it was trained for, in this training.

    Returns:
        What goes on with it: call `follow(optimizer)`.

    Raises:
        ValueError: there is none, its layers want different things, or weights are shards of FSDP2.
    """
    weights = {path: found for path, found in _weights(model) if found[0].weight_masks is not None}
    asked = {module.quant.sparsity for module, _ in weights.values()}
    if len(asked) != 1 or "" in asked:
        listed = ", ".join(map(repr, sorted(asked)))
        wanted = (
            f"its layers ask for sparsity {listed}" if asked else "no layer of it is to be sparse"
        )
        raise ValueError(
            f"{type(model).__name__} has no sparsity of its configuration to follow: {wanted}; make"
            " them with one "
            "QuantConfig(sparsity='2:4'), or call lsq.models.sparsity.sparsify(model)"
        )
    for module, name in weights.values():
        check_whole(module, name)
    found = Sparsity(model, Pruning.read(asked.pop()), weights)
    found.begin(updates)
    return found


class Sparsity:
    """The masks of a model over a training.

    Attributes:
        pruning: how, and when.
        updates: of the optimizer, so far.
        weights: path in the model -> the module that a weight belongs to, and its name there.
    """

    def __init__(
        self, model: nn.Module, pruning: Pruning, weights: dict[str, tuple[ProgramModule, str]]
    ):
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

    # Over a training

    def begin(self, updates: int = 0) -> None:
        """Let masks be as they are after so many updates: those that there are, of a checkpoint, or
        else new ones."""
        self.updates = updates
        modules = self._modules()
        for module in modules:
            module.weight_masks.followed = True
        if not self.pruning.sparse(updates):
            self._make_dense()
        elif not any(module.weight_masks.active for module in modules):
            self.choose()

    def follow(self, optimizer: Optimizer) -> None:
        """From now on every step of `optimizer`, lsq's or another, is an update: `step` is called
        after it.

        Before it, what is pruned is drawn to zero. Optimizers without step hooks need both calls:
        `draw` and `step`; so do several optimizers, once before all of their steps and once after
        them.

        Raises:
            ValueError: it follows one already, and would count updates twice.
        """
        if self._hooks:
            raise ValueError(
                "it follows an optimizer already, and updates would count twice; call leave()"
                " first, or, with several "
                "optimizers, draw() before all of their steps and step() after them"
            )
        self._hooks += [
            optimizer.register_step_pre_hook(lambda *_: self.draw()),
            optimizer.register_step_post_hook(lambda *_: self.step()),
        ]

    @torch.no_grad()
    def draw(self) -> None:
        """SR-STE: add a share of itself to the gradient of what is pruned, in proportion to the
        gradient's size."""
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
        """An update is done: choose masks, or make the model dense again, where that is due."""
        self.updates += 1
        if self.pruning.due(self.updates):
            self.choose()
        elif not self.pruning.sparse(self.updates):
            self._make_dense()

    @torch.no_grad()
    def choose(self) -> None:
        """Choose all masks anew.

        Raises:
            ValueError: weights are shards of FSDP2.
        """
        self._changed = []
        for path, (module, name) in self.weights.items():
            check_whole(module, name)
            values = module.own_parameter(name)
            in_out = module.declared[name].in_out
            rows = (values.t() if in_out else values).float()
            scores = rows.abs()
            if path in self._squares:
                # squares of small weights would vanish
                scores = scores * self._squares[path].to(rows.device).sqrt()
            mask = choose(scores)
            mask = mask.t() if in_out else mask
            self._changed.append((mask != module.weight_masks.mask(module, name)).float().mean())
            module.weight_masks.put(module, name, mask)

    def measure(self, run: Callable[[], object]) -> None:
        """Measure what inputs are, for measure="output": the masks chosen next go by that.

        Raises:
            ValueError: a weight was not used.
        """
        found = mean_squares({module for module, _ in self.weights.values()}, run)
        missing = [
            path for path, (module, name) in self.weights.items() if name not in found[module]
        ]
        if missing:
            raise ValueError(
                f"{missing[0]} was not used in this batch, and {len(missing) - 1} others; skip them"
            )
        shared: dict[
            tuple[int, ...], torch.Tensor
        ] = {}  # a parameter of several layers has one mask
        owners = {
            path: tuple(map(id, module.sources(name)))
            for path, (module, name) in self.weights.items()
        }
        for path, (module, name) in self.weights.items():
            shared[owners[path]] = shared.get(owners[path], 0) + found[module][name]
        self._squares = {path: shared[owner] for path, owner in owners.items()}

    @property
    def changed(self) -> float:
        """Share of values that the last choice kept and the one before did not, or the other way
        round; 0 to 1.

        Hu et al. 2024 (arXiv:2404.01847) tell by this flip rate whether `decay` is large enough: it
        has to rise, and fall again while the model learns.
        """
        return torch.stack(self._changed).mean().item() if self._changed else 0.0

    def finish(self) -> None:
        """Write what masks leave into the weights, and forget the masks: an ordinary model, whose
        weights have zeros.

        Where masks do not count now, weights stay as they are.
        """
        self.leave()
        for module in self._modules():
            module.weight_masks.remove(module)
        keep_apart(self._model)
        self.weights = {}

    def write_zeros(self) -> None:
        """Write what masks leave into the weights, and keep the masks."""
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

    # State

    def state_dict(self) -> dict[str, Any]:
        """Updates, and mean squares of inputs by path. Masks are in the state dict of the model."""
        return {"updates": self.updates, "squares": dict(self._squares)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after so many updates, with the masks that the model has loaded, or will load.

        Raises:
            ValueError: it is of other weights.
        """
        strange = state["squares"].keys() ^ (
            self.weights.keys() if self.pruning.measure == "output" else set()
        )
        if strange:
            raise ValueError(
                f"the state is of other weights or another measure: {min(strange)} is in one of"
                " both alone; sparsify "
                "with the same Pruning and skip"
            )
        self.updates, self._squares = state["updates"], dict(state["squares"])

    def _modules(self) -> set[ProgramModule]:
        return {module for module, _ in self.weights.values()}

    def _make_dense(self) -> None:
        """Let zeros be where weights are pruned, and all weights count."""
        self.write_zeros()
        for module in self._modules():
            if module.weight_masks.active:
                module.weight_masks.fill(module)


def _chosen(model: nn.Module, skip: Skip) -> dict[str, tuple[ProgramModule, str]]:
    """Path -> module and name there of the weights to prune.

    Raises:
        ValueError: there are none, or a pattern in `skip` fits nothing.
    """
    found = dict(_weights(model))
    skips = skipping(skip, {path: module for path, (module, _) in found.items()})
    chosen = {
        path: (module, name) for path, (module, name) in found.items() if not skips(module, path)
    }
    if not chosen:
        ours = any(isinstance(module, ProgramModule) for module in model.modules())
        reason = (
            f"skip leaves none of {len(found)}: skip less"
            if found
            else "its layers of lsq are projections onto a vocabulary, which stay dense"
            if ours
            else "none of its layers is lsq's: call lsq.convert(model) first"
        )
        raise ValueError(f"{type(model).__name__} has no weight to prune; {reason}")
    return chosen


def _weights(model: nn.Module) -> Iterator[tuple[str, tuple[ProgramModule, str]]]:
    require_model(model)
    for prefix, module in model.named_modules():
        if isinstance(module, ProgramModule):
            for name in module.prunable():
                yield f"{prefix}.{name}" if prefix else name, (module, name)


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
            " (lsq.models.sparsity.sparsity_of, if"
            " QuantConfig asked "
            "for it) before it is sparsified again"
        )
    check_width(path, values.shape[0 if module.declared[name].in_out else 1])
