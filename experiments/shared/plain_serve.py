"""Plain Ray Serve with a Ray of its own, as a program that is compared with isobatch."""

import signal
import threading
from collections.abc import Callable
from typing import Any


def answer_until_stopped(application: Callable[[Any], Any], port: int, ready: str) -> None:
    """Serve at `/predict` what `application` makes with `ray.serve`; say `ready`; end all at the first signal."""
    import ray
    from ray import serve

    ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(application(serve), name="default", route_prefix="/predict")
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    print(ready, flush=True)
    stop.wait()
    serve.shutdown()
    ray.shutdown()
