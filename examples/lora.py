"""PEFT's LoRA on a frozen int8 base: a small Llama knows the English names of numbers, and adapters
learn the German.

    python examples/lora.py               # some minutes on two cores
    python examples/lora.py --float       # the same once more in float32, for comparison

The base is trained first, from a configuration: nothing is downloaded. `pip install
".[huggingface]" peft` brings what is needed.
"""

import argparse
import random
import time

import peft
import torch
from num2words import num2words
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

# isort: skip  (first: a torchaudio that cannot be loaded is kept from transformers)
import lsq.models.huggingface
from lsq.optim import Adam

LENGTH, LETTERS, LARGEST = 64, 256, 1_000_000


def batch(language: str, rows: int, generator: random.Random) -> torch.Tensor:
    """Lines of names of numbers, letter by letter, int64 [rows, LENGTH]."""
    lines = []
    for _ in range(rows):
        line = ""
        while len(line) < LENGTH:
            line += num2words(generator.randrange(LARGEST), lang=language) + "\n"
        lines.append([min(ord(letter), LETTERS - 1) for letter in line[:LENGTH]])
    return torch.tensor(lines)


def loss_of(model: torch.nn.Module, letters: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the next letter, in nats."""
    return model(input_ids=letters, labels=letters).loss


def train(
    model: torch.nn.Module, language: str, steps: int, given: argparse.Namespace, what: str
) -> float:
    """Train what is not frozen; seconds a step."""
    generator = random.Random(given.seed)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    print(f"{what}: {sum(parameter.numel() for parameter in trained):,} parameters learn")
    optimizer, seconds = Adam(trained, lr=given.lr), 0.0
    with tqdm(range(steps), desc=what, unit=" steps") as bar:
        for _ in bar:
            letters, began = batch(language, given.rows, generator), time.perf_counter()
            loss = loss_of(model, letters)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds += time.perf_counter() - began
            bar.set_postfix(loss=f"{loss.item():.2f}", refresh=False)
    return seconds / steps


@torch.no_grad()
def held_out(model: torch.nn.Module, language: str, given: argparse.Namespace) -> float:
    """The loss on numbers of another seed."""
    return loss_of(
        model.eval(), batch(language, 4 * given.rows, random.Random(given.seed + 1))
    ).item()


def main(words: list[str] | None = None) -> dict[str, float]:
    """Train base and adapters; the loss on German by side."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--float", action="store_true", help="train in float32 as well, and compare"
    )
    for name, default in {
        "steps": 150,
        "rows": 32,
        "hidden": 256,
        "layers": 4,
        "rank": 16,
        "seed": 1,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    parser.add_argument("--lr", type=float, default=2e-3, help="default: 0.002")
    given = parser.parse_args(words)
    results = {}
    for side in ("float32", "int8") if given.float else ("int8",):
        torch.manual_seed(given.seed)
        base = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=LETTERS,
                hidden_size=given.hidden,
                num_hidden_layers=given.layers,
                num_attention_heads=4,
                intermediate_size=3 * given.hidden,
                max_position_embeddings=LENGTH,
            )
        )
        if side == "int8":
            print(lsq.convert(base))
        train(base, "en", given.steps, given, f"{side}, the base, English")
        adapters = peft.LoraConfig(r=given.rank, target_modules="all-linear")
        # the base is frozen: rounded once, without gradients of weights
        adapted = peft.get_peft_model(base, adapters)
        before = held_out(adapted, "de", given)
        seconds = train(adapted.train(), "de", given.steps, given, f"{side}, the adapters, German")
        results[side] = before, held_out(adapted, "de", given), seconds
    for side, (before, after, seconds) in results.items():
        print(
            f"{side:8} loss on German {before:.3f} before, {after:.3f} with adapters,"
            f" {1000 * seconds:.0f} ms a step"
        )
    return {side: after for side, (_, after, _) in results.items()}


if __name__ == "__main__":
    main()
