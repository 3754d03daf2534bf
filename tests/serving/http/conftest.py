"""A service at work in this process, and a translator that says every sentence again."""

import asyncio
import concurrent.futures
import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lsq.serving import Hypothesis, SearchOptions
from lsq.serving.http.requests import Limits
from lsq.serving.http.server import listen, server_of
from lsq.serving.http.service import Service
from lsq.serving.subwords import Subwords, Words
from lsq.serving.translator import Part, TextTranslator, TranslationModel, stamp_of

SYMBOLS = ["<s>", "<pad>", "</s>", "<unk>", *(f"w{word}" for word in range(100))]
WORDS = Words(symbols=SYMBOLS, beginning=0, padding=1, end=2, unknown=3)


class Echo(TextTranslator):
    """Takes words w0 to w99, and takes its time: until `may_go` is set."""

    def __init__(self, file: Path):
        model = TranslationModel(
            file=file,
            stamp=stamp_of(file),
            steps=None,
            subwords=Subwords(WORDS, WORDS, None),
            longest_source=20,
            options=SearchOptions(),
        )
        super().__init__(model, batch_tokens=64)
        self.batches, self.interrupted = [], 0
        self.may_go, self.at_work = threading.Event(), threading.Event()
        self.may_go.set()

    def limit(self, options: SearchOptions) -> SimpleNamespace:
        return SimpleNamespace(holds=lambda count, longest: count * longest <= self.batch_tokens)

    def search(
        self, parts: list[Part], options: SearchOptions, before_step=None
    ) -> list[list[Hypothesis]]:
        """The words of each part; w99 is what no option allows, and w98 breaks down."""
        self.batches.append((len(parts), options))
        self.at_work.set()
        end = time.monotonic() + 30
        while not self.may_go.wait(0.01):
            assert time.monotonic() < end
            try:
                before_step()
            except Exception:
                self.interrupted += 1
                raise
        texts = [self.model.subwords.text(part.words) for part in parts]
        if any("w99" in text for text in texts):
            raise ValueError("no hypothesis")
        if any("w98" in text for text in texts):
            raise RuntimeError("broken")
        scores = torch.zeros(1)
        return [
            [Hypothesis(words=part.words, score=-1.0, word_scores=scores)] * options.nbest
            for part in parts
        ]


@pytest.fixture
def echo(tmp_path) -> Iterator[Echo]:
    file = tmp_path / "model"
    file.write_text("1")
    translator = Echo(file)
    yield translator
    translator.may_go.set()


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


class Served:
    """A service at work."""

    def __init__(self, service: Service):
        self.service, self.address = service, listen("127.0.0.1", 0)
        self.port = self.address.getsockname()[1]
        self.server = server_of(service.application())
        self.thread = threading.Thread(
            target=lambda: asyncio.run(self.server.serve(sockets=[self.address]))
        )
        self.thread.start()

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, object]:
        """(status, JSON or text); a body that is no bytes is sent as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        with contextlib.closing(connection):
            connection.request(method, path, content)
            answer = connection.getresponse()
            text = answer.read().decode()
            is_json = answer.headers["Content-Type"] == "application/json"
            return answer.status, json.loads(text) if is_json else text

    def translate(self, text: object, **options: object) -> tuple[int, object]:
        return self.ask("POST", "/translate", {"text": text, **options})

    @contextlib.contextmanager
    def busy(self, clients: int = 8) -> Iterator[concurrent.futures.ThreadPoolExecutor]:
        """Threads of clients, after a request "w1" whose translation takes until the end of this
        context, where it is answered."""
        echo = self.service.translator
        echo.may_go.clear()
        with concurrent.futures.ThreadPoolExecutor(clients + 1) as threads:
            first = threads.submit(self.translate, "w1")
            assert echo.at_work.wait(20)
            try:
                yield threads
            finally:
                echo.may_go.set()
            assert first.result()[0] == 200

    def wait_for_queue(self, sentences: int) -> None:
        wait_for(lambda: self.service.batcher.waiting == sentences)

    def connect(self) -> socket.socket:
        """A client that speaks for itself, with little room for answers."""
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.settimeout(20)
        client.connect(("127.0.0.1", self.port))
        return client

    def end(self) -> None:
        wait_for(lambda: self.server.started)
        self.server.stop()
        self.thread.join(30)
        assert not self.thread.is_alive()


@pytest.fixture
def serve(echo) -> Iterator[Callable[..., Served]]:
    """serve(**limits): a service of `echo` or another translator, which ends with the test."""
    started = []

    def serve(translator: TextTranslator = echo, **limits: object) -> Served:
        started.append(Served(Service(translator, translator.options, Limits(**limits))))
        return started[-1]

    yield serve
    echo.may_go.set()
    for served in started:
        served.end()
