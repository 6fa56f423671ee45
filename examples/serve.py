"""Serve a run's model: python examples/serve.py runs/my-run 8000, then curl -d '[[0.1, 0.2]]' 127.0.0.1:8000."""

import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

import torch

import fedpews

run = fedpews.load(sys.argv[1])


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        x = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(run.predict(torch.tensor(x)).tolist()).encode())


server = HTTPServer(("127.0.0.1", int(sys.argv[2])), Handler)
print(f"http://127.0.0.1:{server.server_port}")
server.serve_forever()
