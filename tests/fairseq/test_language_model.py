"""lsq_transformer_lm: equal to fairseq's in float, trained, resumed, evaluated and generated with
by fairseq."""

import itertools
from argparse import Namespace
from dataclasses import fields

import pytest
import torch
from fairseq import checkpoint_utils, options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models.transformer_lm import TransformerLanguageModelConfig
from fairseq_cli import eval_lm

from lsq.commands import generate, limits
from lsq.commands.plan import parse_step
from lsq.commands.train import parse_training
from lsq.fairseq import checkpoint, language_model, memory
from lsq.fairseq.generator import LSQGenerator, engine_backend
from lsq.fairseq.language_model import LSQTransformerLanguageModel
from lsq.fairseq.products import products_of_training
from lsq.layers.memory import plan_memory
from tests.fairseq.comparison import (
    Beam,
    assert_close_in_int8,
    assert_equal_in_float,
    assert_resumes_to_the_bit,
    assert_same_loss,
    decoded_alike,
)
from tests.fairseq.conftest import COMMON
from tests.sampling import first

TINY = """
    --decoder-embed-dim 32 --decoder-ffn-embed-dim 48 --decoder-attention-heads 4
    --decoder-layers 2 --tokens-per-sample 16 --sample-break-mode eos
""".split()
SHORT = [*COMMON, "--arch", "lsq_transformer_lm", "--task", "lsq_language_modeling"]
SHORT += ["--max-update", "6"]
THEIRS = (
    "--arch transformer_lm --decoder-input-dim 32 --decoder-output-dim 32 --criterion cross_entropy"
)
VARIANTS = {
    "post-norm": "",
    "pre-norm": "--decoder-normalize-before --activation-fn gelu --add-bos-token",
    "shared": "--share-decoder-input-output-embed --decoder-learned-pos --decoder-normalize-before",
    "others": (
        "--layernorm-embedding --no-scale-embedding --decoder-normalize-before"
        " --no-decoder-final-norm"
    ),
    "blocks": "--sample-break-mode none --tokens-per-sample 11",
}


@pytest.fixture
def parse(corpus):
    """As that of conftest.py, for language models; `build` and `train` follow."""

    def parse(arguments: str | list[str] = "") -> Namespace:
        extra = arguments.split() if isinstance(arguments, str) else arguments
        return options.parse_args_and_arch(
            options.get_training_parser(), [str(corpus), *TINY, *SHORT, *extra]
        )

    return parse


def words_of(task, sample):
    return sample["net_input"]["src_tokens"].ne(task.source_dictionary.pad())


@pytest.mark.parametrize("name", VARIANTS)
def test_float_mode_equals_fairseq(pair, batch, name):
    task, theirs, ours = pair(VARIANTS[name])
    sample = batch(task)
    words = words_of(task, sample)
    assert name == "blocks" or not words.all()
    assert_equal_in_float(theirs, ours, sample, words)


def test_int8_is_close_to_float(pair, build, batch):
    task, theirs, _ = pair("")
    _, ours = build("")
    checkpoint.load_float(ours, theirs.state_dict())
    sample = batch(task)
    assert_close_in_int8(theirs, ours, sample, words_of(task, sample))


@pytest.mark.parametrize("mode", ["float", "int8"])
@pytest.mark.parametrize(
    "theirs, more",
    [
        ("cross_entropy", ""),
        ("label_smoothed_cross_entropy", "--label-smoothing 0.1 --report-accuracy"),
    ],
)
def test_the_fused_criterion_equals_those_of_fairseq(parse, build, batch, theirs, more, mode):
    names = [theirs, "lsq_label_smoothed_cross_entropy"]
    assert_same_loss(parse, build, batch, names, f"{more} --lsq-mode {mode}")


