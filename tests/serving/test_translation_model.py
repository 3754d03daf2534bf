"""Where a translator computes: by name, on the CPU and by a GPU's kernels."""

import pytest

from lsq import Translator
from lsq.run.backends import backend
from lsq.serving import SearchOptions, translation_model
from lsq.serving.translation_model import backend_of
from lsq.text.corpus import read_items

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def test_devices_by_name(monkeypatch):
    assert backend_of("cpu") is backend("cpu") and backend_of("emulator") is backend("emulated")
    with pytest.raises(ValueError, match="device is 'gpu'; allowed: 'cpu', 'cuda', 'emulator'"):
        backend_of("gpu")
    monkeypatch.setattr(translation_model, "gpu_fault", lambda: "there is none")
    with pytest.raises(ValueError, match="device cuda: there is none"):
        backend_of("cuda")


@pytest.mark.thorough
def test_translations_are_those_of_the_cpu(output, translator):
    lines = read_items(output / "data" / "test.src")[:2]
    options = SearchOptions(beam=2, max_len_b=4)
    found = Translator(output, device="emulator").translate(lines, options)
    for first, second in zip(translator.translate(lines, options), found, strict=True):
        assert [one.text for one in second] == [one.text for one in first]
        scores = [one.score for one in first]
        assert [one.score for one in second] == pytest.approx(scores, abs=1e-4)
