"""LitServe at its best: one stage on virtual devices, batches of 16, six workers, its fast queue.

LitServe is no dependency of isobatch: this file is run by a Python of its own that has it.
"""

import sys
import threading
import time
import urllib.request
from typing import Any

import litserve

BATCH, PASS_S, WORKERS = 16, 0.010, 6


class LitServeStage(litserve.LitAPI):  # type: ignore[misc]  # it has no types here
    """A virtual device of 10 ms per batch of 16."""

    def setup(self, device: str) -> None:
        """Nothing to load."""

    def decode_request(self, request: dict[str, Any]) -> object:
        return request["inputs"]

    def batch(self, inputs: list[Any]) -> list[Any]:
        return inputs

    def predict(self, inputs: list[Any]) -> list[int]:
        time.sleep(PASS_S)
        return [0 for _ in inputs]

    def unbatch(self, outputs: list[int]) -> list[int]:
        return outputs

    def encode_response(self, output: int) -> dict[str, int]:
        return {"label": output}


def say_when_ready(port: int) -> None:
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
                print("ready", flush=True)
                return
        except OSError:
            time.sleep(0.1)


if __name__ == "__main__":
    api = LitServeStage(max_batch_size=BATCH, batch_timeout=PASS_S)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=WORKERS, fast_queue=True)
    # LitServe does not report when it is ready; its port opens a moment after its workers have started.
    threading.Thread(target=say_when_ready, args=(int(sys.argv[1]),), daemon=True).start()
    server.run(host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", generate_client_file=False)
