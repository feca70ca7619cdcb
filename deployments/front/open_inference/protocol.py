"""The Open Inference Protocol's description of a model, for HTTP and gRPC. Field names are those of the protocol."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isobatch.deployments.front.answers import Answer, RefusedError, shown
from isobatch.deployments.front.counts import together
from isobatch.deployments.front.open_inference.schemas import BYTES
from isobatch.deployments.front.service import Service
from isobatch.deployments.map_tasks import Keypoints, PixelClassification
from isobatch.deployments.tasks import WINNER, best_labels

VERSION = "1"
Tensors = Mapping[str, tuple[str, Sequence[int]]]  # kind and shape, by name
SCORES = "scores"  # the probabilities of all labels
_EXIT_BLOCK = {"exit_block": ("INT64", list[int]())}
# Only of texts: the text was longer than the network reads, so its end was cut off.
_TRUNCATED = {"truncated": ("BOOL", list[int]())}


@dataclass(frozen=True)
class DescribedModel:
    """The one model of a server."""

    name: str
    inputs: Tensors
    outputs: Tensors
    extensions: Sequence[str]  # of the protocol, which the server has
    configuration: Mapping[str, Any] = field(default_factory=dict)  # besides the names of tensors
    on_request: Collection[str] = ()  # outputs that a request gets only if it names them
    ranked: Collection[str] = ()  # outputs with a score for each label of the network

    @property
    def usual_outputs(self) -> list[str]:
        """The outputs for a request that names none."""
        return [name for name in self.outputs if name not in self.on_request]


def model_of(service: Service) -> DescribedModel:
    """The first dimension of the input tensor, and of each output, is the number of inputs.

    The configuration is the part that Triton's tools read, and the promise of the early exits.
    """
    kind, shape = (BYTES, [1]) if service.reads_text else ("FP32", service.example.shape or [-1, -1])
    configuration = {
        "max_batch_size": service.config.most_inputs,
        "parameters": {"promise": {"string_value": service.promised}},
    }
    outputs = {name: (of, [-1, *sizes]) for name, (of, sizes) in _outputs(service).items()}
    task = service.task
    ranked = () if task.by_token or task.by_map or task.by_score else (SCORES,)
    extensions = ["classification"] if ranked else []
    extensions += ["binary_tensor_data", "model_configuration", "statistics"]
    on_request = (SCORES,) if service.config.scores == WINNER else ()
    inputs = {"inputs": (kind, [-1, *shape])}
    return DescribedModel(service.name, inputs, outputs, extensions, configuration, on_request, ranked)


def server(model: DescribedModel) -> dict[str, Any]:
    return {"name": "isobatch", "version": VERSION, "extensions": model.extensions}


def metadata(model: DescribedModel) -> dict[str, Any]:
    inputs, outputs = (
        [{"name": name, "datatype": kind, "shape": shape} for name, (kind, shape) in tensors.items()]
        for tensors in (model.inputs, model.outputs)
    )
    about = {"name": model.name, "versions": [VERSION], "platform": "isobatch"}
    return about | {"inputs": inputs, "outputs": outputs}


def configuration(model: DescribedModel) -> dict[str, Any]:
    inputs, outputs = ([{"name": name} for name in tensors] for tensors in (model.inputs, model.outputs))
    return {"name": model.name, "platform": "isobatch", "input": inputs, "output": outputs, **model.configuration}


def check(model: DescribedModel, name: str, version: str = VERSION) -> None:
    """Raise `RefusedError` for any but the one model in its one version."""
    if (name, version or VERSION) != (model.name, VERSION):
        problem = f"there is no model {shown(name)} in version {shown(version or VERSION)}"
        raise RefusedError(404, f"{problem}: this is {model.name!r}, {VERSION!r}")


def check_outputs(model: DescribedModel, names: Collection[str], best: Mapping[str, int]) -> None:
    """Raise `RefusedError` for an unknown output, or if the best labels of one are wanted that has no score for each
    label."""
    if unknown := sorted(set(names) - set(model.outputs)):
        raise RefusedError(400, f"there is no output {shown(unknown[0])}; there are: {', '.join(model.outputs)}")
    for name, count in best.items():
        wanted = f"classification = {shown(count)} of output {shown(name)}"
        if name not in model.ranked:
            has = ", ".join(model.ranked) or "none"
            raise RefusedError(400, f"{wanted}: this output has no score for each label; outputs that have: {has}")
        if count < 1:
            raise RefusedError(400, f"{wanted}: the number must be 1 or more")


def check_scores(service: Service, names: Collection[str], inputs: int) -> None:
    """Raise `RefusedError` if the probabilities of all labels would be more values than a request may have."""
    task, most = service.task, service.sizes.max_bytes
    if SCORES not in names or not isinstance(task, PixelClassification | Keypoints):
        return
    if (values := inputs * prod(task.grid) * len(service.labels)) > most:
        raise RefusedError(422, f"output {SCORES!r} has {values} values: {most} are allowed; leave it out")


async def statistics(service: Service) -> dict[str, Any]:
    """Counts since the start. A request's time in queues is the mean over its inputs."""
    counts = together([front.counts for front in await service.all_fronts()])
    requests = counts.outcomes["answered"]

    def duration(seconds: float, count: int = requests) -> dict[str, int]:
        return {"count": count, "ns": round(1e9 * seconds)}

    none = duration(0.0, 0)
    model = {
        "name": service.name,
        "version": VERSION,
        "inference_count": counts.exits.total(),
        "execution_count": sum(launches.number for (_, block), launches in counts.launches.items() if block == 0),
        "inference_stats": {
            "success": duration(counts.seconds["all"]),
            "fail": duration(0.0, counts.outcomes["failed"]),
            "queue": duration(counts.seconds["queued"]),
            "compute_input": duration(0.0),
            "compute_infer": duration(counts.seconds["computed"]),
            "compute_output": duration(0.0),
            "cache_hit": none,
            "cache_miss": none,
        },
    }
    return {"model_stats": [model]}


