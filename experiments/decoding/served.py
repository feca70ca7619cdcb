"""Measures a really computed decoder over HTTP: the rates that it sustains over those promised, and over `generate`.

Ways take turns of seconds on one server, which changes its plan for each: first each way at a rate of its own, then
with the number of texts that `generate` of transformers writes at once, in turns with it.
"""

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

from experiments.decoding.networks import DECODERS, TOKENS, RealDecoder, prompts
from experiments.shared.commands import run_isobatch
from experiments.shared.live import NAME, Live, bare
from experiments.shared.machine import ROOT
from experiments.shared.rate_search import FIRST, LEAD_S, RateSearch, in_turns, run_passes
from isobatch.cluster.controller.application import RunningApplication
from isobatch.cluster.load.generator import LoadRecord
from isobatch.cluster.load.prompts import PromptLoad, WrittenText
from isobatch.cluster.load.workloads import arrivals
from isobatch.deployments.decoding.config import DecoderConfig
from isobatch.deployments.decoding.engine_setup import load_decoder, load_tokenizer, splits_and_limits
from isobatch.deployments.decoding.ramp_rules import rules_of
from isobatch.deployments.deployer.steps import FRONT
from isobatch.deployments.models.backends import compute_with
from isobatch.optimizer.plan import Plan, read_plan
from isobatch.optimizer.text_plans import residents_of, terms_of, tokens_per_s, with_terms

console = Console(stderr=True, width=140)
RESIDENTS, MEGABYTES = 32, 2048  # texts at once and memory for KV in plans without limits on times
TTFT_MS, TPOT_MS = 1000.0, 250.0
NO_LIMIT_MS = 1e6
LATEST_S = (TTFT_MS + (TOKENS - 1) * TPOT_MS) / 1e3  # when a text in time has ended, at the latest
WAYS = ("off", "recompute", "verified", "project")
SHARED, OWN = 500, 12  # tokens at the beginning that all prompts share, and tokens after them
PROMPTS = 600  # more than are used, so that no prompt comes twice and shares all its pages
KNOWN = prompts(PROMPTS, seed=100)
WARMS_UP, WARMS_UP_S = 0.7, 6.0  # a share of the promised rate; seconds of 32 texts at once
LOST = 0.02  # the largest share of lost texts at a sustained rate
TWICE_S = 60.0  # seconds of load at twice the promise


@dataclass(frozen=True)
class ServedCase:
    """A network in one precision on a number of threads."""

    decoder: RealDecoder
    dtype: str
    threads: int

    def __str__(self) -> str:
        return f"{self.decoder.name} {self.dtype}, {self.threads} thread{'s' * (self.threads > 1)}"

    @property
    def suffix(self) -> str:
        """The end of the figures' names, without the name of the first network."""
        network = "" if self.decoder is next(iter(DECODERS.values())) else f"{self.decoder.name}_"
        return f"{network}{self.dtype}_{self.threads}"

    @property
    def network(self) -> Path:
        return self.decoder.checkpoint(self.dtype)


def measure_served(case: ServedCase, rounds: int, turns: int, seconds: int, ways: Sequence[str]) -> dict[str, float]:
    """The figures of a case: `turns` at a rate, and `rounds` beside `generate`."""
    network, precision = case.network, ("--dtype", case.dtype, "--threads", str(case.threads))
    with TemporaryDirectory() as folder, bare() as here:
        profile = Path(folder) / "profile.json"
        run_isobatch("profile", str(network), *precision, "--out", str(profile))
        plans = {way: _planned(network, profile, Path(folder), way) for way in ways}
        return asyncio.run(_measured(here, Path(folder), case, plans, rounds, turns, seconds))


def _planned(network: Path, profile: Path, folder: Path, way: str) -> Plan:
    path = folder / f"{way}.json"
    limits = ["--ttft-ms", f"{TTFT_MS:g}", "--tpot-ms", f"{TPOT_MS:g}"]
    run_isobatch("plan", str(network), "--profile", str(profile), *limits, "--exits", way, "--out", str(path))
    return read_plan(path)


async def _measured(
    here: Live, folder: Path, case: ServedCase, plans: Mapping[str, Plan], rounds: int, turns: int, seconds: int
) -> dict[str, float]:
    planned = await ServedWays.deployed(here, folder / "planned.json", case, plans)
    figures = await _sustained(planned, turns, seconds)
    free = {way: _free(case, way, plan) for way, plan in plans.items()}
    served = await ServedWays.deployed(here, folder / "free.json", case, free)
    figures |= await _with_residents(served, case, rounds, seconds)
    if case.decoder.shares:
        figures["prefix_over_none"] = await _prefix_over_none(served, seconds)
    return figures


