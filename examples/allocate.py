"""Which bits where: a small Llama learns a text, its weights get formats under a budget, and it
trains on with them.

    python examples/allocate.py                          # lsq's own documentation, some minutes
    python examples/allocate.py novel.txt --bits 3 3.5 4

For each format it tells, before and after the last updates: the divergence of its predictions from
those of the float model, and the loss, on the end of the text. `pip install ".[huggingface,study]"`
brings transformers, scipy and matplotlib.
"""

import argparse
import copy
import tempfile
import time
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from torch.nn.functional import kl_div
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

import lsq
from lsq import QuantConfig
from lsq.quant.numbers import scaled_format
from lsq.study import Search

ROOT = Path(__file__).resolve().parents[1]
HELD_OUT = 0.1
"""Share of the text, its end, that models are tried on."""
UNIFORM = ("int8", "int4/row", "int3/row")


def read(file: Path | None, subwords: int) -> torch.Tensor:
    """A text as subwords int64 [L], made from it; None: lsq's own documentation."""
    files = [file] if file else [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([text], vocab_size=subwords, show_progress=False)
    return torch.tensor(tokenizer.encode(text).ids)


def batches(text: torch.Tensor, given: argparse.Namespace, count: int, seed: int) -> list:
    """Pieces of the text int64 [rows, context], drawn at random."""
    chance = torch.Generator().manual_seed(seed)
    places = torch.arange(given.context)
    starts = torch.randint(len(text) - given.context, (count, given.rows, 1), generator=chance)
    return [text[start + places] for start in starts]


def train(model: torch.nn.Module, data: list, lr: float, side: str) -> None:
    """One update for each batch; the learning rate falls to zero."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)
    model.train()
    with tqdm(data, desc=side, unit=" updates") as bar:
        for done, batch in enumerate(bar):
            optimizer.param_groups[0]["lr"] = lr * min((done + 1) / 20, 1 - done / len(data))
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            bar.set_postfix(loss=f"{loss.item():.2f}", refresh=False)
    model.eval()


@torch.no_grad()
def tried(model: torch.nn.Module, of_float: list, data: list) -> tuple[float, float]:
    """(divergence from the logarithms of the float model's probabilities, loss), in nats."""
    divergence = loss = 0.0
    for batch, before in zip(data, of_float, strict=True):
        output = model(input_ids=batch, labels=batch)
        now = output.logits.log_softmax(2)
        divergence += kl_div(now, before, reduction="none", log_target=True).sum(2).mean().item()
        loss += output.loss.item()
    return divergence / len(data), loss / len(data)


def bits_of(model: torch.nn.Module, form: str) -> float:
    """Mean bits of a value, scales included, of the weights that products read, in one format."""
    scaled = scaled_format("int8/row" if form == "int8" else form)
    weights = [one.weight for one in model.modules() if isinstance(one, torch.nn.Linear)]
    taken = sum(scaled.bits_per_value(one.shape) * one.numel() for one in weights)
    return taken / sum(one.numel() for one in weights)


def main(words: list[str] | None = None) -> dict[str, tuple[float, float, float, float]]:
    """Train, choose formats, train on; (bits, divergence, loss, loss in the end) by side."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", nargs="?", type=Path, help="a file; default: lsq's documentation")
    parser.add_argument(
        "--bits", type=float, nargs="+", default=[3.0, 3.5, 4.0], help="mean bits of a weight"
    )
    numbers = {
        "steps": 600,
        "last": 200,
        "mixes": 300,
        "rows": 16,
        "context": 128,
        "hidden": 256,
        "heads": 4,
        "layers": 4,
        "subwords": 2000,
        "seed": 1,
    }
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    parser.add_argument("--lr", type=float, default=2e-3, help="default: 0.002")
    given = parser.parse_args(words)
    text = read(given.text, given.subwords)
    border = int(len(text) * (1 - HELD_OUT))
    if len(text) - border <= given.context:
        parser.error(f"the text has {len(text)} subwords; --context {given.context} needs more")

    torch.manual_seed(given.seed)
    shape = {"num_attention_heads": given.heads, "num_key_value_heads": given.heads}
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=int(text.max()) + 1,
            hidden_size=given.hidden,
            intermediate_size=-(-given.hidden * 8 // 3 // 64) * 64,
            num_hidden_layers=given.layers,
            max_position_embeddings=given.context,
            **shape,
        )
    )
    train(model, batches(text[:border], given, given.steps, given.seed), given.lr, "float32")
    held_out = batches(text[border:], given, 16, given.seed)
    with torch.no_grad():
        of_float = [model(input_ids=batch).logits.log_softmax(2) for batch in held_out]
    last = batches(text[:border], given, given.last, given.seed + 1)

    quants: dict[str, tuple[float, QuantConfig | None]] = {"float32": (32.0, None)}
    for form in UNIFORM:
        quants[form] = bits_of(model, form), QuantConfig(weight_format=form)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for bits in given.bits:
            found = lsq.allocate(
                model,
                [{"input_ids": one} for one in batches(text[:border], given, 4, given.seed + 2)],
                bits,
                held_out=batches(text[:border], given, 2, given.seed + 3),
                how=Search(mixes=given.mixes, seed=given.seed),
                folder=folder,
            )
            chosen = found.allocation
            quants[f"mix of {bits:g}"] = chosen.bits, chosen.quant
            print(f"\n{chosen.table()}\ndivergence {found.divergence:.4f}, {found.mixes} mixes")
    print(f"\nsearched for {time.perf_counter() - began:.0f} s\n")

    results = {}
    print("weights        bits   divergence   loss   after the last updates")
    for side, (bits, quant) in quants.items():
        other = copy.deepcopy(model)
        if quant is not None:
            lsq.convert(other, quant)
        divergence, loss = tried(other, of_float, held_out)
        train(other, last, given.lr / 4, side)
        _, after = tried(other, of_float, held_out)
        results[side] = bits, divergence, loss, after
        print(f"{side:14} {bits:5.2f}   {divergence:8.5f}   {loss:7.4f}   {after:7.4f}")
    return results


if __name__ == "__main__":
    main()
