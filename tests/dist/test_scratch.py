import torch

from lsq.dist.scratch import Scratch


def test_pieces_grow_and_are_used_again():
    scratch = Scratch(torch.device("cpu"))
    first = scratch.take("a", (3, 5), torch.float32)
    assert first.shape == (3, 5) and first.dtype == torch.float32 and first.is_contiguous()
    assert scratch.take("a", (7,)).data_ptr() == first.data_ptr()
    assert scratch.take("b", (3, 5), torch.float32).data_ptr() != first.data_ptr()
    assert scratch.take("a", (0, 4), torch.float16).shape == (0, 4)
    assert scratch.take("a", (1000,)).numel() == 1000