def _free(case: ServedCase, way: str, plan: Plan) -> Plan:
    """The same cuts without limits on times, so that every client has a place."""
    cuts, blocks = [split.start for split in plan.splits[1:]] or None, plan.splits[-1].stop
    fields = {"model": str(case.network), "exits": way, "cuts": cuts, "dtype": case.dtype, "kv_megabytes": MEGABYTES}
    free = {"max_residents": RESIDENTS, "ttft_ms": NO_LIMIT_MS, "tpot_ms": NO_LIMIT_MS}
    config = DecoderConfig.model_validate(fields | free)
    splits, limits = splits_and_limits(config, rules_of(case.network, blocks), blocks)
    return with_terms(config.as_plan(splits, limits, plan.placements[0].kind), threads=case.threads)


@dataclass(frozen=True)
class ServedWays:
    """A server that changes between these plans; its fixed settings fit all of them."""

    base: str
    plans: Mapping[str, Plan]

    @classmethod
    async def deployed(cls, here: Live, path: Path, case: ServedCase, plans: Mapping[str, Plan]) -> "ServedWays":
        first = max(plans.values(), key=lambda plan: terms_of(plan).kv_megabytes)
        path.write_text(first.to_json())
        arguments = {"model": str(case.network), "name": "decoder", "plan": str(path), "replan": True}
        decoder = {"name": NAME, "import_path": "isobatch.deployments.decoding.app:build", "args": arguments}
        await asyncio.to_thread(here.deploy, decoder)
        return cls(here.base, plans)

    async def follow(self, way: str) -> None:
        await RunningApplication(NAME, FRONT).roll_out(self.plans[way])

    def promised(self, way: str) -> float:
        """Texts per second."""
        return tokens_per_s(self.plans[way]) / TOKENS

    def lead_s(self, way: str) -> float:
        """The time after which as many texts end as begin, and queues have built up."""
        return LEAD_S + residents_of(self.plans[way]) / self.promised(way)

    async def sustains(self, seconds: int, way: str, per_s: float, seed: int) -> bool:
        await self.follow(way)
        load, lead_s = PromptLoad(self.base, KNOWN, TOKENS), self.lead_s(way)
        due_s = arrivals("poisson", per_s, lead_s + seconds, seed)
        return await run_passes(load, due_s, lead_s, LOST, partial(_lost, load))

    async def open(self, way: str, per_s: float, seconds: float, seed: int) -> list[WrittenText]:
        """The texts of an open loop, without those of its lead."""
        load, lead_s = PromptLoad(self.base, KNOWN, TOKENS), self.lead_s(way)
        texts = load.texts(await load.at(arrivals("poisson", per_s, lead_s + seconds, seed)))
        return [text for text in texts if text.due_s >= lead_s]

    async def closed(self, seconds: float, texts: Sequence[str]) -> list[WrittenText]:
        """The texts of a closed loop, whose clients wait for each text."""
        load = PromptLoad(self.base, texts, TOKENS)
        return load.texts(await load.by_clients(RESIDENTS, seconds))


def _lost(load: PromptLoad, record: LoadRecord, now_s: float) -> NDArray[Any]:
    """Marks the texts that were refused or are late."""
    late = np.array([not _is_in_time(text) for text in load.texts(record)], bool)
    return np.where(np.isnan(record.ended_s), now_s - record.due_s > LATEST_S, late)


def _is_in_time(text: WrittenText) -> bool:
    return text.status == 200 and text.ttft_s <= TTFT_MS / 1e3 and text.tpot_s <= TPOT_MS / 1e3


async def _sustained(served: ServedWays, turns: int, seconds: int) -> dict[str, float]:
    """The rates that all ways sustain, and the texts in time at twice the promise."""
    for way in served.plans:
        await served.follow(way)
        await served.open(way, WARMS_UP * served.promised(way), 0.0, seed=turns)
    searches = {way: RateSearch(FIRST * served.promised(way)) for way in served.plans}
    await in_turns(searches, turns, partial(served.sustains, seconds))
    figures = dict[str, float]()
    for way, own in searches.items():
        figures |= {f"promised_{way}": TOKENS * served.promised(way), f"live_{way}": TOKENS * own.sustained_per_s}
        figures[f"live_over_promise_{way}"] = own.sustained_per_s / served.promised(way)
    if "recompute" in searches and (per_s := searches["recompute"].sustained_per_s):
        figures |= await _at_twice(served, "recompute", per_s, seconds)
    return figures


