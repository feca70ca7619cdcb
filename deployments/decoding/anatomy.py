"""What differs between families of decoders: the modules of their blocks, and whether an encoder reads the prompt."""

from collections.abc import Callable
from collections.abc import Sequence as Listed
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from isobatch.deployments.decoding.paged_attention import PagedKv, PagedView, capped
from isobatch.deployments.decoding.scheduler import Piece
from isobatch.deployments.decoding.sequences import GREEDY, Sampling, TextRequest
from isobatch.deployments.models.products import pack_when_used, product_of
from isobatch.deployments.transport.device_copies import to_device

ENCODER_READS = 512  # tokens that an encoder reads if config.json does not say it: T5 models were trained on no more


@dataclass(frozen=True)
class DecoderShape:
    """The sizes of a decoder, by the network's config.

    `heads`: those of the keys of one position in one block, each with `width` numbers; values have as many. `reads`:
    the most tokens of a text. `start`: the token that every text begins with if an encoder reads the prompt; None if
    the text continues the prompt. A network with an encoder has no limit of its own, so a user may set a higher one.
    """

    num_blocks: int
    vocabulary: int
    heads: int
    width: int
    reads: int
    start: int | None = None

    @property
    def kv_width(self) -> int:
        return self.heads * self.width

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
            config.num_decoder_layers, config.vocab_size, config.num_heads, config.d_kv, reads, start=start
        )
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return DecoderShape(
        config.num_hidden_layers, config.vocab_size, config.num_key_value_heads, width, config.max_position_embeddings
    )


Rotation = tuple[Tensor, Tensor]
Rows = Callable[[Tensor], Tensor]


class LlamaBlock:
    """One block of Llama or of a network like it, by the layers of its modules, in few operations.

    `rotation`: the name of the rotation of its queries and keys, where the network has several; None: they are not
    rotated.
    """

    def __init__(self, block: Any, number: int) -> None:
        attention, feed, config = block.self_attn, block.mlp, block.self_attn.config
        self._number, self._width, self._scaling = number, attention.head_dim, attention.scaling
        self._queries = config.num_attention_heads
        self._keys = self._queries + config.num_key_value_heads  # among the heads
        self._query_norm, self._key_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        self._window: int | None = getattr(attention, "sliding_window", getattr(config, "sliding_window", None))
        self._cap: float | None = config.attn_logit_softcapping if config.model_type == "gemma2" else None
        several = isinstance((config.rope_parameters or {}).get("full_attention"), dict)
        self.rotation = (attention.layer_type if several else "") if getattr(attention, "use_rope", True) else None
        joined = hasattr(attention, "qkv_proj")
        self._attention = product_of(attention, *(["qkv_proj"] if joined else ["q_proj", "k_proj", "v_proj"]))
        self._feed = product_of(feed, *(["gate_up_proj"] if joined else ["gate_proj", "up_proj"]))
        self._out, self._down = product_of(attention, "o_proj"), product_of(feed, "down_proj")
        self._activation: Rows = feed.activation_fn if joined else feed.act_fn
        norms = [block.input_layernorm, block.post_attention_layernorm]
        self._after_attention: Rows | None = None
        self._after_feed: Rows | None = None
        if hasattr(block, "pre_feedforward_layernorm"):  # Gemma norms what it adds, too
            norms[1], self._after_attention = block.pre_feedforward_layernorm, block.post_attention_layernorm
            self._after_feed = block.post_feedforward_layernorm
        self._norm, self._feed_norm = map(_norm_of, norms)

    def __call__(self, states: Tensor, rotation: Rotation | None, view: PagedView) -> Tensor:
        heads = self._attention(self._norm(states)).view(len(states), -1, self._width)
        queries, keys = heads[:, : self._queries], heads[:, self._queries : self._keys]
        if self._query_norm is not None and self._key_norm is not None:
            queries.copy_(self._query_norm(queries))
            keys.copy_(self._key_norm(keys))
        _rotate(heads[:, : self._keys], rotation)
        scoring = self._scaling, self._window, self._cap
        attended = self._out(view.attend(self._number, queries, heads[:, self._queries :], *scoring))
        states = states + (self._after_attention(attended) if self._after_attention else attended)
        gate, up = self._feed(self._feed_norm(states)).chunk(2, dim=-1)
        fed = self._down(self._activation(gate).mul_(up))
        return states + (self._after_feed(fed) if self._after_feed else fed)

    def project(self, states: Tensor, rotation: Rotation | None, view: PagedView) -> None:
        """Make the KV of this block alone."""
        heads = self._attention(self._norm(states), self._queries * self._width).view(len(states), -1, self._width)
        keys = heads[:, : self._keys - self._queries]
        if self._key_norm is not None:
            keys.copy_(self._key_norm(keys))
        _rotate(keys, rotation)
        view.write(self._number, heads)


