import json
import os
import re
import socket
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from lsq.commands.launch import ONE_MACHINE
from tests.sampling import first

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
PUBLIC = ("iwslt14_de_en", "wmt14_en_de")


@pytest.fixture
def run(tmp_path):
    """run(script, *arguments) starts a script of recipes/ in an empty folder, where nothing can be
    downloaded."""
    programs = tmp_path / "programs"
    programs.mkdir()
    curl = programs / "curl"
    curl.write_text('#!/bin/sh\necho "curl $*" >&2\nexit 22\n')
    curl.chmod(0o755)
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    common = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"}

    def run(
        script: str, *arguments: str, environment: Mapping[str, str] = {}
    ) -> subprocess.CompletedProcess:
        options = {"capture_output": True, "text": True, "timeout": 110, "cwd": tmp_path}
        command = [str(RECIPES / script), *arguments]
        return subprocess.run(command, env=common | environment, **options)

    return run


def check(done: subprocess.CompletedProcess) -> None:
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.slow
def test_numbers(run, tmp_path):
    check(run("numbers/run.sh", "--dry-run", "--quiet", "--threads", "1"))
    results = json.loads((tmp_path / "runs/numbers/dry-run/results.json").read_text())
    assert results["test_pairs"] == 12


@pytest.mark.slow
def test_text(run, tmp_path):
    check(run("text/run.sh", "--dry-run", "out", "--quiet"))
    for mode in ("float", "int8"):
        results = json.loads((tmp_path / "out/dry-run" / mode / "results.json").read_text())
        assert results["updates"] == 3


def test_text_without_files(run):
    done = run("text/run.sh", "only.en")
    assert done.returncode == 2 and done.stderr.startswith("usage: run.sh SOURCE TARGET OUTPUT")


@pytest.mark.parametrize(
    ("recipe", "mode", "processes"), first([(PUBLIC[1], "float", 2), (PUBLIC[0], "int8", 1)], 0, 1)
)
def test_dry_run(run, tmp_path, recipe, mode, processes):
    given = ["--processes", str(processes), "--gradients", "int8"]
    done = run(f"{recipe}/run.sh", "out", "--dry-run", "--mode", mode, *given)
    check(done)
    assert ("gradients: int8 between 2 workers" in done.stdout) == (processes == 2)
    output = tmp_path / "out" / "dry-run"
    assert list((tmp_path / "out").iterdir()) == [output]  # nothing real is touched
    scores = json.loads((output / mode / "scores.json").read_text())
    assert [score["name"] for score in scores] == ["BLEU", "chrF2"]
    assert len((output / mode / "translation" / "hypotheses.txt").read_text().splitlines()) == 10


@pytest.mark.parametrize("recipe", PUBLIC)
def test_nothing_is_downloaded_unasked(run, tmp_path, recipe):
    done = run(f"{recipe}/prepare.sh", "out")
    assert done.returncode == 2
    assert "out/raw is incomplete; get http" in done.stderr and "curl" not in done.stderr
    assert done.stderr.count(".tgz") == {"iwslt14_de_en": 1, "wmt14_en_de": 4}[recipe]
    assert len(done.stderr.splitlines()) == 1 and not (tmp_path / "out").exists()
    done = run(f"{recipe}/prepare.sh", "out", "--download")
    assert done.returncode == 22 and "curl --fail --location" in done.stderr
    assert not list((tmp_path / "out" / "raw").iterdir())


@pytest.mark.parametrize("script", ["prepare.sh", "run.sh"])
def test_unknown_options(run, script):
    assert run(f"iwslt14_de_en/{script}", "out", "--no-such-option").returncode == 2
    assert run(f"iwslt14_de_en/{script}").returncode == 2


@pytest.mark.parametrize(
    "options", ["--mode in8", "--processes 0", "--processes many", "--updates -1", "--machine 1"]
)
def test_unusable_values(run, options):
    done = run("wmt14_en_de/run.sh", "out", "--print", *options.split())
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith(f"run.sh: {options} ") and len(done.stderr.splitlines()) == 1


@pytest.mark.thorough
def test_training_without_data(run):
    done = run("iwslt14_de_en/run.sh", "out")
    assert done.returncode == 2 and "there is no data folder out/data" in done.stderr


SEVERAL = (
    "torchrun --nnodes {} --rdzv-backend c10d --rdzv-endpoint {} --rdzv-id {} --nproc-per-node"
)


