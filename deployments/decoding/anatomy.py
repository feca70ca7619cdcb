"""What differs between families of decoders: the modules of their blocks, and whether an encoder reads the prompt."""

from collections.abc import Sequence as Listed
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from deployments.decoding.paged_attention import PagedKv, PagedView, Projection, replace_attention
from deployments.decoding.scheduler import Piece
from deployments.decoding.sequences import GREEDY, Sampling, TextRequest

# Tokens that an encoder reads if config.json does not say it: T5 models were trained on no more.
ENCODER_READS = 512


@dataclass(frozen=True)
class DecoderShape:
    """The sizes of a decoder, by the network's config.

    `kv_width`: the numbers in the keys of one position in one block; values have as many. `reads`: the most tokens of a
    text. `start`: the token that every text begins with if an encoder reads the prompt; None if the text continues the
    prompt. A network with an encoder has no limit of its own, so a user may set a higher one.
    """

    num_blocks: int
    vocabulary: int
    kv_width: int
    reads: int
    start: int | None = None

    def context(self, most: int | None) -> int:
        """The most tokens of a prompt and its answer together; with an encoder, of each of them."""
        if self.start is not None:
            return most or self.reads
        return min(self.reads, most or self.reads)

    def room(self, prompt: int, context: int) -> int:
        """The number of tokens that may be written after a prompt."""
        return context - (prompt if self.start is None else 1)

    def request(
        self, prompt: Listed[int], max_tokens: int, stop: frozenset[int] = frozenset(), sampling: Sampling = GREEDY
    ) -> TextRequest:
        """The request for a text after a prompt."""
        if self.start is None:
            return TextRequest(tuple(prompt), max_tokens, stop, sampling)
        return TextRequest((self.start,), max_tokens, stop, sampling, source=tuple(prompt))


def shape_of(config: Any) -> DecoderShape:
    """The shape of a network, by its Hugging Face config."""
    if config.is_encoder_decoder:
        start = getattr(config, "decoder_start_token_id", None)
        start = config.pad_token_id if start is None else start
        reads = getattr(config, "n_positions", None) or ENCODER_READS
        return DecoderShape(
            config.num_decoder_layers, config.vocab_size, config.num_heads * config.d_kv, reads, start=start
        )
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return DecoderShape(
        config.num_hidden_layers,
        config.vocab_size,
        config.num_key_value_heads * width,
        config.max_position_embeddings,
    )


class DecoderAnatomy(Protocol):
    """The modules of one network. States are rows x width.

    `blocks`: those of the decoder. `queries_per_key`: query heads that read the same keys.
    """

    shape: DecoderShape
    blocks: Listed[nn.Module]
    weights: Tensor  # of the head: KV has their type and device
    queries_per_key: int

    def read(self, pieces: Listed[Piece], kv: PagedKv) -> None:
        """Make the KV of these sequences' sources."""

    def embed(self, tokens: Tensor) -> Tensor: ...

    def through(self, blocks: range, states: Tensor, view: PagedView) -> Tensor:
        """The states after these blocks."""

    def project(self, blocks: range, states: Tensor, projection: Projection) -> None:
        """Make the KV of these blocks from the states in which tokens left before them."""

    def head(self, states: Tensor) -> Tensor:
        """The logits of the next token, after the final norm."""

    def whole(self, request: TextRequest, tokens: Listed[int]) -> None:
        """Run one text through all blocks as the model itself does, for hooks that read the states after blocks."""


class LlamaAnatomy:
    """A causal language model like Llama: it continues prompts, and rotates queries and keys by their positions."""

    def __init__(self, model: Any) -> None:
        replace_attention(model)
        self._body, self._lm_head, self.weights = model.model, model.lm_head, model.lm_head.weight
        self.shape, self.blocks = shape_of(model.config), model.model.layers
        self.queries_per_key: int = model.config.num_attention_heads // model.config.num_key_value_heads

    def read(self, pieces: Listed[Piece], kv: PagedKv) -> None:
        """There is nothing to read: the network has no encoder."""

    def embed(self, tokens: Tensor) -> Tensor:
        states: Tensor = self._body.embed_tokens(tokens)
        return states

    def through(self, blocks: range, states: Tensor, view: PagedView) -> Tensor:
        states = states.unsqueeze(0)
        rotations = self._body.rotary_emb(states, position_ids=view.positions)
        for block in blocks:
            states = self.blocks[block](states, attention_mask=view, position_embeddings=rotations)
        return states[0]

    def project(self, blocks: range, states: Tensor, projection: Projection) -> None:
        cosine, sine = self._body.rotary_emb(states.unsqueeze(0), position_ids=projection.positions)
        cosine, sine = cosine[0].unsqueeze(1), sine[0].unsqueeze(1)
        for block in blocks:
            normed, attention = self.blocks[block].input_layernorm(states), self.blocks[block].self_attn
            key = attention.k_proj(normed).view(len(states), -1, attention.head_dim)
            if hasattr(attention, "k_norm"):
                key = attention.k_norm(key)
            rotated = key * cosine + _half_rotated(key) * sine
            projection.write(block, rotated.flatten(1), attention.v_proj(normed))

    def head(self, states: Tensor) -> Tensor:
        logits: Tensor = self._lm_head(self._body.norm(states))
        return logits

    def whole(self, request: TextRequest, tokens: Listed[int]) -> None:
        self._body(torch.tensor([tokens], device=self.weights.device))


