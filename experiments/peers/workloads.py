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
    """A network, inputs for it, and other inputs for its profile, in a column of this name."""

    name: str
    folder: str
    inputs: Sequence[Any]
    recorded: Sequence[Any]
    column: str

    def body(self, value: Any, listed: bool) -> bytes:
        return json.dumps({"inputs": [value] if listed else value}).encode()

    def bodies(self, listed: bool) -> list[bytes]:
        return [self.body(value, listed) for value in self.inputs]


def workloads() -> Iterator[PeerWorkload]:
    """The demo, and MiniLM on SST-2 with exits if its weights are at hand."""
    digits = [digit.tolist() for digit in demo_inputs(2 * INPUTS)]
    yield PeerWorkload("demo", str(demo_directory()), digits[:INPUTS], digits[INPUTS:], "image")
    try:
        texts = minilm.sentences("test", 2 * INPUTS)[0]
        yield PeerWorkload("minilm", str(minilm.prepared()), texts[:INPUTS], texts[INPUTS:], "text")
    except UserError as error:
        console.print(f"[bold red]minilm IS NOT MEASURED[/] ({error}): it needs {minilm.NEEDS}", soft_wrap=True)