async def _at_twice(served: ServedWays, way: str, sustained_per_s: float, seconds: int) -> dict[str, float]:
    """Texts in time at twice the promise, in runs that each follow a run at the sustained rate."""
    await served.follow(way)
    before, twice = list[WrittenText](), list[WrittenText]()
    for number in range(ceil(TWICE_S / seconds)):
        before += await served.open(way, sustained_per_s, seconds, seed=number)
        twice += await served.open(way, 2 * served.promised(way), seconds, seed=number)
    in_time, admitted = sum(map(_is_in_time, twice)), sum(text.status == 200 for text in twice)
    return {
        "in_time_at_twice": in_time / max(1, admitted),
        "goodput_at_twice": in_time / max(1, sum(map(_is_in_time, before))),
    }


async def _with_residents(served: ServedWays, case: ServedCase, rounds: int, seconds: int) -> dict[str, float]:
    """Tokens per second with the number of residents that `generate` writes at once."""
    for way in served.plans:
        await served.follow(way)
        await served.closed(WARMS_UP_S, KNOWN)
    seen: dict[str, list[float]] = {name: [] for name in (*served.plans, "generate")}
    for number in range(rounds):
        seen["generate"].append(await asyncio.to_thread(generated_per_s, case))
        for way in list(served.plans)[:: 1 if number % 2 == 0 else -1]:
            await served.follow(way)
            seen[way].append(_per_s(await served.closed(seconds, KNOWN)))
        console.print(f"round {number + 1} of {rounds}:", {name: round(each[-1]) for name, each in seen.items()})

    def over(name: str, other: str) -> float:
        return median(one / two for one, two in zip(seen[name], seen[other], strict=True))

    figures = {f"tokens_per_s_{name}": median(speeds) for name, speeds in seen.items()}
    figures["off_over_generate"] = over("off", "generate")
    return figures | {f"{way}_over_off": over(way, "off") for way in served.plans if way != "off"}


def _per_s(texts: Sequence[WrittenText]) -> float:
    """Tokens per second, until the last text ended."""
    written = [text for text in texts if text.status == 200]
    return sum(text.tokens for text in written) / max(text.last_s for text in written) if written else 0.0


async def _prefix_over_none(served: ServedWays, seconds: int) -> float:
    """Tokens per second of prompts with a common beginning, over those of prompts without."""
    await served.follow("off")
    draw = random.Random(0)
    start = _digits(draw, SHARED)
    same = [start + _digits(draw, OWN) for _ in range(PROMPTS)]
    other = [_digits(draw, SHARED + OWN) for _ in range(PROMPTS)]
    await served.closed(WARMS_UP_S, same[::-1])  # the last prompts first, so that no prompt comes twice
    return _per_s(await served.closed(seconds, same)) / _per_s(await served.closed(seconds, other))


def _digits(draw: random.Random, count: int) -> str:
    """A text with this number of tokens, since the tokenizer has a token for each digit."""
    return "".join(draw.choice("0123456789") for _ in range(count))


def generated_per_s(case: ServedCase) -> float:
    """Tokens per second of transformers' `generate`, in a process of its own."""
    code = "import sys; from experiments.decoding import served; served.print_generated(*sys.argv[1:])"
    command = [sys.executable, "-c", code, str(case.network), case.dtype, str(case.threads)]
    done = subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True)
    return float(json.loads(done.stdout.splitlines()[-1]))


def print_generated(network: str, dtype: str, threads: str) -> None:
    compute_with(int(threads))  # as a replica, which keeps freed memory, too
    model, tokenizer = load_decoder(Path(network), dtype=dtype), load_tokenizer(Path(network))
    tokenizer.padding_side = "left"
    batch = tokenizer(prompts(RESIDENTS, seed=3), return_tensors="pt", padding=True)
    batch.pop("token_type_ids", None)
    write = partial(model.generate, **batch, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False)
    seconds = []
    with torch.inference_mode():
        for _ in range(4):  # the first one warms up
            begun_s = time.perf_counter()
            write()
            seconds.append(time.perf_counter() - begun_s)
    print(json.dumps(RESIDENTS * TOKENS / float(np.median(seconds[1:]))))
