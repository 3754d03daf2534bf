import json

import pytest
from fairseq.trainer import Trainer

from lsq.commands import train_text
from lsq.commands.interruption import Interrupted

SMALL = (
    "--vocabulary-size 60 --character-coverage 1.0 --max-length 40 --layers 1 --hidden 16 --feed-forward 32 --heads 2 "
    "--max-tokens 300 --warmup 4 --log-every 1 --validate-every 2 --beam 2 --quiet"
).split()


@pytest.fixture
def command(files, tmp_path):
    """command(*options): the command line of a small run into tmp_path/out."""

    def command(*options: str) -> list[str]:
        given = ["--src", str(files.train[0]), "--tgt", str(files.train[1]), "--output", str(tmp_path / "out")]
        for split in ("valid", "test"):
            source, target = files.splits()[split]
            given += [f"--{split}-src", str(source), f"--{split}-tgt", str(target)]
        return [*given, *SMALL, *options]

    return command


@pytest.mark.parametrize(
    ("options", "criterion"),
    [
        (["--mode", "float"], "label_smoothed_cross_entropy"),
        (["--mode", "int8", "--lsq-backward", "int8"], "lsq_label_smoothed_cross_entropy"),
        (["--mode", "float", "--arch", "lsq_transformer", "--name", "other"], "lsq_label_smoothed_cross_entropy"),
    ],
)
def test_from_text_to_scores(command, tmp_path, capsys, options, criterion):
    arguments = command("--updates", "3", *options, "--", "--encoder-normalize-before")
    assert train_text.run(arguments) == 0
    name = options[-1] if "--name" in options else options[1]
    folder = tmp_path / "out" / name
    results = json.loads((folder / "results.json").read_text())
    assert results["updates"] == 3 and results["test_pairs"] == 9
    assert 0 <= results["bleu"] <= 100 and "version" in results["bleu_signature"]
    assert results["options"]["--criterion"] == criterion
    assert results["options"]["more"] == ["--encoder-normalize-before"]
    assert len((folder / "translation" / "hypotheses.txt").read_text().splitlines()) == 9
    assert (folder / "losses.png").exists() and (folder / "model" / "checkpoint_best.pt").exists()
    printed = capsys.readouterr()
    assert "BLEU" in printed.out and "nrefs:1" in printed.out

    assert train_text.run(arguments) == 0
    again = capsys.readouterr().out
    assert f"{name}: already trained" in again and "translation: already done" in again
    assert json.loads((folder / "results.json").read_text()) == results


def test_prepare_only(command, tmp_path, capsys):
    assert train_text.run(command("--prepare-only")) == 0
    assert "The data are in " in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"text", "vocabulary", "data"}


def test_interrupted_run_continues(command, tmp_path, monkeypatch):
    arguments = command("--updates", "4", "--mode", "float")
    step = Trainer.train_step

    def stop_at_three(trainer, samples, raise_oom=False):
        if trainer.get_num_updates() == 2:
            raise Interrupted(15, "stopped")
        return step(trainer, samples, raise_oom)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", stop_at_three)
        with pytest.raises(Interrupted):
            train_text.run(arguments)
    assert not (tmp_path / "out" / "float" / "results.json").exists()
    assert train_text.run(arguments) == 0
    results = json.loads((tmp_path / "out" / "float" / "results.json").read_text())
    assert results["updates"] == 4
    assert "(epoch 1 @ 2 updates)" in (tmp_path / "out" / "float" / "model" / "train.log").read_text()


def test_changed_options_need_another_name_or_overwrite(command, tmp_path):
    arguments = command("--updates", "2", "--mode", "float")
    assert train_text.run(arguments) == 0
    changed = [*arguments, "--lr", "0.01"]
    with pytest.raises(ValueError, match=r"other options \(--lr: 0.001 before, 0.01 now\); choose another --name"):
        train_text.run(changed)
    assert train_text.run([*changed, "--overwrite"]) == 0
    results = json.loads((tmp_path / "out" / "float" / "results.json").read_text())
    assert results["options"]["--lr"] == "0.01"
    assert train_text.run([*changed, "--beam", "1"]) == 0  # translates again, trains no more
    log = (tmp_path / "out" / "float" / "model" / "train.log").read_text()
    assert log.count("begin training epoch 1") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mode", "int8", "--arch", "transformer"], "--arch transformer has no quantisers"),
        (["--mode", "float", "--lsq-bits", "4"], "--arch transformer has no quantisers"),
        (["--max-tokens", "40"], "--max-tokens 40 is too small for sentences of --max-length 40 .* at least 41"),
        (["--mode", "int8", "--lsq-bits", "9"], "bits is 9"),
        (["--hidden", "24"], "hidden is 24, but int8 products need a multiple of 16; use 32"),
        (["--heads", "3"], "hidden size 16 is not divisible by 3 heads"),
        (["--src", "nowhere.en"], "there is no file nowhere.en"),
        (["--vocabulary-size", "5000"], "--vocabulary-size 5000 is too large"),
    ],
)
def test_mistakes(command, options, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        train_text.run(command("--updates", "1", *options))


def test_half_a_pair_of_files(files, tmp_path):
    given = ["--src", str(files.train[0]), "--tgt", str(files.train[1]), "--output", str(tmp_path)]
    with pytest.raises(ValueError, match="--test-src and --test-tgt go together"):
        train_text.run([*given, "--test-src", str(files.test[0])])


def test_unknown_options(command, capsys):
    for arguments in (command("--learning-rate", "1"), command("--updates", "1", "--", "--no-such-option")):
        with pytest.raises(SystemExit) as stopped:
            train_text.run(arguments)
        assert stopped.value.code == 2
        assert "unrecognized arguments: --" in capsys.readouterr().err


def test_help_is_complete(capsys):
    with pytest.raises(SystemExit) as stopped:
        train_text.run(["--help"])
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    for option in ("--src", "--test-tgt", "--vocabulary-size", "--mode", "--lsq-backward", "--lsq-from", "--seed"):
        assert option in printed
