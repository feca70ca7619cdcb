"""Decoders of which only the times are known."""

from isobatch.profiles.devices import Device
from isobatch.profiles.text_profile import DecoderProfile, DecodingTable, DecodingWorkload, LaunchSize

WEIGHTS_BIND = LaunchSize(blocks=1e-3)
BOTH = LaunchSize(launches=2e-4, pieces=1e-6, blocks=2e-4, rows=1e-5, read=2e-8, heads=1e-4, asked=5e-6)
CPU = Device("cpu", 1, 16 * 10**9, 0.19)


def paper_decoder(
    price_s: LaunchSize = BOTH, survival: tuple[tuple[int, float], ...] = ((1, 0.3),), prompt: int = 16,
    output: int = 32, num_blocks: int = 8, kind: str = "cpu", has_encoder: bool = False, reads: int = 256,
) -> DecoderProfile:  # fmt: skip
    """Texts are of one length, and of half as much again: prompts and outputs by turns."""
    prompts, outputs = (prompt, prompt + prompt // 2), (output + output // 2, output)
    table = DecodingTable(kind, price_s, "made up", 1024, 10**6, error=0.1)
    workload = DecodingWorkload(survival, prompts, outputs)
    return DecoderProfile("paper", num_blocks, reads, (table,), workload, has_encoder)
