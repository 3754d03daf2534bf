"""Up to 1,024 workers in one process: how exact their mean gradient is, and what a training makes
of it.

Each worker's gradient is that of a small language model on a microbatch of its own, and what lsq
would send of it is made by the code that sends it (simulated_exchange.py). Workers come one after
another: of each, the message is kept, not the gradient (gcq keeps them, for at most 64 workers).
    With `--json FILE`, what FILE has already is not made again.
"""

import json
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

import common
import language_model
import torch
from simulated_exchange import GCQ, Exact, Noisy, Ring, TwoHop, relative_error
from torch import Tensor
from tqdm import tqdm

from lsq.files import write_text

NODE_SIZE = 8
MOST_GCQ_WORKERS = 64
LEARNING_RATE = 2e-3
PREPARATION = {"steps": 200, "sequences": 32}
"""The training that leads to the weights whose gradients are compared; it may be stopped before its
end."""
EXACT = "exact"
TEXTS = {"numbers": language_model.make_text, "sentences": language_model.make_sentences}
SETTING = ("text", "workers", "sequences", "steps", "seed")
"""What trainings that are compared have in common."""
Maker = Callable[[int, int], object]


def hierarchical(workers: int, values: int, **rounding) -> TwoHop | None:
    """None where all workers share a node: lsq averages floats there."""
    return TwoHop(workers, values, node_size=NODE_SIZE, **rounding) if workers > NODE_SIZE else None


def gcq(workers: int, values: int, quantile: float) -> GCQ | None:
    """None where too many workers leave no code but 0, or one."""
    return GCQ(workers, values, quantile=quantile) if workers <= MOST_GCQ_WORKERS else None


SCHEMES: dict[str, Maker] = {
    EXACT: Exact,
    "exact, noisy": Noisy,
    "bf16": Ring,
    "gcq": lambda workers, values: gcq(workers, values, 0.99),
    "gcq, largest value as clip": lambda workers, values: gcq(workers, values, 1.0),
    "int8": TwoHop,
    "int8, block 64": lambda workers, values: TwoHop(workers, values, block=64),
    "int8, block 256": lambda workers, values: TwoHop(workers, values, block=256),
    "int8_hier": hierarchical,
    "int8_hier, block 64": lambda workers, values: hierarchical(workers, values, block=64),
    "int8_hier, block 256": lambda workers, values: hierarchical(workers, values, block=256),
    "int4_hier, nodes of 1": lambda workers, values: TwoHop(
        workers, values, bits=4, stochastic=True
    ),
    "int4_hier": lambda workers, values: hierarchical(workers, values, bits=4, stochastic=True),
}
"""Name -> simulated exchange of N workers with v values, or None where there is nothing to
simulate."""


class Workers:
    """The model and the text that all workers share.

    Args:
        sequences, length: of each worker's microbatch.
    """

    def __init__(
        self,
        shape: language_model.Shape,
        text: language_model.Text,
        seed: int,
        sequences: int,
        length: int,
    ):
        self.model = language_model.LanguageModel(shape, seed)
        self.text = text
        self.pieces = {"sequences": sequences, "length": length}
        self.parameters = list(self.model.parameters())
        self.values = sum(parameter.numel() for parameter in self.parameters)
        self.optimizer = torch.optim.Adam(self.parameters, LEARNING_RATE)

    def gradients(self, numbers: range) -> Iterator[tuple[float, Tensor]]:
        """(loss, gradient float32 [v]) of each microbatch."""
        for number in numbers:
            loss = self.model(language_model.microbatch(self.text.train, number, **self.pieces))
            gradients = torch.autograd.grad(loss, self.parameters)
            yield loss.item(), torch.cat([gradient.flatten() for gradient in gradients])

    def update(self, gradient: Tensor, factor: float) -> None:
        """One step of Adam along gradient [v], with `factor` times the learning rate."""
        sizes = [parameter.numel() for parameter in self.parameters]
        for parameter, piece in zip(self.parameters, gradient.float().split(sizes), strict=True):
            parameter.grad = piece.view_as(parameter)
        for group in self.optimizer.param_groups:
            group["lr"] = LEARNING_RATE * factor
        self.optimizer.step()

    def held_out_loss(self) -> float:
        """See language_model."""
        return language_model.held_out_loss(
            self.model, self.text.held_out, sequences=400, length=self.pieces["length"]
        )


