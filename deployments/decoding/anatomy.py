"""What differs between families of decoders: the modules of their blocks, and whether an encoder reads the prompt."""

from collections.abc import Sequence as Listed
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from isobatch.deployments.decoding.paged_attention import PagedKv, PagedView
from isobatch.deployments.decoding.scheduler import Piece
from isobatch.deployments.decoding.sequences import GREEDY, Sampling, TextRequest

# Tokens that an encoder reads if config.json does not say it: T5 models were trained on no more.
ENCODER_READS = 512


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
            config.num_decoder_layers, config.vocab_size, config.num_heads, config.d_kv, reads, start=start
        )
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return DecoderShape(
        config.num_hidden_layers,
        config.vocab_size,
        config.num_key_value_heads,
        width,
        config.max_position_embeddings,
    )


class JoinedLayers:
    """Linear layers that read the same rows, as one product. Their own weights become parts of its weights."""

    def __init__(self, *layers: nn.Linear) -> None:
        self._weight, self._bias = torch.cat([layer.weight.data for layer in layers]), None
        parts = torch.split(self._weight, [layer.out_features for layer in layers])
        for layer, part in zip(layers, parts, strict=True):
            layer.weight.data = part
        if layers[0].bias is not None:
            self._bias = torch.cat([layer.bias.data for layer in layers])

    def __call__(self, rows: Tensor, first: int = 0) -> Tensor:
        """The outputs from `first` on."""
        return functional.linear(rows, self._weight[first:], None if self._bias is None else self._bias[first:])


