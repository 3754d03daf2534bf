"""The options of `lsq train` that `lsq train-text` sets, and how its users know them."""

from argparse import ArgumentParser, Namespace

from lsq.commands.options import positive


def _both(end: str) -> tuple[str, str]:
    return f"--encoder-{end}", f"--decoder-{end}"


MODEL = (
    ("--layers", 3, "layers of the encoder, and of the decoder", *_both("layers")),
    ("--hidden", 256, "hidden size", *_both("embed-dim")),
    ("--feed-forward", 1024, "inner size of feed-forward blocks", *_both("ffn-embed-dim")),
    ("--heads", 4, "attention heads", *_both("attention-heads")),
    ("--dropout", 0.1, "dropout", "--dropout"),
)
TRAINING = (
    ("--max-tokens", 4096, "tokens in a batch, with padding", "--max-tokens"),
    ("--update-freq", 1, "batches in an update", "--update-freq"),
    ("--lr", 1e-3, "highest learning rate", "--lr"),
    ("--warmup", 1000, "updates until the highest learning rate", "--warmup-updates"),
    ("--label-smoothing", 0.1, "label smoothing", "--label-smoothing"),
    ("--clip-norm", 1.0, "largest norm of the gradient", "--clip-norm"),
    (
        "--validate-every",
        500,
        "updates between validations, each with a checkpoint",
        "--save-interval-updates",
    ),
    ("--log-every", 50, "updates between points of the loss curve", "--log-interval"),
)
"""(option of `lsq train-text`, default, help, options of `lsq train` that it sets)"""
FIXED = {
    "--share-all-embeddings": None,
    "--optimizer": "lsq_adam",
    "--adam-betas": "(0.9, 0.98)",
    "--lr-scheduler": "inverse_sqrt",
    "--keep-interval-updates": "1",
    "--no-epoch-checkpoints": None,
    "--save-interval": "1000000",
    "--validate-interval": "1000000",
    "--num-workers": "0",
}
"""Options of `lsq train` that are always the same; None for switches."""
NAMES = {name: option for option, _, _, *names in (*MODEL, *TRAINING) for name in names}
"""Options of `lsq train` -> those of `lsq train-text` that set them."""
UNBOUND = frozenset(
    "--cpu --max-update --num-workers --log-interval --log-format --log-file --no-progress-bar"
    " --tensorboard-logdir"
    " --save-interval --save-interval-updates --validate-interval --validate-interval-updates"
    " --keep-interval-updates"
    " --keep-last-epochs --keep-best-checkpoints --no-epoch-checkpoints --stop-time-hours"
    " --lsq-memory"
    " --lsq-gemm-config --lsq-gemm-coverage --lsq-timeout --lsq-device --lsq-activations".split()
)
"""Options of `lsq train` that change nothing of what a run has made: they may differ when it goes
on."""
OF_THIS_COMMAND = {
    "--disable-validation": "the checkpoint that translates is chosen by it",
    "--no-last-checkpoints": "an interrupted training goes on from them",
    "--max-update": "give --updates",
    "--no-save": "the checkpoints are needed to translate",
    "--save-dir": "give --output and --name",
}
"""Options of `lsq train` that cannot follow a lone --, and what to do instead."""


def add(
    parser: ArgumentParser, table: tuple[tuple, ...], defaults: dict[str, int | float] | None = None
) -> None:
    """Add the options of MODEL or TRAINING to a parser; with `defaults`, those alone that have one
    there."""
    for option, default, text, *_ in table:
        if defaults is None or option in defaults:
            default = (defaults or {}).get(option, default)
            parser.add_argument(
                option, type=positive if type(default) is int else float, default=default, help=text
            )


def values(given: Namespace) -> dict[str, str | None]:
    """The options of `lsq train`, with their values, from what `add` parsed."""
    found = {
        name: str(getattr(given, option[2:].replace("-", "_"))) for name, option in NAMES.items()
    }
    return {**FIXED, **found}


def named_options(words: list[str]) -> dict[str, str | None]:
    """Options of a command line with their values, None for those without; words before any option
    are under ""."""
    found: dict[str, list[str]] = {}
    option = ""
    for word in words:
        if word.startswith("--"):
            option, _, value = word.partition("=")
            found[option] = [value] if value else []
        else:
            found.setdefault(option, []).append(word)
    return {option: " ".join(values) or None for option, values in found.items()}


def bound(training: dict[str, str | None], extra: list[str]) -> dict[str, str | bool]:
    """What a run depends on, by names that its user knows, with values; True for switches.

    Args:
        training: options of `lsq train` that `lsq train-text` sets, with their values.
        extra: further ones, as the user gave them.
    """
    further = named_options(extra)
    ours = {
        name: value
        for name, value in training.items()
        if name not in further and name not in UNBOUND
    }
    found = {NAMES.get(name, name): value for name, value in ours.items()}
    found |= {name: value for name, value in further.items() if name not in UNBOUND}
    return {name: True if value is None else value for name, value in found.items()}
