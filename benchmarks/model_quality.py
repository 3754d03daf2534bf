"""Trains small models of transformers in float and in int8, over several seeds, and compares what
they learn.

The sides differ in nothing but what `lsq.convert` does: the same weights to begin with, batches,
AdamW of PyTorch and learning rates. Each training is a file in OUTPUT, and is not run again while
its options are the same.
"""

import argparse
import dataclasses
import json
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

import common
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

import lsq
from lsq.config import QuantConfig
from lsq.dist.collectives import small_positions, take_out
from lsq.dist.two_hop import CODECS, Codec
from lsq.files import write_folder, write_text
from lsq.models import checkpoint_layers
from lsq.observe import quantized_tensors
from lsq.optim import Adam
from lsq.text.corpus import read_items
from lsq.text.numbers import write_numbers

sys.modules.setdefault("torchaudio", None)  # one that cannot be loaded would stop transformers

BYTES = 256
IGNORED = -100
"""The label that counts for nothing in models of transformers."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """Sizes of a model and its training."""

    layers: int
    """Of an encoder and of a decoder each, where there are both."""
    hidden: int
    heads: int
    feed_forward: int
    length: int
    """Tokens of a window; of a sentence at most."""
    batch: int
    """Windows or images; of sentences, tokens of either side at most."""
    updates: int
    warmup: int
    learning_rate: float
    weight_decay: float


class Task:
    """A model, its batches and what is asked of it."""

    name: str
    size: Size
    metric: str
    """Of what `scores` finds, the one that is compared."""

    def model(self) -> nn.Module:
        """A new one in training mode, with weights of torch's generator."""
        raise NotImplementedError

    def batches(self, seed: int) -> Iterator[dict[str, Tensor]]:
        """Batches of sentences of about the same length, without end."""
        raise NotImplementedError

    def scores(self, model: nn.Module, last: bool) -> dict[str, float]:
        """Scores of a model in eval mode; `last`: after the last update, with slow ones."""
        raise NotImplementedError


class Text(Task):
    """GPT-2 on bytes of a text.

    Its loss is in bits a byte; the last tenth of the text is for validation.
    """

    name, metric = "text", "bits"
    vocabulary = BYTES
    WINDOWS = 128

    def __init__(self, size: Size, path: Path | None = None):
        text = (
            "\n".join(topics[name] for name in sorted(topics))
            if path is None
            else path.read_text("utf-8")
        )
        found = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        self.size, end = size, len(found) * 9 // 10
        self.training, held = found[:end], found[end:]
        if len(held) <= size.length:
            raise ValueError(
                f"the text has {len(found)} bytes; it must have more than {10 * size.length}"
            )
        starts = torch.linspace(0, len(held) - size.length, self.WINDOWS).long()
        self.validation = torch.stack(
            [held[start : start + size.length] for start in starts]
        ).long()

    def model(self) -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        size = self.size
        config = GPT2Config(
            vocab_size=BYTES,
            n_positions=size.length,
            n_embd=size.hidden,
            n_layer=size.layers,
            n_head=size.heads,
            n_inner=size.feed_forward,
            bos_token_id=0,
            eos_token_id=0,
        )
        return GPT2LMHeadModel(config).train()

    def batches(self, seed: int) -> Iterator[dict[str, Tensor]]:
        drawn = torch.Generator().manual_seed(seed)
        while True:
            starts = torch.randint(
                len(self.training) - self.size.length, (self.size.batch,), generator=drawn
            )
            windows = torch.stack(
                [self.training[start : start + self.size.length] for start in starts]
            ).long()
            yield {"input_ids": windows, "labels": windows}

    def scores(self, model: nn.Module, last: bool) -> dict[str, float]:
        parts = self.validation.split(self.size.batch)
        total = sum(model(input_ids=part, labels=part).loss.item() * len(part) for part in parts)
        return {"bits": total / len(self.validation) / torch.tensor(2.0).log().item()}


class Llama(Text):
    """Llama on the same text: RMSNorm, SwiGLU, rotary positions; no dropout."""

    name = "llama"

    def model(self) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        size = self.size
        config = LlamaConfig(
            vocab_size=self.vocabulary,
            max_position_embeddings=size.length,
            hidden_size=size.hidden,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            intermediate_size=size.feed_forward,
            bos_token_id=0,
            eos_token_id=0,
        )
        return LlamaForCausalLM(config).train()


