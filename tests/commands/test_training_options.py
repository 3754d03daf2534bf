from lsq.commands.train_text import parser
from lsq.commands.training_options import bound, named_options, values


def test_one_option_sets_both_sides():
    found = values(parser().parse_args("--src a --tgt b --output c --layers 2 --lr 0.5".split()))
    assert (
        found["--encoder-layers"] == found["--decoder-layers"] == "2"
        and found["--encoder-embed-dim"] == "256"
    )
    assert (
        found["--lr"] == "0.5"
        and found["--warmup-updates"] == "1000"
        and found["--share-all-embeddings"] is None
    )


def test_named_options():
    words = ["odd", "--a", "1", "-2", "--b", "--c=3", "--a", "4"]
    assert named_options(words) == {"": "odd", "--a": "4", "--b": None, "--c": "3"}


def test_options_that_bind_a_run():
    training = {
        "--arch": "transformer",
        "--share-all-embeddings": None,
        "--lr": "0.1",
        "--log-interval": "1",
    }
    training |= {"--encoder-layers": "3", "--decoder-layers": "3"}
    extra = ["--lr", "0.2", "--num-workers", "3", "--encoder-normalize-before"]
    assert bound(training, extra) == {
        "--arch": "transformer",
        "--share-all-embeddings": True,
        "--lr": "0.2",
        "--encoder-normalize-before": True,
        "--layers": "3",
    }
