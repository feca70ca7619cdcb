"""Estimates the prices of a decoder's launches on other devices: a roofline from datasheets and the network's config.

A launch reads the weights of each block once, and the KV of its sequences, and it multiplies every row with the
weights. The longer of the two times hides the other. The costs of kernels and launches are those of
profiles/datasheet.py. Nothing is measured, so the table is marked as estimated.
"""

from typing import Any

from isobatch.deployments.decoding.anatomy import shape_of
from isobatch.profiles.datasheet import BYTES, COMPUTE_SHARE, KERNEL_S, LAUNCH_S, MEMORY_SHARE
from isobatch.profiles.devices import known_kind
from isobatch.profiles.text_profile import DecodingTable, LaunchSize

KERNELS = 10  # of one block
PROJECTION_KERNELS = 4  # of one block that only makes keys and values


def estimated_table(config: Any, kind: str) -> DecodingTable:
    """The table of a network by its Hugging Face config."""
    device = known_kind(kind)
    dtype = device.best_dtype
    wide, shape = BYTES[dtype], shape_of(config)
    peak = COMPUTE_SHARE * (device.fp16_flops if dtype == "float16" else device.fp32_flops)
    stream = MEMORY_SHARE * device.memory_bytes_per_s
    block, attended, width = _block(config)
    encoder, crossed, layers = _encoder(config)
    head = shape.vocabulary * width
    price = LaunchSize(
        launches=LAUNCH_S,
        blocks=block * wide / stream,
        bands=KERNELS * KERNEL_S,
        rows=2 * block / peak,
        read=2 * shape.kv_width * wide / stream,
        seen=4 * attended / peak,
        heads=head * wide / stream,
        asked=2 * head / peak,
        sources=(encoder + crossed) * wide / stream + layers * KERNELS * KERNEL_S,
        source_rows=2 * (encoder + crossed) / peak,
        source_seen=4 * attended * layers / peak,
        projections=PROJECTION_KERNELS * KERNEL_S,
        projected=4 * shape.kv_width * width / peak,
    )
    tied = getattr(config, "tie_word_embeddings", False)
    weights = shape.num_blocks * block + encoder + crossed + head * (1 if tied else 2)
    return DecodingTable(
        kind.lower(),
        price,
        f"estimated: roofline of {kind.lower()}'s datasheet in {dtype}, nothing measured",
        kv_bytes=2 * shape.kv_width * wide,
        weights_bytes=weights * wide,
        dtype=dtype,
        overlaps=True,
        projects=True,
    )


def _block(config: Any) -> tuple[int, int, int]:
    """The weights of one block of the decoder that a row is multiplied with, the width of all heads, and of a row."""
    if config.is_encoder_decoder:
        heads = config.num_heads * config.d_kv
        return 6 * config.d_model * heads + _t5_inner(config), heads, config.d_model
    width, shape = config.hidden_size, shape_of(config)
    head = getattr(config, "head_dim", None) or width // config.num_attention_heads
    heads = config.num_attention_heads * head
    return 2 * width * (heads + shape.kv_width) + 3 * width * config.intermediate_size, heads, width


def _encoder(config: Any) -> tuple[int, int, int]:
    """The weights that a position of the source is multiplied with: the encoder's, and those that make its KV for the
    decoder; and the number of the encoder's layers."""
    if not config.is_encoder_decoder:
        return 0, 0, 0
    heads = config.num_heads * config.d_kv
    layers = config.num_layers * (4 * config.d_model * heads + _t5_inner(config))
    return layers, config.num_decoder_layers * 2 * config.d_model * heads, config.num_layers


def _t5_inner(config: Any) -> int:
    gated = str(config.feed_forward_proj).startswith("gated")
    return int((3 if gated else 2) * config.d_model * config.d_ff)