def test_the_defaults_are_those_of_fairseqs_dataclass(parse):
    args, theirs = parse("--decoder-embed-dim 512"), TransformerLanguageModelConfig()
    given = {"_name", "dropout", "decoder_layers"}
    given |= {"decoder_ffn_embed_dim", "decoder_attention_heads"}
    for field in fields(theirs):
        if field.name not in given and "${" not in str(field.default):
            assert getattr(args, field.name) == getattr(theirs, field.name), field.name


@pytest.mark.parametrize(
    ("name", "mode"), first(itertools.product(["pre-norm", "shared"], ["int8", "float"]), 1)
)
def test_generation_with_a_state_equals_that_from_scratch(build, batch, name, mode):
    """Prefixes of several lengths are continued, by lsq's search as by fairseq's."""
    task, model = build(f"{VARIANTS[name]} --lsq-mode {mode}")
    sample = batch(task)
    prefixes = sample["target"][:, :3]
    found = decoded_alike(task, model, sample, Beam(beam=3, max_len_b=14), prefix_tokens=prefixes)
    generator = task.build_generator([model], Beam(beam=3, max_len_b=14))
    assert (engine_backend([model]) is not None) == (mode == "int8") and isinstance(
        generator, LSQGenerator
    )
    searched = task.inference_step(generator, [model], sample, prefix_tokens=prefixes)
    for ours, theirs in zip(searched, found, strict=True):
        assert [list(h["tokens"]) for h in ours] == [list(h["tokens"]) for h in theirs]
    for hypotheses, prefix in zip(found, prefixes.tolist(), strict=True):
        given = [word for word in prefix if word != task.target_dictionary.pad()]
        assert all(h["tokens"].tolist()[: len(given)] == given for h in hypotheses)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "given",
    [
        "--lsq-backward float --update-freq 2 --sample-break-mode none",
        "",
        "--lsq-mode float --criterion cross_entropy",
    ],
)
def test_resuming_continues_to_the_bit(train, tmp_path, given):
    assert_resumes_to_the_bit(train, tmp_path, given, (4, 9))


