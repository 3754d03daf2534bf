"""transformers' Trainer, TRL's SFTTrainer and accelerate with converted models."""

import json
import logging
from pathlib import Path

import pytest
import torch

import lsq
from lsq.config import QuantConfig
from lsq.dist import GradientConfig
from lsq.models import LsqCallback, load_clips
from lsq.observe import quantized_tensors
from lsq.optim import Adam
from tests.models.trainings import (
    MAKERS,
    SHORT,
    converted,
    data,
    losses,
    same_states,
    trainer,
    transformers,
)
from tests.sampling import first

from accelerate import Accelerator  # isort: skip  (after torchaudio is out of the way)
from accelerate.state import AcceleratorState  # isort: skip

WATCHED = {
    "every": 3,
    "bounds": {"output": 200, "input_gradient": -100, "weight_gradient": -100},
}
DECODED = {
    "weight_format": "nvfp4",
    "activation_format": "fp8-e4m3/tensor",
    "gradient_format": "fp8-e5m2/row",
}
SPARSE = {"sparsity": "2:4,every=2,begin=1"}


def batch(name: str, rows: int = 8) -> dict[str, torch.Tensor]:
    examples = data(name, rows)
    return {key: torch.stack([example[key] for example in examples]) for key in examples[0]}


def adapted(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    peft = pytest.importorskip("peft")
    torch.manual_seed(seed)
    targets = ["q_proj", "v_proj", "up_proj"]
    return peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=targets))


def callback_of(training) -> LsqCallback:
    (callback,) = [
        one for one in training.callback_handler.callbacks if isinstance(one, LsqCallback)
    ]
    return callback


@pytest.mark.thorough
def test_trainer_needs_nothing_else(tmp_path):
    training = trainer("bert", tmp_path, save_strategy="no", max_steps=30)
    training.train()
    assert losses(training)[-1] < losses(training)[0] - 0.3
    assert training.evaluate()["eval_loss"] < losses(training)[0]
    assert training.predict(data("bert", 5)).predictions.shape == (5, 3)


# Trainings that were cut off


def whole_and_later(name: str, folder: Path, quant=None, monitor=None, at: int = 4, **options):
    """A training, and another one that goes on from one of its checkpoints, which has moved."""

    def training(part: str, seed: int):
        lora = name == "llama"  # whose base is not saved
        model = converted(name, seed=1 if lora else seed, quant=quant, fused=not lora)
        model = adapted(model, seed) if lora else model
        return trainer(name, folder / part, LsqCallback(monitor=monitor), model=model, **options)

    whole, later = training("whole", 1), training("later", 5)
    whole.train()
    moved = (folder / "whole" / f"checkpoint-{at}").rename(folder / "moved")
    later.train(resume_from_checkpoint=str(moved))
    assert losses(later) == losses(whole)
    assert same_states(later.model, whole.model)
    return whole, later


@pytest.mark.parametrize("name", ["bert", pytest.param("gpt2", marks=pytest.mark.thorough)])
def test_training_goes_on_bit_for_bit(name, tmp_path):
    whole_and_later(name, tmp_path)


@pytest.mark.thorough
def test_low_rank_adapters_go_on_bit_for_bit(tmp_path):
    whole, _ = whole_and_later("llama", tmp_path)
    assert losses(whole)[-1] < losses(whole)[0]


@pytest.mark.thorough
def test_a_watched_training_goes_on_bit_for_bit(tmp_path):
    _, later = whole_and_later("gpt2", tmp_path, monitor=WATCHED)
    callback = callback_of(later)
    assert callback.monitor.steps == 8 and len(callback.monitor.in_floats) == 3
    state = LsqCallback(monitor=WATCHED).state()["args"]
    assert json.loads(json.dumps(state)) == state
    assert LsqCallback(**state).monitor_options == callback.monitor_options


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [
        {"sparsity": "2:4,every=2", "mode": "float"},
        pytest.param(
            {"sparsity": "2:4,every=2,begin=1,end=6", **DECODED}, marks=pytest.mark.thorough
        ),
    ],
    ids=["float", "decoded"],
)
def test_a_sparse_training_goes_on_bit_for_bit(options, tmp_path):
    """In floats, which have no clips, and with the learned clips of formats that are decoded."""
    whole_and_later("gpt2", tmp_path, QuantConfig(**options), at=3, max_steps=7, save_steps=3)