class Digits(Task):
    """ViT on scikit-learn's 1,797 digits of 8 x 8 points, in patches of 2 x 2."""

    name, metric = "digits", "right"
    TEST = 500

    def __init__(self, size: Size):
        from sklearn.datasets import load_digits

        self.size, digits = size, load_digits()
        order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(1))
        images = torch.tensor(digits.images, dtype=torch.float32)[order, None] / 8 - 1
        labels = torch.tensor(digits.target)[order]
        self.images, self.test_images = images[self.TEST :], images[: self.TEST]
        self.labels, self.test_labels = labels[self.TEST :], labels[: self.TEST]

    def model(self) -> nn.Module:
        from transformers import ViTConfig, ViTForImageClassification

        size = self.size
        config = ViTConfig(
            image_size=8,
            patch_size=2,
            num_channels=1,
            hidden_size=size.hidden,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            intermediate_size=size.feed_forward,
            num_labels=10,
            hidden_dropout_prob=0.1,
        )
        return ViTForImageClassification(config).train()

    def batches(self, seed: int) -> Iterator[dict[str, Tensor]]:
        drawn = torch.Generator().manual_seed(seed)
        while True:
            for chosen in torch.randperm(len(self.labels), generator=drawn).split(self.size.batch):
                if len(chosen) == self.size.batch:
                    yield {"pixel_values": self.images[chosen], "labels": self.labels[chosen]}

    def scores(self, model: nn.Module, last: bool) -> dict[str, float]:
        logits = model(pixel_values=self.test_images).logits.float()
        right = (logits.argmax(1) == self.test_labels).float().mean().item()
        return {
            "right": 100 * right,
            "loss": functional.cross_entropy(logits, self.test_labels).item(),
        }


