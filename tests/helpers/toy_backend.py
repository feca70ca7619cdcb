"""A backend of one's own takes one small file: it is this one."""

from collections.abc import Mapping

from torch import Tensor

from isobatch.deployments.models import TorchModel
from isobatch.deployments.models.interface import Backend
from isobatch.deployments.models.served_model import BlockRange, RangeOutput
from isobatch.deployments.models.spans import Spans


class ToyModel(TorchModel):
    """Computes one block at a time, and counts them."""

    backend = "toy"

    def __init__(self, inner: TorchModel) -> None:
        super().__init__(inner.anatomy, inner.encoder, inner.ramps, inner.labels, inner.device, inner.dtype)
        self.inner, self.computed = inner, 0

    @property
    def exact(self) -> TorchModel:
        return self.inner

    def through(self, block_range: BlockRange, arrays: Mapping[str, Tensor], spans: Spans | None) -> RangeOutput:
        logits = dict[int, Tensor]()
        for block in range(block_range.start, block_range.stop):
            one = BlockRange(block, block + 1, tuple(ramp for ramp in block_range.ramps if ramp == block))
            passed = self.inner.through(one, arrays, spans)
            logits |= passed.ramps
            arrays = {} if passed.hidden is None else {"hidden": passed.hidden}
            self.computed += 1
        return RangeOutput(passed.hidden, logits, passed.head)


def _obstacle(model: TorchModel, int8: bool) -> str | None:
    return None if model.num_blocks > 3 else "a toy runs no network of 3 blocks: use backend: torch"


TOY = Backend(lambda model, fingerprint, int8: ToyModel(model), _obstacle)