@pytest.mark.thorough
def test_sparse_weights(tmp_path):
    """Masks are chosen, come back with a checkpoint, and are zeros in the end."""
    whole, _ = whole_and_later("gpt2", tmp_path, QuantConfig(**SPARSE))
    weight = whole.model.transformer.h[1].mlp.c_fc.weight
    assert ((weight.t().unflatten(1, (-1, 4)) != 0).sum(2) == 2).all()
    kept = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "moved")
    assert (kept.transformer.h[1].mlp.c_fc.weight != 0).all()


@pytest.mark.thorough
def test_restored_callbacks(tmp_path):
    options = {"restore_callback_states_from_checkpoint": True, "max_steps": 4, "save_steps": 2}
    checkpoint, gradients = str(tmp_path / "checkpoint-2"), GradientConfig(mode="int8")
    given = LsqCallback(every_tensor=True, gradients=gradients)
    first = trainer("bert", tmp_path, given, **options)
    first.train()
    later = trainer("bert", tmp_path, LsqCallback(), model=converted("bert", seed=3), **options)
    later.train(resume_from_checkpoint=checkpoint)
    assert losses(later) == losses(first) and same_states(later.model, first.model)
    callback = callback_of(later)
    assert callback.every_tensor and callback.gradients == gradients
    trainer("bert", tmp_path, LsqCallback(largest_batch=batch("bert")), **options).train()
    with pytest.raises(ValueError, match="cannot bring back largest_batch"):
        trainer("bert", tmp_path, LsqCallback(), **options).train(resume_from_checkpoint=checkpoint)


@pytest.mark.thorough
def test_checkpoints_of_others(tmp_path, caplog):
    """Without the callback's entry, clips are measured again."""
    trainer("bert", tmp_path, max_steps=2, save_steps=2).train()
    later = trainer("bert", tmp_path, LsqCallback(), max_steps=4, save_steps=2)
    later.train(resume_from_checkpoint=True)
    assert "written without LsqCallback: clips are measured again" in caplog.text
    state = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["stateful_callbacks"]["LsqCallback"]["attributes"]["clips"]


def assert_loads(training, folder: str | Path) -> None:
    """A folder holds the model of a training, as transformers reads it, and its clips."""
    loaded, information = type(training.model).from_pretrained(folder, output_loading_info=True)
    assert not any(information.values())
    lsq.convert(loaded)
    load_clips(loaded, folder)
    assert same_states(loaded, training.model)


@pytest.mark.parametrize("name", first(["bert", "gpt2", "llama"], 1))
def test_checkpoints_are_ordinary_ones(name, tmp_path):
    training = trainer(name, tmp_path, LsqCallback(), max_steps=2, save_steps=2)
    training.train()
    assert_loads(training, tmp_path / "checkpoint-2")


def test_the_best_model_has_its_clips(tmp_path):
    training = trainer(
        "bert",
        tmp_path,
        LsqCallback(),
        eval_strategy="steps",
        eval_steps=2,
        save_steps=2,
        max_steps=6,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=True,
    )
    training.train()
    best = training.state.best_model_checkpoint
    assert not best.endswith("checkpoint-6")
    assert_loads(training, best)


# Logs


def ours(logs: dict, *kinds: str) -> dict[str, float]:
    """What lsq has logged; `kinds`: parts of names."""
    found = {key: value for key, value in logs.items() if key.startswith("lsq/")}
    return {key: one for key, one in found.items() if any(kind in key for kind in kinds or [""])}


def test_signals_are_logged(tmp_path):
    options = {"max_steps": 2, "save_strategy": "no", "report_to": ["tensorboard"]}
    training, seen = trainer("bert", tmp_path, LsqCallback(), **options), []

    class Reporter(transformers.TrainerCallback):
        def on_log(self, args, state, control, *, logs, **others):
            seen.append(dict(logs))

    training.callback_handler.callbacks.insert(0, Reporter())
    training.train()
    first, second, *_ = training.state.log_history
    kinds, signals = ("weight", "activation"), ("clip", "clipped_share", "zero_share")
    names = {f"lsq/{kind}_{signal}" for kind in kinds for signal in signals}
    assert ours(first).keys() == ours(seen[0]).keys() == names
    assert not ours(second)
    assert first["lsq/activation_clipped_share"] == 0 < first["lsq/activation_zero_share"]
    assert first["lsq/weight_clip"] > 0