class Store:
    """The figures, kept in a JSON file if there is one.

    Raises:
        ValueError: the file was made with other options.
    """

    def __init__(self, path: Path | None, options: dict, conditions: dict):
        self.path = path
        self.content: dict = {
            "benchmark": "simulated_workers",
            "conditions": conditions,
            "options": options,
            "errors": [],
            "trainings": [],
        }
        if path is not None and path.exists():
            found = json.loads(path.read_text())
            if found["options"] != options:
                raise ValueError(
                    f"{path} was made with other options, {found['options']}; name another file"
                )
            self.content.update({key: found[key] for key in self.content})

    def find(self, kind: str, **key) -> dict | None:
        """The figure with these values, if there is one."""
        return next((row for row in self.content[kind] if key.items() <= row.items()), None)

    def add(self, kind: str, row: dict) -> None:
        """Keep a figure; the file is written anew."""
        self.content[kind].append(row)
        if self.path is not None:
            write_text(self.path, self.line() + "\n")

    def line(self) -> str:
        """Everything as one JSON object."""
        return json.dumps(self.content)


def measure_errors(store: Store, workers: Workers, options: Namespace) -> None:
    """Relative errors of the mean, after each number of steps of a training, for each number of
    workers."""
    batch = {**workers.pieces, "sequences": PREPARATION["sequences"]}
    done = 0
    for after in sorted(options.after):
        key = {"text": options.text, "after_steps": after}
        missing = [
            count for count in options.workers if store.find("errors", **key, workers=count) is None
        ]
        while missing and done < after:
            loss = workers.model(language_model.microbatch(workers.text.train, done, **batch))
            gradients = torch.autograd.grad(loss, workers.parameters)
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            workers.update(flat, language_model.schedule(done, PREPARATION["steps"], 20))
            done += 1
        for count in missing:
            made = {name: make(count, workers.values) for name, make in SCHEMES.items()}
            sides = {name: side for name, side in made.items() if side is not None}
            numbers = range(10**6, 10**6 + count)
            name = f"{count} workers, step {after}"
            bar = tqdm(numbers, desc=name, unit=" gradients", disable=options.quiet, leave=False)
            for _, gradient in workers.gradients(bar):
                for side in sides.values():
                    side.add(gradient)
            exact = sides.pop(EXACT).mean()
            errors = {name: relative_error(side.mean(), exact) for name, side in sides.items()}
            store.add("errors", {**key, "workers": count, "errors": errors})


