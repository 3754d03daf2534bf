"""Layers of torch.nn.TransformerEncoder."""

import torch
from torch import nn

from lsq.models.batch import HIDDEN, remembered, visible
from lsq.models.fused_layer import FusedLayer, SideInputs
from lsq.models.reading import activation_of, at, sources


class EncoderLayer(FusedLayer):
    """PyTorch's encoder layer: masks decide if a pass is causal, and padding becomes zero."""

    STATE = (*FusedLayer.STATE, "causal")
    PARTS = {}
    MODULES = {
        "self_attn.out": "self_attn.out_proj",
        "self_attn_layer_norm": "norm1",
        "feed_forward.fc1": "linear1",
        "feed_forward.fc2": "linear2",
        "final_layer_norm": "norm2",
    }
    SOURCES = sources(MODULES) | {
        "self_attn.qkv_weight": ("self_attn.in_proj_weight",),
        "self_attn.qkv_bias": ("self_attn.in_proj_bias",),
    }
    SHAPE = {}
    SETTINGS = at(
        heads="self_attn.num_heads",
        attention_dropout="self_attn.dropout",
        activation_dropout="dropout.p",
        dropout=("dropout1.p", "dropout2.p"),
        pre_norm="norm_first",
        layer_norm_epsilon=("norm1.eps", "norm2.eps"),
    )

    @classmethod
    def shape(cls, layer: nn.Module) -> dict[str, object]:
        return {**super().shape(layer), "head_bias": layer.self_attn.in_proj_bias is not None}

    @classmethod
    def settings(cls, layer: nn.Module) -> dict[str, object]:
        if layer.self_attn.add_zero_attn:
            raise ValueError("its attention has add_zero_attn")
        return {**super().settings(layer), "activation": activation_of(layer.activation)}

    @classmethod
    def _check_attention(cls, layer: nn.Module) -> None:
        """Check nothing: PyTorch has one implementation, and masks decide whether it is causal."""

    @property
    def attention_kind(self) -> str:
        return "sdpa"

    def forward(
        self,
        src: torch.Tensor,
        src_mask: torch.Tensor | None = None,
        src_key_padding_mask: torch.Tensor | None = None,
        is_causal: bool = False,
    ) -> torch.Tensor:
        if src.is_nested:  # TransformerEncoder leaves padding out in evaluation
            return self._nested(src)
        read = None
        if src.dim() in (2, 3) and (src_mask is not None or not is_causal):
            x, masks = self._sentences(src), (src_mask, src_key_padding_mask)
            shape = tuple(x.shape[3 - src.dim() : 2])
            read = remembered("masks", masks, shape, lambda: _read(*masks, shape))
        if read is not None:
            self.causal, present = read
            packing = self.packing(x, present, {})
            if packing is not None:
                return self._as_given(self.fused(x, packing), src)
        return self.own_pass(src, src_mask, src_key_padding_mask, is_causal)

    def _nested(self, src: torch.Tensor) -> torch.Tensor:
        lengths = src._nested_tensor_size()[:, 0].to(src.device)
        x = src.to_padded_tensor(0.0)
        present = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
        y = self._as_given(self.forward(self._as_given(x, x), None, ~present), x)
        return torch._nested_tensor_from_mask(y, present, mask_check=False)

    def _sentences(self, src: torch.Tensor) -> torch.Tensor:
        """Return src as [B, T, H]: one sentence [T, H], or a batch ordered by batch_first."""
        if src.dim() == 2:
            return src[None]
        return src if self.self_attn.batch_first else src.transpose(0, 1)

    def _as_given(self, y: torch.Tensor, src: torch.Tensor) -> torch.Tensor:
        if src.dim() == 2:
            return y[0]
        return y if self.self_attn.batch_first else y.transpose(0, 1)

    def original(
        self, x: torch.Tensor, mask: torch.Tensor | None, side: SideInputs
    ) -> torch.Tensor:
        mask = None if mask is None else mask[0, 0]
        return self._sentences(self.float_class.forward(self, self._as_given(x, x), mask))


def _read(
    mask: torch.Tensor | None, padding: torch.Tensor | None, shape: tuple[int, ...]
) -> tuple[bool, torch.Tensor | None] | None:
    """Return (whether a pass is causal, its tokens bool [B, T] or None for all), from its masks.

    `mask`: [T, T], True where a query does not see a key, or numbers that are added to scores.
    `padding`: [B, T] or [T], the same for keys. Returns None if attention is neither full nor
    causal, or PyTorch refuses the masks.
    """
    present = None if padding is None or padding.shape != shape else _seen(padding)
    if padding is not None and present is None:
        return None
    present = present if present is None or present.dim() == 2 else present[None]
    if mask is None:
        return False, present
    sees = _seen(mask) if tuple(mask.shape) == 2 * shape[-1:] else None
    if sees is None:
        return None
    if sees.all():
        return False, present
    past = visible(torch.ones_like(sees[:1]), causal=True)[0]
    return (True, present) if torch.equal(sees, past) else None


def _seen(mask: torch.Tensor) -> torch.Tensor | None:
    """Return where a mask hides nothing; None if it adds other numbers to scores."""
    if mask.dtype == torch.bool:
        return ~mask
    seen = mask == 0
    return seen if (seen | (mask <= HIDDEN)).all() else None
