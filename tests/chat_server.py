"""A chat endpoint on loopback that fails on purpose, for the tests of whatever asks a model."""

import json
import socket
import struct
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FAULTS = {  # status, body and headers; None: `Handler.answer` has them
    "429": (429, {"error": {"message": "slow down"}}),
    "500": (500, b"<html>oops</html>"),
    "503": (503, {"detail": "overloaded"}),
    "truncated JSON": (200, b'{"choices": [{"message": {"content"'),
    "wrong types": (200, {"choices": [{"message": {"content": 9}}]}),
    "error in 200": (200, {"error": {"message": "upstream", "code": 502}}),
    "short body": None,
    "slow": None,
    "reset": None,
}
TIMEOUT = 2.0  # seconds; a slow call takes half a second longer


class Fault(str):
    """The kind of failure of a call that gets no answer. Anything else that `behave` returns is an answer."""


class ChatServer(ThreadingHTTPServer):
    """A chat endpoint on a free port of loopback.

    behave(text of the last message, number of earlier calls with it) returns the content of the answer, a
    Fault, or a tuple (status, body, headers). A request with the parameter `refuses` gets HTTP 400. Completions
    by token ids have the text "".
    """

    daemon_threads, request_queue_size = True, 256

    def __init__(self, behave, usage=(10, 5)):
        super().__init__(("127.0.0.1", 0), Handler)
        self.behave, self.usage, self.lock = behave, usage, threading.Lock()
        self.calls, self.answered, self.requests = Counter(), [], []
        self.headers = []  # of each request
        self.answers_to = Counter()  # by the Authorization header of the request
        self.refuses = ""
        self.now = self.most = 0  # calls under way, and their maximum
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def handle_error(self, request, client_address):
        pass  # a client that was killed


class Handler(BaseHTTPRequestHandler):
    protocol_version, disable_nagle_algorithm = "HTTP/1.1", True

    def log_message(self, *args):
        pass

    def send(self, status, body, headers=(), length=None):
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = [
            f"HTTP/1.1 {status} X",
            "Content-Type: application/json",
            f"Content-Length: {length or len(body)}",
        ]
        self.wfile.write("\r\n".join([*lines, *(f"{k}: {v}" for k, v in headers), "", ""]).encode() + body)
        self.wfile.flush()

    def do_POST(self):
        server, request = self.server, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = request.get("messages", [{"content": ""}])[-1]["content"]
        with server.lock:
            n, server.now = server.calls[text], server.now + 1
            server.most = max(server.most, server.now)
            server.calls[text] += 1
            server.requests.append((request, self.headers["Authorization"]))
            server.headers.append(dict(self.headers))
        try:
            content = server.behave(text, n)
            if server.refuses in request:
                content = (400, {"error": {"message": f"{server.refuses} is not supported"}})
            self.answer(server, text, content)
        finally:
            with server.lock:
                server.now -= 1

    def answer(self, server, text, content):
        if isinstance(content, Fault):
            content = FAULTS[content] or content
        if isinstance(content, tuple):
            self.send(*content)
            return
        message = {"role": "assistant", "content": content}
        choice = {"finish_reason": "stop", "message": message, "logprobs": None}
        body = {"model": "m", "choices": [choice]}
        if server.usage:
            body["usage"] = dict(zip(("prompt_tokens", "completion_tokens"), server.usage))
        whole = json.dumps(body).encode()
        if not isinstance(content, Fault):
            with server.lock:  # before it is sent, because the client may finish first
                server.answered.append((text, content))
                server.answers_to[self.headers["Authorization"]] += 1
            self.send(200, whole)
        elif content == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.connection.close()
        elif content == "slow":
            time.sleep(TIMEOUT + 0.5)
            self.send(200, whole)
        else:
            self.close_connection = True
            self.send(200, whole[:-20], length=len(whole))


def ask_for(*texts, **kwargs) -> list[dict]:
    return [{"messages": [{"role": "user", "content": t}], "max_tokens": 5, **kwargs} for t in texts]
