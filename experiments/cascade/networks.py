"""MiniLM's first two layers and all six as classifiers, each fine-tuned by itself for a short time."""

from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from experiments.shared.machine import data
from experiments.shared.minilm import fine_tune, prepared, source
from isobatch.deployments.folders import cache_directory, locked, replacing
from isobatch.deployments.models.loading import quietly
from isobatch.deployments.prepare.data import Columns, rows
from isobatch.deployments.prepare.measuring import PrepareOptions
from isobatch.deployments.prepare.pipeline import prepare
from isobatch.deployments.prepare.records import Layout
from isobatch.deployments.prepare.sample import LabelNames, Sample, draw

LAYERS = (2, 6)
LEARNT_ROWS, JUDGED_ROWS = 6000, 3000
RAMP_ROWS = 2000
HALF = 3800  # rows of AG News' test file, in no order


@dataclass(frozen=True)
class PublicSet:
    """A public data set: what networks learn from, and other rows that they are put together and judged on."""

    name: str
    train: str
    test: str
    train_columns: Columns
    test_columns: Columns
    labels: LabelNames

    def learnt(self, most: int) -> Sample:
        """Rows that networks and ramps learn from. Where there is one file for all, they are its first half."""
        return self._drawn(self.train, self.train_columns, most, slice(None, HALF if self._one_file else None))

    def judged(self) -> Sample:
        return self._drawn(self.test, self.test_columns, JUDGED_ROWS, slice(HALF if self._one_file else None, None))

    @property
    def _one_file(self) -> bool:
        return self.train == self.test

    def _drawn(self, name: str, columns: Columns, most: int, part: slice) -> Sample:
        path = data(name)
        return draw(islice(rows(path, columns), part.start, part.stop), path, self.labels, most)


TRAIN = Columns(layout=Layout(("text", "label")))
AG_TEST = Layout(("class", "title", "text"))
TEST, TITLES = (Columns(text=column, label="class", layout=AG_TEST) for column in ("text", "title"))
SENTIMENTS = LabelNames(("negative", "positive"))
TOPICS = LabelNames(("World", "Sports", "Business", "Sci/Tech"), {str(n + 1): str(n) for n in range(4)})
SETS = (
    PublicSet("sst2", "text/sst2_glue/train.tsv", "text/sst2_glue/dev.tsv", Columns(), Columns(), SENTIMENTS),
    PublicSet("agnews", "text/agnews/train_10k.tsv", "text/agnews/test.csv", TRAIN, TEST, TOPICS),
    # As short as questions.
    PublicSet("titles", "text/agnews/test.csv", "text/agnews/test.csv", TITLES, TITLES, TOPICS),
)


def classifier(data_set: PublicSet, layers: int) -> Path:
    """MiniLM's first layers, fine-tuned for this data set for a short time: at first use, then kept in the cache."""
    target = cache_directory() / f"cascade-{data_set.name}-{layers}"
    with locked(target):
        if not target.is_dir():
            learnt = data_set.learnt(LEARNT_ROWS)
            assert learnt.labels is not None, "This is a bug: the file has labels."
            with quietly(), replacing(target) as draft:
                fine_tune(source(), list(learnt.values), learnt.labels, draft, layers, len(data_set.labels.names))
    return target


def large_network(data_set: PublicSet) -> Path:
    """All layers, with ramps from rows of the file that it learnt from, on which it is not judged.

    That of SST-2 is the one that `make bench-backend` has made too.
    """
    if data_set.name == "sst2":
        return prepared()
    plain, target = classifier(data_set, LAYERS[1]), cache_directory() / f"cascade-{data_set.name}-{LAYERS[1]}-ramps"
    with locked(target):
        if not target.is_dir():
            prepare(plain, data_set.learnt(RAMP_ROWS), target, PrepareOptions())
    return target
