"""The model: equal to fairseq's in float, usable by fairseq's generators, and the same step by
step."""

from types import SimpleNamespace

import pytest
import torch

from lsq.fairseq import checkpoint
from lsq.run import step as run_step
from tests.fairseq.comparison import (
    assert_close_in_int8,
    assert_equal_in_float,
)
from tests.sampling import first

THEIRS = "--arch transformer --criterion label_smoothed_cross_entropy"
VARIANTS = {
    "post-norm": "",
    "pre-norm": "--encoder-normalize-before --decoder-normalize-before --activation-fn gelu",
    "shared": "--share-all-embeddings --encoder-learned-pos --decoder-learned-pos",
    "normed embedding": (
        "--layernorm-embedding --no-scale-embedding --share-decoder-input-output-embed"
    ),
    "uneven": (
        "--encoder-layers 1 --decoder-layers 3 --encoder-attention-heads 2"
        " --decoder-ffn-embed-dim 80"
    ),
}


def words_of(task, sample):
    """Where the batch has words, bool [B, T] of the target."""
    return sample["net_input"]["prev_output_tokens"].ne(task.target_dictionary.pad())


@pytest.mark.parametrize("name", first(VARIANTS, 2))
def test_float_mode_equals_fairseq(pair, batch, name):
    task, theirs, ours = pair(VARIANTS[name])
    sample = batch(task)
    assert_equal_in_float(theirs, ours, sample, words_of(task, sample))


def test_int8_is_close_to_float(pair, build, batch):
    task, theirs, _ = pair("")
    _, ours = build("")
    checkpoint.load_float(ours, theirs.state_dict())
    sample = batch(task)
    assert_close_in_int8(theirs, ours, sample, words_of(task, sample))


def test_interface_of_encoder_and_decoder(build, batch):
    task, model = build("")
    net_input = batch(task)["net_input"]
    model.eval()
    out = model.encoder(net_input["src_tokens"], net_input["src_lengths"], return_all_hiddens=True)
    sentences, length = net_input["src_tokens"].shape
    assert out["encoder_out"][0].shape == (length, sentences, 32)
    assert len(out["encoder_states"]) == 3
    assert torch.equal(out["src_lengths"][0].flatten().long(), net_input["src_lengths"])
    again = model.encoder.forward_torchscript(net_input)
    torch.testing.assert_close(again["encoder_out"], out["encoder_out"], rtol=0, atol=0)

    order = torch.tensor([3, 3, 0])
    reordered = model.encoder.reorder_encoder_out(out, order)
    assert torch.equal(reordered["encoder_out"][0], out["encoder_out"][0][:, order])
    assert torch.equal(reordered["encoder_padding_mask"][0], out["encoder_padding_mask"][0][order])

    features, extra = model.extract_features(**net_input)
    assert features.shape == (*net_input["prev_output_tokens"].shape, 32)
    assert extra["attn"] == [None] and len(extra["inner_states"]) == 3
    logits, _ = model.forward_decoder(net_input["prev_output_tokens"], encoder_out=out)
    assert logits.shape == (*net_input["prev_output_tokens"].shape, len(task.target_dictionary))
    torch.testing.assert_close(model.decoder.output_layer(features), logits, rtol=0, atol=0)
    assert model.max_positions() == (1024, 1024) and model.max_decoder_positions() == 1024


@pytest.mark.parametrize("mode", ["int8", "float"])
def test_results_are_zero_where_there_is_padding(build, batch, mode):
    task, model = build(f"--lsq-mode {mode} --encoder-normalize-before --decoder-normalize-before")
    sample = batch(task)
    net_input, words = sample["net_input"], words_of(task, sample)
    model.eval()
    out = model.encoder(net_input["src_tokens"], net_input["src_lengths"], return_all_hiddens=True)
    padding = out["encoder_padding_mask"][0].t()
    features, extra = model.extract_features(**net_input)
    assert padding.any() and not words.all()
    for state in (*out["encoder_out"], *out["encoder_states"]):
        assert not state[padding].any() and state[~padding].abs().sum(1).all()
    for state in (features, *(state.transpose(0, 1) for state in extra["inner_states"])):
        assert not state[~words].any() and state[words].abs().sum(1).all()


