"""A local server in place of a language model behind HTTP, which fails at random, as real ones do.

    python server.py COMMAND...     # serves on a free port while COMMAND runs, with MODEL_URL in its environment

It answers 85% of the questions right, and one tenth of the requests with an error: 429 with Retry-After, or 503.
A question about "passwords" is refused for good, with 400.
"""

import hashlib
import json
import os
import random
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

RANDOM = random.Random(0)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_POST(self) -> None:
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
        luck = RANDOM.random()
        if "password" in question:
            self.reply(400, {"error": "this question is against the rules"})
        elif luck < 0.05:
            self.reply(429, {"error": "too many requests"}, {"Retry-After": "0.1"})
        elif luck < 0.10:
            self.reply(503, {"error": "overloaded"})
        else:
            self.reply(200, {"answer": answer(question)})

    def reply(self, status: int, document: dict[str, str], headers: dict[str, str] | None = None) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args: object) -> None:
        """Print nothing."""


def answer(question: str) -> str:
    """Compute the answer; be wrong for about 15% of the questions, always the same ones."""
    left, operator, right = question.removeprefix("What is ").removesuffix("?").split()
    a, b = int(left), int(right)
    value = {"plus": a + b, "minus": a - b, "times": a * b}[operator]
    unlucky = hashlib.sha256(question.encode()).digest()[0] < {"plus": 13, "minus": 26, "times": 77}[operator]
    return f"It is {value + unlucky}."


class Server(ThreadingHTTPServer):
    request_queue_size = 128
    daemon_threads = True


def main() -> int:
    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/v1/answer"
        code = subprocess.run(sys.argv[1:], env={**os.environ, "MODEL_URL": url}, check=False).returncode
        server.shutdown()
    return code


if __name__ == "__main__":
    sys.exit(main())