@pytest.mark.parametrize(
    ("options", "start", "update_freq"),
    [
        ("", "", 8),
        ("--processes 8", f"torchrun {' '.join(ONE_MACHINE)} --nproc-per-node 8 --no-python ", 1),
        (
            "--processes 8 --machines 2 --machine 1 --master host0",
            f"{SEVERAL.format(2, 'host0:29500', 'lsq')} 8 --no-python ",
            1,
        ),
        (
            "--processes 4 --machines 4 --machine 0 --master host0:1234 --name job7",
            f"{SEVERAL.format(4, 'host0:1234', 'job7')} 4 --no-python ",
            1,
        ),
    ],
)
def test_launches(run, options, start, update_freq):
    given = ["--print", *options.split(), "--", "--lr", "1e-3"]
    done = run("wmt14_en_de/run.sh", "out", *given)
    check(done)
    assert done.stdout.startswith(f"{start}lsq train ")
    assert ("--lsq-gradients auto " in done.stdout) == bool(options)
    assert f"--update-freq {update_freq} " in done.stdout
    assert done.stdout.split()[-2:] == ["--lr", "1e-3"]


def test_gradients_are_passed_on(run):
    options = "--print --processes 2 --gradients int8_hier".split()
    done = run("wmt14_en_de/run.sh", "out", *options)
    assert "--lsq-gradients int8_hier " in done.stdout
    done = run("wmt14_en_de/run.sh", "out", "--gradients")
    assert done.returncode == 2 and not done.stdout


