"""What the Open Inference Protocol says of a service, in whatever way it is asked. Names are those of the protocol."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from deployments.front.answers import Answer, RefusedError, shown
from deployments.front.counts import together
from deployments.front.open_inference.requests import BYTES
from deployments.front.service import Service

VERSION = "1"
_EXTENSIONS = ["binary_tensor_data", "model_configuration", "statistics"]
_EXIT_BLOCK = {"exit_block": ("INT64", list[int]())}
_OF_TEXTS = {"truncated": ("BOOL", list[int]())}  # the text is longer than the network reads: its end was cut off


def server() -> dict[str, Any]:
    return {"name": "isobatch", "version": VERSION, "extensions": _EXTENSIONS}


def metadata(service: Service) -> dict[str, Any]:
    """One tensor goes in, whose first dimension counts the inputs; what comes out has a row for each."""
    kind, shape = (BYTES, [1]) if service.reads_text else ("FP32", service.example.shape or [-1, -1])
    outputs = [
        {"name": output, "datatype": kind, "shape": [-1, *sizes]} for output, (kind, sizes) in _outputs(service).items()
    ]
    return {
        "name": service.name,
        "versions": [VERSION],
        "platform": "isobatch",
        "inputs": [{"name": "inputs", "datatype": kind, "shape": [-1, *shape]}],
        "outputs": outputs,
    }


def configuration(service: Service) -> dict[str, Any]:
    """As much of Triton's as its tools ask for: that requests may carry several inputs. And what exits promise."""
    return {
        "name": service.name,
        "platform": "isobatch",
        "max_batch_size": service.config.most_inputs,
        "input": [{"name": "inputs"}],
        "output": [{"name": name} for name in _outputs(service)],
        "parameters": {"promise": {"string_value": service.promised}},
    }


async def statistics(service: Service) -> dict[str, Any]:
    """Since the start, of requests that were answered; a request's time in queues is that of its mean input."""
    counts = together([front.counts for front in await service.everywhere()])
    requests = counts.outcomes["answered"]

    def took(seconds: float, count: int = requests) -> dict[str, int]:
        return {"count": count, "ns": round(1e9 * seconds)}

    nothing = took(0.0, 0)
    model = {
        "name": service.name,
        "version": VERSION,
        "inference_count": counts.exits.total(),
        "execution_count": sum(each.count for (_, block), each in counts.launches.items() if block == 0),
        "inference_stats": {
            "success": took(counts.seconds["all"]),
            "fail": took(0.0, counts.outcomes["failed"]),
            "queue": took(counts.seconds["queued"]),
            "compute_input": took(0.0),
            "compute_infer": took(counts.seconds["computed"]),
            "compute_output": took(0.0),
            "cache_hit": nothing,
            "cache_miss": nothing,
        },
    }
    return {"model_stats": [model]}


def check(service: Service, name: str, version: str = VERSION) -> None:
    """There is one model, in one version."""
    if (name, version or VERSION) != (service.name, VERSION):
        asked = f"there is no model {shown(name)} in version {shown(version)}"
        raise RefusedError(404, f"{asked}: this is {service.name!r}, {VERSION!r}")


def columns(service: Service, answers: Sequence[Answer]) -> dict[str, Any]:
    """The outputs: a row for each answer."""
    found = service.task.columns(answers, service.labels)
    found["exit_block"] = np.array([answer.exit_block for answer in answers], np.int64)
    if service.reads_text:
        found["truncated"] = np.array([answer.truncated for answer in answers], np.bool_)
    return {name: found[name] for name in _outputs(service)}


def _outputs(service: Service) -> dict[str, tuple[str, list[int]]]:
    own = {**service.task.tensors}
    name = {"name": own.pop("name")}
    return own | _EXIT_BLOCK | name | (_OF_TEXTS if service.reads_text else {})
