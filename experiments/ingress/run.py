"""Claim: what a request costs the front is mostly HTTP and calls to replicas, and this is how much.

Virtual devices so fast that the front is the limit. Times are processor time, so a busy machine hardly changes them.
"""

import json
import pickle
import socket
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console

from experiments.ingress.network import COSTS
from experiments.ingress.sampler import TOLD_EVERY_S
from experiments.serve import measures, servers
from experiments.serve.fleet import BATCH, BLOCKS, PASS_S, Part, plan, profile, serve_file
from isobatch.deployments.replica.virtual import VirtualModel
from isobatch.deployments.transport.orders import Order
from isobatch.deployments.transport.packed import pack
from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.files import Profile

CLIENTS, SECONDS = 64, 10.0
LOADER = "experiments.ingress.network:load"
console = Console(stderr=True)


def measure() -> dict[str, float]:
    facts = profile(PASS_S / 10)
    facts = replace(facts, tables=(replace(facts.tables[0], kind="cpu"),))
    two = plan(Part(4, 2, "cpu"), Part(BLOCKS, 1, "cpu"))
    with TemporaryDirectory() as folder:
        file = serve_file(Path(folder), two, facts, slo_ms=10_000.0)
        costs = Path(folder, "model", COSTS)
        with servers.isobatch(_watched(file)) as url:
            console.print("two splits, the front watched")
            measures.rate(url, CLIENTS, 2.0)  # warms up
            before = _told(costs)
            answered = SECONDS * measures.rate(url, CLIENTS, SECONDS)
            after = _told(costs)
            sizes = _bytes(url)
    spent = {name: 1e6 * seconds / answered for name, seconds in _spent(before, after).items()}
    figures = {f"us_{name}": us for name, us in sorted(spent.items(), key=lambda item: -item[1])}
    return {"us_all": sum(spent.values())} | figures | sizes | _wire_bytes(facts)


def _watched(file: Path) -> Path:
    """The same file with the sampling loader, whose devices are also virtual."""
    content = json.loads(file.read_text())
    arguments = content["applications"][0]["args"]
    arguments |= {"loader": LOADER, "backend": "torch", "cpus_per_replica": 0}
    file.write_text(json.dumps(content))
    return file


def _told(costs: Path) -> Mapping[str, Any]:
    time.sleep(2 * TOLD_EVERY_S)  # so that the file covers the last seconds, too
    costs_of_run: Mapping[str, Any] = json.loads(costs.read_text())
    return costs_of_run


def _spent(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, float]:
    """Processor seconds by layer, between two moments."""
    looks = Counter(after["looks"]) - Counter(before["looks"])
    thread_s, process_s = (after[name] - before[name] for name in ("thread_s", "process_s"))
    return {name: thread_s * count / looks.total() for name, count in looks.items()} | {
        "other threads": process_s - thread_s
    }


def _bytes(url: str) -> dict[str, float]:
    """The bytes of one request and of its reply, heads included."""
    place = urlsplit(url)
    request = b"POST /predict HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (
        len(measures.DRAWN),
        measures.DRAWN,
    )
    with socket.create_connection((place.hostname or "", place.port or 0)) as connection:
        connection.sendall(request)
        reply = b"".join(iter(lambda: connection.recv(65536), b""))
    return {"bytes_in": len(request), "bytes_out": len(reply)}


def _wire_bytes(facts: Profile) -> dict[str, float]:
    """The bytes per input of a full batch on its way to the first split, and to the second."""
    model = VirtualModel(facts.tables[0], facts.exits or ExitProfile((1.0,)), sleep=lambda _: None)
    batch = model.encode([{"exit_block": BLOCKS - 1}] * BATCH)
    survivors = model.run(batch, 4, ()).survivors
    assert survivors, "This is a bug: all of them stay to the end."
    each = {"first": batch, "second": survivors}
    return {
        f"bytes_to_the_{name}_split": len(pickle.dumps(Order(BLOCKS, frozenset(), (pack(ahead),)))) / BATCH
        for name, ahead in each.items()
    }
