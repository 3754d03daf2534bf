"""A model and its loss on a batch of text, for `lsq formats` and `lsq sensitivity`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated

import torch
from torch import Tensor, nn

from lsq.commands import run_files
from lsq.commands.options import Count, File, Folder
from lsq.commands.user_code import UserCode
from lsq.text.corpus import read_lines, read_pairs

LONGEST = 256
IGNORED = -100
MASKED_SHARE = 0.15
"""Share of words that are masked (Devlin et al. 2019)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelBatch:
    """A model in eval mode on the CPU, and its loss on a batch."""

    model: nn.Module
    loss: Callable[[], Tensor]
    """Function that returns the mean loss of the batch, differentiable, the same at each call."""
    lengths: Sequence[int]
    losses: Callable[[Sequence[int]], tuple[Tensor, float, Tensor]]
    """Indices of sentences -> (sum of their losses without label smoothing, number of words, logits
    [words, vocabulary])."""
    description: str


class TextOptions(UserCode):
    """model and text"""

    text: list[File] = []
    """with a folder of transformers' as --model: sentences, one a line, and a second file of
    translations for a model that translates"""
    words: Count
    """with --model: about how many words of the text"""
    data: Folder | None = None
    """data folder of a checkpoint as --model"""
    quiet: bool = False
    """no progress bar"""


class BatchOptions(TextOptions):
    """model, text and formats"""

    tensors: Annotated[list[str], "PATTERN"] = []
    """names of weights, with * and ?; without it, all"""
    formats: Annotated[list[str], "FORMAT"]
    """such as nvfp4 or int4/group16/uint4, see docs/numbers.md"""


def is_of_transformers(model: Path) -> bool:
    """Return whether a path is a folder of transformers'."""
    return model.is_dir() and (model / "config.json").exists()


def load(given: TextOptions) -> ModelBatch:
    """Read the model and make a batch of sentences spread over the text; ValueError or OSError."""
    if not is_of_transformers(given.model):
        return _of_fairseq(given)
    if given.data is not None:
        raise ValueError(f"{given.model} is a folder of transformers'; leave --data out")
    return of_transformers(given.model, given.text, given.words)


