"""transformers' Trainer of converted models, by itself and with LsqCallback."""

import json
import logging

import pytest
import torch

import lsq
from lsq.config import QuantConfig
from lsq.dist import GradientConfig
from lsq.models import LsqCallback, load_clips
from lsq.observe import quantized_tensors
from lsq.optim import Adam
from tests.constants import quant_with
from tests.models.trainings import (
    MAKERS,
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


def batch(name: str, rows: int = 8) -> dict[str, torch.Tensor]:
    examples = data(name, rows)
    return {key: torch.stack([example[key] for example in examples]) for key in examples[0]}


def test_trainer_needs_nothing_else(tmp_path):
    training = trainer("bert", tmp_path, save_strategy="no", max_steps=30)
    training.train()
    assert losses(training)[-1] < losses(training)[0] - 0.3
    assert training.evaluate()["eval_loss"] < losses(training)[0]
    assert training.predict(data("bert", 5)).predictions.shape == (5, 3)


@pytest.mark.parametrize("name", first(["bert", "gpt2"], 1))
def test_training_goes_on_bit_for_bit(name, tmp_path):
    whole = trainer(name, tmp_path / "whole", LsqCallback())
    whole.train()
    checkpoint = tmp_path / "whole" / "checkpoint-4"
    moved = checkpoint.rename(tmp_path / "moved")
    later = trainer(name, tmp_path / "later", LsqCallback(), model=converted(name, seed=5))
    later.train(resume_from_checkpoint=str(moved))
    assert losses(later) == losses(whole)
    assert same_states(later.model, whole.model)


@pytest.mark.parametrize("name", first(["bert", "gpt2", "llama"], 1))
def test_checkpoints_are_ordinary_ones(name, tmp_path, caplog):
    training = trainer(name, tmp_path, LsqCallback(), max_steps=2, save_steps=2)
    training.train()
    folder = tmp_path / "checkpoint-2"
    loaded, information = type(training.model).from_pretrained(folder, output_loading_info=True)
    assert not any(information.values())
    assert loaded.state_dict().keys() == MAKERS[name]().state_dict().keys()
    lsq.convert(loaded)
    load_clips(loaded, folder)
    assert same_states(loaded, training.model)


def ours(logs: dict) -> set[str]:
    return {key for key in logs if key.startswith("lsq/")}


def test_signals_are_logged(tmp_path):
    training = trainer(
        "bert", tmp_path, LsqCallback(), max_steps=2, save_strategy="no", report_to=["tensorboard"]
    )
    seen = []

    class Reporter(transformers.TrainerCallback):
        def on_log(self, args, state, control, *, logs, **others):
            seen.append(dict(logs))

    training.callback_handler.callbacks.insert(0, Reporter())
    training.train()
    first, second, *_ = training.state.log_history
    kinds, signals = ("weight", "activation"), ("clip", "clipped_share", "zero_share")
    assert (
        ours(first)
        == ours(seen[0])
        == {f"lsq/{kind}_{signal}" for kind in kinds for signal in signals}
    )
    assert not ours(second)
    assert first["lsq/activation_clipped_share"] == 0 < first["lsq/activation_zero_share"]
    assert first["lsq/weight_clip"] > 0


def test_signals_of_every_tensor(tmp_path):
    training = trainer(
        "gpt2", tmp_path, LsqCallback(every_tensor=True), max_steps=1, save_strategy="no"
    )
    training.train()
    found = {key for key in training.state.log_history[0] if key.startswith("lsq/clip/")}
    assert found == {f"lsq/clip/{name}" for name, _ in quantized_tensors(training.model)}


def test_clips_that_cut_are_warned_of_once(tmp_path, caplog):
    model = converted("bert", quant=quant_with(clip_init="fixed", activation_clip=0.05))
    trainer(
        "bert",
        tmp_path,
        LsqCallback(),
        model=model,
        max_steps=26,
        logging_steps=25,
        save_strategy="no",
    ).train()
    told = [
        record.getMessage()
        for record in caplog.records
        if "values are clipped" in record.getMessage()
    ]
    names = [text.partition(",")[0] for text in told]
    assert "bert.encoder.layer.0.feed_forward.input" in names and len(set(names)) == len(names)
    assert all("try QuantConfig(clip_init='absmax')" in text for text in told)


def test_what_is_decoded_is_logged(tmp_path, caplog):
    caplog.set_level(logging.INFO, "lsq")
    model = converted("gpt2", quant=QuantConfig(weight_format="int8,*h.0.mlp*=nvfp4"))
    trainer("gpt2", tmp_path, LsqCallback(), model=model, max_steps=1, save_strategy="no").train()
    (said,) = [one.getMessage() for one in caplog.records if "decoded values" in one.getMessage()]
    assert said.endswith("int8/row (2 weights), nvfp4 (2 weights), int8/tensor (5 activations)"), (
        said
    )


def noise(logs: dict) -> dict[str, float]:
    return {
        key: value
        for key, value in logs.items()
        if "signal_to_noise" in key or key == "lsq/modules_in_floats"
    }


def test_noise_is_watched_and_logged(tmp_path, caplog):
    below = {"output": 200, "input_gradient": -100, "weight_gradient": -100}
    watched = LsqCallback(
        monitor={"every": 2, "bounds": below}, largest_batch=batch("gpt2"), every_tensor=True
    )
    caplog.set_level(logging.INFO, "lsq")
    training = trainer("gpt2", tmp_path, watched, max_steps=6, save_strategy="no")
    training.train()
    found = [noise(entry) for entry in training.state.log_history if "loss" in entry]
    assert [bool(one) for one in found] == [False, True, False, True, False, True]
    modules = [name for name in found[1] if name.startswith("lsq/output_signal_to_noise/")]
    assert (
        found[1]["lsq/output_signal_to_noise"] == min(found[1][name] for name in modules)
        and len(modules) == 3
    )
    assert [found[step]["lsq/modules_in_floats"] for step in (1, 3, 5)] == [0, 3, 3]
    assert sum("memory (planned)" in record.getMessage() for record in caplog.records) == 2
    assert watched.monitor.in_floats == ("transformer.h.0", "transformer.h.1", "lm_head")


@pytest.mark.thorough
def test_a_watched_training_goes_on_bit_for_bit(tmp_path):
    options = {
        "every": 3,
        "bounds": {"output": 200, "input_gradient": -100, "weight_gradient": -100},
    }
    whole = trainer("gpt2", tmp_path / "whole", LsqCallback(monitor=options))
    whole.train()
    later = trainer(
        "gpt2", tmp_path / "later", LsqCallback(monitor=options), model=converted("gpt2", seed=5)
    )
    later.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    assert losses(later) == losses(whole) and same_states(later.model, whole.model)
    (callback,) = [one for one in later.callback_handler.callbacks if isinstance(one, LsqCallback)]
    assert callback.monitor.steps == 8 and len(callback.monitor.in_floats) == 3
    state = LsqCallback(monitor=options).state()["args"]
    assert (
        json.loads(json.dumps(state)) == state
        and LsqCallback(**state).monitor_options == callback.monitor_options
    )


OPTIONS = {
    "bfloat16": {"bf16": True},
    "checkpointing": {"gradient_checkpointing": True},
    "accumulation": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
    "bfloat16, planned": {"bf16": True},
    "accumulation, planned": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
}


@pytest.mark.thorough
@pytest.mark.parametrize("options", OPTIONS)
def test_options_of_trainer(options, tmp_path):
    given = OPTIONS[options]
    planned = (
        batch("llama", given.get("per_device_train_batch_size", 8))
        if "planned" in options
        else None
    )
    training = trainer(
        "llama",
        tmp_path,
        LsqCallback(largest_batch=planned),
        save_strategy="no",
        learning_rate=1e-2,
        **given,
    )
    training.train()
    assert losses(training)[-1] < losses(training)[0] - 0.3
    assert training.evaluate()["eval_loss"] < losses(training)[0]


@pytest.mark.thorough
def test_planned_memory_changes_nothing(tmp_path, caplog):
    caplog.set_level(logging.INFO, "lsq")
    found = []
    for planned in (False, True):
        callback = LsqCallback(largest_batch=batch("gpt2") if planned else None)
        training = trainer("gpt2", tmp_path, callback, save_strategy="no")
        training.train()
        found.append(training)
    assert losses(found[0]) == losses(found[1])
    assert same_states(found[0].model, found[1].model)
    (said,) = [
        record.getMessage()
        for record in caplog.records
        if "memory (planned)" in record.getMessage()
    ]
    assert all(
        part in said for part in ("of lsq's layers in", "modules that are not lsq's (", "Dropout")
    )


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
    loaded = type(training.model).from_pretrained(best)
    lsq.convert(loaded)
    load_clips(loaded, best)
    assert same_states(loaded, training.model)


@pytest.mark.thorough
def test_checkpoints_of_others(tmp_path, caplog):
    """What a Trainer without the callback has written: the training goes on with clips that are
    measured again."""
    trainer("bert", tmp_path, max_steps=2, save_steps=2).train()
    later = trainer("bert", tmp_path, LsqCallback(), max_steps=4, save_steps=2)
    later.train(resume_from_checkpoint=True)
    assert "written without LsqCallback: clips are measured again" in caplog.text
    state = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["stateful_callbacks"]["LsqCallback"]["attributes"]["clips"]


def test_restored_callbacks(tmp_path):
    options = {"restore_callback_states_from_checkpoint": True, "max_steps": 4, "save_steps": 2}
    first = trainer(
        "bert",
        tmp_path,
        LsqCallback(every_tensor=True, gradients=GradientConfig(mode="int8")),
        **options,
    )
    first.train()
    later = trainer("bert", tmp_path, LsqCallback(), model=converted("bert", seed=3), **options)
    later.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert losses(later) == losses(first) and same_states(later.model, first.model)
    (callback,) = [one for one in later.callback_handler.callbacks if isinstance(one, LsqCallback)]
    assert callback.every_tensor and callback.gradients == GradientConfig(mode="int8")
    planned = trainer("bert", tmp_path, LsqCallback(largest_batch=batch("bert")), **options)
    planned.train()
    with pytest.raises(ValueError, match="cannot bring back largest_batch"):
        trainer("bert", tmp_path, LsqCallback(), **options).train(
            resume_from_checkpoint=str(tmp_path / "checkpoint-2")
        )


def test_what_does_not_fit_is_refused(tmp_path, caplog):
    with pytest.raises(ValueError, match="memory is 'some'; allowed"):
        LsqCallback(memory="some")
    with pytest.raises(ValueError, match="'guard', but no memory is planned without largest_batch"):
        trainer("bert", tmp_path, LsqCallback(memory="guard")).train()
    with pytest.raises(ValueError, match="monitor has 'often'; allowed: every, rows"):
        LsqCallback(monitor={"often": 3})
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
    training = trainer(
        "bert", tmp_path, LsqCallback(), model=model, max_steps=1, save_strategy="no"
    )
    training.optimizer = optimizer
    training.train()
    assert "no optimizer has the" in caplog.text


@pytest.mark.thorough
def test_optimizer_of_lsq(tmp_path):
    training = trainer("bert", tmp_path, LsqCallback(), save_strategy="no", max_steps=20)
    training.optimizer_cls_and_kwargs = (Adam, {"lr": 3e-3})
    training.train()
    assert losses(training)[-1] < losses(training)[0] - 0.3


def test_low_rank_adapters_go_on_bit_for_bit(tmp_path):
    peft = pytest.importorskip("peft")

    def adapted(seed: int) -> torch.nn.Module:
        model = converted("llama", fused=False)
        torch.manual_seed(seed)
        return peft.get_peft_model(
            model, peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj", "up_proj"])
        )

    whole = trainer("llama", tmp_path / "whole", LsqCallback(), model=adapted(1))
    whole.train()
    later = trainer("llama", tmp_path / "later", LsqCallback(), model=adapted(2))
    later.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    assert losses(later) == losses(whole) and losses(whole)[-1] < losses(whole)[0]
    assert same_states(later.model, whole.model)


@pytest.mark.parametrize(
    "options",
    [
        {"sparsity": "2:4,every=2", "mode": "float"},
        pytest.param(
            {
                "sparsity": "2:4,every=2,begin=1,end=6",
                "weight_format": "nvfp4",
                "activation_format": "fp8-e4m3/tensor",
                "gradient_format": "fp8-e5m2/row",
            },
            marks=pytest.mark.thorough,
        ),
    ],
    ids=["float", "decoded"],
)
def test_a_sparse_training_that_was_cut_off_goes_on_bit_for_bit(options, tmp_path):
    """In floats, which have no clips, and with the learned clips of formats that are decoded."""
    quant = QuantConfig(**options)

    def training(folder: str, seed: int):
        model = converted("gpt2", seed=seed, quant=quant)
        return trainer(
            "gpt2", tmp_path / folder, LsqCallback(), model=model, max_steps=7, save_steps=3
        )

    whole, later = training("whole", 1), training("later", 5)
    whole.train()
    later.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert losses(later) == losses(whole) and same_states(later.model, whole.model)


SPARSE = QuantConfig(sparsity="2:4,every=2,begin=1")


def test_sparse_weights(tmp_path):
    """Masks are chosen, come back with a checkpoint, and are zeros in the end."""
    whole = trainer(
        "gpt2", tmp_path / "whole", LsqCallback(), model=converted("gpt2", quant=SPARSE)
    )
    whole.train()
    later = trainer(
        "gpt2", tmp_path / "later", LsqCallback(), model=converted("gpt2", seed=5, quant=SPARSE)
    )
    later.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    assert losses(later) == losses(whole)
    assert same_states(later.model, whole.model)
    weight = whole.model.transformer.h[1].mlp.c_fc.weight
    assert ((weight.t().unflatten(1, (-1, 4)) != 0).sum(2) == 2).all()
    kept = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "whole" / "checkpoint-4")
    assert (kept.transformer.h[1].mlp.c_fc.weight != 0).all()


@pytest.fixture
def accelerate():
    yield Accelerator
    AcceleratorState._reset_state(reset_partial_state=True)


def steps(accelerator, model, optimizer, count: int) -> list[float]:
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


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_loop_goes_on_bit_for_bit(precision, tmp_path, accelerate):
    accelerator = accelerate(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
    model = converted("gpt2")
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    found = steps(accelerator, model, optimizer, 12)
    assert found[-1] < found[0] - 0.3
    accelerator.save_state(tmp_path)
    expected = steps(accelerator, model, optimizer, 4)
    other = converted("gpt2", seed=9)
    other, optimizer = accelerator.prepare(other, torch.optim.AdamW(other.parameters(), lr=1e-2))
    accelerator._models, accelerator._optimizers = (
        accelerator._models[1:],
        accelerator._optimizers[1:],
    )
    accelerator.load_state(tmp_path)
    assert steps(accelerator, other, optimizer, 4) == expected
    assert same_states(accelerator.unwrap_model(other), accelerator.unwrap_model(model))
