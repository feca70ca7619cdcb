"""A decoder that computes for real, served over HTTP: whether it writes what is planned, and what plain code writes.

Ways to write take turns on one application, beside `generate` of transformers with as many texts and threads. A rate is
offered for `seconds` to an empty server, about as long as one text may take. So an overload of some percent passes.
"""

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from rich.console import Console

from experiments.decoding.networks import DECODERS, TOKENS, RealDecoder, prompts
from experiments.shared.commands import run_isobatch
from experiments.shared.live import NAME, Live, bare
from experiments.shared.machine import ROOT
from isobatch.cluster.load.prompts import PromptLoad, WrittenText
from isobatch.cluster.load.workloads import arrivals
from isobatch.deployments.decoding.engine_setup import load_decoder, load_tokenizer
from isobatch.deployments.models.backends import compute_with
from isobatch.optimizer.plan import Plan, read_plan
from isobatch.optimizer.text_plans import terms_of, tokens_per_s

console = Console(stderr=True, width=140)
RESIDENTS = 32
TTFT_MS, TPOT_MS = 1000.0, 250.0
WAYS = ("off", "recompute", "verified", "project")
SHARED, OWN = 500, 12  # tokens with which all prompts begin, and that follow
PROMPTS = 400  # more than are written, so that none is there twice and shares all its pages
WARMS_UP, WARMS_UP_S = 0.7, 6.0  # of the promise, and for how long
SHARES = (0.8, 0.9, 0.95, 1.0, 1.05, 1.1)  # of the promise, which are tried
KEPT = 0.98  # of the texts in time: then a rate is sustained


@dataclass(frozen=True)
class ServedCase:
    """What is served: a network in one precision on so many threads."""

    decoder: RealDecoder
    dtype: str
    threads: int

    def __str__(self) -> str:
        return f"{self.decoder.name} {self.dtype}, {self.threads} thread{'s' * (self.threads > 1)}"

    @property
    def suffix(self) -> str:
        """Ends the names of its figures. Those of the first network do not name it."""
        network = "" if self.decoder is next(iter(DECODERS.values())) else f"{self.decoder.name}_"
        return f"{network}{self.dtype}_{self.threads}"

    @property
    def network(self) -> Path:
        return self.decoder.checkpoint()


def measure_served(case: ServedCase, rounds: int, seconds: int, ways: Sequence[str]) -> dict[str, float]:
    """Figures of one network, precision, and number of threads."""
    network, precision = case.network, ("--dtype", case.dtype, "--threads", str(case.threads))
    with TemporaryDirectory() as folder, bare() as here:
        profile = Path(folder) / "profile.json"
        run_isobatch("profile", str(network), *precision, "--out", str(profile))
        plans = {way: _planned(network, profile, Path(folder), way) for way in ways}
        return asyncio.run(_measured(here, case, plans, rounds, seconds))


def _planned(network: Path, profile: Path, folder: Path, way: str) -> Path:
    path = folder / f"{way}.json"
    limits = ["--ttft-ms", f"{TTFT_MS:g}", "--tpot-ms", f"{TPOT_MS:g}"]
    run_isobatch("plan", str(network), "--profile", str(profile), *limits, "--exits", way, "--out", str(path))
    return path


@dataclass(frozen=True)
class ServedWay:
    """One way to write, as it is deployed now."""

    base: str
    texts: Sequence[str]

    async def closed(self, clients: int, seconds: float) -> float:
        """Tokens per second of clients that each wait for their text."""
        load = PromptLoad(self.base, self.texts, TOKENS)
        return _per_s(load.texts(await load.by_clients(clients, seconds)))

    async def open(self, texts_per_s: float, seconds: float, seed: int) -> list[WrittenText]:
        load = PromptLoad(self.base, self.texts, TOKENS)
        return load.texts(await load.at(arrivals("poisson", texts_per_s, seconds, seed)))


def _per_s(texts: Sequence[WrittenText]) -> float:
    """Tokens per second of the texts that were written, until the last one."""
    written = [text for text in texts if text.status == 200]
    return sum(text.tokens for text in written) / max(text.last_s for text in written) if written else 0.0


def _in_time(texts: Sequence[WrittenText]) -> list[WrittenText]:
    return [
        text for text in texts
        if text.status == 200 and text.ttft_s <= TTFT_MS / 1e3 and text.tpot_s <= TPOT_MS / 1e3
    ]  # fmt: skip


async def _measured(
    here: Live, case: ServedCase, plans: dict[str, Path], rounds: int, seconds: int
) -> dict[str, float]:
    seen: dict[str, list[float]] = {}
    for number in range(rounds):
        for name, value in (await _round(here, case, plans, seconds, number)).items():
            seen.setdefault(name, []).append(value)
        console.print(f"{case}, round {number + 1}:", {n: round(v[-1], 3) for n, v in seen.items()})
    figures = {name: median(values) for name, values in seen.items()}
    for way, path in plans.items():
        figures[f"promised_{way}"] = tokens_per_s(read_plan(path))
        figures[f"live_over_promise_{way}"] = figures[f"live_{way}"] / figures[f"promised_{way}"]
    figures["off_over_generate"] = figures["tokens_per_s_off"] / figures["tokens_per_s_generate"]
    for way in plans.keys() - {"off"}:
        figures[f"{way}_over_off"] = figures[f"tokens_per_s_{way}"] / figures["tokens_per_s_off"]
    return figures


