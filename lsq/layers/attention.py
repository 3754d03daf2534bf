"""MultiheadAttention: over the input itself, or over a memory."""

import torch

from lsq.config import LayerConfig
from lsq.layers import programs
from lsq.layers.blocks import PackedSequences
from lsq.layers.module import ProgramModule
from lsq.layers.packing import check_memory, pack_time_major, packing_options, unpack_time_major
from lsq.layers.positions import position_inputs
from lsq.layers.torch_compile import beside_the_graph


class MultiheadAttention(ProgramModule):
    """Multi-head attention with int8 projections (Vaswani et al. 2017), initialised as fairseq
    does.

    Args:
        config: width, heads and dropout; what looks at places is self-attention's alone.
        cross: attend over a memory instead of the input itself.
    """

    def __init__(self, config: LayerConfig, *, cross: bool = False):
        super().__init__(config.quant)
        self.config, self.cross = config, cross
        one = PackedSequences(rows=1, count=1)
        if cross:
            self.declare(lambda mode: programs.cross_attention(config, one, one, mode))
        else:
            self.declare(
                lambda mode: programs.self_attention(
                    config, one, mode, causal=config.window is not None
                )
            )

    @beside_the_graph
    def forward(
        self,
        x: torch.Tensor,
        memory: torch.Tensor | None = None,
        key_padding_mask: torch.Tensor | None = None,
        causal: bool = False,
    ) -> torch.Tensor:
        """x float32 [T, B, H], memory [S, B, H] if cross; key_padding_mask bool, True is padding ->
        [T, B, H].

        The mask is [B, T], or [B, S] of the memory. Results are zero where x is padding.

        Raises:
            ValueError: a memory is missing or not wanted; another shape, no sentence, or no word.
        """
        if self.cross != (memory is not None):
            raise ValueError(
                f"cross is {self.cross}, but a memory was {'not ' if memory is None else ''}given"
            )
        width, options = self.config.hidden, packing_options(self)
        if memory is None:
            rows, packing = pack_time_major(x, key_padding_mask, width, **options)
            program = programs.self_attention(
                self.config, packing.sentences, self.mode(x), causal=causal
            )
            positions = position_inputs(
                self.config, packing.positions, packing.shape[1], causal=causal
            )
            (y,) = self.execute(program, {"x": rows, "cu_seqlens": packing.cu_seqlens, **positions})
        else:
            rows, packing = pack_time_major(x, None, width, **options)
            check_memory(memory, x)
            source, source_packing = pack_time_major(memory, key_padding_mask, width, **options)
            program = programs.cross_attention(
                self.config, packing.sentences, source_packing.sentences, self.mode(x, memory)
            )
            inputs = {"x": rows, "cu_seqlens": packing.cu_seqlens}
            (y,) = self.execute(
                program,
                {**inputs, "memory": source, "memory_cu_seqlens": source_packing.cu_seqlens},
            )
        return unpack_time_major(y, packing)