class Translation(Task):
    """Marian on sentence pairs, in subwords of both languages.

    Its loss is in bits a subword, BLEU of greedy search.

    Args:
        size: of the model and its training.
        folder: has train, valid and test files of both languages.
        languages: how their names end.
        subwords: how many.
        work: where their vocabulary is put, or lies already.
    """

    name, metric = "translation", "bits"
    SPLITS = {"train": None, "valid": 500, "test": 500}
    """Pairs at most, after those that are too long."""
    LEARNT = 100_000
    """Pairs that the vocabulary is learnt from."""
    EVALUATED = 4096
    """Tokens of a batch in evaluation."""
    PADDING, END = 3, 2

    def __init__(
        self, size: Size, folder: Path, languages: tuple[str, str], subwords: int, work: Path
    ):
        from lsq.text.corpus import Corpus
        from lsq.text.vocabulary import MODEL, learn_vocabulary, load_vocabulary

        self.size = size
        text = {
            split: [read_items(folder / f"{split}.{language}") for language in languages]
            for split in self.SPLITS
        }
        if not (work / MODEL).exists():
            source, target = (side[: self.LEARNT] for side in text["train"])
            corpus = Corpus(source=source, target=target, lines=list(range(1, len(source) + 1)))
            write_folder(work, lambda new: learn_vocabulary(corpus, new, subwords, 1.0))
        self.subwords = load_vocabulary(work)
        self.pairs = {
            split: self._pairs(*text[split])[: self.SPLITS[split]] for split in self.SPLITS
        }

    def _pairs(self, source: list[str], target: list[str]) -> list[tuple[list[int], list[int]]]:
        encoded = (self.subwords.encode(side, add_eos=True) for side in (source, target))
        return [
            pair for pair in zip(*encoded, strict=True) if max(map(len, pair)) <= self.size.length
        ]

    def model(self) -> nn.Module:
        from transformers import MarianConfig, MarianMTModel

        size, words = self.size, self.subwords.get_piece_size()
        config = MarianConfig(
            vocab_size=words,
            d_model=size.hidden,
            encoder_layers=size.layers,
            decoder_layers=size.layers,
            encoder_attention_heads=size.heads,
            decoder_attention_heads=size.heads,
            encoder_ffn_dim=size.feed_forward,
            decoder_ffn_dim=size.feed_forward,
            max_position_embeddings=max(64, size.length + 1),
            dropout=0.1,
            activation_function="swish",
            pad_token_id=self.PADDING,
            eos_token_id=self.END,
            decoder_start_token_id=self.PADDING,
            forced_eos_token_id=None,
            scale_embedding=True,
        )
        return MarianMTModel(config).train()

    def batches(self, seed: int) -> Iterator[dict[str, Tensor]]:
        """Batches of sentences of about the same length, without end."""
        pairs, drawn = self.pairs["train"], torch.Generator().manual_seed(seed)
        while True:
            order = torch.randperm(len(pairs), generator=drawn).tolist()
            for chunk in range(0, len(order), 4096):
                chosen = sorted(
                    order[chunk : chunk + 4096], key=lambda number: max(map(len, pairs[number]))
                )
                found = list(self._batches([pairs[number] for number in chosen], self.size.batch))
                for number in torch.randperm(len(found), generator=drawn).tolist():
                    yield found[number]

    def _batches(
        self, pairs: list[tuple[list[int], list[int]]], tokens: int
    ) -> Iterator[dict[str, Tensor]]:
        batch: list[tuple[list[int], list[int]]] = []
        for pair in pairs:
            if (
                batch
                and (len(batch) + 1) * max(max(map(len, one)) for one in (*batch, pair)) > tokens
            ):
                yield self._batch(batch)
                batch = []
            batch.append(pair)
        if batch:
            yield self._batch(batch)

    def _batch(self, pairs: list[tuple[list[int], list[int]]]) -> dict[str, Tensor]:
        source = _padded([pair[0] for pair in pairs], self.PADDING)
        labels = _padded([pair[1] for pair in pairs], IGNORED)
        return {
            "input_ids": source,
            "attention_mask": (source != self.PADDING).long(),
            "labels": labels,
        }

    def scores(self, model: nn.Module, last: bool) -> dict[str, float]:
        total = words = 0.0
        pairs = sorted(self.pairs["valid"], key=lambda pair: max(map(len, pair)))
        for batch in self._batches(pairs, self.EVALUATED):
            count = int((batch["labels"] != IGNORED).sum())
            total, words = total + model(**batch).loss.item() * count, words + count
        found = {"bits": total / words / torch.tensor(2.0).log().item()}
        return found | ({"bleu": self._bleu(model)} if last else {})

    def _bleu(self, model: nn.Module) -> float:
        from sacrebleu.metrics import BLEU

        pairs = sorted(self.pairs["test"], key=lambda pair: len(pair[0]))
        found = []
        for batch in self._batches(pairs, self.EVALUATED):
            given = {name: batch[name] for name in ("input_ids", "attention_mask")}
            words = model.generate(
                **given, max_new_tokens=self.size.length, num_beams=1, do_sample=False
            )
            found += [self._text(one) for one in words.tolist()]
        return BLEU().corpus_score(found, [[self._text(pair[1]) for pair in pairs]]).score

    def _text(self, words: list[int]) -> str:
        words = words[1:] if words[0] == self.PADDING else words
        end = words.index(self.END) if self.END in words else len(words)
        return self.subwords.decode([word for word in words[:end] if word != self.PADDING])


def _padded(rows: list[list[int]], value: int) -> Tensor:
    """int64 [B, T]."""
    return nn.utils.rnn.pad_sequence(
        [torch.tensor(row) for row in rows], batch_first=True, padding_value=value
    )