class LlamaBlock:
    """One block of Llama, by the layers of its modules, in few operations."""

    def __init__(self, block: Any, number: int) -> None:
        attention, feed = block.self_attn, block.mlp
        self._number, self._width, self._scaling = number, attention.head_dim, attention.scaling
        self._out, self._down, self._activation = attention.o_proj, feed.down_proj, feed.act_fn
        self._norm, self._feed_norm = (
            (norm.weight.data, norm.variance_epsilon)
            for norm in (block.input_layernorm, block.post_attention_layernorm)
        )
        self._query_norm, self._key_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        self._queries = attention.q_proj.out_features
        self._keys = attention.k_proj.out_features
        self._attention = JoinedLayers(attention.q_proj, attention.k_proj, attention.v_proj)
        self._feed = JoinedLayers(feed.gate_proj, feed.up_proj)

    def __call__(self, states: Tensor, rotation: tuple[Tensor, Tensor], view: PagedView) -> Tensor:
        heads = self._attention(_normed(states, *self._norm)).view(len(states), -1, self._width)
        queries = self._queries // self._width
        keys = queries + self._keys // self._width
        if self._query_norm is not None and self._key_norm is not None:
            heads[:, :queries] = self._query_norm(heads[:, :queries])
            heads[:, queries:keys] = self._key_norm(heads[:, queries:keys])
        _rotate(heads[:, :keys], *rotation)
        attended = view.attend(self._number, heads[:, :queries], heads[:, queries:], self._scaling)
        states = states + self._out(attended)
        gate, up = self._feed(_normed(states, *self._feed_norm)).chunk(2, dim=-1)
        fed: Tensor = self._down(self._activation(gate).mul_(up))
        return states + fed

    def project(self, states: Tensor, rotation: tuple[Tensor, Tensor], view: PagedView) -> None:
        """Make the KV of this block alone."""
        heads = self._attention(_normed(states, *self._norm), first=self._queries).view(len(states), -1, self._width)
        keys = heads[:, : self._keys // self._width]
        if self._key_norm is not None:
            keys.copy_(self._key_norm(keys))
        _rotate(keys, *rotation)
        view.write(self._number, heads)


class LlamaAnatomy:
    """A causal language model like Llama: it continues prompts, and rotates queries and keys by their positions.

    `blocks`: those of the decoder. `weights`: those of the head; KV has their type and device. `queries_per_key`: query
    heads that read the same keys. States are rows x width.
    """

    def __init__(self, model: Any) -> None:
        self._body, self._lm_head = model.model, model.lm_head
        self.weights: Tensor = model.lm_head.weight
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
        rotation = self._rotation(states, view.positions)
        for block in blocks:
            states = self._joined[block](states, rotation, view)
        return states

    def project(self, blocks: range, states: Tensor, view: PagedView) -> None:
        """Make the KV of these blocks from the states in which tokens left before them."""
        rotation = self._rotation(states, view.positions)
        for block in blocks:
            self._joined[block].project(states, rotation, view)

    def _rotation(self, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The factors by which heads are rotated at these positions, rows x 1 x width: of each number itself, and of
        the one that is half a head away."""
        cosine, sine = self._body.rotary_emb(states, position_ids=positions)
        half = sine.shape[-1] // 2
        sine[..., :half].neg_()
        return cosine[0].unsqueeze(1), sine[0].unsqueeze(1)

    def head(self, states: Tensor) -> Tensor:
        """The logits of the next token, after the final norm."""
        logits: Tensor = self._lm_head(self._body.norm(states))
        return logits

    def whole(self, request: TextRequest, tokens: Listed[int]) -> None:
        """Run one text through all blocks as the model itself does, for hooks that read the states after blocks."""
        self._body(torch.tensor([tokens], device=self.weights.device))


def _rotate(heads: Tensor, cosine: Tensor, sine: Tensor) -> None:
    """Rotate rows x heads x width in place."""
    other = heads.roll(heads.shape[-1] // 2, dims=-1)
    heads.mul_(cosine).addcmul_(other, sine)


def _normed(states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Llama's norm, which computes in float32 whatever the network runs in."""
    return functional.rms_norm(states.float(), weight.shape, eps=epsilon).to(states.dtype).mul_(weight)


class T5Anatomy:
    """An encoder that reads the prompt, and a decoder whose blocks attend to the encoder's states.

    T5's layers take a mask and a position bias for texts of one length, so this class computes attention from the
    layers' norms and projections. Attention adds a bias by the distance between positions, from a table in block 0.
    """

    queries_per_key = 1

    def __init__(self, model: Any) -> None:
        self._encoder, self._decoder, self._lm_head = model.encoder, model.decoder, model.lm_head
        self.weights: Tensor = model.lm_head.weight
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
        self._own = [JoinedLayers(each.q, each.k, each.v) for each in own]
        across = [block.layer[1].EncDecAttention for block in self.blocks]
        self._sources = [JoinedLayers(each.k, each.v) for each in across]

    def read(self, pieces: Listed[Piece], kv: PagedKv) -> None:
        sources = [torch.tensor(piece.sequence.request.source) for piece in pieces]
        padded = nn.utils.rnn.pad_sequence(sources, batch_first=True, padding_value=0).to(kv.device)
        lengths = torch.tensor([len(source) for source in sources], device=kv.device)
        real = torch.arange(padded.shape[1], device=kv.device) < lengths.unsqueeze(1)
        states = self._encoder(input_ids=padded, attention_mask=real.long()).last_hidden_state[real]
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
            states = states + attention.o(view.attend_source(block, queries, 1.0))
            states = feed(states)
        return states

    def project(self, blocks: range, states: Tensor, view: PagedView) -> None:
        for block in blocks:
            normed = self.blocks[block].layer[0].layer_norm(states)
            view.write(block, self._own[block](normed, first=self.shape.kv_width))

    def _heads(self, rows: Tensor) -> Tensor:
        return rows.view(len(rows), -1, self._width)

    def head(self, states: Tensor) -> Tensor:
        logits: Tensor = self._lm_head(self._decoder.final_layer_norm(states) * self._scale)
        return logits

    def whole(self, request: TextRequest, tokens: Listed[int]) -> None:
        source, written = (torch.tensor([row], device=self.weights.device) for row in (request.source, tokens))
        encoded = self._encoder(input_ids=source).last_hidden_state
        self._decoder(input_ids=written, encoder_hidden_states=encoded, use_cache=False)


DecoderAnatomy = LlamaAnatomy | T5Anatomy


def anatomy_of(model: Any) -> DecoderAnatomy:
    """The modules of a model that Hugging Face has loaded; they are looked up once."""
    if not hasattr(model, "isobatch_anatomy"):
        model.isobatch_anatomy = T5Anatomy(model) if model.config.is_encoder_decoder else LlamaAnatomy(model)
    anatomy: DecoderAnatomy = model.isobatch_anatomy
    return anatomy
