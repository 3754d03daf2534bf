import pytest
import torch
from fairseq.data import TokenBlockDataset


@pytest.mark.parametrize(
    "mode, expected",
    [
        ("eos", [[5, 6, 2], [7, 2]]),
        ("none", [[5, 6], [2, 7], [2]]),
        ("complete", [[5, 6, 2], [7, 2]]),
    ],
)
def test_text_is_cut_into_blocks(mode, expected):
    sentences = [torch.tensor([5, 6, 2]), torch.tensor([7, 2])]
    size = 2 if mode == "none" else 3
    blocks = TokenBlockDataset(sentences, [3, 2], block_size=size, pad=1, eos=2, break_mode=mode)
    assert [blocks[number].tolist() for number in range(len(blocks))] == expected
