"""Small models of transformers, converted, and trainings of them that take a second."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import lsq
from lsq.config import QuantConfig

sys.modules.setdefault("torchaudio", None)  # one that cannot be loaded would stop transformers
transformers = pytest.importorskip("transformers", minversion="5")
pytest.importorskip("accelerate")

WORDS, CLASSES, LENGTH, ROWS = 96, 3, 17, 40
SHAPE = {"vocab_size": WORDS, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
MAKERS: dict[str, Callable[[], torch.nn.Module]] = {
    "bert": lambda: transformers.BertForSequenceClassification(
        transformers.BertConfig(**SHAPE, intermediate_size=128, num_labels=CLASSES)
    ),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=WORDS, n_embd=64, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=1
        )
    ),
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SHAPE, intermediate_size=128)
    ),
}


def converted(
    name: str, seed: int = 1, quant: QuantConfig | None = None, **options
) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = MAKERS[name]()
    lsq.convert(model, quant, **options)
    return model


def data(name: str, rows: int = ROWS) -> list[dict[str, torch.Tensor]]:
    """Texts that count upwards; the class of a text is that of its first word."""
    firsts = torch.randint(WORDS, (rows,), generator=torch.Generator().manual_seed(1))
    words = (firsts[:, None] + torch.arange(LENGTH)) % 24
    labels = firsts % CLASSES if name == "bert" else words
    return [{"input_ids": row, "labels": label} for row, label in zip(words, labels, strict=True)]


SHORT = {
    "max_steps": 8,
    "save_steps": 4,
    "per_device_train_batch_size": 8,
    "learning_rate": 3e-3,
    "logging_steps": 1,
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}
"""Arguments of trainings."""


def trainer(name: str, folder: Path, *callbacks, model: torch.nn.Module | None = None, **options):
    return transformers.Trainer(
        converted(name) if model is None else model,
        transformers.TrainingArguments(str(folder), **{**SHORT, **options}),
        train_dataset=data(name),
        eval_dataset=data(name, 16),
        callbacks=list(callbacks),
    )


def losses(trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def same_states(first: torch.nn.Module, second: torch.nn.Module) -> bool:
    one, other = first.state_dict(), second.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