def train(workers: Workers, scheme: str, count: int, steps: int, seed: int, quiet: bool) -> dict:
    """Train with `count` workers; the mean loss at every step, and that on held-out text at the
    end."""
    losses = []
    for step in tqdm(
        range(steps), desc=f"{count} workers, {scheme}", unit=" steps", disable=quiet, leave=False
    ):
        side = SCHEMES[scheme](count, workers.values)
        first = (seed * steps + step) * count
        total = 0.0
        for loss, gradient in workers.gradients(range(first, first + count)):
            side.add(gradient)
            total += loss
        losses.append(round(total / count, 5))
        workers.update(side.mean(), language_model.schedule(step, steps, max(1, steps // 10)))
    return {"losses": losses, "final_loss": workers.held_out_loss()}


def error_rows(store: Store) -> Iterator[dict]:
    """One row for each state of the weights and each scheme, workers from left to right."""
    found_at: dict[tuple[str, int], list[dict]] = {}
    for row in sorted(
        store.content["errors"], key=lambda row: (row["text"], row["after_steps"], row["workers"])
    ):
        found_at.setdefault((row["text"], row["after_steps"]), []).append(row)
    for (text, after), found in found_at.items():
        for scheme in SCHEMES:
            if scheme != EXACT:
                errors = {f"N={row['workers']}": row["errors"].get(scheme) for row in found}
                yield {"text": text, "after_steps": after, "error_of": scheme, **errors}


def training_rows(store: Store) -> Iterator[dict]:
    """One row for each training: its final loss, and how far it is from that of the exact mean."""
    for row in store.content["trainings"]:
        exact = store.find("trainings", scheme=EXACT, **{key: row[key] for key in SETTING})
        yield {
            **{key: row[key] for key in (*SETTING, "scheme", "final_loss")},
            "difference": row["final_loss"] - exact["final_loss"],
        }


def make_text(name: str, quick: bool) -> language_model.Text:
    """The text of that name; little of it for a quick run."""
    return TEXTS[name](*([100, 50] if quick else []))


def main() -> None:
    parser = common.parser(__doc__)
    parser.set_defaults(threads=1)
    numbers = {"type": common.positive, "nargs": "+", "metavar": "N"}
    parser.add_argument(
        "--workers", **numbers, default=[2**power for power in range(1, 11)], help="for the errors"
    )
    parser.add_argument(
        "--after",
        type=int,
        nargs="*",
        default=[0, 60, 200],
        metavar="STEPS",
        help=f"steps of training, at most {PREPARATION['steps']}, before errors are measured",
    )
    parser.add_argument(
        "--train", nargs="*", choices=SCHEMES, default=[], metavar="SCHEME", help="train with these"
    )
    parser.add_argument(
        "--train-workers", type=common.positive, default=32, metavar="N", help="in trainings"
    )
    parser.add_argument(
        "--train-sequences", type=common.positive, default=4, metavar="N", help="of each worker"
    )
    parser.add_argument(
        "--steps", type=common.positive, default=200, metavar="N", help="of trainings"
    )
    parser.add_argument(
        "--seeds", **{**numbers, "metavar": "SEED"}, default=[1], help="of trainings"
    )
    parser.add_argument("--text", choices=TEXTS, default="numbers", help="what is read")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    options = common.parse(parser)
    if any(not 0 <= after <= PREPARATION["steps"] for after in options.after):
        parser.error(f"--after is {options.after}; it must be between 0 and {PREPARATION['steps']}")
    shape, length = language_model.Shape(), 64
    if options.quick:
        shape, length = language_model.Shape(hidden=32, layers=1, positions=16), 16
        options.workers, options.after, options.steps = [2, 16], [1], 2
        options.train_workers, options.train_sequences = 2, 1
    sequences = 1 if options.quick else 8
    kept = {
        "hidden": shape.hidden,
        "layers": shape.layers,
        "length": length,
        "sequences": sequences,
    }
    try:
        store = Store(
            options.json, kept, common.conditions(options, baseline=EXACT, node_size=NODE_SIZE)
        )
    except ValueError as error:
        parser.error(str(error))
    text = make_text(options.text, options.quick)
    measure_errors(store, Workers(shape, text, 1, sequences, length), options)
    for seed in options.seeds:
        for scheme in dict.fromkeys([EXACT, *options.train] if options.train else []):
            setting = (
                options.text,
                options.train_workers,
                options.train_sequences,
                options.steps,
                seed,
            )
            key = {**dict(zip(SETTING, setting, strict=True)), "scheme": scheme}
            if store.find("trainings", **key) is None:
                workers = Workers(shape, text, seed, options.train_sequences, length)
                done = train(
                    workers, scheme, options.train_workers, options.steps, seed, options.quiet
                )
                store.add("trainings", {**key, **done})
    common.show(store.content["conditions"])
    for table in (list(error_rows(store)), list(training_rows(store))):
        print(common.table(table), end="\n\n")
    print(store.line(), flush=True)


if __name__ == "__main__":
    main()
