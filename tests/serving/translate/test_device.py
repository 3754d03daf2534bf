"""Where a translator computes: by name, on the CPU and by a GPU's kernels."""

import pytest

from lsq.run.backends import backend
from lsq.serving.decode import SearchOptions
from lsq.serving.translate import Translator, device
from lsq.serving.translate.device import place_of
from lsq.text.corpus import read_items

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def test_places_by_name(monkeypatch):
    assert place_of("cpu") is backend("cpu") and place_of("emulator") is backend("emulated")
    with pytest.raises(ValueError, match="device is 'gpu'; allowed: 'cpu', 'cuda', 'emulator'"):
        place_of("gpu")
    monkeypatch.setattr(device, "gpu_fault", lambda: "there is none")
    with pytest.raises(ValueError, match="device cuda: there is none"):
        place_of("cuda")


@pytest.mark.thorough
def test_translations_are_those_of_the_cpu(output, translator):
    lines, options = (
        read_items(output / "data" / "test.src")[:2],
        SearchOptions(beam=2, max_len_b=4),
    )
    found = Translator(output, device="emulator").translate(lines, options)
    for first, second in zip(translator.translate(lines, options), found, strict=True):
        assert [one.text for one in second] == [one.text for one in first]
        assert [one.score for one in second] == pytest.approx(
            [one.score for one in first], abs=1e-4
        )
