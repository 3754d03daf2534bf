"""Paddings of batches, which stay on the CPU."""

import pickle

import torch
from fairseq import utils

from lsq.fairseq.paddings import BATCH, Collater, Paddings

PAD = 1
TOKENS = torch.tensor([[5, 6, PAD], [7, 8, 9]])


def collate(samples):
    return {"id": torch.tensor(samples), "net_input": {"src_tokens": TOKENS}} if samples else {}


def test_a_batch_has_its_paddings():
    batch = Collater(collate, PAD)([1, 2])
    assert (
        torch.equal(batch[BATCH].src_tokens, TOKENS == PAD)
        and batch[BATCH].prev_output_tokens is None
    )
    assert Collater(collate, PAD)([]) == {}, "the batch of a process that has none left"


def test_they_stay_where_they_are_and_reach_workers():
    batch = Collater(collate, PAD)([1, 2])
    moved = utils.apply_to_sample(lambda tensor: tensor.to("meta"), batch)
    assert moved["net_input"]["src_tokens"].is_meta and moved[BATCH] is batch[BATCH]
    assert pickle.loads(pickle.dumps(Collater(collate, PAD)))([1])[BATCH].src_tokens.shape == (2, 3)


def test_a_model_takes_them_instead_of_looking_at_the_tokens(build, batch):
    task, model = build("")
    inputs, target = batch(task)["net_input"], batch(task)["target"]
    paddings = Paddings(*(inputs[name].eq(PAD) for name in ("src_tokens", "prev_output_tokens")))
    model.eval()(**inputs)  # measures the clips
    losses = [model(**inputs, target=target, paddings=given)[0] for given in (None, paddings)]
    assert torch.equal(*losses)
    more = Paddings(torch.zeros_like(paddings.src_tokens), paddings.prev_output_tokens)
    assert not torch.equal(losses[0], model(**inputs, target=target, paddings=more)[0])


def test_batches_of_a_training_have_them(build):
    task, _ = build("")
    task.load_dataset("train")
    iterator = task.get_batch_iterator(
        task.dataset("train"), max_tokens=200, max_positions=(50, 50)
    )
    again = task.get_batch_iterator(task.dataset("train"), max_tokens=200, max_positions=(50, 50))
    for found in (iterator, again):
        one = next(iter(found.next_epoch_itr(shuffle=False)))
        inputs = one["net_input"]
        assert torch.equal(
            one[BATCH].src_tokens, inputs["src_tokens"] == task.source_dictionary.pad()
        )
        assert torch.equal(
            one[BATCH].prev_output_tokens,
            inputs["prev_output_tokens"] == task.source_dictionary.pad(),
        )
