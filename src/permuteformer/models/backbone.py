"""The backbone of all models: embeddings, pre-norm blocks around any attention, a final norm."""

from __future__ import annotations

import inspect
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import can_return_tuple

from permuteformer.attention import ATTENTIONS, Attention
from permuteformer.attention.base import positions_of, select_tokens
from permuteformer.models import fused
from permuteformer.models.cache import PermuteFormerCache
from permuteformer.models.card import NAME, card_beside, is_template
from permuteformer.models.config import PermuteFormerConfig
from permuteformer.models.loading import check_folder, readable_errors
from permuteformer.ops.call import Tokens
from permuteformer.ops.checks import can_read_values
from permuteformer.ops.modules import Dropout, Linear
from permuteformer.ops.sequence_parallel import SequenceGroup
from permuteformer.positions import Compose, PositionEncoding
from permuteformer.registry import unknown
from permuteformer.storage import atomic_write


class PermuteFormerBlock(GradientCheckpointingLayer):  # type: ignore[misc]
    """x + attention(norm(x)), then x + feed-forward(norm(x))."""

    attention_eligibility: fused.Eligibility | None = None
    feed_forward_eligibility: fused.Eligibility | None = None

    def __init__(self, config: PermuteFormerConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attention = config.build_layer(layer)
        for projection in (self.attention.query, self.attention.key, self.attention.value):
            if projection is not None:  # fairseq initialises these as one matrix; transformers shows a module without its parent
                projection.is_input_projection = True  # type: ignore[assignment]
        self.feed_forward_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.expand = Linear(config.hidden_size, config.intermediate_size)
        self.activation = ACT2FN[config.hidden_act]
        self.contract = Linear(config.intermediate_size, config.hidden_size)
        self.dropout = Dropout(config.hidden_dropout)

    def forward(self, x: Tensor, tokens: Tokens, state: Any, is_fused: bool = False) -> tuple[Tensor, Any]:
        """Return ``b l d`` (``b n d`` of ``tokens.queries``) and the layer's state.

        ``is_fused``: run the halves of the block by the CPU kernel, where it can.
        """
        if is_fused and tokens.segments is None and state is None and (attended := fused.attend(self, x, tokens)) is not None:
            return self.feed_forward(attended, is_fused), None
        mixed, state = self.attention(self.attention_norm(x), state=state, tokens=tokens)
        x = x if tokens.queries is None else select_tokens(x, tokens.queries)
        return self.feed_forward(x + self.dropout(mixed), is_fused), state

    def feed_forward(self, x: Tensor, is_fused: bool) -> Tensor:
        """Return x + feed-forward(norm(x))."""
        if is_fused and (fed := fused.feed_forward(self, x)) is not None:
            return fed
        out: Tensor = x + self.dropout(self.contract(self.activation(self.expand(self.feed_forward_norm(x)))))
        return out


class PermuteFormerPreTrainedModel(PreTrainedModel):  # type: ignore[misc]
    """Base class of all models: configuration, initialisation, loading."""

    config: PermuteFormerConfig
    config_class = PermuteFormerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["PermuteFormerBlock"]  # noqa: RUF012
    _is_stateful = True

    @classmethod
    def from_pretrained(cls, source: str | os.PathLike[str] | None, *arguments: Any, **options: Any) -> Any:
        """Load as transformers does, but safetensors only, since a pickle can run code; and check a folder first."""
        options.setdefault("use_safetensors", True)
        with readable_errors(source):
            folder = Path(source or "", options.get("subfolder") or "")
            if source is not None and options.get("config") is None and (folder / "config.json").exists():
                check_folder(folder, cls.config_class)
            return super().from_pretrained(source, *arguments, **options)

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], is_main_process: bool = True, *arguments: Any, **options: Any
    ) -> None:
        """Save as transformers does, with a model card, README.md, unless the folder has one."""
        self._card = card_beside(self, Path(save_directory))
        super().save_pretrained(save_directory, is_main_process, *arguments, **options)
        place = Path(save_directory) / NAME
        if is_main_process and not place.exists():
            atomic_write(place, self._card.encode())

    def _upload_modified_files(self, working_dir: str | os.PathLike[str], *arguments: Any, **options: Any) -> Any:
        """Replace the empty card of transformers by ours before an upload to the hub."""
        if is_template(Path(working_dir) / NAME):
            atomic_write(Path(working_dir) / NAME, self._card.encode())
        return super()._upload_modified_files(working_dir, *arguments, **options)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise parameters that were not loaded, and buffers that no checkpoint holds."""
        if isinstance(module, (PositionEncoding, Attention)):
            module.reset(init.copy_)
        elif self.config.initialization == "fairseq" and isinstance(module, nn.Linear):
            init.xavier_uniform_(module.weight, gain=2**-0.5 if getattr(module, "is_input_projection", False) else 1)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif self.config.initialization == "fairseq" and isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=self.config.hidden_size**-0.5)
            if module.padding_idx is not None and not getattr(module.weight, "_is_hf_initialized", False):
                init.zeros_(module.weight[module.padding_idx])
        else:
            super()._init_weights(module)


class PermuteFormerModel(PermuteFormerPreTrainedModel):
    """Computes hidden states of tokens.

    >>> model = PermuteFormerModel(PermuteFormerConfig(vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=2))
    >>> model(torch.randint(3, 99, (1, 10))).last_hidden_state.shape    # b l d
    torch.Size([1, 10, 32])
    """

    sequence: SequenceGroup | None = None
    """The processes that hold the shards of each row; see ``models.parallel``."""

    def __init__(self, config: PermuteFormerConfig) -> None:
        super().__init__(config)
        # The embedding of padding is zero and not trained, unless it is the end token too.
        padding = None if config.pad_token_id == config.eos_token_id else config.pad_token_id
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=padding)
        self.position = Compose(config.build_embedding_positions())
        self.dropout = Dropout(config.hidden_dropout)
        self.layers = nn.ModuleList(PermuteFormerBlock(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: PermuteFormerCache | None = None,
        use_cache: bool | None = None,
        segment_ids: Tensor | None = None,
        global_mask: Tensor | None = None,
        output_hidden_states: bool | None = None,
        queries: Tensor | None = None,
    ) -> BaseModelOutputWithPast:
        """Compute hidden states.

        Args:
            input_ids: ``b l`` int64, or pass ``inputs_embeds`` ``b l d``.
            attention_mask: ``b l`` (or ``b s`` with earlier tokens), 1 for real tokens, 0 for padding.
            position_ids: ``b l``, or ``b l a`` for several axes, which need them. ``None`` counts real tokens.
            inputs_embeds: embeddings instead of ``input_ids``.
            past_key_values: what an earlier call of a causal model returned, to continue from.
            use_cache: return states; default: the configuration's ``use_cache`` for causal models.
            segment_ids: ``b l`` int64 for packed rows: tokens see their own segment only.
            global_mask: ``b l`` bool, for models with a two-sided decay: tokens with weight 1 in both directions.
            output_hidden_states: return the hidden states before every block and at the end.
            queries: ``b n`` int64, indices of the tokens whose last hidden states are needed, ``b n d``: the last block computes no more.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass either input_ids or inputs_embeds")
        given = input_ids if inputs_embeds is None else inputs_embeds
        assert given is not None
        dimensions = 2 if inputs_embeds is None else 3
        if given.dim() != dimensions or given.shape[1] == 0:
            shape = "(batch, length)" if dimensions == 2 else f"(batch, length, {self.config.hidden_size})"
            raise ValueError(f"the input must have shape {shape} with length >= 1, got {tuple(given.shape)}")
        batch, length = given.shape[:2]
        cache = self._cache(past_key_values, use_cache, batch)
        seen = 0 if cache is None else cache.get_seq_length()
        tokens = self.tokens(batch, length, given.device, attention_mask, position_ids, segment_ids, global_mask, seen)
        state = None if cache is None else cache.layers[0].state
        x = self.embed(input_ids, inputs_embeds, tokens, state)
        reach = self.blocks[0].attention.reach(tokens, x, state)
        if queries is not None:  # for the last block only
            queries = Tokens.build(batch, length, given.device, queries=queries).queries
        is_fused = fused.is_enabled()
        hidden_states: list[Tensor] = []
        keeps = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        for n, block in enumerate(self.blocks):
            if keeps:
                hidden_states.append(x)
            if queries is not None and n == len(self.layers) - 1:
                tokens = replace(tokens, queries=queries)
            block.attention.attention.position.check(reach)
            x, state = block(x, tokens, None if cache is None else cache.layers[n].state, is_fused)
            if cache is not None:
                cache.layers[n].store(state, length)
        x = self.norm(x)
        if keeps:
            hidden_states.append(x)
        return BaseModelOutputWithPast(last_hidden_state=x, past_key_values=cache, hidden_states=tuple(hidden_states) if keeps else None)

    @property
    def blocks(self) -> list[PermuteFormerBlock]:
        """The layers, typed."""
        return list(self.layers)  # type: ignore[arg-type]

    @property
    def has_state(self) -> bool:
        """Whether the model can continue from a state."""
        return bool(self.config.causal and "state" in ATTENTIONS[self.config.attention["name"]].modes)

    def tokens(
        self,
        batch: int,
        length: int,
        device: torch.device,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        segment_ids: Tensor | None = None,
        global_mask: Tensor | None = None,
        seen: int = 0,
    ) -> Tokens:
        """Check arguments and return the tokens that all layers share. ``attention_mask`` may cover the ``seen`` tokens before too."""
        if attention_mask is not None:
            if attention_mask.dim() != 2 or attention_mask.shape[0] != batch or attention_mask.shape[1] not in (length, seen + length):
                raise ValueError(
                    f"attention_mask must have shape (batch, length) = ({batch}, {length}), or {seen} more columns for earlier tokens, got "
                    f"{tuple(attention_mask.shape)}"
                )
            attention_mask = attention_mask[:, -length:].bool()
        if position_ids is None and self.config.axes > 1:
            raise ValueError(
                f"position_ids are needed with axes={self.config.axes}: pass int64 of shape ({batch}, {length}, {self.config.axes}), the "
                "coordinates of each token; see permuteformer.tokens"
            )
        position = self.blocks[0].attention.attention.position
        if global_mask is not None and not position.two_sided:
            raise ValueError("global_mask is for models with a two-sided decay: leave it out")
        return Tokens.build(
            batch,
            length,
            device,
            positions=position_ids.unsqueeze(-1) if position_ids is not None and position_ids.dim() == 2 else position_ids,
            mask=attention_mask,
            segments=segment_ids,
            global_mask=global_mask,
            axes=self.config.axes,
            ordered=position.decay_axes > 1,
            mask_name="attention_mask",
        )

    def embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None, tokens: Tokens, state: Any = None) -> Tensor:
        """Return the input of the first block, ``b l d``, from ids ``b l`` or embeddings."""
        if inputs_embeds is None:
            assert input_ids is not None
            self._check_ids(input_ids)
            inputs_embeds = self.embed_tokens(input_ids)
        x = inputs_embeds * self.config.hidden_size**0.5 if self.config.scale_embeddings else inputs_embeds
        if self.position.hooks:
            x = self.position.embed(x, self._positions(tokens, x, state))
        embedded: Tensor = self.dropout(x)
        return embedded

    def _positions(self, tokens: Tokens, x: Tensor, state: Any) -> Tensor:
        """Return positions ``b l a``, given or counted, for encodings of embeddings."""
        if tokens.positions is not None:
            return tokens.positions
        if self.sequence is None:
            return positions_of(tokens, state, x)
        batch, length, _ = x.shape
        shards = self.sequence.shards(tokens.mask, tokens.segments, batch, length, x.device)
        first = None if shards.first is None else shards.first[self.sequence.rank]
        return tokens.count(shards.before(self.sequence.rank), length, first)

    def _check_ids(self, input_ids: Tensor) -> None:
        if can_read_values(input_ids) and input_ids.numel():
            low, high = int(input_ids.min()), int(input_ids.max())
            if low < 0 or high >= self.config.vocab_size:
                raise ValueError(
                    f"input_ids must be from 0 to {self.config.vocab_size - 1} (vocab_size={self.config.vocab_size}), got "
                    f"{low if low < 0 else high}: does the tokenizer belong to this model?"
                )

    def _cache(self, past: Any, use_cache: bool | None, batch: int) -> PermuteFormerCache | None:
        if self.sequence is not None:
            if past is not None or use_cache:
                raise ValueError("past_key_values and use_cache are for whole rows: a model with sequence parallelism does not generate")
            return None
        if past is not None:
            if not self.has_state:
                raise ValueError("past_key_values is for causal models with a state: this one sees its whole sequence in one call")
            if not isinstance(past, PermuteFormerCache) or len(past.layers) != len(self.layers):
                raise ValueError(
                    f"past_key_values must be a PermuteFormerCache of {len(self.layers)} layers, as this model returns it, got "
                    f"{type(past).__name__}"
                )
            state = past.layers[0].state
            if state is not None and len(state[0]) != batch:
                raise ValueError(f"past_key_values has a batch of {len(state[0])}, the input one of {batch}: continue with the same rows")
            return past
        has_state = self.has_state
        if use_cache and not has_state:
            why = "it is not causal" if not self.config.causal else f"attention {self.config.attention['name']!r} has no state"
            raise ValueError(f"use_cache=True is for models with a state, and this one has none: {why}")
        wanted = self.config.use_cache and not self.training if use_cache is None else use_cache
        return PermuteFormerCache(len(self.layers)) if wanted and has_state else None


def check_extra(arguments: dict[str, Any]) -> None:
    """Remove arguments that have no effect, and raise for unknown ones; those for the loss stay.

    Tokenizers of other families return ``token_type_ids``, all 0 for one text.
    """
    types = arguments.pop("token_type_ids", None)
    if types is not None and can_read_values(types) and bool(types.any()):
        raise ValueError("token_type_ids other than 0 are not supported: these models have no token types; leave them out")
    if arguments.pop("output_attentions", None):
        raise ValueError("output_attentions=True is not supported: linear attention never forms its weights")
    for name in arguments:
        if name not in ("num_items_in_batch", "shift_labels"):
            known = [*inspect.signature(PermuteFormerModel.forward).parameters, "labels"]
            raise TypeError(unknown("argument of the model:", name, known[1:]))
