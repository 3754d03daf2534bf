"""A toy translation task, models on it, and training in this process."""

import random
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from fairseq import options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq_cli import preprocess
from fairseq_cli import train as fairseq_train
from torch import distributed

from lsq.fairseq import checkpoint  # registers the plugin, too
from lsq.fairseq.compatibility import checkpoints
from lsq.fairseq.task import LSQTranslationTask
from tests.configurations import quick_configurations  # noqa: F401

WORDS = "abcdefghij"
TINY = [
    *"--encoder-embed-dim 32 --encoder-ffn-embed-dim 48 --encoder-attention-heads 4".split(),
    *"--decoder-embed-dim 32 --decoder-ffn-embed-dim 48 --decoder-attention-heads 4".split(),
    *"--encoder-layers 2 --decoder-layers 2".split(),
]
COMMON = """
    --criterion lsq_label_smoothed_cross_entropy --optimizer adam --lr 0.003 --max-tokens 120 --cpu
    --no-progress-bar --log-interval 1 --no-epoch-checkpoints --disable-validation --num-workers 0
    --dropout 0.1
""".split()
SHORT = [*COMMON, "--arch", "lsq_transformer", "--task", "lsq_translation", "--max-update", "8"]
SHORT += ["--label-smoothing", "0.1"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """fairseq 0.12 is older than the libraries under it: their advice about its code is not for
    us."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(
                pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
            )


def binarised(folder: Path, texts: dict[str, list[str]], given: str) -> Path:
    """A folder of binarised text of files of lines, by fairseq-preprocess."""
    for name, lines in texts.items():
        (folder / name).write_text("\n".join(lines) + "\n")
    given += f" --destdir {folder}/bin --trainpref {folder}/train --validpref {folder}/valid"
    preprocess.main(options.get_preprocessing_parser().parse_args(given.split()))
    return folder / "bin"


@pytest.fixture(scope="session")
def toy(tmp_path_factory) -> Path:
    """A folder of binarised text: sources of random letters, targets the same reversed."""
    chance, texts = random.Random(1), {}
    for split, count in (("train", 90), ("valid", 12)):
        lines = [" ".join(chance.choices(WORDS, k=chance.randint(2, 9))) for _ in range(count)]
        texts |= {f"{split}.xx": lines, f"{split}.yy": [line[::-1] for line in lines]}
    given = "-s xx -t yy --joined-dictionary --workers 1"
    return binarised(tmp_path_factory.mktemp("toy"), texts, given)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A folder of binarised text in which each letter is followed by one of two."""
    chance, texts = random.Random(1), {}
    for split, count in (("train", 120), ("valid", 16)):
        texts[split] = []
        for _ in range(count):
            line = [chance.randrange(10)]
            for _ in range(chance.randint(1, 9)):
                line.append((line[-1] + chance.choice((1, 3))) % 10)
            texts[split].append(" ".join(WORDS[letter] for letter in line))
    return binarised(tmp_path_factory.mktemp("corpus"), texts, "--only-source")


@pytest.fixture
def parse(toy):
    """parse("--option value ...") -> the namespace that fairseq makes of a training's command
    line."""

    def parse(arguments: str | list[str] = "") -> Namespace:
        extra = arguments.split() if isinstance(arguments, str) else arguments
        return options.parse_args_and_arch(
            options.get_training_parser(), [str(toy), *TINY, *SHORT, *extra]
        )

    return parse


@pytest.fixture
def build(parse):
    """build("--option value ...") -> (task, model) on the toy data."""

    def build(arguments: str = ""):
        args = parse(arguments)
        task = tasks.setup_task(args)
        return task, task.build_model(args)

    return build


@pytest.fixture
def pair(build, request):
    """pair(options) -> (task, fairseq's model by THEIRS of the test's file, ours in float mode with
    its weights)."""

    def pair(options: str):
        task, theirs = build(f"{options} {request.module.THEIRS}")
        assert type(theirs).__module__.startswith("fairseq.")
        _, ours = build(f"{options} --lsq-mode float")
        checkpoint.load_float(ours, theirs.state_dict())
        return task, theirs.eval(), ours.eval()

    return pair


@pytest.fixture
def train(parse):
    """train(save folder, "--option value ...") trains as fairseq-train does and returns the last
    checkpoint's state."""

    def train(folder: Path, arguments: str = "") -> dict:
        extra = [*arguments.split(), "--save-dir", str(folder)]
        try:
            fairseq_train.main(convert_namespace_to_omegaconf(parse(extra)))
        finally:
            checkpoints.release_folder()
        return torch.load(folder / "checkpoint_last.pt")

    return train


@pytest.fixture
def losses(monkeypatch) -> list[float]:
    """The loss of every batch that is trained on."""
    found = []
    original = LSQTranslationTask.train_step

    def train_step(*arguments, **options):
        result = original(*arguments, **options)
        found.append(result[2]["loss"].item())
        return result

    monkeypatch.setattr(LSQTranslationTask, "train_step", train_step)
    return found


@pytest.fixture
def batch():
    """batch(task) -> the first batch of its validation set, as a criterion gets it."""

    def batch(task, size: int = 7) -> dict:
        task.load_dataset("valid")
        dataset = task.dataset("valid")
        return dataset.collater([dataset[i] for i in range(size)])

    return batch


@pytest.fixture
def group(tmp_path):
    """A group of this process alone."""
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    distributed.destroy_process_group()
