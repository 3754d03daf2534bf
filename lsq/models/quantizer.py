"""LsqConfig: lsq as a quantization_config of transformers, whose weights train as codes."""

from dataclasses import asdict, fields
from typing import Any

import torch
from torch import nn

from lsq import extras
from lsq.config import QuantConfig
from lsq.layers import ProgramModule
from lsq.layers.trained_codes import TrainedCodes
from lsq.models import huggingface
from lsq.models.clips import clip_names
from lsq.models.conversion import convert
from lsq.models.trained_codes import train_codes

extras.require("LsqConfig", "huggingface")
huggingface.keep_broken_torchaudio_out()
from transformers.core_model_loading import ConversionOps  # noqa: E402
from transformers.quantizers import HfQuantizer  # noqa: E402
from transformers.quantizers.auto import (  # noqa: E402
    register_quantization_config,
    register_quantizer,
)
from transformers.utils.quantization_config import QuantizationConfigMixin  # noqa: E402

METHOD = "lsq"


@register_quantization_config(METHOD)
class LsqConfig(QuantizationConfigMixin):
    """How `from_pretrained(..., quantization_config=LsqConfig())` loads a model to train it.

    The model is converted (lsq.convert), and each weight becomes codes as soon as it is read from
    its file (lsq.train_codes), so that no float copy of the model exists. `save_pretrained` writes
    an ordinary model, which anyone loads without lsq. Other parameters are float32, whatever
    `dtype` says. Train with lsq.optim.Adam.

    Args:
        remainder: see lsq.train_codes.
        **quant: fields of QuantConfig.
    """

    def __init__(self, remainder: bool = True, quant_method: str = METHOD, **quant):
        if quant_method != METHOD:
            raise ValueError(f"quant_method is {quant_method!r}; an LsqConfig has {METHOD!r}")
        if not isinstance(remainder, bool):
            raise ValueError(f"remainder is {remainder!r}; it must be True or False")
        known = [field.name for field in fields(QuantConfig)]
        unknown = [name for name in quant if name not in known]
        if unknown:
            raise ValueError(
                f"LsqConfig has no {unknown[0]!r}; it has remainder, {', '.join(known)}"
            )
        self.quant_method, self.remainder = METHOD, remainder
        self.quant = QuantConfig(**quant)

    def to_dict(self) -> dict[str, Any]:
        plain = {name: one for name, one in asdict(self.quant).items()}
        return {"quant_method": METHOD, "remainder": self.remainder, **plain}


@register_quantizer(METHOD)
class LsqQuantizer(HfQuantizer):
    """What transformers calls while it loads a model under an LsqConfig."""

    quantization_config: LsqConfig

    def validate_environment(self, *_, device_map: Any = None, **__) -> None:
        devices = device_map.values() if isinstance(device_map, dict) else [device_map]
        if self.pre_quantized:
            raise ValueError(
                "an LsqConfig stands in the configuration of a model; remove it there, and give it"
                " to from_pretrained(..., quantization_config=...)"
            )
        wrong = [one for one in devices if one not in (None, "cpu", torch.device("cpu"))]
        if wrong:
            raise ValueError(
                f"device_map is {device_map!r}, but weights train as codes on the CPU; leave it out"
            )

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32  # of what does not become codes, as norms and biases

    def _process_model_before_weight_loading(self, model: nn.Module, **_) -> None:
        config = self.quantization_config
        with torch.device("cpu"):  # transformers makes everything on the meta device
            convert(model, config.quant, tied=True, check=False)
            train_codes(model, remainder=config.remainder)
        self._kept = {
            name: one for name, one in model.named_parameters() if isinstance(one, TrainedCodes)
        }
        # files do not hold what conversion adds, and the first pass measures clips
        added = clip_names(model)

        def leave_out(_, state: dict[str, Any], prefix: str, *__) -> None:
            for name in added:
                state.pop(prefix + name, None)

        self._hook = model.register_state_dict_post_hook(leave_out)

    def param_needs_quantization(self, model: nn.Module, param_name: str, **_) -> bool:
        path, _, name = param_name.rpartition(".")
        return isinstance(getattr(model.get_submodule(path), name, None), TrainedCodes)

    def get_quantize_ops(self) -> ConversionOps:
        return Encode()

    def _process_model_after_weight_loading(self, model: nn.Module, **_) -> nn.Module:
        self._hook.remove()
        with torch.no_grad():
            for name, kept in self._kept.items():  # a weight that no file has was made as floats
                path, _, last = name.rpartition(".")
                holder = model.get_submodule(path)
                if not isinstance(holder._parameters[last], TrainedCodes):
                    kept.copy_(holder._parameters[last])
                    holder._parameters[last] = kept
        for module in model.modules():
            if isinstance(module, ProgramModule):
                module.allocate_clips()
        self.remove_quantization_config(model)  # its files are those of an ordinary model
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True


class Encode(ConversionOps):
    """Rounds a weight from a file to the codes that the model has for it."""

    def convert(
        self,
        input_dict: dict[str, list[torch.Tensor]],
        full_layer_name: str,
        model: nn.Module,
        **_,
    ) -> dict[str, torch.Tensor]:
        (values,) = input_dict.values()
        kept = model.get_parameter(full_layer_name)
        if isinstance(values, list):
            (values,) = values
        with torch.no_grad():
            kept.copy_(values)
        return {full_layer_name: kept}