@pytest.mark.thorough
def test_what_is_decoded_is_logged(tmp_path, caplog):
    caplog.set_level(logging.INFO, "lsq")
    model = converted("gpt2", quant=QuantConfig(weight_format="int8,*h.0.mlp*=nvfp4"))
    trainer("gpt2", tmp_path, LsqCallback(), model=model, max_steps=1, save_strategy="no").train()
    (said,) = [one.getMessage() for one in caplog.records if "decoded values" in one.getMessage()]
    assert said.endswith("int8/row (2 weights), nvfp4 (2 weights), int8/tensor (5 activations)")


@pytest.mark.thorough
def test_noise_is_watched_and_logged(tmp_path, caplog):
    options = {"largest_batch": batch("gpt2"), "every_tensor": True}
    watched = LsqCallback(monitor=WATCHED | {"every": 2}, **options)
    caplog.set_level(logging.INFO, "lsq")
    training = trainer("gpt2", tmp_path, watched, max_steps=6, save_strategy="no")
    training.train()
    logs = [entry for entry in training.state.log_history if "loss" in entry]
    clips = {f"lsq/clip/{name}" for name, _ in quantized_tensors(training.model)}
    assert ours(logs[0], "lsq/clip/").keys() == clips
    found = [ours(entry, "signal_to_noise", "modules_in_floats") for entry in logs]
    assert [bool(one) for one in found] == [False, True, False, True, False, True]
    modules = [name for name in found[1] if name.startswith("lsq/output_signal_to_noise/")]
    least = min(found[1][name] for name in modules)
    assert found[1]["lsq/output_signal_to_noise"] == least and len(modules) == 3
    assert [found[step]["lsq/modules_in_floats"] for step in (1, 3, 5)] == [0, 3, 3]
    assert sum("memory (planned)" in record.getMessage() for record in caplog.records) == 2
    assert watched.monitor.in_floats == ("transformer.h.0", "transformer.h.1", "lm_head")


# Options


@pytest.mark.thorough
@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"bf16": True},
        {"gradient_checkpointing": True},
        {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
    ],
    ids=str,
)
def test_options_of_trainer(options, planned, tmp_path):
    if planned and "gradient_checkpointing" in options:
        pytest.skip("it is refused")
    largest = batch("llama", options.get("per_device_train_batch_size", 8)) if planned else None
    callback = LsqCallback(largest_batch=largest)
    training = trainer(
        "llama", tmp_path, callback, save_strategy="no", learning_rate=1e-2, **options
    )
    training.train()
    assert losses(training)[-1] < losses(training)[0] - 0.3
    assert training.evaluate()["eval_loss"] < losses(training)[0]


@pytest.mark.thorough
def test_planned_memory_changes_nothing(tmp_path, caplog):
    caplog.set_level(logging.INFO, "lsq")
    found = []
    for largest in (None, batch("gpt2")):
        callback = LsqCallback(largest_batch=largest)
        found.append(trainer("gpt2", tmp_path, callback, save_strategy="no"))
        found[-1].train()
    assert losses(found[0]) == losses(found[1])
    assert same_states(found[0].model, found[1].model)
    messages = [record.getMessage() for record in caplog.records]
    (said,) = [text for text in messages if "memory (planned)" in text]
    parts = "of lsq's layers in", "modules that are not lsq's (", "Dropout"
    assert all(part in said for part in parts)


@pytest.mark.thorough
def test_optimizer_of_lsq(tmp_path):
    training = trainer("bert", tmp_path, LsqCallback(), save_strategy="no", max_steps=20)
    training.optimizer_cls_and_kwargs = (Adam, {"lr": 3e-3})
    training.train()
    assert losses(training)[-1] < losses(training)[0] - 0.3


@pytest.mark.thorough
def test_trainer_on_codes(tmp_path):
    """Steps in the backward pass are clipped by the optimizer, not by Trainer."""
    for most in (1.0, 0.0):
        model = converted("llama")
        lsq.train_codes(model)
        options = {"save_strategy": "no", "max_grad_norm": most}
        training = trainer("llama", tmp_path, LsqCallback(), model=model, **options)
        training.optimizer = Adam(model.parameters(), 3e-3, moment_bits=8).step_in_backward()
        if most:
            with pytest.raises(ValueError, match="set max_grad_norm=0, and"):
                training.train()
        else:
            training.optimizer.backward.max_norm = 1.0
            training.train()
            assert losses(training)[-1] < losses(training)[0] - 0.3


