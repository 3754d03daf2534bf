"""What lsq.models hands out, and a torchaudio that cannot be loaded."""

import sys

import pytest

from lsq import models
from lsq.models import huggingface


@pytest.mark.parametrize("works", [True, False])
def test_a_broken_torchaudio_is_left_out(works, monkeypatch):
    def load(name: str) -> None:
        if not works:
            raise OSError("undefined symbol: torch\nmore")

    for name in ("transformers", "torchaudio"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(huggingface.util, "find_spec", lambda name: name)
    monkeypatch.setattr(huggingface, "import_module", load)
    if works:
        huggingface.keep_broken_torchaudio_out()
        assert "torchaudio" not in sys.modules
        return
    with pytest.warns(UserWarning, match=r"cannot be loaded \(undefined symbol: torch\); it is"):
        huggingface.keep_broken_torchaudio_out()
    assert sys.modules.pop("torchaudio") is None


def test_names_that_users_import():
    assert set(models.__all__) <= set(dir(models))
    assert models.save_clips.__module__ == "lsq.models.clips"
    with pytest.raises(AttributeError, match="'lsq.models' has no attribute 'nothing'"):
        models.nothing  # noqa: B018
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    assert models.LsqCallback.__module__ == "lsq.models.trainer"