async def _round(here: Live, case: ServedCase, plans: dict[str, Path], seconds: int, number: int) -> dict[str, float]:
    figures = {"tokens_per_s_generate": await asyncio.to_thread(generated_per_s, case)}
    known = prompts(400, seed=100 + number)
    for way, path in plans.items():
        plan = read_plan(path)
        await asyncio.to_thread(here.deploy, _application(case.network, plan=str(path), replan=True))
        served = ServedWay(here.base, known)
        promised = tokens_per_s(plan) / TOKENS
        await served.open(WARMS_UP * promised, WARMS_UP_S, seed=number)
        kept, most = await _sustained(served, promised, seconds, number)
        figures[f"live_{way}"] = kept * TOKENS
        if way == "recompute":
            twice = await served.open(2 * promised, seconds, seed=50 + number)
            admitted = [text for text in twice if text.status == 200]
            figures["in_time_at_twice"] = len(_in_time(twice)) / max(1, len(admitted))
            figures["goodput_at_twice"] = len(_in_time(twice)) / max(1, most)
        figures[f"tokens_per_s_{way}"] = await _with_residents(here, case, plan, way, known, seconds)
    if case.decoder.shares:
        figures["prefix_over_none"] = await _prefix_over_none(here, case, seconds, number)
    return figures


async def _sustained(served: ServedWay, promised: float, seconds: int, seed: int) -> tuple[float, int]:
    """The most texts per second, of some shares of the promise, at which nearly all are in time; and the most texts
    that were in time at any of these rates. Two rates in a row that are not kept end the search."""
    kept, most, missed = 0.0, 0, 0
    for share in SHARES:
        texts = await served.open(share * promised, seconds, seed)
        in_time = len(_in_time(texts))
        most = max(most, in_time)
        console.print(f"{share:.0%} of {promised:.1f} texts/s: {in_time} of {len(texts)} in time")
        if in_time >= KEPT * len(texts):
            kept, missed = share * promised, 0
        elif (missed := missed + 1) == 2:
            break
    return kept, most


async def _with_residents(
    here: Live, case: ServedCase, plan: Plan, way: str, known: Sequence[str], seconds: int
) -> float:
    """Tokens per second of as many residents as `generate` has texts."""
    cuts = [split.start for split in plan.splits[1:]] or None
    own = {"exits": way, "dtype": plan.dtype, "cuts": cuts, "kv_megabytes": terms_of(plan).kv_megabytes}
    await asyncio.to_thread(here.deploy, _free(case, **own))
    served = ServedWay(here.base, known)
    await served.closed(RESIDENTS, WARMS_UP_S)
    return await served.closed(RESIDENTS, seconds)


async def _prefix_over_none(here: Live, case: ServedCase, seconds: int, number: int) -> float:
    """Texts per second whose prompts begin with the same tokens, over those of prompts that begin differently."""
    await asyncio.to_thread(here.deploy, _free(case, exits="off", dtype=case.dtype, kv_megabytes=2048))
    draw = random.Random(number)
    start = _digits(draw, SHARED)
    same = [start + _digits(draw, OWN) for _ in range(PROMPTS)]
    other = [_digits(draw, SHARED + OWN) for _ in range(PROMPTS)]
    await ServedWay(here.base, same[::-1]).closed(RESIDENTS, WARMS_UP_S)  # the last ones first: none is written twice
    return await ServedWay(here.base, same).closed(RESIDENTS, seconds) / await ServedWay(here.base, other).closed(
        RESIDENTS, seconds
    )


def _digits(draw: random.Random, count: int) -> str:
    """A text with this number of tokens: the tokenizer has one for each digit."""
    return "".join(draw.choice("0123456789") for _ in range(count))


def _application(network: Path, **fields: Any) -> dict[str, Any]:
    arguments = {"model": str(network), "name": "decoder", **fields}
    return {"name": NAME, "import_path": "isobatch.deployments.decoding.app:build", "args": arguments}


def _free(case: ServedCase, **fields: Any) -> dict[str, Any]:
    """The application without a plan and without limits on times, so that all clients have a place."""
    free = {"max_residents": RESIDENTS, "ttft_ms": 1e6, "tpot_ms": 1e6, "cpus_per_replica": case.threads}
    return _application(case.network, **free, **{name: value for name, value in fields.items() if value is not None})


def generated_per_s(case: ServedCase) -> float:
    """Tokens per second of transformers' `generate`, in a process of its own."""
    code = "import sys; from experiments.decoding import served; served.print_generated(*sys.argv[1:])"
    command = [sys.executable, "-c", code, str(case.network), case.dtype, str(case.threads)]
    done = subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True)
    return float(json.loads(done.stdout.splitlines()[-1]))


def print_generated(network: str, dtype: str, threads: str) -> None:
    compute_with(int(threads))  # as a replica does, which keeps freed memory too
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
