import pytest

from lsq.serving.serve.metrics import Metrics


def test_what_is_counted():
    metrics = Metrics()
    metrics.watch(lambda: 7)
    metrics.answered(200, 0.03)
    metrics.answered(503, 0.001)
    with metrics.batch(5):
        pass
    with pytest.raises(RuntimeError), metrics.batch(100):
        raise RuntimeError
    lines = metrics.text().decode().splitlines()
    for line in (
        'lsq_requests_total{status="200"} 1.0',
        'lsq_requests_total{status="503"} 1.0',
        'lsq_request_seconds_bucket{le="0.01"} 1.0',
        'lsq_request_seconds_bucket{le="0.05"} 2.0',
        "lsq_sentences_total 5.0",
        'lsq_batch_sentences_bucket{le="4.0"} 0.0',
        'lsq_batch_sentences_bucket{le="8.0"} 1.0',
        "lsq_waiting_sentences 7.0",
    ):
        assert line in lines
