"""Formats of weights under budgets of bits: what each method of `lsq allocate` finds, on a small
Llama that has learned a text by subwords.

All methods have the same model, batches and number of mixes. Divergences are of predictions from
the float model's, in nats a subword; "held_out" is on text that neither the training nor the search
has seen, and "ratio" is that over a uniform format's. Budgets are the bits of that format, int3/row
and int4/row, and half a bit more than int3/row. "lost" are nats that the loss there grows by;
"lost_after" is the same after --last more updates with these formats, beside the float model after
as many. Seconds are of the processor, and of measuring costs, which exact and greedy add up.
"""

import argparse
import copy
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

import common
import torch
from model_quality import GRADIENT_NORM, OF_TEXT, QUICK, Llama, Side, Size, groups, rate
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div
from tqdm import tqdm

import lsq
from lsq.quant.numbers import scaled_format
from lsq.study import (
    Allocation,
    Allocator,
    Budget,
    Search,
    estimate,
    groups_of,
    search,
    sensitivity,
)
from lsq.study.search import SEARCHES
from lsq.study.tensors import WEIGHT

FORMATS = ("int2/row", "int3/row", "int4/row", "int6/row", "int8/row")
SIZE = replace(OF_TEXT, layers=6, feed_forward=384, batch=16)
SUBWORDS, QUICK_SUBWORDS = 2000, 300
SMALLER, LARGER = "int3/row", "int4/row"
SUMS = {
    "exact": "divergence",
    "greedy": "divergence",
    "exact, loss": "loss",
    "exact, second": "second",
    "exact, drawn labels": "drawn",
}
"""Methods that add up costs -> which costs."""
BATCHES, RATE = 2, 0.25
"""Of a search; and the learning rate of the last updates, as a part of the first one."""


class Words(Llama):
    """A Llama on subwords of a text; its last tenth is for validation."""

    def __init__(self, size: Size, text: str, subwords: int):
        end = len(text) * 9 // 10
        tokenizer = ByteLevelBPETokenizer()
        tokenizer.train_from_iterator([text[:end]], vocab_size=subwords, show_progress=False)
        self.size, self.vocabulary = size, tokenizer.get_vocab_size()
        self.training, held = (
            torch.tensor(tokenizer.encode(part).ids) for part in (text[:end], text[end:])
        )
        if len(held) <= size.length:
            raise ValueError(f"the text has {len(text)} letters; give a longer one")
        starts = torch.linspace(0, len(held) - size.length, self.WINDOWS).long()
        self.validation = torch.stack([held[start : start + size.length] for start in starts])


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, float, Tensor]:
    """The sum of losses, their number, and logits."""
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1].flatten(0, 1)
    total = cross_entropy(logits, batch["input_ids"][:, 1:].flatten(), reduction="sum")
    return total, float(len(logits)), logits


def train(task: Words, model: nn.Module, seed: int, updates: int, factor: float, say: str) -> None:
    """Train by AdamW with so many updates, at a factor of the task's learning rate."""
    size, model = replace(task.size, updates=updates), model.train()
    parameters = groups(model, Side(), size.weight_decay)
    optimizer = torch.optim.AdamW(parameters, lr=size.learning_rate * factor)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(rate, size))
    batches = zip(range(updates), task.batches(seed), strict=False)
    for _, batch in tqdm(batches, say, updates, leave=False):
        model(**batch).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.eval()


@torch.no_grad()
def tried(task: Words, model: nn.Module, other: nn.Module) -> tuple[float, float]:
    """(divergence of another model's predictions, its loss), on held-out text."""
    divergence = loss = 0.0
    for part in task.validation.split(task.size.batch):
        p, q = (one(input_ids=part).logits.float().log_softmax(2) for one in (model, other))
        divergence += float(kl_div(q, p, reduction="sum", log_target=True))
        loss += float(loss_of(other, {"input_ids": part})[0])
    return divergence / task.validation.numel(), loss / task.validation[:, 1:].numel()