def _spread(lengths: Sequence[int], words: int) -> list[int]:
    """Choose indices of evenly spaced sentences with about `words` words together; at least one."""
    count = max(1, min(len(lengths), round(words * len(lengths) / max(sum(lengths), 1))))
    return [i * len(lengths) // count for i in range(count)]


# Models of fairseq


def _of_fairseq(given: TextOptions) -> ModelBatch:
    path = given.model
    if given.text:
        raise ValueError(
            f"--text is for a folder of transformers'; {path} takes the validation data of its"
            " training, so leave it out"
        )
    found = run_files.load(run_files.find(path, given.data))
    try:
        found.task.load_dataset("valid")
    except FileNotFoundError:
        raise ValueError(f"{found.task.cfg.data} has no validation data to measure with") from None
    dataset = found.task.dataset("valid")
    chosen = _spread([dataset.num_tokens(i) for i in range(len(dataset))], given.words)
    sample = dataset.collater([dataset[i] for i in chosen])
    if found.criterion is None:
        raise ValueError(f"{path} does not say what its loss was; give that of a training")
    criterion, plain = (found.task.build_criterion(found.criterion).eval() for _ in range(2))
    plain.eps = 0.0

    def loss() -> Tensor:
        total, count, _ = criterion(found.model, sample)
        return total.sum() / count

    def losses(numbers: Sequence[int]) -> tuple[Tensor, float, Tensor]:
        part = dataset.collater([dataset[chosen[number]] for number in numbers])
        output = found.model(**part["net_input"])
        logits = found.model.get_normalized_probs(output, log_probs=True)
        words = found.model.get_targets(part, output) != found.task.target_dictionary.pad()
        return plain(found.model, part)[0].sum(), float(part["ntokens"]), logits[words]

    return ModelBatch(
        model=found.model,
        loss=loss,
        losses=losses,
        lengths=[int(dataset.num_tokens(i)) for i in chosen],
        description=f"{len(chosen)} sentences, {sample['ntokens']} words of its validation data",
    )


# Models of transformers


def of_transformers(path: Path, texts: Sequence[Path], words: int) -> ModelBatch:
    """Do `load` for a folder of transformers'."""
    import_module("lsq.models.huggingface")  # keeps a broken torchaudio out of transformers
    transformers = import_module("transformers")
    if not texts:
        raise ValueError(
            f"{path} is a folder of transformers', which has no data in it; give --text FILE"
        )
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
        name = (config.architectures or ["none"])[0]
        kind = getattr(transformers, name, None)
        losses = [make for ends, make in LOSSES.items() if name.endswith(ends)]
        if kind is None or not losses:
            raise ValueError(
                f"{path} is of the architecture {name}, of which no loss on plain text is known"
                " here; known are those whose name ends with"
                f" {', '.join(end for ends in LOSSES for end in ends)}. For others call"
                " lsq.study.measure(model, run)"
            )
        model = kind.from_pretrained(path, local_files_only=True, dtype=torch.float32).eval()
    except OSError as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from None
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token or tokenizer.unk_token
    inputs, count = losses[0](model, tokenizer, texts, words)
    amount = int(inputs["attention_mask"].sum())
    return ModelBatch(
        model=model,
        loss=lambda: model(**inputs).loss,
        lengths=inputs["attention_mask"].sum(1).tolist(),
        losses=lambda numbers: _losses(model, inputs, numbers, losses[0] is _next_word),
        description=f"{count} sentences, {amount} words of {' and '.join(map(str, texts))}",
    )


def _losses(
    model: nn.Module, inputs: dict[str, Tensor], numbers: Sequence[int], shifted: bool
) -> tuple[Tensor, float, Tensor]:
    """Compute `ModelBatch.losses` for a model of transformers' on its inputs [B, T]; `shifted`: it
    predicts the next word."""
    rows = {name: tensor[list(numbers)] for name, tensor in inputs.items()}
    columns = rows["attention_mask"].any(0)
    of_labels = (rows["labels"] != IGNORED).any(0) if model.config.is_encoder_decoder else columns
    rows = {
        name: tensor[:, of_labels if name == "labels" else columns] for name, tensor in rows.items()
    }
    wanted = rows["labels"] != IGNORED
    count = int(wanted.sum())
    if not count:
        return torch.zeros((), requires_grad=True), 0.0, torch.zeros(0, 1)
    found = model(**rows)
    logits = found.logits[:, :-1][wanted[:, 1:]] if shifted else found.logits[wanted]
    return found.loss * count, float(count), logits


def _encoded(model: nn.Module, tokenizer, lines: Sequence[str]):
    longest = min(LONGEST, getattr(model.config, "max_position_embeddings", None) or LONGEST)
    return tokenizer(
        list(lines), return_tensors="pt", padding=True, truncation=True, max_length=longest
    )


def _chosen(tokenizer, columns: Sequence[Sequence[str]], words: int) -> list[list[str]]:
    """Return the same lines of each file, none empty, with about `words` words together."""
    rows = [row for row in zip(*columns, strict=True) if all(row)]
    if not rows:
        raise ValueError("--text has empty lines alone")
    few = rows[:: max(1, len(rows) // 1000)]  # about 1000 lines, as long as all lines on average
    lengths = [len(tokenizer(row[0])["input_ids"]) for row in few]
    return [list(column) for column in zip(*(few[i] for i in _spread(lengths, words)), strict=True)]


def _one_file(model: nn.Module, tokenizer, texts: Sequence[Path], words: int) -> tuple[dict, int]:
    if len(texts) != 1:
        raise ValueError(f"--text has {len(texts)} files; a {type(model).__name__} reads one")
    (lines,) = _chosen(tokenizer, [read_lines(texts[0], print)], words)
    return dict(_encoded(model, tokenizer, lines)), len(lines)


def _next_word(model: nn.Module, tokenizer, texts: Sequence[Path], words: int) -> tuple[dict, int]:
    inputs, count = _one_file(model, tokenizer, texts, words)
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, IGNORED)
    first = inputs["attention_mask"].argmax(1, keepdim=True)  # no word precedes it
    labels = labels.scatter(1, first, IGNORED)
    return {**inputs, "labels": labels}, count


def _masked_words(
    model: nn.Module, tokenizer, texts: Sequence[Path], words: int
) -> tuple[dict, int]:
    """Mask random words, the same in each call, as words to predict."""
    inputs, count = _one_file(model, tokenizer, texts, words)
    ids = inputs["input_ids"]
    guessed = torch.rand(ids.shape, generator=torch.Generator().manual_seed(1)) < MASKED_SHARE
    guessed &= inputs["attention_mask"] == 1
    guessed[0, 0] = True  # at least one
    hidden = ids.masked_fill(guessed, tokenizer.mask_token_id)
    return {**inputs, "input_ids": hidden, "labels": ids.masked_fill(~guessed, IGNORED)}, count


def _translation(
    model: nn.Module, tokenizer, texts: Sequence[Path], words: int
) -> tuple[dict, int]:
    if len(texts) != 2:
        raise ValueError(f"--text has {len(texts)} file(s); give sentences, and their translations")
    pairs = read_pairs(*texts, print)
    source, target = _chosen(tokenizer, [pairs.source, pairs.target], words)
    inputs, wanted = _encoded(model, tokenizer, source), _encoded(model, tokenizer, target)
    labels = wanted["input_ids"].masked_fill(wanted["attention_mask"] == 0, IGNORED)
    return {**inputs, "labels": labels}, len(source)


LOSSES: dict[tuple[str, ...], Callable] = {
    ("ForCausalLM", "LMHeadModel"): _next_word,
    ("ForMaskedLM",): _masked_words,
    ("ForConditionalGeneration", "MTModel"): _translation,
}
"""Endings of architectures' names -> function that makes their inputs."""
