"""Loss curves of a small language model trained by several processes, one way to average gradients
beside another.

All sides begin with the same weights and read the same text; `difference` is the final held-out
loss minus that of exact averaging, `ratio` the one divided by the other. "exact, disturbed" shows
what differences mean: it is exact but for the last digits.
"""

import sys

import common
import gradient_sides
import language_model
import processes
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

LEARNING_RATE = 2e-3
LAST = 20
"""Steps whose mean training loss is the final one."""
NAMES = tuple(gradient_sides.SIDES)


def train(rank: int, side: str, options: dict, text: language_model.Text) -> dict:
    """One process of one training.

    Returns:
        "training": mean loss of all processes at each step; "held_out": loss after every
        `options["every"]` steps, by step; "agree": whether all processes end with the same bits.
    """
    world = distributed.get_world_size()
    model = language_model.LanguageModel(language_model.Shape(**options["shape"]), options["seed"])
    parallel = DistributedDataParallel(model)
    gradient_sides.attach(parallel, side, node_size=max(1, world // 2))
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE)
    pieces = {"sequences": options["sequences"], "length": options["length"]}
    losses = torch.zeros(options["steps"])
    held_out = {}
    for step in range(options["steps"]):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * language_model.schedule(
                step, options["steps"], options["warm_up"]
            )
        number = (options["seed"] * options["steps"] + step) * world + rank
        loss = parallel(language_model.microbatch(text.train, number, **pieces))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses[step] = loss.detach()
        if (step + 1) % options["every"] == 0 or step + 1 == options["steps"]:
            held_out[step + 1] = language_model.held_out_loss(
                model, text.held_out, sequences=400, length=options["length"]
            )
    distributed.all_reduce(losses)
    weights = torch.cat(
        [parameter.detach().flatten().view(torch.int32) for parameter in model.parameters()]
    )
    first = weights.clone()
    distributed.broadcast(first, 0)
    return {
        "training": (losses / world).tolist(),
        "held_out": held_out,
        "agree": torch.equal(first, weights),
    }


def train_all(
    rank: int, sides: list[str], options: dict, text: language_model.Text
) -> list[list[dict]]:
    """One process of all trainings: those of a side are one after another, one for each seed."""
    found = []
    for side in sides:
        found.append(
            [train(rank, side, {**options, "seed": seed}, text) for seed in options["seeds"]]
        )
        if rank == 0:
            losses = ", ".join(f"{run['held_out'][options['steps']]:.4f}" for run in found[-1])
            print(
                f"{distributed.get_world_size()} processes, {side}: {losses}",
                file=sys.stderr,
                flush=True,
            )
    return found


def measure(world: int, sides: list[str], options: dict, text: language_model.Text) -> list[dict]:
    """Train with every side, the first of which is exact; the rows of the table, curves
    included."""
    answers = processes.run(train_all, world, sides, options, text)
    rows = []
    exact = [run["held_out"][options["steps"]] for run in answers[0][0]]
    for number, side in enumerate(sides):
        runs = []
        for place, run in enumerate(answers[0][number]):
            final, last = run["held_out"][options["steps"]], run["training"][-LAST:]
            agree = all(answer[number][place]["agree"] for answer in answers)
            more = {
                "final": final,
                "difference": final - exact[place],
                "last": sum(last) / len(last),
                "agree": agree,
            }
            runs.append({**run, **more})
        rows.append(row(world, side, runs))
    return rows


def row(world: int, side: str, runs: list[dict]) -> dict:
    """Means over the seeds."""
    mean = {
        key: sum(run[key] for run in runs) / len(runs) for key in ("final", "difference", "last")
    }
    return {
        "processes": world,
        "side": side,
        "final_loss": mean["final"],
        "difference": mean["difference"],
        "largest": max((run["difference"] for run in runs), key=abs),
        "last_training_losses": mean["last"],
        "bit_identical": all(run["agree"] for run in runs),
        "ratio": (mean["final"] - mean["difference"]) / mean["final"],
        "curves": [{"training": run["training"], "held_out": run["held_out"]} for run in runs],
    }


def main() -> None:
    parser = common.parser(__doc__)
    parser.set_defaults(threads=1)
    parser.add_argument(
        "--processes", type=common.positive, nargs="+", default=[2, 4], metavar="N", help="sets"
    )
    parser.add_argument(
        "--steps", type=common.positive, default=200, metavar="N", help="updates of each training"
    )
    parser.add_argument(
        "--seeds",
        type=common.positive,
        nargs="+",
        default=[1, 2],
        metavar="SEED",
        help="of each side",
    )
    parser.add_argument(
        "--sides",
        nargs="+",
        choices=NAMES,
        default=NAMES,
        metavar="SIDE",
        help="also: exact, always",
    )
    options = common.parse(parser)
    training = {
        "steps": options.steps,
        "warm_up": 20,
        "every": 20,
        "sequences": 4,
        "length": 64,
        "shape": {},
    }
    if options.quick:
        options.processes, options.seeds, options.sides = [2], [1], ["int8"]
        training.update(
            steps=2, sequences=2, length=16, shape={"hidden": 32, "layers": 1, "positions": 16}
        )
    training["seeds"] = options.seeds
    text = language_model.make_text(*([100, 50] if options.quick else []))
    sides = [
        gradient_sides.EXACT,
        *(side for side in options.sides if side != gradient_sides.EXACT),
    ]
    rows = [row for world in options.processes for row in measure(world, sides, training, text)]
    curves = [
        {key: row[key] for key in ("processes", "side")} | {"seeds": row.pop("curves")}
        for row in rows
    ]
    conditions = common.conditions(
        options,
        **training,
        baseline=gradient_sides.EXACT,
        backend="gloo",
        nodes=2,
        parameters=sum(
            map(
                torch.numel,
                language_model.LanguageModel(
                    language_model.Shape(**training["shape"]), 1
                ).parameters(),
            )
        ),
    )
    common.report("gradients_training", rows, conditions, options, curves=curves)


if __name__ == "__main__":
    main()