def rounded(model: nn.Module, found: Allocation, clip: str) -> nn.Module:
    """A copy with rounded weights."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for name, form in found.of(WEIGHT).items():
            weight, how = other.get_parameter(name), scaled_format(form)
            weight.copy_(how.decode(how.encode(weight, clip)))
    return other


def found_by(
    method: str, allocators: dict[str, Allocator], budget: Budget, options, **model
) -> Allocation:
    """What a method finds; `model`: the model and batches."""
    if method in SUMS:
        allocator = allocators[SUMS[method]]
        return replace(allocator, method=method.partition(",")[0]).run(budget)
    how = Search(method=method, mixes=options.mixes)
    return search(allocators["divergence"], budget, loss=loss_of, how=how, **model).allocation


def rows(task: Words, seed: int, options: argparse.Namespace) -> Iterator[dict]:
    """The rows of one model."""
    torch.manual_seed(seed)
    model = task.model()
    train(task, model, seed, task.size.updates, 1.0, f"seed {seed}: float32")
    batches = [batch for _, batch in zip(range(BATCHES), task.batches(seed + 100), strict=False)]
    sentences = [{"input_ids": row[None]} for batch in batches for row in batch["input_ids"]]
    spent, asked = {}, {"formats": FORMATS, "clip": options.clip}
    begin = time.process_time()
    drawn = estimate(model, loss_of, batches, **asked)
    spent["drawn"], begin = time.process_time() - begin, time.process_time()
    costs = sensitivity(model, loss_of, batches, samples=sentences, activations=False, **asked)
    spent |= dict.fromkeys(("divergence", "loss", "second"), time.process_time() - begin)
    parts = groups_of(copy.deepcopy(model), minimum_width=0)
    allocators = {
        rule: Allocator(costs=costs, groups=parts, rule=rule)
        for rule in ("divergence", "loss", "second")
    }
    allocators["drawn"] = Allocator(costs=drawn, groups=parts, rule="second")
    uniform = allocators["divergence"].uniform()
    budgets = [(uniform[SMALLER].bits, SMALLER), (uniform[SMALLER].bits + 0.5, SMALLER)]
    budgets += [(uniform[LARGER].bits, LARGER)]
    _, loss = tried(task, model, model)
    last = partial(train, task, seed=seed + 200, updates=options.last, factor=RATE)
    after = copy.deepcopy(model)
    last(after, say="float32")
    _, loss_after = tried(task, model, after)
    for bits, form in budgets[: options.budgets]:
        base = tried(task, model, rounded(model, uniform[form], options.clip))[0]
        for method in (form, *options.methods):
            begin = time.process_time()
            if method == form:
                found = uniform[form]
            else:
                budget = Budget(bits=bits * (1 + 1e-9))
                found = found_by(method, allocators, budget, options, model=model, batches=batches)
            seconds = time.process_time() - begin + spent.get(SUMS.get(method, "divergence"), 0.0)
            divergence, now = tried(task, model, rounded(model, found, options.clip))
            row = {
                "seed": seed,
                "budget": bits,
                "side": method,
                "bits": found.bits,
                "held_out": divergence,
                "ratio": divergence / base,
                "lost": now - loss,
                "lost_after": None,
                "seconds": 0.0 if method == form else seconds,
            }
            if options.last and method in (form, *options.trained):
                other = copy.deepcopy(model)
                lsq.convert(other, found.quant, minimum_width=0)
                last(other, say=method)
                row["lost_after"] = tried(task, model, other)[1] - loss_after
            print(common.table([row]).splitlines()[-1], flush=True)
            yield row


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.set_defaults(threads=1)
    methods = [*SUMS, *SEARCHES]
    parser.add_argument("--text", type=Path, metavar="FILE", help="Python's manual if left out")
    parser.add_argument("--seeds", type=common.positive, nargs="+", default=[1], metavar="SEED")
    parser.add_argument("--updates", type=common.positive, metavar="N", help="in float")
    parser.add_argument("--last", type=int, default=0, metavar="N", help="updates with formats")
    parser.add_argument("--budgets", type=common.positive, default=3, metavar="N", help="the first")
    parser.add_argument("--mixes", type=common.positive, default=300, metavar="N")
    parser.add_argument("--clip", default="mse", help="how clips of weights are measured")
    for name in ("methods", "trained"):
        default = methods if name == "methods" else ["exact", "refine"]
        text = "all" if name == "methods" else "those that train on by --last"
        parser.add_argument(
            f"--{name}", nargs="+", choices=methods, default=default, metavar="METHOD", help=text
        )
    options = common.parse(parser, arguments)
    size = SIZE
    if options.quick:
        size, options.mixes = replace(SIZE, **QUICK, batch=2), 3
    if options.updates is not None:
        size = replace(size, updates=options.updates)
    text = "\n".join(topics[name] for name in sorted(topics))
    if options.text is not None:
        text = options.text.read_text("utf-8")
    task = Words(size, text, QUICK_SUBWORDS if options.quick else SUBWORDS)
    found = [row for seed in options.seeds for row in rows(task, seed, options)]
    conditions = common.conditions(
        options,
        packages=("transformers", "scipy"),
        baseline="the uniform format",
        size=vars(size),
        vocabulary=task.vocabulary,
        mixes=options.mixes,
        last=options.last,
        clip=options.clip,
        formats=FORMATS,
    )
    common.report("allocation_quality", found, conditions, options)


if __name__ == "__main__":
    main()
