"""fairseq's configuration of a training, made in a tenth of the time.

fairseq gives Hydra about 280 values of options, one by one as text, and Hydra reads its folders
anew each time. That takes as long as the smallest training of these tests. Here it reads them once
for each choice of parts (criterion, optimizer ...), and each text once.
tests/fairseq/test_configurations.py compares.
"""

import contextlib
import copy
import functools
from pathlib import Path

import fairseq
import hydra
import pytest
from fairseq.dataclass import utils
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf


@pytest.fixture(scope="session", autouse=True)
def quick_configurations() -> None:
    """Import it where trainings start in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "initialize", lambda config_path: contextlib.nullcontext())
        patch.setattr(utils, "compose", compose)
        yield


def compose(name: str, overrides: list[str], strict: bool) -> DictConfig:
    """As Hydra's: the configuration `name` with "part=choice" and "part.option=value" in
    `overrides`."""
    parsed = [_parsed(override) for override in overrides]
    parts = tuple(override.input_line for override in parsed if "." not in override.key_or_group)
    config = copy.deepcopy(_of_parts(name, parts))
    for override in parsed:
        if "." in override.key_or_group:
            OmegaConf.update(config, override.key_or_group, override.value(), merge=True)
    return config


@functools.cache
def _of_parts(name: str, parts: tuple[str, ...]) -> DictConfig:
    with hydra.initialize_config_dir(
        str(Path(fairseq.__file__).parent / "config"), version_base="1.1"
    ):
        return hydra.compose(name, overrides=list(parts))


@functools.lru_cache(4096)
def _parsed(override: str) -> Override:
    return OverridesParser.create().parse_override(override)