class T5Anatomy:
    """An encoder that reads the prompt, and a decoder whose blocks attend to the encoder's states.

    T5's layers take a mask and a position bias for texts of one length, so this class computes attention from the
    layers' norms and projections. Attention adds a bias by the distance between positions, from a table in block 0.
    """

    queries_per_key = 1

    def __init__(self, model: Any) -> None:
        self._encoder, self._decoder, self._lm_head = model.encoder, model.decoder, model.lm_head
        self.weights = model.lm_head.weight
        config = model.config
        self.shape, self.blocks, self._width = shape_of(config), model.decoder.block, config.d_kv
        scales = getattr(config, "scale_decoder_outputs", config.tie_word_embeddings) and config.model_type == "t5"
        self._scale = config.d_model**-0.5 if scales else 1.0
        self._by_distance = _bias_by_distance(
            self.blocks[0].layer[0].SelfAttention, config.relative_attention_max_distance
        )

    def read(self, pieces: Listed[Piece], kv: PagedKv) -> None:
        sources = [torch.tensor(piece.sequence.request.source) for piece in pieces]
        padded = nn.utils.rnn.pad_sequence(sources, batch_first=True, padding_value=0).to(kv.device)
        lengths = torch.tensor([len(source) for source in sources], device=kv.device)
        real = torch.arange(padded.shape[1], device=kv.device) < lengths.unsqueeze(1)
        states = self._encoder(input_ids=padded, attention_mask=real.long()).last_hidden_state[real]
        for block, places in enumerate(kv.source_places(pieces)):
            attention = self.blocks[block].layer[1].EncDecAttention
            kv.keys.index_copy_(0, places, attention.k(states))
            kv.values.index_copy_(0, places, attention.v(states))

    def embed(self, tokens: Tensor) -> Tensor:
        states: Tensor = self._decoder.embed_tokens(tokens)
        return states

    def through(self, blocks: range, states: Tensor, view: PagedView) -> Tensor:
        view.add_bias(self._by_distance)
        for block in blocks:
            own, across, feed = self.blocks[block].layer
            attention, normed = own.SelfAttention, own.layer_norm(states)
            query, key, value = (self._heads(layer(normed)) for layer in (attention.q, attention.k, attention.v))
            states = states + attention.o(view.attend(block, query, key, value, 1.0))
            attention = across.EncDecAttention
            query = self._heads(attention.q(across.layer_norm(states)))
            states = states + attention.o(view.attend_source(block, query, 1.0))
            states = feed(states)
        return states

    def project(self, blocks: range, states: Tensor, projection: Projection) -> None:
        for block in blocks:
            own = self.blocks[block].layer[0]
            normed = own.layer_norm(states)
            projection.write(block, own.SelfAttention.k(normed), own.SelfAttention.v(normed))

    def _heads(self, rows: Tensor) -> Tensor:
        return rows.view(len(rows), -1, self._width)

    def head(self, states: Tensor) -> Tensor:
        logits: Tensor = self._lm_head(self._decoder.final_layer_norm(states) * self._scale)
        return logits

    def whole(self, request: TextRequest, tokens: Listed[int]) -> None:
        source, written = (torch.tensor([row], device=self.weights.device) for row in (request.source, tokens))
        encoded = self._encoder(input_ids=source).last_hidden_state
        self._decoder(input_ids=written, encoder_hidden_states=encoded, use_cache=False)


def _half_rotated(key: Tensor) -> Tensor:
    """The second half of each key, negated, before the first half: a part of Llama's rotation by position."""
    first, second = key.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _bias_by_distance(attention: Any, most: int) -> Tensor:
    """The bias of T5's attention, heads x distances; all larger distances have the bias of the last one."""
    with torch.no_grad():
        bias: Tensor = attention.compute_bias(most + 1, most + 1)
    return bias[0, :, -1].flip(-1)


def anatomy_of(model: Any) -> DecoderAnatomy:
    """The modules of a model that Hugging Face has loaded."""
    return T5Anatomy(model) if model.config.is_encoder_decoder else LlamaAnatomy(model)
