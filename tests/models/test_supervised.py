"""TRL's SFTTrainer of a converted model."""

import pytest

from lsq.models import LsqCallback
from tests.models.trainings import converted, data, losses, transformers

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
tokenizers = pytest.importorskip("tokenizers")


def tokenizer():
    words = {str(word): word for word in range(96)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="95", eos_token="94", unk_token="0"
    )


def test_supervised_finetuning_goes_on_bit_for_bit(tmp_path):
    texts = [
        {"text": " ".join(map(str, example["input_ids"].tolist()))} for example in data("llama", 32)
    ]

    def training(folder: str, seed: int):
        options = trl.SFTConfig(
            output_dir=str(tmp_path / folder),
            max_steps=8,
            save_steps=4,
            per_device_train_batch_size=8,
            learning_rate=1e-2,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
            gradient_checkpointing=False,
            max_length=32,
        )
        return trl.SFTTrainer(
            converted("llama", seed),
            args=options,
            train_dataset=datasets.Dataset.from_list(texts),
            processing_class=tokenizer(),
            callbacks=[LsqCallback()],
        )

    whole, later = training("whole", 1), training("later", 4)
    whole.train()
    later.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    assert losses(whole) == losses(later) and losses(whole)[-1] < losses(whole)[0] - 0.3
    assert "lsq/activation_clip" in whole.state.log_history[0]
    assert "mean_token_accuracy" in whole.state.log_history[0]
