"""Two machines of friends train one model over a slow line, each with a token of its own (DiLoCo).

python examples/52_diloco_friends.py
"""

from __future__ import annotations

import select
import socket
import socketserver
import threading
import time

import skyward as sky
from skyward.training.diloco import DiLoCoServer

STEPS, DELAY_S, BYTES_PER_S = 200, 0.02, 2_500_000


@sky.compute
def train(server: str, token: str, name: str, part: int) -> str:
    """Train on every second digit, as a worker of the server."""
    import torch
    from sklearn import datasets

    from skyward.training.diloco import DiLoCoWorker

    x, y = (torch.as_tensor(array) for array in datasets.load_digits(return_X_y=True))
    x = x.float() / 16
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    worker = DiLoCoWorker(model, optimizer, server, worker_id=name, token=token, sync_every=50, quantization_bits=4)
    with worker:
        for _ in range(STEPS):
            rows = 2 * torch.randint(700, (32,)) + part
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    metrics, right = worker.sync_metrics, model(x[1400:]).argmax(1) == y[1400:]
    sent = f"{metrics['diloco/sync_count']} synchronisations of {metrics['diloco/last_send_mb']:.4f} MB"
    return f"{name}: {sent}, accuracy {right.double().mean():.2f}"


class SlowLine(socketserver.BaseRequestHandler):
    """A connection by a relay to the server, as slow as one over the internet."""

    port = 0

    def handle(self) -> None:
        with socket.create_connection(("127.0.0.1", self.port)) as other:
            ends = {self.request: other, other: self.request}
            while readable := select.select([*ends], [], [], 60)[0]:
                for end in readable:
                    piece = end.recv(2**16)
                    if not piece:
                        return
                    time.sleep(DELAY_S + len(piece) / BYTES_PER_S)
                    ends[end].sendall(piece)


def main() -> None:
    with (
        DiLoCoServer(num_workers=2, port=0, quantization_bits=4) as server,
        socketserver.ThreadingTCPServer(("127.0.0.1", 0), SlowLine) as line,
        sky.ComputePool(provider=sky.Local(), nodes=2) as pool,
    ):
        SlowLine.port = int(server.address.rpartition(":")[2])
        threading.Thread(target=line.serve_forever, daemon=True).start()
        address, names = f"127.0.0.1:{line.server_address[1]}", ("ada", "grace")
        calls = [train(address, server.add_token(name), name, n) > pool.node(n) for n, name in enumerate(names)]
        print("\n".join(call.result() for call in calls))
        server.revoke_token("ada")
        print("accepted tokens:", server.tokens)
        line.shutdown()


if __name__ == "__main__":
    main()