@pytest.mark.parametrize(
    "given, sentences", [("", 8), ("--batch-size 3", 3), ("--add-bos-token", 15)]
)
def test_the_largest_batch_bounds_all(build, parse, given, sentences):
    task, model = build(given)
    criterion = task.build_criterion(parse(given))
    batch = task.bounding_batch(model)
    longest = model.max_positions()
    assert batch["net_input"]["src_tokens"].shape == batch["target"].shape == (sentences, longest)
    plan_memory(model, lambda: criterion(model, batch)[0])
    extra = "--add-bos-token" in given
    for length in (1, 5, longest - extra):
        words = torch.full((min(120 // length, 3 if "batch" in given else 120), length + extra), 5)
        net_input = {"src_tokens": words, "src_lengths": torch.full((len(words),), length + extra)}
        counts = {"ntokens": words.numel(), "nsentences": len(words)}
        criterion(model, {"net_input": net_input, "target": words, **counts})[0].backward()


def test_it_starts_from_a_checkpoint_of_fairseqs(train, build, batch, tmp_path):
    same = "--decoder-normalize-before --share-decoder-input-output-embed"
    train(tmp_path / "float", f"{same} {THEIRS} --max-update 30")
    path = tmp_path / "float" / "checkpoint_last.pt"
    task, ours = build(f"{same} --lsq-from {path}")
    (theirs,), _, _ = checkpoint_utils.load_model_ensemble_and_task([str(path)])
    sample = batch(task)
    words = words_of(task, sample)
    expected, actual = (model.eval()(**sample["net_input"])[0][words] for model in (theirs, ours))
    assert 0 < (actual - expected).square().mean() / expected.square().mean() < 1e-2
    state = train(tmp_path / "int8", f"{same} --lsq-from {path} --max-update 2")
    assert state["cfg"]["model"].lsq_from is None
    with pytest.raises(
        ValueError, match=r"decoder.layer_norm.weight: \[32\] in the checkpoint, not"
    ):
        build(f"{same} --lsq-from {path} --no-decoder-final-norm")


@pytest.mark.thorough
def test_evaluation_and_generation_as_of_fairseq(train, corpus, tmp_path, capsys):
    """Perplexities of ours and of fairseq's, trained alike, and a generation of each from
    prefixes."""
    found = []
    for given in (f"{THEIRS} --decoder-normalize-before", "--decoder-normalize-before"):
        folder = tmp_path / str(len(found))
        train(folder, f"{given} --max-update 40 --lr 0.01 --max-tokens 240")
        path = folder / "checkpoint_last.pt"
        data = f"{corpus} --path {path} --cpu --gen-subset valid --num-workers 0".split()
        data += ["--sample-break-mode", "eos"]
        args = options.parse_args_and_arch(
            options.get_eval_lm_parser(), [*data, "--task", "lsq_language_modeling"]
        )
        found.append(eval_lm.main(convert_namespace_to_omegaconf(args))["loss"].item())
        more = f"--prefix-size 1 --beam 2 --max-len-b 9 --results-path {folder}"
        generate.run([*data, *more.split()])
        lines = (folder / "generate-valid.txt").read_text().splitlines()
        assert sum(line.startswith("H-") for line in lines) == 16
    # 3.5 bits before any training
    assert found[0] == pytest.approx(found[1], abs=0.15) and found[1] < 2.4


@pytest.mark.parametrize(
    "given", ["--output-dictionary-size 12", "--pad-to-fixed-length --pad-to-fixed-bsz"]
)
def test_other_shapes_of_batches_train(train, tmp_path, given):
    train(tmp_path, f"{given} --batch-size 50 --max-update 2")


@pytest.mark.parametrize(
    "given, message",
    [
        ("--adaptive-softmax-cutoff 5,8", r"does not support --adaptive-softmax-cutoff \(5,8\)"),
        ("--character-embeddings", "does not support --character-embeddings"),
        (
            "--decoder-input-dim 16",
            "--decoder-input-dim 16, --decoder-output-dim 32; make them equal",
        ),
        ("--past-target", "Unsupported language modeling target: past"),
    ],
)
def test_what_it_does_not_do_is_refused(build, given, message):
    with pytest.raises(ValueError, match=message):
        build(given)


def test_tasks_and_models_that_do_not_fit_are_refused(corpus, toy):
    ours, other = "lsq_transformer_lm", "lsq_language_modeling"
    for given, message in (
        (f"{corpus} --arch lsq_transformer --task {other}", "lsq_transformer is none; use --arch"),
        (f"{toy} --arch {ours} --task lsq_translation", f"not translate; .* --task {other}"),
    ):
        args = options.parse_args_and_arch(options.get_training_parser(), given.split())
        with pytest.raises(ValueError, match=message):
            tasks.setup_task(args).build_model(args)


def test_lsq_train_takes_its_task_and_criterion(corpus):
    args = parse_training(
        [str(corpus), "--arch", "lsq_transformer_lm_gpt2_tiny", "--max-tokens", "120"]
    )
    assert (args.task, args.criterion) == (
        "lsq_language_modeling",
        "lsq_label_smoothed_cross_entropy",
    )
    with pytest.raises(ValueError, match="ctc is not for --task lsq_language_modeling"):
        limits.check_training(Namespace(**{**vars(args), "criterion": "ctc"}))


def test_its_memory_and_products_follow_from_its_options():
    given = parse_step("lsq plan", language_model.MODEL, [*TINY, "--max-tokens", "96"])
    assert memory.describe_training(given, 40).plan.peak > 0
    products = products_of_training(given, 40, backward=["int8"], tokens=[96], rows=[10])
    kinds = {"project", "matmul", "project_input_gradient", "project_weight_gradient"}
    assert {key.op for key in products} == kinds
    assert isinstance(memory.build_training(given, 40)[1], LSQTransformerLanguageModel)
