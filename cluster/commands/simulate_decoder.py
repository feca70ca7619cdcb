"""`isobatch simulate` for a decoder: its own engine and scheduler, on launches on paper."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from profiles.errors import UserError

if TYPE_CHECKING:
    from cluster.decoding.simulation import AskedText
    from cluster.simulator.command import Workload


@dataclass(frozen=True)
class DecoderRehearsal:
    """What the user says of a decoder. `given` has the options for classifiers by name: (value, default)."""

    applications: Sequence[dict[str, Any]]
    prompts: Path | None
    load: "Workload"
    given: Mapping[str, tuple[object, object]]

    def run(self) -> None:
        """Play the plan, and say what came of it."""
        from cluster.commands import check_not_given
        from cluster.commands.plan_decoder import profile_for
        from cluster.decoding.simulation import asked_texts, play
        from cluster.load.prompts import summed, table
        from deployments.config import checked
        from deployments.decoding.config import DecoderConfig
        from optimizer.decoding_plans import exits_of
        from optimizer.plan import read_plan

        check_not_given(self.given, "it plays no decoder")
        if len(self.applications) != 1:
            raise UserError(f"{len(self.applications)} decoders are in the file: a simulation needs exactly one")
        config = checked(DecoderConfig, self.applications[0]["args"])
        if config.plan is None:
            raise UserError("there is no plan: isobatch plan makes one, and --plan names it")
        source, made = Path(config.model), read_plan(Path(config.plan))
        profile = profile_for(source, Path(config.profile) if config.profile else None).under(exits_of(made))
        texts = asked_texts(profile.workload, self.load.times_s(), self.load.seed)
        if not texts:
            raise UserError("no text comes in so short a time: give more --hours, or a higher --rate")
        texts = self._prompted(texts, source) if self.prompts else texts
        with Console(stderr=True).status("playing"):
            run = play(made, profile, texts, self.load.seed, config)
        console = Console(soft_wrap=True)
        console.print(table(summed(run.texts, 1e3 * run.ttft_s), 1e3 * run.ttft_s))
        written = sum(run.exits.values()) or 1
        exits = ", ".join(f"{count / written:.1%} after block {block}" for block, count in sorted(run.exits.items()))
        console.print(
            f"TTFT of {1e3 * run.ttft_s:g} ms kept for {run.ttft_kept:.1%} of the texts, "
            f"TPOT of {1e3 * run.tpot_s:g} ms for {run.tpot_kept:.1%}; "
            f"tokens known: {exits}; {run.preempted} texts were put out for a while",
            highlight=False,
        )

    def _prompted(self, texts: "Sequence[AskedText]", source: Path) -> "list[AskedText]":
        """The same with prompts as long as those of the file."""
        from dataclasses import replace

        from cluster.load.prompts import prompts_in
        from deployments.decoding.loading import load_tokenizer

        assert self.prompts, "This is a bug: there is no file."
        words = load_tokenizer(source)
        lengths = cycle([len(words(prompt)["input_ids"]) for prompt in prompts_in(self.prompts)])
        return [replace(text, prompt=length) for text, length in zip(texts, lengths, strict=False)]
