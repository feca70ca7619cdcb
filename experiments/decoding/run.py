"""Claim: decoding with exits at full batches beats decoding without exits, and exits without full batches.

The demo's decoder and a T5 of the same task write held-out sums, really computed on one thread, with the same number of
residents and the same memory. Ways take turns, and tokens are counted per second of processor time, so that a busy
machine does not change the ratios. The baseline is the continuous batching of transformers, which does not support T5.
Other devices are simulated (on_paper.py).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console

from experiments.decoding import served
from experiments.decoding.networks import DECODERS
from experiments.decoding.on_paper import measure_on_paper
from experiments.demos.sums import add_ramps
from experiments.demos.t5_sums import save, train
from experiments.shared.kept_parts import kept_part
from experiments.shared.live import in_own_process
from experiments.shared.real_network import DTYPE
from isobatch.deployments.decoding.config import DecoderConfig
from isobatch.deployments.decoding.engine_setup import (
    decoder_shape,
    engine_of,
    load_decoder,
    load_tokenizer,
    stop_tokens,
)
from isobatch.deployments.decoding.ramp_rules import DecoderRules, rules_of
from isobatch.deployments.decoding.sequences import TextRequest
from isobatch.deployments.demo import llm_demo_directory
from isobatch.deployments.demo.sums import answer_to, prompt_of, sums
from isobatch.deployments.folders import cache_directory, replacing
from isobatch.profiles.errors import UserError

MAX_TOKENS = 24
RESIDENTS = 32
KV_MEGABYTES = 32  # more than all residents need together
AT_ONCE = 0.01  # the deep part runs as soon as a token waits
console = Console(stderr=True)

Texts = list[list[int]]


@dataclass(frozen=True)
class WrittenWay:
    """The texts of a way of decoding for some prompts, and their speed."""

    name: str
    write: Callable[[Sequence[TextRequest]], Texts]
    share: float = 1.0  # the share of the prompts that slow ways get


PARTS = ("engines", "paper", "served")
PRECISIONS = tuple(dict.fromkeys((DTYPE, "float32")))


def measure(
    parts: str = ",".join(PARTS), rounds: int = 3, texts: int = 320, networks: str = ",".join(DECODERS),
    dtypes: str = ",".join(PRECISIONS), threads: str = "1,2", turns: int = 6, seconds: int = 20,
    ways: str = ",".join(served.WAYS), again: int = 0,
) -> dict[str, float]:  # fmt: skip
    """`rounds`: of the engines, and of served texts beside `generate`. `turns`: runs of `seconds` at a rate.

    The first of `networks` is served in each of `dtypes` with each number of `threads`, the others in the first of
    both, in all `ways`. `again=1`: measure parts again that the same code has measured on this machine.
    """
    if unknown := set(parts.split(",")) - set(PARTS):
        raise UserError(f"parts={','.join(sorted(unknown))}: there are {','.join(PARTS)}")
    if (unknown := set(ways.split(",")) - set(served.WAYS)) or "off" not in ways.split(","):
        raise UserError(f"ways={ways}: there are {','.join(served.WAYS)}, and off is what others are compared with")

    def part(name: str, options: str, measure_part: Callable[[], dict[str, float]]) -> dict[str, float]:
        return kept_part("decoding", name, options, bool(again), measure_part, console)

    figures: dict[str, float] = {}
    if "engines" in parts:
        figures |= part("engines", f"{rounds} {texts}", partial(_of_engines, rounds, texts))
    if "paper" in parts:
        figures |= part("paper", "", partial(measure_on_paper, console.print))
    if "served" in parts:
        for case in _cases(networks.split(","), dtypes.split(","), str(threads).split(",")):
            measure_case = partial(served.measure_served, case, rounds, turns, seconds, ways.split(","))
            options = f"{rounds} {turns} {seconds} {ways}"
            seen = part(f"served {case}", options, partial(in_own_process, measure_case))
            figures |= {f"{name}_{case.suffix}": value for name, value in seen.items()}
    return figures


def _cases(networks: list[str], dtypes: list[str], threads: list[str]) -> list[served.ServedCase]:
    """The first network with all precisions and threads, the others with the first of both."""
    try:
        first, *others = (DECODERS[name] for name in networks)
    except KeyError as error:
        raise UserError(f"networks={error.args[0]}: there are {','.join(DECODERS)}") from None
    cases = [served.ServedCase(first, dtype, int(count)) for dtype, count in product(dtypes, threads)]
    return cases + [replace(cases[0], decoder=other) for other in others]


def _of_engines(rounds: int, texts: int) -> dict[str, float]:
    torch.set_num_threads(1)
    llama = measured(llm_demo_directory(), rounds, texts, [WrittenWay("generate_batch", _generate_batch())])
    t5 = measured(t5_directory(), rounds, texts, [])
    figures = llama | {f"t5_{name}": value for name, value in t5.items()}
    for way in ("recompute", "project"):
        figures[f"points_lost_by_{way}"] = _points_lost(llama, way)
        figures[f"t5_points_lost_by_{way}"] = _points_lost(t5, way)
    return figures


def _points_lost(figures: dict[str, float], way: str) -> float:
    return 100 * (figures["exact_match_full"] - figures[f"exact_match_{way}"])


def measured(folder: Path, rounds: int, texts: int, others: list[WrittenWay]) -> dict[str, float]:
    """The figures of one network, beside other ways to write the same texts."""
    words, rules = load_tokenizer(folder), rules_of(folder, num_blocks=1_000)
    shape, stop, pairs = decoder_shape(folder), stop_tokens(folder), sums(held_out=True)[:texts]
    requests = [shape.request(words(prompt_of(*pair))["input_ids"], MAX_TOKENS, stop) for pair in pairs]
    ways = [*_ways(folder, rules), *others]
    written = {way.name: way.write(_some(requests, way)) for way in ways}  # warms up, too
    speeds: dict[str, list[float]] = {way.name: [] for way in ways}
    for number in range(rounds):
        for way in ways:
            speeds[way.name].append(_tokens_per_s(way, _some(requests, way)))
        console.print(number, {name: round(result[-1]) for name, result in speeds.items()})
    right = [[*words(answer_to(*pair))["input_ids"], words.eos_token_id] for pair in pairs]
    return _figures(speeds, written, right)


def t5_directory() -> Path:
    """A T5 that writes sums, made once on a machine."""
    target = cache_directory() / "t5-sums"
    if not target.exists():
        with replacing(target) as folder:
            save(train(), folder)
            add_ramps(folder)
    return target


def _ways(folder: Path, rules: DecoderRules) -> list[WrittenWay]:
    def ours(**settings: Any) -> Callable[[Sequence[TextRequest]], Texts]:
        return _ours(folder, rules, **settings)

    return [
        WrittenWay("full", ours(exits="off")),
        WrittenWay("recompute", ours(exits="recompute")),
        WrittenWay("project", ours(exits="project")),
        WrittenWay("verified", ours(exits="verified")),
        WrittenWay("exits_at_once", ours(exits="recompute", deep_share=AT_ONCE)),
        WrittenWay("exits_batch_of_one", ours(exits="recompute", max_residents=1), share=0.1),
    ]


def _ours(folder: Path, rules: DecoderRules, **settings: Any) -> Callable[[Sequence[TextRequest]], Texts]:
    """The engine of a replica, without its thread."""
    base = {"model": "", "max_residents": RESIDENTS, "max_waiting": 10**6, "ttft_ms": 1e12, "tpot_ms": 1e12}
    base["kv_megabytes"] = KV_MEGABYTES
    config = DecoderConfig.model_validate(base | settings)
    return engine_of(load_decoder(folder), rules, config).write_all


def _generate_batch() -> Callable[[Sequence[TextRequest]], Texts]:
    """The continuous batching of transformers, with the same number of sequences at once."""
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    model = load_decoder(llm_demo_directory())
    settings = GenerationConfig(max_new_tokens=MAX_TOKENS, eos_token_id=0, pad_token_id=0, do_sample=False)
    batching = ContinuousBatchingConfig(
        page_size=16, num_blocks=512, max_batch_tokens=256, max_requests_per_batch=RESIDENTS
    )

    def write(requests: Sequence[TextRequest]) -> Texts:
        prompts = [list(each.prompt) for each in requests]
        result = model.generate_batch(
            prompts, generation_config=settings, continuous_batching_config=batching, progress_bar=False
        )
        ordered = sorted(result.values(), key=lambda each: int(each.request_id.rpartition("_")[2]))
        return [list(each.generated_tokens) for each in ordered]

    return write


def _some(requests: Sequence[TextRequest], way: WrittenWay) -> Sequence[TextRequest]:
    return requests[: round(way.share * len(requests))]


def _tokens_per_s(way: WrittenWay, requests: Sequence[TextRequest]) -> float:
    begun_s = time.process_time()
    written = way.write(requests)
    return sum(map(len, written)) / (time.process_time() - begun_s)


def _figures(speeds: dict[str, list[float]], written: dict[str, Texts], right: Texts) -> dict[str, float]:
    figures = {f"tokens_per_s_{name}": median(result) for name, result in speeds.items()}

    def over(name: str, other: str) -> float:
        return median(one / two for one, two in zip(speeds[name], speeds[other], strict=True))

    figures["recompute_over_full"] = over("recompute", "full")
    figures["project_over_full"] = over("project", "full")
    figures["verified_over_full"] = over("verified", "full")
    figures["over_exits_at_once"] = over("recompute", "exits_at_once")
    figures["over_exits_batch_of_one"] = over("recompute", "exits_batch_of_one")
    if "generate_batch" in speeds:
        figures["full_over_generate_batch"] = over("full", "generate_batch")
    for name in sorted(speeds.keys() - {"exits_at_once", "exits_batch_of_one"}):
        figures[f"exact_match_{name}"] = _same(written[name], right)
    figures["texts_changed_by_verified"] = 1.0 - _same(written["verified"], written["full"])
    return figures


def _same(written: Texts, others: Texts) -> float:
    """The share of texts with the same tokens."""
    return sum(one == other for one, other in zip(written, others, strict=True)) / len(others)