@pytest.mark.thorough
def test_what_does_not_fit_is_refused(tmp_path, caplog):
    with pytest.raises(ValueError, match="memory is 'some'; allowed"):
        LsqCallback(memory="some")
    with pytest.raises(ValueError, match="'guard', but no memory is planned without largest_batch"):
        trainer("bert", tmp_path, LsqCallback(memory="guard")).train()
    with pytest.raises(ValueError, match="monitor has 'often'; allowed: every, rows"):
        LsqCallback(monitor={"often": 3})
    for options in ({"monitor": 5}, {"gradients": "int8"}, {"largest_batch": 8}):
        with pytest.raises(TypeError, match=f"{next(iter(options))} is .*; give .*leave it out"):
            LsqCallback(**options)
    with pytest.raises(ValueError, match="call lsq.convert.model. before the Trainer"):
        trainer("bert", tmp_path, LsqCallback(), model=MAKERS["bert"]()).train()
    with pytest.raises(ValueError, match="something else has called it"):
        LsqCallback().on_train_begin(None, None, None, model=converted("bert"), optimizer=None)
    checkpointed = LsqCallback(largest_batch=batch("llama"))
    with pytest.raises(
        ValueError, match="runs layers again in the backward pass, which cannot be planned"
    ):
        trainer("llama", tmp_path, checkpointed, gradient_checkpointing=True).train()
    model = MAKERS["bert"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lsq.convert(model, QuantConfig(clips="learned"))
    options = {"max_steps": 1, "save_strategy": "no"}
    training = trainer("bert", tmp_path, LsqCallback(), model=model, **options)
    training.optimizer = optimizer
    training.train()
    assert "was made before lsq.convert" in caplog.text


# Others that train


@pytest.mark.thorough
def test_supervised_finetuning_goes_on_bit_for_bit(tmp_path):
    trl, datasets, tokenizers = map(pytest.importorskip, ("trl", "datasets", "tokenizers"))
    vocabulary = {str(word): word for word in range(96)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="95", eos_token="94", unk_token="0"
    )
    rows = [example["input_ids"].tolist() for example in data("llama", 32)]
    texts = datasets.Dataset.from_list([{"text": " ".join(map(str, row))} for row in rows])

    def training(folder: str, seed: int):
        options = SHORT | {"bf16": False, "gradient_checkpointing": False, "learning_rate": 1e-2}
        options = trl.SFTConfig(str(tmp_path / folder), **options, max_length=32)
        return trl.SFTTrainer(
            converted("llama", seed),
            args=options,
            train_dataset=texts,
            processing_class=tokenizer,
            callbacks=[LsqCallback()],
        )

    whole, later = training("whole", 1), training("later", 4)
    whole.train()
    later.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    assert losses(whole) == losses(later) and losses(whole)[-1] < losses(whole)[0] - 0.3
    assert {"lsq/activation_clip", "mean_token_accuracy"} <= whole.state.log_history[0].keys()


@pytest.fixture
def accelerate():
    """accelerate's Accelerator, without the state that a Trainer of another test has left."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield Accelerator
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_loop_goes_on_bit_for_bit(precision, tmp_path, accelerate):
    def prepared(seed: int):
        model = converted("gpt2", seed=seed)
        return accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

    def steps(model, optimizer, count: int) -> list[float]:
        found = []
        for example in data("gpt2", count):
            words = example["input_ids"][None]
            with accelerator.accumulate(model):
                loss = model(input_ids=words, labels=words).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            found.append(loss.item())
        return found

    accelerator = accelerate(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
    first = prepared(1)
    found = steps(*first, 12)
    assert found[-1] < found[0] - 0.3
    accelerator.save_state(tmp_path)
    expected, second = steps(*first, 4), prepared(9)
    del accelerator._models[0], accelerator._optimizers[0]
    accelerator.load_state(tmp_path)
    assert steps(*second, 4) == expected
    assert same_states(*(accelerator.unwrap_model(model) for model, _ in (first, second)))
