"""Command lines of every subcommand with options that nobody should give."""

import dataclasses
import os
from argparse import ArgumentParser
from importlib import import_module

import pytest
import torch
from fairseq import options

from lsq.commands import cli, doctor, numbers
from lsq.serving import model_file
from tests.commands.conftest import TRAINING, write_pairs
from tests.fuzz import trial
from tests.fuzz.mutations import mutated_options
from tests.sampling import first
from tests.serving.test_model_file import exported

pytestmark = pytest.mark.thorough

NOT_ADDED = {"--user-dir", "--help", "--device-id", "--local_rank"}
NOT_ADDED |= {"--distributed-init-method", "--distributed-port"}
"""Options that run other code, or wait for other machines."""


def known(parser: ArgumentParser) -> list[str]:
    names = {name for action in parser._actions for name in action.option_strings}
    return sorted({name for name in names if name.startswith("--")} - NOT_ADDED)


TEXT = (
    "--src given/text.en --tgt given/text.de --output output --vocabulary-size 60 --layers 1"
    " --hidden 32 --seed 1"
)
CSV = b"id,lower,upper,size\na,0,3,100\nb,1,4,64\n"
COMMANDS = {
    "plan": "plan given/b.csv --align 16 --method portfolio --capacity 4096",
    "tune": "tune --shapes given/p.csv --device cuda --beam 5 --max-tokens 64 --output t.json",
    "configs list": "configs list",
    "configs show": "configs show given/file.json",
    "user-dir": "user-dir",
    "doctor": "doctor",
    "translate": (
        "translate given/short.txt --model given/words.safetensors --beam 2 --max-len-b 5"
        " --output out"
    ),
    "serve": "serve --port 0 --model given/model.safetensors --limit-queue 10 --beam 2",
    "export": "export given/model.safetensors --to ctranslate2 --output model --overwrite",
    "numbers": ("numbers --output output --updates 3 --train-pairs 100 --test-pairs 5 --seed 1"),
    "train-text": f"train-text {TEXT}",
}
"""Name -> a sound command line."""
LAST = {
    "tune": "--list",
    "translate": "given/short.txt",
    "serve": "--model missing",
    "train-text": "--prepare-only",
}
"""What is put at the end of some whatever became of them."""


def added(name: str) -> list[str]:
    """What may be added to a command line."""
    module = import_module(f"lsq.commands.{name.split()[0].replace('-', '_')}")
    return known(module.parser()) if hasattr(module, "parser") else []


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder with files; what takes long or leaves this process does nothing."""
    monkeypatch.chdir(tmp_path)
    given = tmp_path / "given"
    given.mkdir()
    write_pairs(given, "text", 60, seed=1)
    (given / "b.csv").write_bytes(CSV)
    (given / "p.csv").write_text("op,m,n,k\nproject,64,128,256\n")
    model_file.write(given / "model.safetensors", exported())
    model_file.write(given / "words.safetensors", dataclasses.replace(exported(), subwords=None))
    (given / "short.txt").write_text("encoder5\u2581 encoder6\u2581\n\nencoder7\u2581\n")
    report = doctor.report()
    monkeypatch.setattr(doctor, "report", lambda: report)
    monkeypatch.setattr(numbers, "compare", lambda given: {})
    monkeypatch.setattr(os, "execv", lambda *command: pytest.fail(f"would become {command}"))
    threads = torch.get_num_threads()
    yield tmp_path
    torch.set_num_threads(threads)


def attempts(name, line, may_add, last, folder, count):
    command = line.split()

    def attempt(chance):
        given = [command[0], *mutated_options(command[1:], chance, may_add), *last.split()]
        found = trial.outcome(lambda: cli.main(given), folder / "given")
        torch.set_num_threads(1)
        if found.fault:
            return trial.Outcome(fault=f"{' '.join(given)[:500]}: {found.fault}")
        assert not (folder / "planted").exists()
        return found

    return trial.survey(name, count, attempt)


@pytest.mark.parametrize("name", first(COMMANDS, 4))
@trial.counts(100)
def test_a_command_line_is_followed_or_refused(folder, name, count):
    last = LAST.get(name, "")
    worked, refused = attempts(name, COMMANDS[name], added(name), last, folder, count)
    assert refused > count / 10, (worked, refused)


@trial.counts(10, 200)
def test_a_training_is_done_or_refused(folder, prepared, count):
    line = " ".join(["train", str(prepared.data), *TRAINING])
    line += (
        " --cpu --no-save --disable-validation --max-update 1 --arch lsq_transformer --lsq-backward"
        " int8 --lr-scheduler inverse_sqrt --warmup-updates 10"
    )
    may_add = known(options.get_training_parser())
    attempts("train", line, may_add, "--max-update 1", folder, count)


@trial.counts(10, 200)
def test_a_translation_is_done_or_refused(folder, prepared, trained, count):
    line = (
        f"generate {prepared.data} --path {trained / 'lsq_transformer.pt'} --max-tokens 300 --cpu"
        " --gen-subset test --beam 2 --max-len-b 5 --nbest 1 --results-path out --num-workers 0"
    )
    may_add = known(options.get_generation_parser())
    attempts("generate", line, may_add, "--quiet", folder, count)
