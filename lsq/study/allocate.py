"""Formats for the tensors of a model in memory: costs, groups and search in one call."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import nll_loss
from tqdm import tqdm

from lsq.study.allocation import Allocator, groups_of
from lsq.study.product_times import Product, product_times
from lsq.study.resources import Budget
from lsq.study.search import Found, KeptMixes, Search, search
from lsq.study.sensitivity import Keep, estimate, sensitivity

FORMATS = tuple("int2/row int3/row int4/row int6/row int8".split())
"""Formats of weights that have fast products."""
COSTS, MIXES = "sensitivity.json", "mixes.json"


def allocate(
    model: nn.Module,
    batches: Iterable[Any],
    budget: Budget | float,
    *,
    formats: Sequence[str] = FORMATS,
    at_least: Mapping[str, float] | None = None,
    activations: bool = False,
    held_out: Iterable[Any] = (),
    how: Search | None = None,
    folder: Path | str | None = None,
    **options,
) -> Found:
    """Choose a number format for each weight of a float model, so that it loses least in a budget.

    What is lost is the divergence of predictions from the model's own (Kullback and Leibler 1951):
    no labels are read. First each tensor is measured by itself, then mixes are measured together.
    Convert the model afterwards: `lsq.convert(model, found.allocation.quant)`.

    Args:
        model: not converted; it is the same afterwards.
        batches: a batch or several: what the model is called with, a dict of keyword arguments, a
            tuple of arguments in a list, or one argument. It returns logits [..., classes], or an
            object that has them as `logits`. Items whose `attention_mask` is 0 do not count; of an
            encoder and a decoder, those whose `decoder_attention_mask` is 0.
        budget: a Budget, or mean bits of a weight's value, scales included.
        formats: names as for QuantConfig.weight_format.
        at_least: pattern of names -> the fewest bits of a weight's value.
        activations: whether inputs of products get formats, too; these have no fast products.
        held_out: further batches; see lsq.study.search.
        how: method, rule of the first mix, number of mixes and seed.
        folder: where measurements are kept: the same call goes on after an interruption.
        **options: of lsq.convert, such as skip; give it the same ones.

    Raises:
        ValueError: an argument is wrong, nothing fits, or `folder` has other measurements.
    """
    one = isinstance(batches, Mapping | Tensor)
    batches = [batches] if one else list(batches)  # of a loader, which may shuffle them
    budget = budget if isinstance(budget, Budget) else Budget(bits=budget)
    groups = groups_of(model, formats, **options)
    path = None if folder is None else Path(folder)
    if path is not None:
        path.mkdir(parents=True, exist_ok=True)
    how = how or Search()
    if how.rule == "second" and activations:
        raise ValueError('rule is "second", which estimates costs of weights alone: take another')
    if how.rule == "second":
        costs = estimate(model, predictions_of, batches, formats=formats)
    else:
        with tqdm(desc="measuring", unit=" tensors", disable=None) as bar:

            def measured(done: int, wanted: int, name: str) -> None:
                bar.total = wanted
                bar.update(done - bar.n)

            costs = sensitivity(
                model,
                predictions_of,
                batches,
                formats=formats,
                activations=activations,
                keep=Keep(path=path and path / COSTS, progress=measured),
            )
    allocator = timed(
        Allocator(
            costs=costs, groups=groups, activations=activations, at_least=at_least, rule=how.rule
        ),
        budget,
    )
    with tqdm(desc="measuring", unit=" mixes", disable=None) as bar:
        return search(
            allocator,
            budget,
            model,
            predictions_of,
            batches,
            how=how,
            held_out=held_out,
            keep=KeptMixes(path=path and path / MIXES, progress=lambda n, _: bar.update(n - bar.n)),
        )


def timed(allocator: Allocator, budget: Budget) -> Allocator:
    """Return the allocator for the steps of a budget; where this limits milliseconds, with times of
    this machine, which are measured and kept (lsq.study.product_times).

    Raises:
        ValueError: the engine has no products of a format, or the C++ library is missing.
    """
    allocator = replace(allocator, rows=budget.rows)
    if budget.milliseconds is None:
        return allocator
    wanted = [
        Product(form=one.form, rows=budget.rows, outputs=one.outputs, inputs=one.inputs)
        for one in allocator.multiplications
    ]
    widths = [one.weight_bits for one in allocator.multiplications]
    bits = budget.bits or sum(widths) / len(widths)
    with tqdm(desc="timing", unit=" products", disable=None) as bar:

        def progress(done: int, wanted: int) -> None:
            bar.total = wanted
            bar.update(done - bar.n)

        times = product_times(
            wanted, megabytes=max(allocator.values * bits / 8e6, 1), progress=progress
        )
    return replace(
        allocator, milliseconds=lambda form, p, k: times.milliseconds(form, budget.rows, p, k)
    )


def predictions_of(model: nn.Module, batch: Any) -> tuple[Tensor, float, Tensor]:
    """Return (negative log-likelihood of the most probable classes, items, logits [items,
    classes]) of a batch as `allocate` takes it; TypeError: the model returns no logits."""
    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, tuple) else model(batch)
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor) or logits.dim() < 2:
        raise TypeError(
            f"the model returns {type(output).__name__}; it must return logits [..., classes], or"
            " an object that has them as `logits`"
        )
    of_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    name = "decoder_attention_mask" if of_decoder else "attention_mask"
    mask = batch.get(name) if isinstance(batch, Mapping) else None
    if mask is not None and mask.shape == logits.shape[:-1]:
        logits = logits[mask.bool()]
    logits = logits.flatten(0, -2)
    likely = logits.float().log_softmax(1)
    return nll_loss(likely, likely.argmax(1), reduction="sum"), float(len(logits)), logits
