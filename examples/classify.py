"""Trainer of transformers: a small BERT, from a configuration, learns which language the name of a
number is in.

    python examples/classify.py               # some minutes on two cores
    python examples/classify.py --float       # the same once more in float32, for comparison

Names are made here (num2words), so nothing is downloaded. `pip install ".[huggingface]"` brings
transformers.
"""

import argparse
import random
import tempfile

import torch
from num2words import num2words
from tqdm import tqdm
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

# isort: skip  (first: a torchaudio that cannot be loaded is kept from transformers)
import lsq.models.huggingface
from lsq.models import LsqCallback

LANGUAGES = ("cs", "de", "en", "es", "fr", "it", "nl", "pl", "pt", "sv")
LENGTH = 24
"""Letters that the model sees; of longer names, some from the middle."""
LARGEST = 100_000
TESTED = 1000


def examples(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Names of numbers drawn at random as letters int64 [LENGTH], 0 behind the end, with their
    languages."""
    generator = random.Random(seed)
    found = []
    for _ in tqdm(range(count), desc="naming numbers", leave=False):
        language = generator.randrange(len(LANGUAGES))
        name = num2words(generator.randrange(LARGEST), lang=LANGUAGES[language])
        start = generator.randint(0, max(0, len(name) - LENGTH))
        letters = torch.tensor([min(ord(letter), 511) for letter in name[start : start + LENGTH]])
        padding = LENGTH - len(letters)
        found.append(
            {
                "input_ids": torch.nn.functional.pad(letters, (0, padding)),
                "attention_mask": (torch.arange(LENGTH) < len(letters)).long(),
                "labels": torch.tensor(language),
            }
        )
    return found


def accuracy(prediction) -> dict[str, float]:
    """The share of names whose language is found."""
    return {"accuracy": (prediction.predictions.argmax(1) == prediction.label_ids).mean().item()}


def train(side: str, given: argparse.Namespace, data: list, test: list) -> dict[str, float]:
    """What Trainer says of the test data, and its seconds."""
    torch.manual_seed(given.seed)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=512,
            hidden_size=given.hidden,
            num_hidden_layers=given.layers,
            num_attention_heads=4,
            intermediate_size=4 * given.hidden,
            max_position_embeddings=LENGTH,
            num_labels=len(LANGUAGES),
        )
    )
    callbacks = []
    if side == "int8":
        print(lsq.convert(model))
        # not needed: it logs what the quantisers do, and keeps clips in checkpoints
        callbacks = [LsqCallback()]
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            folder,
            max_steps=given.steps,
            per_device_train_batch_size=given.rows,
            per_device_eval_batch_size=100,
            learning_rate=5e-4,
            warmup_steps=given.steps // 10,
            logging_steps=50,
            save_strategy="no",
            report_to=[],
            seed=given.seed,
            use_cpu=not torch.cuda.is_available(),
        )
        trainer = Trainer(
            model,
            options,
            train_dataset=data,
            eval_dataset=test,
            compute_metrics=accuracy,
            callbacks=callbacks,
        )
        seconds = trainer.train().metrics["train_runtime"]
        return {**trainer.evaluate(), "seconds": seconds}


def main(words: list[str] | None = None) -> dict[str, float]:
    """Train; the accuracy by side."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--float", action="store_true", help="train in float32 as well, and compare"
    )
    for name, default in {"steps": 400, "rows": 64, "hidden": 256, "layers": 4, "seed": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    given = parser.parse_args(words)
    data, test = (
        examples(given.steps * given.rows // 4, given.seed),
        examples(TESTED, given.seed + 1),
    )
    results = {
        side: train(side, given, data, test)
        for side in (("float32", "int8") if given.float else ("int8",))
    }
    for side, found in results.items():
        print(
            f"{side:8} finds {found['eval_accuracy']:.1%} of {len(LANGUAGES)} languages (loss"
            f" {found['eval_loss']:.3f})"
            f", {found['seconds']:.0f} s"
        )
    return {side: found["eval_accuracy"] for side, found in results.items()}


if __name__ == "__main__":
    main()