def test_slurm(run, tmp_path):
    """With stand-ins for SLURM's programs that play the second of two nodes."""
    (tmp_path / "recipes").symlink_to(RECIPES)
    programs = {
        "scontrol": '[ "$*" = "show hostnames node[07-08]" ] && printf "node07\\nnode08\\n"',
        "srun": 'while [ "$1" != bash ]; do shift; done; export SLURM_NODEID=1; exec "$@"',
    }
    for name, line in programs.items():
        (tmp_path / "programs" / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / "programs" / name).chmod(0o755)
    job = {"JOB_NODELIST": "node[07-08]", "JOB_NUM_NODES": 2, "JOB_ID": 12345}
    job |= {"GPUS_ON_NODE": 8, "CPUS_ON_NODE": 64}
    job = {f"SLURM_{name}": str(value) for name, value in job.items()}
    done = run("multi_gpu/slurm.sh", "runs/wmt14", "--print", "--", "--lr", "1e-3", environment=job)
    check(done)
    start = f"{SEVERAL.format(2, 'node07:29845', 12345)} 8 --no-python lsq train runs/wmt14/data"
    assert done.stdout.startswith(f"{start} --save-dir runs/wmt14/float/model ")
    assert "--lsq-gradients auto " in done.stdout and done.stdout.split()[-2:] == ["--lr", "1e-3"]
    (tmp_path / "recipes").unlink()
    done = run("multi_gpu/slurm.sh", "runs/wmt14", environment=job)
    assert done.returncode == 2 and "submit from the folder of this repository" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_machines(tmp_path):
    """As two torchruns on this machine that meet at a port; each counts as a node."""
    data = tmp_path / "out"
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"}
    with socket.create_server(("127.0.0.1", 0)) as free:
        master = f"127.0.0.1:{free.getsockname()[1]}"
    options = f"--mode float --dry-run --processes 2 --machines 2 --master {master} --print"
    command = [RECIPES / "wmt14_en_de" / "run.sh", data, *options.split()]
    streams = {"env": environment, "stdout": subprocess.PIPE, "text": True}
    line = subprocess.run(command, timeout=190, **streams).stdout.splitlines()[-1]
    started = [subprocess.Popen(line, shell=True, **streams) for _ in range(2)]
    said = [process.communicate(timeout=190)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    named = r"gradients: (float|bf16|int8_hier|lean) between 4 workers"
    assert sum(re.search(named, text) is not None for text in said) == 1


def write(folder: Path, files: dict[str, str]) -> None:
    """Write files, by their paths in the folder."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)


def archive(path: Path, files: dict[str, str]) -> None:
    """Write a .tgz with these files."""
    folder = path.parent / path.stem
    write(folder, files)
    with tarfile.open(path, "w:gz") as tar:
        for top in folder.iterdir():
            tar.add(top, arcname=top.name)


def evaluation(sentences: list[str]) -> str:
    segments = "".join(
        f'<seg id="{number}"> {text} </seg>\n' for number, text in enumerate(sentences, 1)
    )
    return f"<?xml version='1.0'?>\n<refset><doc>\n{segments}</doc></refset>\n"


def test_iwslt_text(run, tmp_path):
    train = {
        "de": ["<url>http://x</url>", "<title>Titel hier</title>"],
        "en": ["<url>http://x</url>", "<title>A title</title>"],
    }
    for number in range(30):
        train["de"].append(f"das ist Satz {number}")
        train["en"].append(f"this is sentence {number}")
    train["en"][7] = "far too many words for such a short one"
    train["de"][10] = train["en"][20] = ""
    files = {f"de-en/train.tags.de-en.{side}": "\n".join(train[side]) + "\n" for side in train}
    for name in ("TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012"):
        for side in ("de", "en"):
            files[f"de-en/IWSLT14.{name}.de-en.{side}.xml"] = evaluation([f"{side} &amp; {name}"])
    write(tmp_path / "raw", files)
    command = [sys.executable, RECIPES / "extract.py", "iwslt14", tmp_path / "raw"]
    check(subprocess.run([*command, tmp_path / "plain"], capture_output=True, text=True))
    lines = {
        (split, side): (tmp_path / "plain" / f"{split}.{side}").read_text().splitlines()
        for split in ("train", "valid", "test")
        for side in ("de", "en")
    }
    assert [len(lines[split, "de"]) for split in ("train", "valid", "test")] == [26, 2, 5]
    assert lines["valid", "en"] == ["A title", "this is sentence 25"]
    assert lines["valid", "de"] == ["Titel hier", "das ist Satz 25"]
    assert "das ist Satz 5" not in lines["train", "de"]
    pairs = zip(lines["train", "de"], lines["train", "en"], strict=True)
    assert all(german.split()[-1] == english.split()[-1] for german, english in pairs)
    assert lines["test", "de"][0] == "de & TED.dev2010"


@pytest.mark.thorough
def test_wmt_archives_to_data(run, tmp_path):
    """From the archives to fairseq's data, with nothing downloaded."""
    raw = tmp_path / "out" / "raw"
    raw.mkdir(parents=True)
    chance = ["red", "green", "blue", "white"]
    text = {
        side: "".join(f"{chance[row % 4]} {chance[row % 3]} {side} {row}\n" for row in range(1100))
        for side in ("de", "en")
    }
    for name, corpus in (
        ("training-parallel-europarl-v7.tgz", "training/europarl-v7"),
        ("training-parallel-commoncrawl.tgz", "commoncrawl"),
        ("training-parallel-nc-v9.tgz", "training/news-commentary-v9"),
    ):
        archive(raw / name, {f"{corpus}.de-en.{side}": text[side] for side in text})
    test = {"ref.de": evaluation(["rot 1", "blau 2"]), "src.en": evaluation(["red 1", "blue 2"])}
    test = {f"test-full/newstest2014-deen-{kind}.sgm": text for kind, text in test.items()}
    archive(raw / "test-full.tgz", test)
    small = (RECIPES / "wmt14_en_de" / "prepare.sh").read_text().replace("32000", "70")
    script = tmp_path / "recipes" / "wmt14_en_de" / "prepare.sh"
    script.parent.mkdir(parents=True)
    script.write_text(small)
    script.chmod(0o755)
    for name in ("prepare.sh", "extract.py"):
        (tmp_path / "recipes" / name).symlink_to(RECIPES / name)
    check(run(str(script), "out"))
    plain = tmp_path / "out" / "plain"
    assert (plain / "test.en").read_text() == "red 1\nblue 2\n"
    assert len((plain / "train.de").read_text().splitlines()) == 3296
    assert len((plain / "valid.de").read_text().splitlines()) == 4
    assert (tmp_path / "out" / "data" / "train.src-tgt.src.bin").exists()


@pytest.mark.parametrize("recipe", ["numbers", "text", *PUBLIC])
def test_every_recipe_explains_itself(recipe):
    text = (RECIPES / recipe / "README.md").read_text()
    assert "run.sh" in text and "--dry-run" in text
    assert os.access(RECIPES / recipe / "run.sh", os.X_OK)
