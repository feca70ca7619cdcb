"""Claim: through HTTP, launches that count tokens answer more in time than launches that count texts, or padded ones.

MiniLM's shape with random weights, really computed by one replica on this machine, texts as long as those of three
data sets. The plans have the same batches; one counts tokens, the other texts of the mean length, and the third is the
second with a network that pads. Open loop, every request with the SLO as its deadline; an answer is good within the SLO
of when it was due. Each server is offered the same rates, and its best counts.
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from rich.console import Console

from experiments.packing.texts import POSITIONS, lengths_of, untrained_minilm
from experiments.serve import servers
from experiments.serve.fleet import serve_file_of
from experiments.shared.commands import run_isobatch
from isobatch.cluster.load.generator import LoadGenerator
from isobatch.cluster.load.report import Summary, summary
from isobatch.cluster.load.workloads import arrivals
from isobatch.optimizer import Objective, Plan, optimize
from isobatch.profiles.devices import fleet, links_between
from isobatch.profiles.files import Profile, load, save
from isobatch.profiles.lengths import WORD, text_of

SETS = ("sst2", "agnews", "qnli")
SLO_MS = 400.0
MAX_BATCH = 16
SHARES = (0.5, 0.7, 0.85, 1.0, 1.2, 1.5)  # of what the plan promises, that are offered
KIND = "cpu"
PADDED = "experiments.packing.padded:load"
console = Console(stderr=True)


@dataclass(frozen=True)
class Way:
    """A plan and a profile that count in one way, and what loads the network; empty: what does so by default."""

    name: str
    plan: Plan
    profile: Profile
    loader: str = ""


def measure(seconds: int = 20, layers: int = 6, budget: int = 60, texts: int = 2000) -> dict[str, float]:
    random = np.random.default_rng(0)
    tokens = random.permutation(np.concatenate([lengths_of(data_set) for data_set in SETS]))[:texts].tolist()
    with TemporaryDirectory() as name:
        folder = Path(name)
        profile = _profiled(folder, tokens, layers, budget)
        ways = _ways(profile)
        assert ways[0].plan.promise, "This is a bug: the planner makes promises."
        promised_per_s = ways[0].plan.promise.goodput_per_s
        result = {way.name: _asked(way, folder, tokens, promised_per_s, float(seconds)) for way in ways}
    return _figures(result, promised_per_s)


def _figures(result: dict[str, list[Summary]], promised_per_s: float) -> dict[str, float]:
    figures = {"promised_per_s": promised_per_s}
    for name, runs in result.items():
        best = max(runs, key=lambda run: run.goodput_per_s)
        figures[f"goodput_per_s_{name}"] = best.goodput_per_s
        figures[f"good_tokens_per_s_{name}"] = best.good_tokens_per_s or 0.0
        figures[f"late_share_{name}"] = sum(run.lateness.late for run in runs) / sum(run.requests for run in runs)
        figures[f"goodput_per_s_overloaded_{name}"] = runs[-1].goodput_per_s
    for figure in ("goodput_per_s", "goodput_per_s_overloaded"):
        for other, ratio in (("inputs", "ratio"), ("padded", "over_padded")):
            figures[f"{figure}_{ratio}"] = figures[f"{figure}_tokens"] / max(figures[f"{figure}_{other}"], 1e-9)
    return figures


def _ways(profile: Profile) -> tuple[Way, Way, Way]:
    """The same plan, in tokens, in inputs, as if nobody knew that texts differ in length, and this with padding."""
    devices = fleet(f"{KIND}=1")
    objective = Objective(slo_s=SLO_MS / 1e3, max_batch=MAX_BATCH)
    plan = optimize(profile, devices, links_between(devices, one_machine=True), objective)
    alike = replace(profile, lengths=None, token_exits=None)
    inputs = Way("inputs", replace(plan, length=None), alike)
    return Way("tokens", plan, profile), inputs, replace(inputs, name="padded", loader=PADDED)


def _profiled(folder: Path, tokens: Sequence[int], layers: int, budget: int) -> Profile:
    """Of an untrained network in this folder, as `isobatch profile` measures it with these texts."""
    from transformers import BertTokenizer

    model = folder / "model"
    untrained_minilm(layers).save_pretrained(model)
    words = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]", WORD]
    BertTokenizer(vocab={word: index for index, word in enumerate(words)}, model_max_length=POSITIONS).save_pretrained(
        model
    )
    lines = [json.dumps({"text": text_of(count)}) for count in tokens]
    (folder / "texts.jsonl").write_text("\n".join(lines))
    run_isobatch(
        "profile", model, "--device", "cpu", "--kind", KIND, "--data", folder / "texts.jsonl", "--largest", MAX_BATCH,
        "--budget", budget, "--out", folder / "profile.json",
    )  # fmt: skip
    return load(folder / "profile.json")


def _asked(way: Way, folder: Path, tokens: Sequence[int], promised_per_s: float, seconds: float) -> list[Summary]:
    result = []
    with servers.isobatch(_serve_file(way, folder)) as url:
        for number, share in enumerate((SHARES[0], *SHARES)):  # the first only warms up
            rate = share * promised_per_s
            result.append(asyncio.run(_one(url, tokens, rate, seconds if number else min(seconds, 5.0))))
            console.print(f"{way.name}: {rate:,.0f}/s offered, {result[-1].goodput_per_s:,.0f}/s in time")
    return result[1:]


async def _one(url: str, tokens: Sequence[int], rate: float, seconds: float) -> Summary:
    bodies = [json.dumps({"inputs": text_of(count)}).encode() for count in tokens]
    source = LoadGenerator(url, bodies, headers=f"X-Deadline-Ms: {SLO_MS:g}\r\n")
    return summary(await source.at(arrivals("poisson", rate, seconds, seed=1)), SLO_MS, tokens)


def _serve_file(way: Way, folder: Path) -> Path:
    where = folder / way.name
    where.mkdir()
    (where / "plan.json").write_text(way.plan.to_json())
    save(way.profile, where / "profile.json")
    arguments = {
        "model": str(folder / "model"),
        "plan": str(where / "plan.json"),
        "profile": str(where / "profile.json"),
        "slo_ms": SLO_MS,
        "cpus_per_replica": 1,
    }
    if way.loader:
        arguments["loader"] = way.loader
    return serve_file_of(where, arguments)
