"""Markdown and the short table, from results written by hand."""

import json

import pytest
import results_table

OPERATION = {
    "operation": "quantize",
    "kernels_microseconds": 2.0,
    "gigabytes_per_second": 3000.0,
    "ratio": 0.9,
}
STEP = {
    "side": "fairseq",
    "model": "base",
    "tokens": 4096,
    "milliseconds": 50.0,
    "tokens_per_second": 81920.0,
    "peak_gigabytes": None,
    "loss": 5.5,
    "ratio": 1.0,
    "remark": "",
}
PRODUCT = {
    "layer": "vocabulary",
    "tokens": 4096,
    "cublaslt_tops": 900.0,
    "best_tops": 1000.0,
    "int_mm_tops": 800.0,
    "bfloat16_tops": 500.0,
    "ratio": 1.8,
    "best_ratio": 2.0,
}


def result(benchmark, rows, **more):
    return {
        "benchmark": benchmark,
        "conditions": {"device": "a GPU", "cuda": {"nvrtc": "13.0"}},
        "rows": rows,
        **more,
    }


def test_markdown():
    text = results_table.markdown(
        result("step", [{"side": "a|b", "ratio": 1.23456}], failed={"x": "why\nmore"})
    )
    assert text.splitlines() == [
        "## step, a GPU",
        "",
        "* device: a GPU",
        "* cuda: nvrtc 13.0",
        "",
        "| side | ratio |",
        "| --- | --- |",
        "| a\\|b | 1.235 |",
        "* failed: x: why",
    ]


def test_no_rows():
    assert "No rows." in results_table.markdown(result("step", []))


def test_short_table_of_everything(tmp_path, capsys):
    slow = {**OPERATION, "ratio": 0.5, "gigabytes_per_second": 1500.0}
    only_products = {**OPERATION, "kernels_microseconds": None, "ratio": None}
    results = [
        result("quantize", [OPERATION, slow, only_products], left_out=["one", "two"]),
        result("gemm", [PRODUCT, {**PRODUCT, "best_tops": 1200.0}]),
        result("gpu_step", [STEP], failed={"torch.compile": "broke"}),
        result("launch", [{"side": "list", "ratio": 2.0}]),
        result(
            "probe",
            [{"kernel": name, "state": name, "why": "", "ratio": None} for name in ("ok", "wrong")],
        ),
        result(
            "gpu_step",
            [],
            kernels=[
                {
                    "side": side,
                    "model": "big",
                    "tokens": 1,
                    "kernel": f"of {side}",
                    "milliseconds": 4.0,
                }
                for side in ("lsq", "other")
            ],
        ),
    ]
    file = tmp_path / "all.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in results))
    output = tmp_path / "results.md"
    assert results_table.main([str(file), "--short", "--output", str(output)]) == 0
    text = capsys.readouterr().out
    lines = [line.split() for line in text.splitlines()]
    assert ["quantize", "2", "1", "0.5", "0.7", "0.9", "3,000"] in lines
    assert ["4096", "2", "900", "1,100", "800", "500", "1.8", "2", "1,200"] in lines
    assert ["fairseq", "base", "4096", "50", "81,920", "-", "5.5", "1"] in lines
    assert (
        "quantize: 2 measurements left out, no time" in text
        and "gpu_step failed: torch.compile: broke" in text
    )
    assert ["1", "of", "2", "ok"] in lines and ["wrong", "wrong"] in lines
    assert ["lsq", "big", "1", "of", "lsq", "4"] in lines and "of other" not in text
    assert output.read_text().count("## ") == 6 and "of other" in output.read_text()


def test_a_line_that_is_no_result_is_named(tmp_path):
    file = tmp_path / "bad.jsonl"
    file.write_text('{"benchmark": "x"}\n')
    with pytest.raises(ValueError, match="bad.jsonl, line 1"):
        results_table.main([str(file)])
