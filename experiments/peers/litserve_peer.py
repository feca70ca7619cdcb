"""Serves with LitServe and its batching: `python -m experiments.peers.litserve_peer FOLDER PORT WORKERS EXITS BATCH`.

LitServe is not a dependency of isobatch, so another Python may run this file.
"""

import os
import sys
import threading
from typing import Any

import litserve

from experiments.peers.network import WAIT_S, PeerNetwork, PeerOptions, options, say_when_ready
from isobatch.profiles.model import Label

FOLDER, EXITS = "ISOBATCH_PEER_FOLDER", "ISOBATCH_PEER_EXITS"  # the options of its worker processes


class LitServeClassifier(litserve.LitAPI):  # type: ignore[misc]  # it has no types here
    """The network, in batches."""

    def setup(self, device: str) -> None:
        self._network = PeerNetwork(os.environ[FOLDER], os.environ[EXITS])

    def decode_request(self, request: dict[str, Any]) -> object:
        return request["inputs"]

    def batch(self, inputs: list[Any]) -> list[Any]:
        return inputs

    def predict(self, inputs: list[Any]) -> list[Label]:
        return self._network.labels(inputs)

    def unbatch(self, outputs: list[Label]) -> list[Label]:
        return outputs

    def encode_response(self, output: Label) -> dict[str, Label]:
        return {"label": output}


def main(asked: PeerOptions) -> None:
    os.environ |= {FOLDER: asked.folder, EXITS: asked.exits}
    api = LitServeClassifier(max_batch_size=asked.batch, batch_timeout=WAIT_S)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=asked.workers, fast_queue=True)
    threading.Thread(target=say_when_ready, args=(f"http://127.0.0.1:{asked.port}/health",), daemon=True).start()
    server.run(host="127.0.0.1", port=asked.port, log_level="warning", generate_client_file=False)


if __name__ == "__main__":
    main(options(sys.argv[1:]))
