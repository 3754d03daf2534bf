"""What benchmarks/model_quality.py trains: small models of transformers, made from configurations,
on small data.

B sentences, windows or images, T tokens.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional

from lsq.files import write_folder
from lsq.text.corpus import read_items

sys.modules.setdefault("torchaudio", None)  # one that cannot be loaded would stop transformers

BYTES = 256
IGNORED = -100
"""The label that counts for nothing in models of transformers."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """Of a model and its training."""

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
        """What the model takes in training, without end."""
        raise NotImplementedError

    def scores(self, model: nn.Module, last: bool) -> dict[str, float]:
        """Of a model in eval mode, without gradients; `last`: after the last update, with what
        takes long."""
        raise NotImplementedError


class Text(Task):
    """GPT-2 on bytes of a text.

    Its loss is in bits a byte; the last tenth of the text is for validation.
    """

    name, metric = "text", "bits"
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
    """Llama on the same: RMSNorm before blocks, SwiGLU, rotary positions; no dropout, so that masks
    do not differ."""

    name = "llama"

    def model(self) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        size = self.size
        config = LlamaConfig(
            vocab_size=BYTES,
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
    """ViT on scikit-learn's 1,797 digits of 8 x 8 points, in patches of 2 x 2; 500 of them are for
    testing."""

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
        """Sentences of about the same length together."""
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
