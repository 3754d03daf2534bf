"""The comparison of decoders on a short training, whose float32 and int8 translations may
differ."""

import json

import decode_quality
import pytest

from tests.commands.conftest import train_text_run


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_every_decoder(tmp_path, capsys):
    pytest.importorskip("ctranslate2")
    output = train_text_run(tmp_path, "--updates", "300", "--validate-every", "100")
    decode_quality.main([str(output / "int8"), "--threads", "1", "--tokenizer", "char"])
    rows = {
        row["side"]: row for row in json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    }
    assert len(rows) == 6
    assert rows["lsq int8"] == rows[decode_quality.TRAINING] | {"side": "lsq int8"}
    sentences = len((output / "data" / "test.src").read_text().splitlines())
    assert rows["lsq int8"]["same_as_training"] == sentences
    assert all(row["same_as_training"] <= sentences and row["bleu"] > 0 for row in rows.values())
    assert rows["ctranslate2 float32"]["same_as_training"] > 0  # its int8 has scales of its own
    assert rows[decode_quality.FLOAT]["to_float32"] == 0