OF_TEXT = Size(
    **{"layers": 4, "hidden": 128, "heads": 4, "feed_forward": 512, "length": 128, "batch": 8},
    **{"updates": 800, "warmup": 80, "learning_rate": 2e-3, "weight_decay": 0.1},
)
SIZES = {
    "text": OF_TEXT,
    "llama": dataclasses.replace(OF_TEXT, feed_forward=384),
    "digits": dataclasses.replace(
        OF_TEXT, length=17, batch=64, updates=400, warmup=40, learning_rate=1e-3
    ),
    "translation": dataclasses.replace(
        OF_TEXT, layers=2, length=32, batch=1024, updates=600, warmup=120, weight_decay=0.01
    ),
}
QUICK = {"layers": 2, "hidden": 64, "heads": 2, "feed_forward": 128}
QUICK |= {"length": 24, "updates": 3, "warmup": 1}
QUICK_BATCH = {"text": 2, "llama": 2, "digits": 8, "translation": 96}
SUBWORDS, QUICK_SUBWORDS = 4000, 100
NUMBERS, QUICK_NUMBERS = (20_000, 500), (200, 20)
"""Pairs of the built-in task for training, and for testing."""
FLOAT = "float32"
VALIDATIONS = 8
"""In a training, the last one included."""
GRADIENT_NORM = 1.0
WORKERS = 8
NUDGE = 1e-6
"""By how much the weights of a second float training differ, relative to their size."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """How a model is trained."""

    convert: Callable[[nn.Module], object] = lambda model: None
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    autocast: bool = False
    decays_clips: bool = False
    exchange: str | None = None
    """How WORKERS, each with its part of a batch, average their gradients: FLOAT, or one of CODECS;
    None: there is one worker."""


def nudge(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + NUDGE)


def trained_codes(model: nn.Module, *, remainder: bool, again: bool = False) -> object:
    lsq.convert(model)
    if again:
        checkpoint_layers(model)
    return lsq.train_codes(model, remainder=remainder)


def in_backward(*arguments, **options) -> Adam:
    return Adam(*arguments, moment_bits=8, **options).step_in_backward()


def of_torchao(model: nn.Module) -> None:
    """Weights as int8 codes that are multiplied in bfloat16, by torchao's prototype."""
    from torchao.prototype.quantized_training import int8_weight_only_quantized_training
    from torchao.quantization import quantize_

    quantize_(model.bfloat16(), int8_weight_only_quantized_training())


def adam_of_torchao(*arguments, **options) -> torch.optim.Optimizer:
    from torchao.optim import AdamW8bit

    return AdamW8bit(*arguments, bf16_stochastic_round=True, **options)


def rounded(weights: str, **options) -> Side:
    """A side with weights of a format."""
    return Side(convert=partial(lsq.convert, quant=QuantConfig(weight_format=weights, **options)))


SIDES = {
    FLOAT: Side(),
    "float32, other last bits": Side(convert=nudge),
    "bfloat16": Side(autocast=True),
    "int8": Side(convert=lsq.convert),
    "int8, learned clips": Side(convert=partial(lsq.convert, quant=QuantConfig(clips="learned"))),
    "int8, gradients in floats": Side(
        convert=partial(lsq.convert, quant=QuantConfig(backward="float"))
    ),
    "int8, linears alone": Side(convert=partial(lsq.convert, fused=False)),
    "fused layers in floats": Side(convert=partial(lsq.convert, quant=QuantConfig(mode="float"))),
    "int8, activations in floats": Side(
        convert=partial(lsq.convert, quant=QuantConfig(activation_format="float32"))
    ),
    "int8, clips decay": Side(convert=lsq.convert, decays_clips=True),
    "int8, 8-bit moments": Side(convert=lsq.convert, optimizer=partial(Adam, moment_bits=8)),
    "codes and remainders": Side(convert=partial(trained_codes, remainder=True), optimizer=Adam),
    "codes and remainders, 8-bit moments": Side(
        convert=partial(trained_codes, remainder=True), optimizer=in_backward
    ),
    "codes and remainders, 8-bit moments, layers computed again": Side(
        convert=partial(trained_codes, remainder=True, again=True), optimizer=in_backward
    ),
    "codes": Side(convert=partial(trained_codes, remainder=False), optimizer=Adam),
    "codes, 8-bit moments": Side(
        convert=partial(trained_codes, remainder=False), optimizer=in_backward
    ),
    "bfloat16 weights": Side(convert=nn.Module.bfloat16),
    "torchao int8 weights, 8-bit moments": Side(convert=of_torchao, optimizer=adam_of_torchao),
    "int4": rounded("int4"),
    "int4/group64": rounded("int4/group64"),
    "int2/group64": rounded("int2/group64"),
    "ternary": rounded("ternary/tensor,*lm_head*=int8"),
    "ternary rows": rounded("ternary/row,*lm_head*=int8"),
    "ternary, learned clips": rounded("ternary/tensor,*lm_head*=int8", clips="learned"),
    "ternary rows, learned clips": rounded("ternary/row,*lm_head*=int8", clips="learned"),
    **{f"workers, {mode}": Side(exchange=mode) for mode in (FLOAT, *CODECS)},
}
DEFAULT = (FLOAT, "bfloat16", "int8")


