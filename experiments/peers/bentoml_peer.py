"""Serves with BentoML and its batching: `python -m experiments.peers.bentoml_peer FOLDER PORT WORKERS EXITS BATCH`."""

import os
import subprocess
import sys
import threading
from typing import Any

from experiments.peers.network import BATCH, PeerNetwork, PeerOptions, options, say_when_ready
from isobatch.profiles.model import Label

FOLDER, EXITS, WORKERS = "ISOBATCH_PEER_FOLDER", "ISOBATCH_PEER_EXITS", "ISOBATCH_PEER_WORKERS"
LATENCY_MS = 60_000  # so long that it refuses no request; the client counts late answers


def service() -> Any:
    """The service that `bentoml serve` runs in its own processes."""
    import bentoml

    class Classifier:
        def __init__(self) -> None:
            self._network = PeerNetwork(os.environ[FOLDER], os.environ[EXITS])

        @bentoml.api(route="/predict", batchable=True, max_batch_size=BATCH, max_latency_ms=LATENCY_MS)  # type: ignore[untyped-decorator]
        def predict(self, inputs: list[Any]) -> list[Label]:
            return self._network.labels(inputs)

    traffic = {"timeout": 60, "max_concurrency": 4096}
    return bentoml.service(workers=int(os.environ[WORKERS]), traffic=traffic)(Classifier)


def __getattr__(name: str) -> Any:
    """Make `Classifier` when BentoML imports it by name, so that this module can be imported without BentoML."""
    if name != "Classifier":
        raise AttributeError(name)
    globals()[name] = made = service()
    return made


def main(asked: PeerOptions) -> None:
    command = [sys.executable, "-m", "bentoml", "serve", "experiments.peers.bentoml_peer:Classifier"]
    threading.Thread(target=say_when_ready, args=(f"http://127.0.0.1:{asked.port}/readyz",), daemon=True).start()
    own = {FOLDER: asked.folder, EXITS: asked.exits, WORKERS: str(asked.workers), "BENTOML_DO_NOT_TRACK": "True"}
    subprocess.run([*command, "--port", str(asked.port), "--host", "127.0.0.1"], env=os.environ | own, check=False)


if __name__ == "__main__":
    main(options(sys.argv[1:]))
