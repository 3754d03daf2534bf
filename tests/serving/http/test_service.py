import json
import re
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from lsq.serving import SearchOptions
from lsq.serving.http import service
from lsq.serving.http.requests import Limits
from lsq.serving.http.service import Service
from tests.serving.http.conftest import wait_for


def test_translations(serve, echo):
    served = serve()
    answer = {"text": "w1 w2", "score": -1.0, "too_long": False, "alternatives": []}
    assert served.translate("w1  w2") == (200, {"translations": [answer]})
    status, found = served.translate(["w1", "", "w2 w3"], nbest=3)
    assert status == 200 and [each["text"] for each in found["translations"]] == ["w1", "", "w2 w3"]
    assert [len(each["alternatives"]) for each in found["translations"]] == [2, 0, 2]
    assert served.translate([]) == (200, {"translations": []})
    assert echo.batches[-1] == (2, SearchOptions(nbest=3))


def test_lines_that_are_too_long(serve, echo):
    served, long = serve(), " ".join(["w2"] * 40)
    for echo.long_lines in ("cut", "skip", "copy"):
        status, found = served.translate(["w1", long])
        assert [each["too_long"] for each in found["translations"]] == [False, True]
        assert found["translations"][1]["text"] == ("" if echo.long_lines == "skip" else long)
        assert echo.batches.pop() == (4 if echo.long_lines == "cut" else 1, SearchOptions())
    echo.long_lines = "refuse"
    status, found = served.translate(["w1", long])
    message = "line 2: it has 40 subwords, and the model takes 19 at most"
    assert status == 400 and found["error"].startswith(message)


