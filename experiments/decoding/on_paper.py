"""Measures the gain of exits where weights or KV limit decoders, and whether plans keep promises, on virtual devices.

The engine and the scheduler are the product's; launches take the time of a table. Settings are corners of the
arithmetic, and those of E3 and DREX, on tables that are estimated from datasheets.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from isobatch.cluster.load.prompts import summed
from isobatch.cluster.profiling.launch_prices import estimated_table
from isobatch.cluster.simulator.text_choice import choose_plan, saturated, trial_at
from isobatch.optimizer.text_plans import (
    RHYTHMS,
    DecodingFacts,
    DecodingGoal,
    DecodingWay,
    expected_pace,
    plan_of,
    tokens_per_s,
)
from isobatch.profiles.devices import fleet
from isobatch.profiles.text_profile import DecoderProfile, DecodingTable, DecodingWorkload, LaunchSize

RESIDENTS, PROMPT_ROWS = 32, 256
WIDE = DecodingGoal(ttft_s=1e9, tpot_s=1e9)
KIND = "a6000"  # E3's
TEXTS, OTHERS = 200, 3  # the least texts of a run; runs with texts by which no plan was chosen
SLOWER = 2.0  # the limit of TPOT, in times that of a busy replica
TTFT_S = 2.0
SPREAD = (0.5, 0.7, 0.9, 1.1, 1.3, 1.5)  # lengths of outputs over their mean


@dataclass(frozen=True)
class DecoderSetting:
    """A network on paper, cut at the block that a share `p` of the tokens enters."""

    name: str
    profile: DecoderProfile

    @property
    def facts(self) -> DecodingFacts:
        return DecodingFacts(self.profile, fleet(f"{KIND}=1")[0])


def settings() -> list[DecoderSetting]:
    """In E3, 70 % of T5's tokens leave by block 2 of 8, half of Llama's by 25 of 32. Assumed are 30 and 150 tokens for
    texts of WMT and SAMSum, and for BoolQ 150 tokens and one token of output."""
    t5, llama = _t5_small(), _llama_8b()
    return [
        DecoderSetting("weights_bind", _corner(LaunchSize(blocks=1e-3), 2, 0.3, 8)),
        DecoderSetting("kv_binds", _corner(LaunchSize(read=1e-6), 2, 0.3, 400)),
        DecoderSetting("drex", _corner(LaunchSize(blocks=1e-3), 4, 0.8, 8)),
        DecoderSetting("e3_t5_wmt", _published(t5, 8, 2, 0.3, 30, 30)),
        DecoderSetting("e3_t5_samsum", _published(t5, 8, 2, 0.3, 150, 30)),
        DecoderSetting("e3_llama", _published(llama, 32, 25, 0.5, 150, 1)),
    ]


def measure_on_paper(tell: Callable[[str], None]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for setting in settings():
        figures[f"{setting.name}_over_full"] = gain(setting)
        tell(f"{setting.name}: {figures[f'{setting.name}_over_full']:.3f}")
    kept = [promises(setting) for setting in settings() if setting.name in ("weights_bind", "kv_binds", "e3_t5_wmt")]
    for name in kept[0]:
        figures[name] = min(each[name] for each in kept)
        tell(f"{name}: {figures[name]:.4f}")
    return figures


def gain(setting: DecoderSetting) -> float:
    """Tokens per second of a busy replica with exits, over those without, with the same number of residents."""
    facts, num_blocks = setting.facts, setting.profile.num_blocks
    cut = setting.profile.workload.survival[0][0] + 1
    way = max((_way(cut, k) for k in RHYTHMS), key=lambda each: expected_pace(facts, each).tokens_per_s)
    exits, full = (
        saturated(plan_of(each, facts, WIDE, 1), setting.profile, TEXTS) for each in (way, _way(num_blocks, 1))
    )
    return exits / full


def _way(cut: int, launches: int) -> DecodingWay:
    return DecodingWay(cut, launches, RESIDENTS, PROMPT_ROWS)


def promises(setting: DecoderSetting) -> dict[str, float]:
    """Tokens and latencies over a plan's promise, for texts by which it was not chosen."""
    facts = setting.facts
    cut = setting.profile.workload.survival[0][0] + 1
    tpot_s = SLOWER * expected_pace(facts, _way(cut, 2)).tpot_s
    goal = replace(WIDE, ttft_s=TTFT_S, tpot_s=tpot_s, kv_megabytes=_room(setting), texts=TEXTS)
    result = choose_plan(setting.profile, [facts.device], goal)
    promise = result.plan.promise
    assert promise, "This is a bug: what is chosen makes a promise."
    whole = replace(goal, share_in_time=0.0)  # so long that no run ends early
    runs = [
        trial_at(result.plan, setting.profile, promise.goodput_per_s, whole, 10 + seed, times=3).run
        for seed in range(OTHERS)
    ]
    streamed_per_s = sum(summed(run.texts, slo_ms=1e3 * TTFT_S).tokens_per_s for run in runs)
    return {
        "streamed_over_promised": streamed_per_s / OTHERS / tokens_per_s(result.plan),
        "ttft_kept": sum(run.ttft_kept for run in runs) / OTHERS,
        "tpot_kept": sum(run.tpot_kept for run in runs) / OTHERS,
    }


def _room(setting: DecoderSetting) -> int:
    """Megabytes of KV for the residents of every setting, so that runs are short."""
    workload = setting.profile.workload
    return max(1, int(1.1 * RESIDENTS * (workload.prompt + workload.output) * setting.facts.position_bytes / 2**20))


def _corner(price_s: LaunchSize, cut: int, survival: float, prompt: int) -> DecoderProfile:
    table = DecodingTable(KIND, price_s, "a corner of the arithmetic", 4096, 10**9)
    return DecoderProfile("paper", 8, 1024, (table,), _workload(cut, survival, prompt, output=48))


def _published(config: Any, num_blocks: int, cut: int, survival: float, prompt: int, output: int) -> DecoderProfile:
    table, workload = estimated_table(config, KIND), _workload(cut, survival, prompt, output)
    return DecoderProfile(
        config.model_type, num_blocks, 1024, (table,), workload, has_encoder=bool(config.is_encoder_decoder)
    )


def _workload(cut: int, survival: float, prompt: int, output: int) -> DecodingWorkload:
    """Texts of many lengths, since texts of one length would begin and end together without exits."""
    outputs = tuple(max(1, round(share * output)) for share in SPREAD)
    return DecodingWorkload(((cut - 1, survival),), (prompt,) * len(outputs), outputs)


def _t5_small() -> Any:
    """T5 v1.1 small, with 8 blocks, as in CALM."""
    from transformers import T5Config

    return T5Config(
        d_model=512, d_kv=64, d_ff=1024, num_heads=6, num_layers=8, num_decoder_layers=8, vocab_size=32128,
        feed_forward_proj="gated-gelu", tie_word_embeddings=False,
    )  # fmt: skip


def _llama_8b() -> Any:
    """Llama 3.1 8B."""
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, max_position_embeddings=131072,
    )  # fmt: skip