class LlamaAnatomy:
    """A causal language model like Llama: it continues prompts, and rotates queries and keys by their positions.

    `network_bytes`: of all weights. `blocks`: the decoder's. `weights`: the embeddings of tokens; KV has their type and
    device. `queries_per_key`: query heads that read the same keys. States are rows x width.
    """

    def __init__(self, model: Any, network_bytes: int) -> None:
        self._model, self._body, self.network_bytes = model, model.model, network_bytes
        self.weights: Tensor = model.get_input_embeddings().weight
        self.shape: DecoderShape = shape_of(model.config)
        self.blocks: Listed[nn.Module] = model.model.layers
        self.queries_per_key: int = model.config.num_attention_heads // model.config.num_key_value_heads
        self._joined = [LlamaBlock(block, number) for number, block in enumerate(self.blocks)]

    def read(self, pieces: Listed[Piece], kv: PagedKv) -> None:
        """Make the KV of these sequences' sources. There are none: the network has no encoder."""

    def embed(self, tokens: Tensor) -> Tensor:
        states: Tensor = self._body.embed_tokens(tokens)
        return states

    def through(self, blocks: range, states: Tensor, view: PagedView) -> Tensor:
        """The states after these blocks."""
        rotations = self._rotations(states, view.positions)
        for block in (self._joined[number] for number in blocks):
            states = block(states, rotations.get(block.rotation), view)
        return states

    def project(self, blocks: range, states: Tensor, view: PagedView) -> None:
        """Make the KV of these blocks from the states in which tokens left before them."""
        rotations = self._rotations(states, view.positions)
        for block in (self._joined[number] for number in blocks):
            block.project(states, rotations.get(block.rotation), view)

    def _rotations(self, states: Tensor, positions: Tensor) -> dict[str | None, Rotation]:
        """The factors by which heads are rotated at these positions, rows x 1 x width: of each number itself, and of
        the one that is half a head away."""
        rotations: dict[str | None, Rotation] = {}
        positions = functional.pad(positions, (0, len(states) - positions.shape[1]))
        for name in {block.rotation for block in self._joined} - {None}:
            cosine, sine = self._body.rotary_emb(states, positions, *([name] if name else []))
            sine[..., : sine.shape[-1] // 2].neg_()
            rotations[name] = cosine[0].unsqueeze(1), sine[0].unsqueeze(1)
        return rotations

    def head(self, states: Tensor) -> Tensor:
        """The logits of the next token, after the final norm."""
        logits: Tensor = self._model.lm_head(self._body.norm(states))
        return capped(logits, getattr(self._model.config, "final_logit_softcapping", None))

    def states(self, request: TextRequest, tokens: Listed[int]) -> Listed[Tensor]:
        """The states after each block but the last, of one text that the model itself reads as a whole."""
        rows = torch.tensor([tokens], device=self.weights.device)
        states: Listed[Tensor] = self._body(rows, use_cache=False, output_hidden_states=True).hidden_states
        return states[1:-1]


def _rotate(heads: Tensor, rotation: Rotation | None) -> None:
    """Rotate rows x heads x width in place; some networks rotate the first part of a head only."""
    if rotation is None:
        return
    cosine, sine = rotation
    turned = heads[..., : cosine.shape[-1]]
    other = turned.roll(turned.shape[-1] // 2, dims=-1)
    turned.mul_(cosine).addcmul_(other, sine)


def _norm_of(module: Any) -> Rows:
    """Llama's norm in few operations, always computed in float32. Other norms are returned unchanged."""
    if not hasattr(module, "variance_epsilon"):
        norm: Rows = module
        return norm
    weight, epsilon = module.weight.data, module.variance_epsilon
    return lambda states: functional.rms_norm(states.float(), weight.shape, eps=epsilon).to(states.dtype).mul_(weight)


class T5Anatomy:
    """An encoder that reads the prompt, and a decoder whose blocks attend to the encoder's states.

    T5's layers take a mask and a position bias for texts of one length, so this class computes attention from the
    layers' norms and projections. Attention adds a bias by the distance between positions, from a table in block 0.
    """

    queries_per_key = 1

    def __init__(self, model: Any, network_bytes: int) -> None:
        self.network_bytes = network_bytes
        self._model, self._encoder, self._decoder = model, model.encoder, model.decoder
        self.weights: Tensor = model.get_input_embeddings().weight
        config = model.config
        self.shape, self._width = shape_of(config), config.d_kv
        self.blocks: Listed[Any] = model.decoder.block
        scales = getattr(config, "scale_decoder_outputs", config.tie_word_embeddings) and config.model_type == "t5"
        self._scale = config.d_model**-0.5 if scales else 1.0
        # Attention's bias, heads x distances; all larger distances have the bias of the last one.
        most = config.relative_attention_max_distance + 1
        with torch.no_grad():
            bias: Tensor = self.blocks[0].layer[0].SelfAttention.compute_bias(most, most)
        self._by_distance = bias[0, :, -1].flip(-1)
        own = [block.layer[0].SelfAttention for block in self.blocks]
        self._own = [product_of(each, "q", "k", "v") for each in own]
        across = [block.layer[1].EncDecAttention for block in self.blocks]
        self._sources = [product_of(each, "k", "v") for each in across]

    def read(self, pieces: Listed[Piece], kv: PagedKv) -> None:
        lengths = np.array([len(piece.sequence.request.source) for piece in pieces])
        real = np.arange(lengths.max()) < lengths[:, None]
        padded = np.zeros(real.shape, np.int64)
        padded[real] = np.concatenate([piece.sequence.request.source for piece in pieces])
        tokens, mask, rows = to_device([padded, real.astype(np.int64), np.flatnonzero(real)], kv.device)
        states = self._encoder(input_ids=tokens, attention_mask=mask).last_hidden_state.flatten(0, 1)[rows]
        places = kv.source_places(pieces)
        for block, layers in enumerate(self._sources):
            kv.write(block, places, layers(states))

    def embed(self, tokens: Tensor) -> Tensor:
        states: Tensor = self._decoder.embed_tokens(tokens)
        return states

    def through(self, blocks: range, states: Tensor, view: PagedView) -> Tensor:
        view.add_bias(self._by_distance)
        for block in blocks:
            own, across, feed = self.blocks[block].layer
            heads = self._heads(self._own[block](own.layer_norm(states)))
            queries, kv = heads[:, : self.shape.heads], heads[:, self.shape.heads :]
            states = states + own.SelfAttention.o(view.attend(block, queries, kv, 1.0))
            attention = across.EncDecAttention
            queries = self._heads(attention.q(across.layer_norm(states)))
            states = states + attention.o(view.attend_source(block, queries))
            states = feed(states)
        return states

    def project(self, blocks: range, states: Tensor, view: PagedView) -> None:
        for block in blocks:
            normed = self.blocks[block].layer[0].layer_norm(states)
            view.write(block, self._own[block](normed, self.shape.kv_width))

    def _heads(self, rows: Tensor) -> Tensor:
        return rows.view(len(rows), -1, self._width)

    def head(self, states: Tensor) -> Tensor:
        logits: Tensor = self._model.lm_head(self._decoder.final_layer_norm(states) * self._scale)
        return logits

    def states(self, request: TextRequest, tokens: Listed[int]) -> Listed[Tensor]:
        source, written = (torch.tensor([row], device=self.weights.device) for row in (request.source, tokens))
        read = {"input_ids": written, "encoder_hidden_states": self._encoder(input_ids=source).last_hidden_state}
        states: Listed[Tensor] = self._decoder(**read, use_cache=False, output_hidden_states=True).hidden_states
        return states[1:-1]


DecoderAnatomy = LlamaAnatomy | T5Anatomy


def anatomy_of(model: Any) -> DecoderAnatomy:
    """The modules of a model that Hugging Face has loaded; they are looked up once. From then on the model cannot be
    trained or saved: its linear layers are products."""
    if not hasattr(model, "isobatch_anatomy"):
        size = sum(each.nbytes for each in model.parameters())  # weights that modules share count once
        anatomy = T5Anatomy(model, size) if model.config.is_encoder_decoder else LlamaAnatomy(model, size)
        for layer in pack_when_used(model):
            layer.pack()  # now: the first text need not wait for it
        model.isobatch_anatomy = anatomy
    known: DecoderAnatomy = model.isobatch_anatomy
    return known
