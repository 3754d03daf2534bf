"""Planned memory of training steps beside the measured one, for Llamas that train as codes.

Each row is a process of its own, which first trains a small model, so that libraries are loaded.
"measured" is the largest resident memory during UPDATES steps above what there was before the
model. "ratio" is the planned peak over it.
"""

import argparse
import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import common
import torch
from bench_training_bytes import status
from transformers import LlamaConfig, LlamaForCausalLM

import lsq
from lsq.models import checkpoint_layers
from lsq.models.training_memory import WAYS, Way, training_memory
from lsq.optim import Adam

UPDATES = 3
MODELS = {
    "wide": (1024, 2816, 8, 8000, 4, 128),
    "deep": (512, 1408, 20, 4000, 8, 256),
    "vocabulary": (512, 1408, 4, 32000, 4, 256),
    "quick": (128, 384, 2, 320, 2, 64),
}
"""Hidden size, feed-forward size, layers, vocabulary, sequences, tokens of each."""


def llama(name: str) -> LlamaForCausalLM:
    hidden, feed_forward, layers, words, _, _ = MODELS[name]
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        vocab_size=words,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def loss_of(model: LlamaForCausalLM, name: str) -> torch.Tensor:
    words, sequences, tokens = MODELS[name][3:]
    batch = torch.zeros(sequences, tokens, dtype=torch.int64, device=model.device)
    if not batch.is_meta:
        batch.random_(words)
    return model(input_ids=batch, labels=batch).loss


def planned(name: str, way: Way) -> int:
    def make() -> LlamaForCausalLM:
        with torch.device("meta"):
            return llama(name)

    return training_memory(make, lambda model: loss_of(model, name), way).peak


def train(name: str, way: Way) -> int:
    """Train; the peak in bytes."""
    torch.manual_seed(1)
    model = llama(name).train()
    lsq.convert(model)
    lsq.train_codes(model, remainder=way.remainder)
    if way.again:
        checkpoint_layers(model)
    optimizer = Adam(model.parameters(), 1e-4, moment_bits=8).step_in_backward()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    for _ in range(UPDATES):
        loss_of(model, name).backward()
        optimizer.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return status("VmHWM")


def measured(name: str, way: Way) -> dict:
    """What a process finds."""
    train("quick", way)
    ctypes.CDLL(None).malloc_trim(0)
    before = status("VmRSS")
    return {"measured": train(name, way) - before}


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.set_defaults(threads=1)
    parser.add_argument("--row", nargs=2, metavar=("MODEL", "WAY"), help="this process is a row")
    options = common.parse(parser, arguments)
    if options.row is not None:
        name, number = options.row
        print(json.dumps(measured(name, WAYS[int(number)])))
        return
    rows = []
    for name in ["quick"] if options.quick else [one for one in MODELS if one != "quick"]:
        for number, way in enumerate(WAYS[:2] if options.quick else WAYS):
            if way.offload:
                continue  # the system decides how much of the files is in memory
            rows.append(row(name, number, way, options))
    conditions = common.conditions(options, baseline="measured", updates=UPDATES)
    common.report("planned_memory", rows, conditions, options)


def row(name: str, number: int, way: Way, options: argparse.Namespace) -> dict:
    command = [sys.executable, __file__, "--row", name, str(number)]
    command += ["--threads", str(options.threads)]
    # else glibc keeps freed blocks of up to 32 MB, and a peak depends on the order of them
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20)}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    found = json.loads(done.stdout.splitlines()[-1])["measured"]
    peak = planned(name, way)
    return {
        "model": name,
        "way": str(way),
        "measured": found,
        "planned": peak,
        "ratio": peak / found,
    }


if __name__ == "__main__":
    main()
