"""The workloads of the servers: the demo's digits, and sentences for MiniLM."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from experiments.shared import minilm
from isobatch.deployments.demo import demo_directory
from isobatch.deployments.demo.digits import demo_inputs
from isobatch.profiles.errors import UserError

INPUTS = 256
console = Console(stderr=True)


@dataclass(frozen=True)
class PeerWorkload:
    """A network, and inputs for it."""

    name: str
    folder: str
    inputs: Sequence[Any]

    def body(self, value: Any, listed: bool) -> bytes:
        return json.dumps({"inputs": [value] if listed else value}).encode()

    def bodies(self, listed: bool) -> list[bytes]:
        return [self.body(value, listed) for value in self.inputs]


def workloads() -> Iterator[PeerWorkload]:
    """The demo, and MiniLM on SST-2 with exits if its weights are at hand."""
    yield PeerWorkload("demo", str(demo_directory()), [digit.tolist() for digit in demo_inputs(INPUTS)])
    try:
        yield PeerWorkload("minilm", str(minilm.prepared()), minilm.sentences("test", INPUTS)[0])
    except UserError as error:
        console.print(f"[bold red]minilm IS NOT MEASURED[/] ({error}): it needs {minilm.NEEDS}", soft_wrap=True)
