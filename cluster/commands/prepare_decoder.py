"""`isobatch prepare` for a decoder: where its head may be read early."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from cluster.commands import Dtype
from profiles.errors import UserError

if TYPE_CHECKING:
    from deployments.prepare.data import Columns
    from deployments.prepare.decoder import DecoderReport

MAX_TOKENS = 64


@dataclass(frozen=True)
class DecoderCommand:
    """What the user says of a decoder. `given` has the other options by name: (value, default)."""

    source: Path
    data: Path
    out: Path
    columns: "Columns"
    allowed_loss: float
    max_tokens: int | None
    max_rows: int
    dtype: Dtype
    given: Mapping[str, tuple[object, object]]
    force: bool = False

    def run(self, console: Console, model: str) -> None:
        """Write `out`: the checkpoint, and the rules of its ramp."""
        from deployments.decoding.checkpoint import check_decoder
        from deployments.folders import whole
        from deployments.models.checkpoint import copy
        from deployments.prepare.data import rows, taken
        from deployments.prepare.pipeline import check_free
        from deployments.prepare.sample import sampled
        from profiles.promise import RULES

        self._refuse()
        check_decoder(self.source)
        console.print(taken(self.data, self.columns, pairs=False), highlight=False, soft_wrap=True)
        found = rows(self.data, self.columns, pairs=False)
        report = self._report(sampled((_prompt(row.value) for row in found), self.max_rows))
        notes = {"checkpoint": Path(model).name, "data": self.data.name}
        rules = report.rules.model_copy(update={"dtype": self.dtype, "notes": notes})
        check_free(self.out, self.force)  # again, as much may have happened since
        with whole(self.out) as draft:
            copy(self.source, draft)
            (draft / RULES).write_text(rules.model_dump_json(indent=2) + "\n")
        console.print(told(report), highlight=False, soft_wrap=True)
        console.print(f"written to {self.out}: a Hugging Face checkpoint with a ramp; isobatch serve {self.out}")

    def _report(self, prompts: list[str]) -> "DecoderReport":
        from deployments.decoding.anatomy import shape_of
        from deployments.decoding.loading import load_decoder, load_tokenizer, stop_tokens
        from deployments.prepare.decoder import DecoderOptions, ramps_for
        from deployments.progress import busy

        model, words = load_decoder(self.source, dtype=self.dtype), load_tokenizer(self.source)
        most = self.max_tokens or MAX_TOKENS
        tokens = [words(prompt)["input_ids"] for prompt in prompts]
        shape = shape_of(model.config)
        context = shape.context(None)
        fits = [each for each in tokens if 0 < len(each) <= context and most <= shape.room(len(each), context)]
        with busy(f"writing on from {len(fits)} prompts"):
            return ramps_for(model, fits, stop_tokens(self.source), DecoderOptions(self.allowed_loss, most))

    def _refuse(self) -> None:
        from cluster.commands import check_not_given

        check_not_given(self.given, "a decoder's ramp is its own head, read early")
        if self.dtype == "int8":
            raise UserError("--dtype int8 is for classifiers: a decoder is served in float32, float16 or bfloat16")


def _prompt(value: str | list[str]) -> str:
    """A text, or the words that a file has of one."""
    return value if isinstance(value, str) else " ".join(value)


def told(report: "DecoderReport") -> str:
    """What the ramp costs and brings."""
    (ramp,) = report.rules.ramps
    leaving, agreement, same = 1 - (ramp.survival or 0), report.rules.agreement or 0, report.rules.same_texts or 0
    said = (
        f"a ramp after block {ramp.block} (from 0) of {report.num_blocks}: {leaving:.0%} of the tokens leave there, "
        f"where the head is sure by {ramp.threshold:.3f}. Of {report.tokens} tokens after prompts that it was not "
        f"chosen by, {agreement:.2%} are the full network's; {same:.1%} of the texts are, to the last token. Once "
        f"prompts are read, full batches write {report.rhythm.gain:.2f} times as fast as without exits on this device, "
        "by arithmetic"
    )
    return f"{said}. {_projected(report)}"


def _projected(report: "DecoderReport") -> str:
    """What another way to fill KV would cost and bring. Nobody gets it who does not ask for it."""
    found = report.rules.project
    assert found, "This is a bug: it was measured."
    return (
        f"Not chosen is 'exits: project' (KV of skipped blocks made of the state in which a token left): "
        f"{found.same_texts:.1%} of the texts are the full network's, {found.same_tokens:.1%} of the tokens before the "
        f"first other one, {1 - found.survival:.0%} of the tokens leave, and by arithmetic it is at most "
        f"{found.gain:.2f} times as fast as without exits; who "
        "accepts that writes it under args: of a Serve file"
    )