@pytest.mark.parametrize("name", first(VARIANTS, 2))
def test_a_batch_with_padding_equals_its_sentences_one_by_one(build, batch, name):
    task, model = build(f"--lsq-mode float --dropout 0 {VARIANTS[name]}")
    whole, dataset, found = batch(task), task.dataset("valid"), []
    for samples in ([whole], [dataset.collater([dataset[number]]) for number in range(7)]):
        model.zero_grad()
        loss = sum(
            model(**one["net_input"], target=one["target"], label_smoothing=0.1)[0]
            for one in samples
        )
        loss.backward()
        found.append((loss.detach(), *(parameter.grad for parameter in model.parameters())))
    for together, alone in zip(*found, strict=True):
        torch.testing.assert_close(
            together, alone, rtol=0, atol=1e-5 * max(1.0, alone.abs().max().item())
        )


@pytest.mark.parametrize(
    "options", ["--lsq-backward int8", "--lsq-backward float", "--lsq-mode float"]
)
def test_no_operation_of_a_training_step_has_more_rows_than_words(build, options):
    task, model = build(f"{options} --encoder-normalize-before --layernorm-embedding")
    lengths = torch.tensor([150, *[5] * 30])
    tokens = torch.full((31, 150), task.source_dictionary.pad())
    for sentence, length in zip(tokens, lengths, strict=True):
        sentence[:length] = torch.randint(4, 16, (length,))
    widest = max(max(parameter.shape) for parameter in model.parameters())
    assert widest < lengths.sum() < tokens.numel() / 10
    step = run_step.rehearse(
        lambda: model.train()(tokens, lengths, tokens, target=tokens)[0], model.parameters()
    )
    for program in dict.fromkeys(step.programs):
        for operation in program.operations:
            rows = [tensor.shape[0] for tensor in operation.outputs if len(tensor.shape) == 2]
            assert max(rows, default=0) <= lengths.sum(), operation.name
    assert step.programs[0].outputs[0].shape[0] == lengths.sum()


@pytest.mark.parametrize("mode", ["int8", "float"])
def test_one_step_at_a_time_gives_the_logits_of_the_whole(build, batch, mode):
    task, model = build(f"--lsq-mode {mode}")
    net_input = batch(task)["net_input"]
    model.eval()
    whole, _ = model(**net_input)
    encoder_out = model.encoder(net_input["src_tokens"])
    tokens, state = net_input["prev_output_tokens"], {}
    present = tokens.ne(task.target_dictionary.pad())
    for step in range(tokens.shape[1]):
        logits, _ = model.decoder(
            tokens[:, : step + 1], encoder_out=encoder_out, incremental_state=state
        )
        assert logits.shape[1] == 1
        here = present[:, step]
        torch.testing.assert_close(logits[here, 0], whole[here, step], rtol=1e-5, atol=1e-4)


def test_loss_equals_that_of_the_logits(build, batch):
    task, model = build("")
    sample = batch(task)
    model.eval()
    logits, _ = model(**sample["net_input"])
    loss, nll, features = model(**sample["net_input"], target=sample["target"], label_smoothing=0.1)
    words = sample["target"].ne(task.target_dictionary.pad())
    for smoothing, found in ((0.0, nll), (0.1 * 16 / 15, loss)):
        expected = torch.nn.functional.cross_entropy(
            logits[words], sample["target"][words], reduction="sum", label_smoothing=smoothing
        )
        torch.testing.assert_close(found, expected)
    assert features.shape == (int(words.sum()), 32)


def test_what_it_does_not_do_is_refused(build, batch):
    task, model = build("")
    with pytest.raises(ValueError, match="keeps no attention weights"):
        model(**batch(task)["net_input"], alignment_layer=0)
    for name in ("print_alignment", "retain_dropout"):
        config = SimpleNamespace(generation=SimpleNamespace(beam=1, **{name: True}))
        with pytest.raises(ValueError, match=f"--{name.replace('_', '-')}"):
            model.prepare_for_inference_(config)
    with pytest.raises(ValueError, match="leave out --fp16"):
        model.half()
    none, said = (
        torch.zeros(0, 5, dtype=torch.int64),
        r"are \(0, 5\); they must be \[sentences, time",
    )
    with pytest.raises(ValueError, match=said):
        model(none, torch.zeros(0, dtype=torch.int64), none, target=none)
