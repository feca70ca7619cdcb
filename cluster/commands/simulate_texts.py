"""Runs `isobatch simulate` for a decoder: its plan under texts that arrive as its profile says."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

from rich.console import Console

from isobatch.cluster.commands.plan_texts import profile_for
from isobatch.cluster.commands.simulate import TextSimulationOptions
from isobatch.cluster.commands.simulate_run import NO_INPUTS, single_application
from isobatch.cluster.load.prompts import prompts_in, summed
from isobatch.cluster.load.prompts import table as prompt_table
from isobatch.cluster.simulator.text_simulation import DecodingRun, TextArrival, simulate_texts, text_arrivals
from isobatch.deployments.config import checked
from isobatch.deployments.decoding.config import DecoderConfig
from isobatch.deployments.sources import local
from isobatch.optimizer.plan import read_plan
from isobatch.optimizer.text_plans import exits_of
from isobatch.profiles.errors import UserError


def rehearse_texts(options: TextSimulationOptions, applications: list[dict[str, Any]]) -> None:
    """Run a decoder's own engine and scheduler, with launches that only take the time that its profile says."""
    options.check_read()
    config = checked(DecoderConfig, single_application(applications, "decoders")["args"])
    if config.plan is None:
        raise UserError("there is no plan: isobatch plan makes one, and --plan names it")
    source, plan = config.folder, read_plan(local(config.plan))
    profile = profile_for(source, local(config.profile) if config.profile else None, exits_of(plan))
    texts = text_arrivals(profile.workload, options.times_s(options.seconds), options.seed)
    if not texts:
        raise UserError(NO_INPUTS)
    if options.prompts:
        texts = _with_prompts_of(options.prompts, texts, source)
    with Console(stderr=True).status("simulating"):
        run = simulate_texts(plan, profile, texts, options.seed, config)
    console = Console(soft_wrap=True)
    console.print(prompt_table(summed(run.texts, 1e3 * run.ttft_s), 1e3 * run.ttft_s))
    console.print(run_sentence(run), highlight=False)


def run_sentence(run: DecodingRun) -> str:
    """How a simulated run kept its limits, and where its tokens left."""
    tokens = sum(run.exits.values()) or 1
    exits = ", ".join(f"{count / tokens:.1%} after block {block}" for block, count in sorted(run.exits.items()))
    return (
        f"TTFT of {1e3 * run.ttft_s:g} ms kept for {run.ttft_kept:.1%} of the texts, "
        f"TPOT of {1e3 * run.tpot_s:g} ms for {run.tpot_kept:.1%}; "
        f"tokens known: {exits}; {run.preempted} times a text lost its pages and began again"
    )


def _with_prompts_of(file: Path, texts: Sequence[TextArrival], source: Path) -> list[TextArrival]:
    """The same texts, whose prompts have the lengths of those in a file, in turn."""
    from isobatch.deployments.decoding.engine_setup import load_tokenizer  # imports torch

    tokenizer = load_tokenizer(source)
    lengths = cycle([len(tokenizer(prompt)["input_ids"]) for prompt in prompts_in(file)])
    return [replace(text, prompt=length) for text, length in zip(texts, lengths, strict=False)]