BROWSER = """
    const made = {}, document = { getElementById: id => made[id] ??= {
        value: "", textContent: "", addEventListener(kind, act) { this[kind] = act },
    } };
    const headers = { get: () => "application/json" };
    const answers = ['{"translations": [{"text": "rot"}]}', '{"error": "too long"}'];
    const text = async () => answers.shift();
    const fetch = async () => ({ ok: answers.length > 1, headers, text });
"""
SUBMIT = """
    (async () => {
        for (let turn = 0; turn < 2; turn++) {
            await made.form.submit({ preventDefault() {} });
            console.log(JSON.stringify([made.translation.textContent, made.state.textContent]));
        }
    })();
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node, which runs the page's script")
def test_the_page_shows_an_error_in_the_place_of_an_earlier_translation():
    page = (Path(service.__file__).parent / "page.html").read_text(encoding="utf-8")
    script = page.partition("<script>")[2].partition("</script>")[0]
    done = subprocess.check_output(["node", "-e", BROWSER + script + SUBMIT], text=True)
    assert [json.loads(line) for line in done.splitlines()] == [["rot", ""], ["", "too long"]]


def test_page_health_and_metrics(serve, echo):
    served = serve()
    served.translate(["w1", "w2"])
    served.translate(["\0"])
    status, page = served.ask("GET", "/")
    assert status == 200 and page.startswith("<!doctype html>") and 'fetch("translate"' in page
    assert "//" not in page  # nothing from elsewhere
    health = {"status": "ok", "model": str(echo.model.file), "model_changed": False}
    assert served.ask("GET", "/health") == (200, health)
    status, metrics = served.ask("GET", "/metrics")
    assert status == 200
    for line in (
        'lsq_requests_total{status="200"} 1.0',
        'lsq_requests_total{status="400"} 1.0',
        "lsq_sentences_total 2.0",
        'lsq_batch_sentences_bucket{le="1.0"} 0.0',
        'lsq_batch_sentences_bucket{le="2.0"} 1.0',
        "lsq_request_seconds_count 2.0",
        "lsq_waiting_sentences 0.0",
    ):
        assert line in metrics.splitlines()
    assert served.ask("GET", "/nothing") == (404, {"error": "Not Found"})
    assert served.ask("GET", "/translate")[0] == 405


def test_mistakes_of_clients(serve, echo):
    served, most = serve(), "longest, 512 words; with this max_len_a of 0, max_len_b may be 512"
    for body, message in (
        (b'{"text": "\xff"}', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        ({"text": "a\0b"}, "line 1: a NUL character is no text"),
        ({"text": "a\ud800b"}, "line 1: .* half of a character"),
        ({"text": "w99"}, "no hypothesis"),
        ({"text": "w1", "beam": 17}, "beam is 17; this service takes 16 at most"),
        ({"text": "w1", "max_len_b": 10**400}, most),
        ({"text": "w1", "max_len_a": 16}, r"max_len_a \* 20 \+ max_len_b .*, max_len_b may be 192"),
    ):
        status, found = served.ask("POST", "/translate", body)
        assert status == 400 and re.search(message, found["error"])


def test_a_default_that_every_request_would_be_refused_for(echo):
    Service(echo, SearchOptions(beam=3), Limits(beam=3))
    with pytest.raises(
        ValueError,
        match="every request .* would be refused: beam is 4; this service takes 3 at most",
    ):
        Service(echo, SearchOptions(beam=4), Limits(beam=3))
    with pytest.raises(
        ValueError, match="longest, 200 words; with this max_len_a of 0.05, max_len_b may be 199"
    ):
        Service(echo, SearchOptions(max_len_a=0.05), Limits(words=200))


def test_requests_that_wait_are_translated_together(serve, echo):
    served = serve()
    with served.busy() as clients:
        others = [clients.submit(served.translate, [f"w{word}"] * 2) for word in range(4)]
        served.wait_for_queue(8)
    for word, other in enumerate(others):
        assert [each["text"] for each in other.result()[1]["translations"]] == [f"w{word}"] * 2
    assert [count for count, _ in echo.batches] == [1, 8]


def test_a_request_that_fails_fails_alone(serve, echo):
    served = serve()
    with served.busy() as clients:
        found = [clients.submit(served.translate, text) for text in ("w2", "w99", "w98", "w3")]
        served.wait_for_queue(4)
    assert [each.result()[0] for each in found] == [200, 400, 500, 200]
    assert served.translate("w4")[0] == 200


def test_more_than_the_queue_takes(serve, echo):
    served = serve(queue=3)
    with served.busy() as clients:
        waiting = clients.submit(served.translate, ["w2"] * 3)
        served.wait_for_queue(3)
        error = {"error": "too many sentences wait; try again later"}
        assert served.translate("w3") == (503, error)
    assert waiting.result()[0] == 200
    status, found = served.translate(["w1"] * 4)
    assert status == 413 and "more than 3 sentences" in found["error"]
    # nothing waits for these, but their answer is long
    assert served.translate([""] * 4)[0] == 413


def test_large_requests_are_refused(serve, echo):
    served = serve()
    error = {"error": "the request has more than 1048576 bytes; send fewer lines at a time"}
    for body in (b'{"text": "' + b"w" * 10_000_000 + b'"}', b" " * (2**20 + 1)):
        assert served.ask("POST", "/translate", body) == (413, error)
    assert served.translate("w1")[0] == 200


HEAD = b"POST /translate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"


def test_slow_bodies(serve, monkeypatch):
    monkeypatch.setattr(service, "RECEIVE_SECONDS", 0.3)
    served = serve()
    with served.connect() as client:
        client.sendall(HEAD % 100 + b"{")
        assert served.translate("w1")[0] == 200
        answer = b"".join(iter(lambda: client.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"did not arrive within 0.3 seconds" in answer


def test_clients_that_go_away(serve, echo):
    served = serve()
    with served.busy():
        with served.connect() as going:
            body = b'{"text": ["w2", "w3"]}'
            going.sendall(HEAD % len(body) + body)
            served.wait_for_queue(2)
        served.wait_for_queue(0)
        with served.connect() as going:
            going.sendall(HEAD % 100 + b"{")
    assert served.translate("w4")[0] == 200
    assert [count for count, _ in echo.batches] == [1, 1]
    assert 'lsq_requests_total{status="499"} 2.0' in served.ask("GET", "/metrics")[1]


def test_a_batch_that_nobody_waits_for_is_interrupted(serve, echo, monkeypatch):
    """Since its client has gone, or been told that it takes too long."""
    served = serve()
    echo.may_go.clear()
    body = b'{"text": "w1"}'
    with served.connect() as going:
        going.sendall(HEAD % len(body) + body)
        assert echo.at_work.wait(20)
        assert echo.interrupted == 0
    wait_for(lambda: echo.interrupted == 1)
    monkeypatch.setattr(service, "TRANSLATE_SECONDS", 0.2)
    status, found = served.translate("w1")
    assert status == 503 and "not translated within 0.2 seconds" in found["error"]
    wait_for(lambda: echo.interrupted == 2)
    echo.may_go.set()
    assert served.translate("w2")[0] == 200


def test_a_model_file_that_changes_is_told_and_not_read(serve, echo):
    served = serve()
    other = echo.model.file.with_name("other")
    other.write_text("2")
    other.replace(echo.model.file)
    assert served.ask("GET", "/health")[1]["model_changed"] is True
    assert served.translate("w1")[0] == 200
    echo.model.file.unlink()
    assert served.ask("GET", "/health")[1]["model_changed"] is True


def test_what_has_arrived_is_answered_at_the_end(serve, echo):
    served = serve()
    ending = threading.Thread(target=served.end)
    with served.busy() as clients:
        found = [clients.submit(served.translate, f"w{word}") for word in range(1, 4)]
        served.wait_for_queue(3)
        ending.start()
        wait_for(lambda: not served.server.servers[0].is_serving())
    assert [each.result()[0] for each in found] == [200] * 3
    ending.join()
    with pytest.raises(ConnectionRefusedError):
        served.translate("w1")