def task_of(options: argparse.Namespace) -> Task:
    """The task with its data.

    Raises:
        ValueError, OSError: a file is too short, or cannot be read.
    """
    size = SIZES[options.task]
    if options.quick:
        size = dataclasses.replace(size, **QUICK, batch=QUICK_BATCH[options.task])
    given = {name: getattr(options, name) for name in ("updates", "layers", "hidden")}
    size = dataclasses.replace(size, **{name: one for name, one in given.items() if one})
    if options.task in ("text", "llama"):
        return (Text if options.task == "text" else Llama)(size, options.text)
    if options.task == "digits":
        return Digits(size)
    pairs, languages = options.pairs, ("en", "de")
    if pairs is None:
        pairs, languages = options.output / "numbers", ("src", "tgt")
        pairs.mkdir(exist_ok=True)
        write_numbers(pairs, *(QUICK_NUMBERS if options.quick else NUMBERS), seed=1)
    subwords = QUICK_SUBWORDS if options.pairs is None else SUBWORDS
    return Translation(size, pairs, languages, subwords, options.output / f"subwords-{pairs.name}")


def train(
    task: Task, side: Side, seed: int, say: str, start: Path | None, keep: Path | None = None
) -> dict:
    """Train once, perhaps from the weights of a file: final scores, losses of every update,
    validations, clips."""
    torch.manual_seed(seed)
    size, model = task.size, task.model()
    if start is not None:
        model.load_state_dict(torch.load(start, weights_only=True))
    report = side.convert(model)
    optimizer = side.optimizer(groups(model, side, size.weight_decay), lr=size.learning_rate)
    clip = partial(nn.utils.clip_grad_norm_, model.parameters())
    if isinstance(optimizer, Adam):
        clip = optimizer.clip_grad_norm
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(rate, size))
    cast = partial(torch.autocast, "cpu", torch.bfloat16, enabled=side.autocast)
    losses, validated, errors, spent = [], [], [], 0.0
    every = max(1, size.updates // VALIDATIONS)
    progress = tqdm(
        zip(range(1, size.updates + 1), task.batches(seed), strict=False),
        say,
        size.updates,
        leave=False,
    )
    for update, batch in progress:
        begun = time.process_time()
        if side.exchange is None:
            with cast():
                loss = model(**batch).loss
            loss.backward()
        else:
            loss, error = exchanged(model, batch, side.exchange)
            errors.append(error)
        clip(GRADIENT_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        spent += time.process_time() - begun
        if update % every == 0 or update == size.updates:
            with torch.no_grad(), cast():
                validated.append([update, task.scores(model.eval(), last=update == size.updates)])
            model.train()
            progress.set_postfix(validated[-1][1])
    if keep is not None:
        torch.save(model.state_dict(), keep)
    return {
        "scores": validated[-1][1] | ({"nmse": statistics.mean(errors)} if errors else {}),
        "losses": losses,
        "validated": validated,
        "processor_seconds": spent,
        "converted": str(report) if report else None,
        "clips": {name: clip.mean().item() for name, clip in quantized_tensors(model)},
    }


def begun(task: Task, output: Path) -> Path:
    """The file of a float model's weights, trained by the task's recipe."""
    path = output / f"{task.name}-{task.size.updates}.pt"
    if not path.exists():
        made = train(task, SIDES[FLOAT], 0, "the first training", None, keep=path)
        print(f"finetuning begins at {made['scores']}", file=sys.stderr)
    return path


def exchanged(model: nn.Module, batch: dict[str, Tensor], mode: str) -> tuple[Tensor, float]:
    """Leave the mean of the workers' gradients in the parameters -> (their mean loss, the squared
    error of that mean, relative to its square)."""
    parts = zip(*(tensor.chunk(WORKERS) for tensor in batch.values()), strict=True)
    losses, rows, parameters = [], [], list(model.parameters())
    for part in parts:
        losses.append(model(**dict(zip(batch, part, strict=True))).loss)
        found = torch.autograd.grad(losses[-1], parameters, materialize_grads=True)
        rows.append(torch.cat([gradient.flatten() for gradient in found]))
    gradients, sizes = torch.stack(rows), [one.numel() for one in parameters]
    mean = gradients.mean(0)
    average = mean if mode == FLOAT else averaged(gradients, sizes, CODECS[mode])
    for parameter, gradient in zip(parameters, average.split(sizes), strict=True):
        parameter.grad = gradient.view_as(parameter)
    error = (average - mean).square().sum() / mean.square().sum()
    return torch.stack(losses).mean().detach(), error.item()


def averaged(gradients: Tensor, sizes: list[int], codec: Codec) -> Tensor:
    """The mean of gradients [workers, values] by two hops, those of small tensors as floats."""
    workers, values = gradients.shape
    small = small_positions(zip(sizes, sizes, strict=True), gradients.device)
    floats = None if small is None else take_out(gradients, small).mean(0)
    first, second = codec.first(values, workers), codec.second(values, workers)
    sent = torch.empty(workers, workers, first.message_bytes, dtype=torch.uint8)
    sums, mean = torch.empty(workers, second.message_bytes, dtype=torch.uint8), gradients[0].clone()
    for row, messages in zip(gradients, sent, strict=True):
        codec.pack(row[None], first, messages)
    for shard, total in enumerate(sums):
        codec.add(sent[:, shard].contiguous(), first, total, second, 1 / workers)
    codec.unpack(sums, second, mean)
    return mean if small is None else mean.index_copy_(0, small, floats)


def groups(model: nn.Module, side: Side, weight_decay: float) -> list[dict]:
    """Parameter groups: matrices decay, and clips if the side says so."""
    clips = {id(clip) for _, clip in quantized_tensors(model)} if side.decays_clips else set()
    every = list(model.parameters())
    decay = [one for one in every if one.dim() > 1 or id(one) in clips]
    chosen = set(map(id, decay))
    keep = [one for one in every if id(one) not in chosen]
    return [{"params": decay, "weight_decay": weight_decay}, {"params": keep, "weight_decay": 0.0}]


def rate(size: Size, update: int) -> float:
    """Factor of the learning rate: a rise, then a straight fall to a tenth."""
    falls = (update - size.warmup) / max(1, size.updates - size.warmup)
    return min((update + 1) / size.warmup, 1 - 0.9 * max(0.0, falls))


def result(task: Task, side: str, seed: int, options: argparse.Namespace) -> dict:
    """A training's result, read from its file or trained now."""
    name = re.sub(r"\W+", "-", side)
    path = options.output / f"{task.name}-{name}-{seed}.json"
    settings = {
        "task": task.name,
        "side": side,
        "seed": seed,
        "size": dataclasses.asdict(task.size),
        "lsq": lsq.__version__,
        "data": str(options.pairs if task.name == "translation" else options.text),
    }
    if options.finetune is not None:
        settings["finetune"] = options.finetune
    if path.exists() and (known := json.loads(path.read_text()))["settings"] == settings:
        return known
    say = f"{task.name}, {side}, seed {seed}"
    found = {"settings": settings, **train(task, SIDES[side], seed, say, options.start)}
    write_text(path, json.dumps(found))
    return found


def scores_of(found: dict) -> dict[str, float]:
    losses = found["losses"]
    return {
        **found["scores"],
        "training loss": statistics.mean(losses[-max(1, len(losses) // 5) :]),
    }


def rows(found: dict[str, list[dict]]) -> Iterator[dict]:
    """One for each side and score: of every seed, their mean and spread, and how far the mean is
    from the first side's.

    The spread is the standard deviation of seeds; the error is the standard error of the
    difference, paired by seed.
    """
    scores = {side: [scores_of(one) for one in results] for side, results in found.items()}
    baseline = next(iter(scores.values()))
    for side, results in found.items():
        for score in scores[side][0]:
            values = [one[score] for one in scores[side]]
            apart = [value - one[score] for value, one in zip(values, baseline, strict=True)]
            yield {
                "side": side,
                "score": score,
                "seeds": " / ".join(f"{value:.3f}" for value in values),
                "mean": statistics.mean(values),
                "spread": statistics.stdev(values) if len(values) > 1 else None,
                "difference": statistics.mean(apart),
                "error": statistics.stdev(apart) / len(apart) ** 0.5 if len(apart) > 1 else None,
                "processor_seconds": statistics.mean(one["processor_seconds"] for one in results),
            }


def curves(found: dict[str, list[dict]]) -> Iterator[dict]:
    """Losses and validations of each side and seed."""
    for results in found.values():
        for one in results:
            settings = one["settings"]
            yield {
                "side": settings["side"],
                "seed": settings["seed"],
                "losses": [round(loss, 4) for loss in one["losses"]],
                "validated": one["validated"],
            }


TITLES = {
    "text": "GPT-2 on text: bits a byte",
    "llama": "Llama on text: bits a byte",
    "digits": "ViT on digits: % right",
    "translation": "Marian on sentence pairs: bits a subword",
}


def draw(task: Task, curves: list[dict], path: Path) -> None:
    figure = Figure(figsize=(5.5, 4.2), layout="constrained")
    axes, sides = figure.subplots(), list(dict.fromkeys(curve["side"] for curve in curves))
    labels = dict(zip(sides, sides, strict=True))  # of the first curve of each side alone
    for curve in curves:
        points = [(update, scores[task.metric]) for update, scores in curve["validated"]]
        colour, label = f"C{sides.index(curve['side'])}", labels.pop(curve["side"], None)
        axes.plot(*zip(*points, strict=True), color=colour, linewidth=1, alpha=0.8, label=label)
    axes.set(xlabel="updates", title=TITLES[task.name])
    axes.grid(alpha=0.25)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=110)


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.set_defaults(threads=1)
    parser.add_argument(
        "task", choices=SIZES, help="models of text, ViT on digits, or Marian on pairs"
    )
    parser.add_argument("output", type=Path, help="folder of all trainings")
    seeds: dict = {"type": common.positive, "nargs": "+", "metavar": "SEED", "default": [1, 2, 3]}
    parser.add_argument(
        "--seeds", **seeds, help="of weights, order of batches, dropout, and rounding"
    )
    parser.add_argument(
        "--sides", nargs="+", choices=SIDES, default=DEFAULT, metavar="SIDE", help=", ".join(SIDES)
    )
    parser.add_argument("--updates", type=common.positive, metavar="N", help="of each training")
    parser.add_argument("--layers", type=common.positive, metavar="N", help="of each model")
    parser.add_argument("--hidden", type=common.positive, metavar="N", help="width of each model")
    parser.add_argument(
        "--finetune",
        type=float,
        metavar="SHARE",
        help="begin with a float model trained by the same recipe, with this share of its learning"
        " rate",
    )
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="of the task text; Python's manual if left out"
    )
    parser.add_argument(
        "--pairs",
        type=Path,
        metavar="FOLDER",
        help="of the task translation: train, valid and test files, .en and .de; names of numbers"
        " if left out",
    )
    parser.add_argument("--picture", type=Path, metavar="FILE.png", help="draw losses there")
    options = common.parse(parser, arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    task = task_of(options)
    options.start = None
    if options.finetune is not None:
        options.start = begun(task, options.output)
        size = task.size
        task.size = dataclasses.replace(size, learning_rate=size.learning_rate * options.finetune)
    found: dict[str, list[dict]] = {side: [] for side in options.sides}
    for seed in options.seeds:
        for side in options.sides:
            found[side].append(result(task, side, seed, options))
    conditions = common.conditions(
        options,
        packages=("transformers",),
        baseline=options.sides[0],
        task=task.name,
        seeds=options.seeds,
        size=dataclasses.asdict(task.size),
    )
    drawn = list(curves(found))
    common.report("model_quality", rows(found), conditions, options, curves=drawn)
    if options.picture is not None:
        draw(task, drawn, options.picture)


if __name__ == "__main__":
    main()
