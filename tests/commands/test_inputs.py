import pytest

from lsq.commands import inputs, train_text
from tests.without_fairseq import refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "train nowhere --arch x",
            "there is no data folder nowhere; lsq train-text or fairseq-preprocess makes one",
        ),
        (
            "train data --user-dir transformer_lsq",
            "--user-dir transformer_lsq is no folder; leave it out for lsq's own",
        ),
        ("generate data:nowhere", "there is no data folder nowhere"),
        ("generate data --path full:nowhere.pt", "--path nowhere.pt is not there; check the path"),
        ("generate data --path=empty", "--path empty is empty; name another file"),
        ("generate --lm-path nowhere.pt", "--lm-path nowhere.pt is not there; check the path"),
        ("train-text --src full --tgt nowhere.de", "there is no file nowhere.de"),
        ("train-text --src data", "data is not a file"),
        ("compare --valid-src=empty", "empty is empty; it must hold one sentence a line"),
    ],
)
def test_what_is_not_there_is_named(arguments, message, tmp_path, monkeypatch):
    prepare(tmp_path, monkeypatch)
    with pytest.raises((FileNotFoundError, ValueError), match=message):
        inputs.check(*split(arguments))


@pytest.mark.parametrize(
    "arguments",
    [
        "train data",
        "train --arch x nowhere",
        "train",
        "generate data --path full",
        "generate data --path --beam 3",
        "generate data --path part --checkpoint-shard-count 2",
        "train-text --src full --help",
        "train-text nowhere",
        "train-text --src nowhere -h",
        "train-text --src full -- --src nowhere",
        "translate nowhere",
        "train data --user-dir .",
    ],
)
def test_the_rest_is_left_to_the_command(arguments, tmp_path, monkeypatch):
    prepare(tmp_path, monkeypatch)
    inputs.check(*split(arguments))


def prepare(folder, monkeypatch) -> None:
    monkeypatch.chdir(folder)
    (folder / "data").mkdir()
    (folder / "empty").touch()
    (folder / "full").write_text("x")


def split(arguments: str) -> tuple[str, list[str]]:
    command, *words = arguments.split()
    return command, words


def test_it_needs_no_fairseq(tmp_path):
    missing, folder = str(tmp_path / "missing"), str(tmp_path)
    lines = (
        ["train", missing],
        ["generate", folder, "--path", missing],
        ["train-text", "--src", missing],
        ["translate", "--model", missing],
        ["serve", "--model", missing, "--port", "0"],
        ["formats", "--model", missing],
        ["sensitivity", "--model", missing, "--output", str(tmp_path / "o")],
        ["export", missing, "--to", "lsq", "--output", str(tmp_path / "o")],
        ["convert-checkpoint", missing, "--bits", "8", "--output", str(tmp_path / "o")],
    )
    assert all(missing in said for said in refused(*lines))


def test_options_are_those_of_the_command():
    assert set(inputs.TEXTS) <= train_text.parser()._option_string_actions.keys()
