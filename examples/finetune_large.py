"""Finetune all weights of a language model of transformers in 4 bytes a parameter, or 3.

    python examples/finetune_large.py MODEL text.txt OUTPUT
    python examples/finetune_large.py MODEL text.txt OUTPUT --updates 500 --no-remainder

Weights become int8 codes while they are read, and train as codes; moments of Adam have 8 bits;
each matrix steps inside the backward pass, so that gradients of one layer exist at a time; layers
are computed again in the backward pass, from inputs that are kept as codes. `--offload FOLDER`
keeps all but the weights' own codes in files. OUTPUT is an ordinary model in bfloat16. The same
command goes on after an interruption, from the last checkpoint in OUTPUT.training.
`pip install ".[huggingface]"` brings transformers.
"""

import argparse
import resource
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from lsq import files
from lsq.models import (
    LsqConfig,
    checkpoint_layers,
    float_state_dict,
    load_codes,
    save_codes,
)
from lsq.optim import Adam


def tokens_of(folder: Path, text: str) -> torch.Tensor:
    """A text as tokens int64 [L], by the model's tokenizer; bytes, if the folder has none."""
    if any(folder.glob("tokenizer*")):
        return torch.tensor(AutoTokenizer.from_pretrained(folder)(text)["input_ids"])
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()


def main(words: list[str] | None = None) -> list[float]:
    """Load, train, save; the loss of each update."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="folder of a causal language model")
    parser.add_argument("text", type=Path, help="a file to learn")
    parser.add_argument("output", type=Path, help="folder of the trained model")
    parser.add_argument("--updates", type=int, default=100, help="default: 100")
    parser.add_argument("--batch", type=int, default=4, help="sequences; default: 4")
    parser.add_argument("--length", type=int, default=128, help="tokens of each; default: 128")
    parser.add_argument("--lr", type=float, default=1e-5, help="default: 0.00001")
    parser.add_argument("--every", type=int, default=50, help="updates to a checkpoint; 50")
    parser.add_argument("--offload", type=Path, metavar="FOLDER", help="for files with moments")
    parser.add_argument("--no-remainder", action="store_true", help="1 byte a weight, not 2")
    given = parser.parse_args(words)
    for path, there, kind in (
        (given.model, Path.is_dir, "folder"),
        (given.text, Path.is_file, "file"),
        (given.offload, Path.is_dir, "folder"),
    ):
        if path is not None and not there(path):
            parser.error(f"{path} is no {kind}; check the path")
    if min(given.updates, given.batch, given.length, given.every) < 1:
        parser.error("--updates, --batch, --length and --every must be 1 or more")
    if given.output.exists():
        parser.error(f"{given.output} exists; name another folder")
    tokens = tokens_of(given.model, given.text.read_text(encoding="utf-8"))
    if len(tokens) <= given.length:
        parser.error(f"the text has {len(tokens)} tokens; --length {given.length} needs more")
    given.output.parent.mkdir(parents=True, exist_ok=True)  # fails now, not after the training

    config = LsqConfig(remainder=not given.no_remainder)
    model = AutoModelForCausalLM.from_pretrained(given.model, quantization_config=config)
    model.config.use_cache = False
    checkpoint_layers(model, given.offload)
    model.train()
    optimizer = Adam(model.parameters(), lr=given.lr, moment_bits=8).step_in_backward()
    count = sum(one.numel() for one in model.parameters())
    print(f"{count / 1e6:,.0f} million parameters, peak {peak() / count:.2f} bytes each to load")

    kept, first = given.output.with_name(given.output.name + ".training"), 0
    if kept.exists():
        load_codes(model, kept, optimizer)
        first = max(state["step"] for state in optimizer.state.values())
    if given.offload is not None:
        optimizer.offload(given.offload)
    losses, places = [], torch.arange(given.length)
    with tqdm(range(first, given.updates), unit=" updates") as bar:
        for done in bar:
            torch.manual_seed(done)  # so that an update is the same after an interruption
            optimizer.param_groups[0]["lr"] = given.lr * min((done + 1) / 10, 1)
            starts = torch.randint(len(tokens) - given.length, (given.batch, 1))
            batch = tokens[starts + places]
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.clip_grad_norm(1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
            if (done + 1) % given.every == 0:
                save_codes(model, kept, optimizer)
    print(f"peak {peak() / count:.2f} bytes a parameter, {peak() / 1e9:.2f} GB")

    del optimizer
    state = float_state_dict(model, torch.bfloat16)  # decoded shard by shard
    write = partial(model.save_pretrained, state_dict=state, max_shard_size="200MB")
    files.write_folder(given.output, write)  # whole or not at all
    return losses


def peak() -> int:
    """Bytes of the process's largest resident memory."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main()
