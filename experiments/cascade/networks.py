"""MiniLM's first two layers and all six as classifiers, each fine-tuned by itself for a short time."""

from dataclasses import dataclass
from pathlib import Path

from deployments.folders import alone, cache_directory, whole
from deployments.models.loading import quietly
from deployments.prepare.data import Columns, rows
from deployments.prepare.measuring import PrepareOptions
from deployments.prepare.pipeline import prepare
from deployments.prepare.records import Layout
from deployments.prepare.sample import LabelNames, Sample, draw
from experiments.backend.minilm import fine_tune, source
from experiments.shared.public_data import data

LAYERS = (2, 6)
LEARNT_ROWS, JUDGED_ROWS = 6000, 3000
RAMP_ROWS = 2000


@dataclass(frozen=True)
class Task:
    """A public data set: what networks learn from, and other rows that they are put together and judged on."""

    name: str
    train: str
    test: str
    train_columns: Columns
    test_columns: Columns
    labels: LabelNames

    def learnt(self) -> Sample:
        return self.drawn(self.train, self.train_columns, LEARNT_ROWS)

    def judged(self) -> Sample:
        return self.drawn(self.test, self.test_columns, JUDGED_ROWS)

    def drawn(self, name: str, columns: Columns, most: int) -> Sample:
        path = data(name)
        return draw(rows(path, columns), path, self.labels, most)


TRAIN = Columns(layout=Layout(("text", "label")))
TEST = Columns(text="text", label="class", layout=Layout(("class", "title", "text")))
SENTIMENTS = LabelNames(("negative", "positive"))
TOPICS = LabelNames(("World", "Sports", "Business", "Sci/Tech"), {str(n + 1): str(n) for n in range(4)})
TASKS = (
    Task("sst2", "text/sst2_glue/train.tsv", "text/sst2_glue/dev.tsv", Columns(), Columns(), SENTIMENTS),
    Task("agnews", "text/agnews/train_10k.tsv", "text/agnews/test.csv", TRAIN, TEST, TOPICS),
)


def classifier(task: Task, layers: int) -> Path:
    """MiniLM's first layers, fine-tuned for this task for a short time: at first use, then kept in the cache."""
    target = cache_directory() / f"cascade-{task.name}-{layers}"
    with alone(target):
        if not target.is_dir():
            learnt = task.learnt()
            assert learnt.labels is not None, "This is a bug: the file has labels."
            with quietly(), whole(target) as draft:
                fine_tune(source(), list(learnt.values), learnt.labels, draft, layers, len(task.labels.names))
    return target


def with_ramps(task: Task, layers: int) -> Path:
    """The same with ramps, made from rows of the file that it learnt from, on which it is not judged."""
    plain, target = classifier(task, layers), cache_directory() / f"cascade-{task.name}-{layers}-ramps"
    with alone(target):
        if not target.is_dir():
            prepare(plain, task.drawn(task.train, task.train_columns, RAMP_ROWS), target, PrepareOptions())
    return target
