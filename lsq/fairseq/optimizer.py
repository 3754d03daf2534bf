"""`--optimizer lsq_adam`: lsq.optim.Adam with the options and the arithmetic of fairseq's adam. Its
step also multiplies and clips gradients, for which fairseq's adam makes passes of their own."""

import ast
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, List  # noqa: UP035  fairseq cannot read list[...]

from fairseq.dataclass import FairseqDataclass
from fairseq.optim import FairseqOptimizer, register_optimizer
from omegaconf import II, OmegaConf
from torch import Tensor

from lsq.fairseq.gradients import option
from lsq.optim import Adam


@dataclass
class LSQAdamConfig(FairseqDataclass):
    """Options of lsq_adam; the last ones are fairseq's own."""

    adam_betas: Any = option((0.9, 0.999), "decay of the first and of the second moment")
    adam_eps: float = option(1e-8, "added to the root of the second moment")
    weight_decay: float = option(
        0.0, "share of itself, times the learning rate, that a parameter loses in an update"
    )
    fp16: bool = II("common.fp16")
    bf16: bool = II("common.bf16")
    amp: bool = II("common.amp")
    use_bmuf: bool = II("optimization.use_bmuf")
    lr: List[float] = II("optimization.lr")  # noqa: UP006


@register_optimizer("lsq_adam", dataclass=LSQAdamConfig)
class LSQAdam(FairseqOptimizer):
    """Adam that also limits clips and makes the codes of weights; ValueError if an option is out of
    its range, or excludes this optimizer."""

    def __init__(self, cfg: LSQAdamConfig, params):
        super().__init__(cfg)
        for name in ("fp16", "bf16", "amp", "use_bmuf"):
            if getattr(cfg, name, False):
                raise ValueError(
                    "--optimizer lsq_adam steps float32 parameters itself and does not go with "
                    f"--{name.replace('_', '-')}; leave that out, or take --optimizer adam"
                )
        self._optimizer = Adam(params, **self.optimizer_config)

    @property
    def optimizer_config(self) -> dict[str, Any]:
        rate, betas = self.cfg.lr, self.cfg.adam_betas
        betas = ast.literal_eval(betas) if isinstance(betas, str) else OmegaConf.to_container(betas)
        return {
            "lr": rate[0] if isinstance(rate, Collection) else rate,
            "betas": tuple(betas),
            "eps": self.cfg.adam_eps,
            "weight_decay": self.cfg.weight_decay,
            "torch_epsilon": False,
        }

    @property
    def gradient_factor(self) -> float | Tensor:
        return self.optimizer.gradient_factor

    def multiply_grads(self, c: float | Tensor) -> None:
        self.optimizer.multiply_grads(c)

    def clip_grad_norm(
        self, max_norm: float, aggregate_norm_fn: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Return the norm of all gradients; the next step reduces it to a `max_norm` above 0."""
        return self.optimizer.clip_grad_norm(max_norm, aggregate_norm_fn)