def columns(
    service: Service, answers: Sequence[Answer], names: Collection[str], best: Mapping[str, int]
) -> dict[str, Any]:
    """The output tensors of these names, with a row for each answer.

    `best`: by output, how many of the best labels stand in place of all scores, as texts like those of Triton.
    """
    tensors = service.task.columns(answers, service.labels)
    tensors["exit_block"] = np.array([answer.exit_block for answer in answers], np.int64)
    if service.reads_text:
        tensors["truncated"] = np.array([answer.truncated for answer in answers], np.bool_)
    if SCORES in names:
        tensors[SCORES] = service.task.probabilities(answers)
    tensors |= {name: _texts_of_best(tensors[name], service.labels, count) for name, count in best.items()}
    return {name: tensors[name] for name in names}


def _texts_of_best(scores: NDArray[np.float32], names: Sequence[str], count: int) -> NDArray[Any]:
    """The best labels of each input, as Triton writes them: `score:label:name`.

    >>> _texts_of_best(np.float32([[0.2, 0.7, 0.1]]), "abc", 2).tolist()
    [['0.700000:1:b', '0.200000:0:a']]
    """
    rows = [best_labels(row, names, count) for row in scores]
    texts = [[f"{each['score']:f}:{each['label']}:{each['name']}" for each in row] for row in rows]
    return np.array(texts, dtype=object)


def _outputs(service: Service) -> dict[str, tuple[str, list[int]]]:
    own = {**service.task.tensors}
    name = {"name": own.pop("name")} if "name" in own else {}
    scores = {SCORES: (own["score"][0], service.task.score_sizes(len(service.labels)))}
    return own | _EXIT_BLOCK | name | scores | (_TRUNCATED if service.reads_text else {})
