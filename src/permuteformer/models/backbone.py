"""The one backbone: embeddings, pre-norm blocks around any attention, a final norm."""

from __future__ import annotations

import inspect
import os
from dataclasses import dataclass
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
from permuteformer.attention.base import of_tokens
from permuteformer.folders import write_whole
from permuteformer.models import fused
from permuteformer.models.cache import PermuteFormerCache
from permuteformer.models.card import NAME, card_beside, is_template
from permuteformer.models.config import PermuteFormerConfig
from permuteformer.models.dropout import Dropout
from permuteformer.models.loading import check_folder, in_words
from permuteformer.ops.checks import can_look_at
from permuteformer.ops.sequence_parallel import SequenceGroup
from permuteformer.positions import Compose, PositionEncoding
from permuteformer.registry import unknown


@dataclass
class Given:
    """What all blocks are given besides hidden states."""

    positions: Tensor | None
    key_mask: Tensor | None
    segments: Tensor | None
    by_kernel: bool
    """Whether halves of blocks may be computed by the CPU kernel: ``fused``."""
    reach: list[int] | None = None
    """How far tokens are apart on each axis, once a layer has looked."""

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Given:
        """The same on another device: accelerate asks for it where layers are on several."""
        given = (self.positions, self.key_mask, self.segments)
        positions, key_mask, segments = (None if x is None else x.to(device, non_blocking=non_blocking) for x in given)
        return Given(positions, key_mask, segments, self.by_kernel, self.reach)


class PermuteFormerBlock(GradientCheckpointingLayer):  # type: ignore[misc]
    """x + attention(norm(x)), then x + feed-forward(norm(x))."""

    known_attention: fused.Known | None = None
    known_feed_forward: fused.Known | None = None

    def __init__(self, config: PermuteFormerConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attention = config.build_layer(layer)
        for projection in (self.attention.query, self.attention.key, self.attention.value):
            if projection is not None:  # fairseq initialises these as one matrix; transformers shows a module without its parent
                projection.is_input_projection = True  # type: ignore[assignment]
        self.feed_forward_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.expand = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation = ACT2FN[config.hidden_act]
        self.contract = nn.Linear(config.intermediate_size, config.hidden_size)
        self.dropout = Dropout(config.hidden_dropout)

    def forward(self, x: Tensor, given: Given, state: Any, chosen: Tensor | None = None) -> tuple[Tensor, Any]:
        """``b l d`` and the layer's state, to the same; or to ``b n d`` of the tokens ``chosen``, ``b n``."""
        if given.by_kernel and given.segments is None and state is None and (attended := fused.attend(self, x, given, chosen)) is not None:
            return self.feed_forward(attended, given.by_kernel), None
        mixed, state = self.attention(
            self.attention_norm(x),
            positions=given.positions,
            key_mask=given.key_mask,
            segments=given.segments,
            state=state,
            chosen=chosen,
        )
        x = x if chosen is None else of_tokens(x, chosen)
        return self.feed_forward(x + self.dropout(mixed), given.by_kernel), state

    def feed_forward(self, x: Tensor, by_kernel: bool) -> Tensor:
        """x + feed-forward(norm(x))."""
        if by_kernel and (fed := fused.feed_forward(self, x)) is not None:
            return fed
        out: Tensor = x + self.dropout(self.contract(self.activation(self.expand(self.feed_forward_norm(x)))))
        return out


class PermuteFormerPreTrainedModel(PreTrainedModel):  # type: ignore[misc]
    """What all models share: configuration, initialisation, loading."""

    config: PermuteFormerConfig
    config_class = PermuteFormerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["PermuteFormerBlock"]  # noqa: RUF012
    _is_stateful = True

    @classmethod
    def from_pretrained(cls, source: str | os.PathLike[str] | None, *arguments: Any, **options: Any) -> Any:
        """As of transformers, but weights are safetensors, since a pickle could run what it likes; and a folder is looked at before."""
        options.setdefault("use_safetensors", True)
        with in_words(source):
            folder = Path(source or "", options.get("subfolder") or "")
            if source is not None and options.get("config") is None and (folder / "config.json").exists():
                check_folder(folder, cls.config_class)
            return super().from_pretrained(source, *arguments, **options)

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], is_main_process: bool = True, *arguments: Any, **options: Any
    ) -> None:
        """Save as transformers does, with a card: README.md, unless there is one."""
        self._card = card_beside(self, Path(save_directory))
        super().save_pretrained(save_directory, is_main_process, *arguments, **options)
        place = Path(save_directory) / NAME
        if is_main_process and not place.exists():
            write_whole(place, self._card.encode())

    def _upload_modified_files(self, working_dir: str | os.PathLike[str], *arguments: Any, **options: Any) -> Any:
        """To the hub: our card where transformers has put its empty one; one that somebody wrote there stays."""
        if is_template(Path(working_dir) / NAME):
            write_whole(Path(working_dir) / NAME, self._card.encode())
        return super()._upload_modified_files(working_dir, *arguments, **options)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise what was not loaded. Buffers of positions that no checkpoint holds are filled here too."""
        if isinstance(module, (PositionEncoding, Attention)):
            module.reset(init.copy_)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, nn.Linear):
            if self.config.initialization == "fairseq":
                init.xavier_uniform_(module.weight, gain=2**-0.5 if getattr(module, "is_input_projection", False) else 1)
            else:
                init.normal_(module.weight, std=self.config.initializer_range)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Conv2d):
            init.normal_(module.weight, std=self.config.initializer_range)
        elif isinstance(module, nn.Embedding):
            fairseq = self.config.initialization == "fairseq"
            init.normal_(module.weight, std=self.config.hidden_size**-0.5 if fairseq else self.config.initializer_range)
            if module.padding_idx is not None and not getattr(module.weight, "_is_hf_initialized", False):
                init.zeros_(module.weight[module.padding_idx])


class PermuteFormerModel(PermuteFormerPreTrainedModel):
    """Tokens to hidden states.

    >>> model = PermuteFormerModel(PermuteFormerConfig(vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=2))
    >>> model(torch.randint(3, 99, (1, 10))).last_hidden_state.shape    # b l d
    torch.Size([1, 10, 32])
    """

    sequence: SequenceGroup | None = None
    """The processes that hold rows together with this one, as ``parallel.spread`` says."""

    def __init__(self, config: PermuteFormerConfig) -> None:
        super().__init__(config)
        # A row for padding is zero and is not trained, unless it ends texts as well.
        padding = None if config.pad_token_id == config.eos_token_id else config.pad_token_id
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=padding)
        self.position = Compose(config.build_embedding_positions())
        self.dropout = Dropout(config.hidden_dropout)
        self.layers = nn.ModuleList(PermuteFormerBlock(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embed_tokens = value  # type: ignore[assignment]

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
        output_hidden_states: bool | None = None,
        chosen: Tensor | None = None,
    ) -> BaseModelOutputWithPast:
        """Hidden states of tokens.

        Args:
            input_ids: ``b l`` int64, or give ``inputs_embeds`` ``b l d``.
            attention_mask: ``b l`` (or ``b s`` with the tokens before), 1 for real tokens, 0 for padding.
            position_ids: ``b l``, or ``b l a`` for several axes, where they must be given. ``None`` counts real tokens.
            inputs_embeds: embeddings in place of ``input_ids``.
            past_key_values: what an earlier call of a causal model returned, to go on from.
            use_cache: return states; the configuration's ``use_cache`` for causal models if not given.
            segment_ids: ``b l`` int64 for packed rows: tokens see their own segment only.
            output_hidden_states: return the hidden states before every block and at the end.
            chosen: ``b n`` int64, places of the tokens whose last hidden states are wanted, ``b n d``: of the others the last block
                computes what these look at, and no more. ``None`` for all.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give input_ids or inputs_embeds: one of them, not both")
        given_to = input_ids if inputs_embeds is None else inputs_embeds
        assert given_to is not None
        wanted = 2 if inputs_embeds is None else 3
        if given_to.dim() != wanted or given_to.shape[1] == 0:
            shape = "(batch, length)" if wanted == 2 else f"(batch, length, {self.config.hidden_size})"
            raise ValueError(f"input must have shape {shape}, with a length of at least 1; it has {tuple(given_to.shape)}")
        batch, length = given_to.shape[:2]
        cache = self._cache(past_key_values, use_cache)
        if cache is not None and cache.layers[0].next_position is not None and len(cache.layers[0].next_position) != batch:
            raise ValueError(
                f"past_key_values is of a batch of {len(cache.layers[0].next_position)}, the input of {batch}: go on with the same rows"
            )
        key_mask = self.key_mask(attention_mask, batch, length, 0 if cache is None else cache.get_seq_length())
        positions = self.positions(position_ids, key_mask, cache, segment_ids, batch, length, given_to.device)
        x = self.embed(input_ids, inputs_embeds, positions)
        # Relative encodings do not ask where counting starts; without positions a layer counts by itself, which is faster.
        given = Given(positions if position_ids is not None else None, key_mask, segment_ids, fused.is_wanted())
        after = None if cache is None else self._next_position(cache.layers[0].next_position, positions.expand(batch, -1, -1), key_mask)
        hidden_states: list[Tensor] = []
        keeps = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        for n, block in enumerate(self.layers):
            if keeps:
                hidden_states.append(x)
            state = None if cache is None else cache.layers[n].state
            x, state = block(x, given, state, chosen if n == len(self.layers) - 1 else None)
            if cache is not None:
                cache.layers[n].store(state, after, length, segment_ids)
        x = self.norm(x)
        if keeps:
            hidden_states.append(x)
        return BaseModelOutputWithPast(last_hidden_state=x, past_key_values=cache, hidden_states=tuple(hidden_states) if keeps else None)

    @staticmethod
    def _next_position(before: Tensor | None, positions: Tensor, key_mask: Tensor | None) -> Tensor:
        """``b``: the position after the last real token; for a row without one, what it was ``before``."""
        first = positions[..., 0]
        if key_mask is None:
            return first[:, -1] + 1
        places = torch.arange(key_mask.shape[1], device=key_mask.device)
        last = torch.where(key_mask, places, 0).amax(-1, keepdim=True)
        after = first.expand(len(key_mask), -1).gather(1, last).squeeze(1) + 1
        return torch.where(key_mask.any(-1), after, 0 if before is None else before)

    @property
    def blocks(self) -> list[PermuteFormerBlock]:
        """The layers, typed."""
        return list(self.layers)  # type: ignore[arg-type]

    @property
    def has_state(self) -> bool:
        """Whether the model can go on from a state."""
        return bool(self.config.causal and "state" in ATTENTIONS[self.config.attention["name"]].modes)

    def embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None, positions: Tensor) -> Tensor:
        """What goes into the first block: ``b l d`` of tokens ``b l``, or of their embeddings."""
        if inputs_embeds is None:
            assert input_ids is not None
            self._check_ids(input_ids)
            inputs_embeds = self.embed_tokens(input_ids)
        x = inputs_embeds * self.config.hidden_size**0.5 if self.config.scale_embeddings else inputs_embeds
        x = self.position.embed(x, positions) if self.position.hooks else x
        embedded: Tensor = self.dropout(x)
        return embedded

    def _check_ids(self, input_ids: Tensor) -> None:
        if can_look_at(input_ids) and input_ids.numel():
            low, high = int(input_ids.min()), int(input_ids.max())
            if low < 0 or high >= self.config.vocab_size:
                raise ValueError(
                    f"input_ids must be from 0 to {self.config.vocab_size - 1} (vocab_size={self.config.vocab_size}); there is "
                    f"{low if low < 0 else high}: does the tokenizer belong to this model?"
                )

    def key_mask(self, attention_mask: Tensor | None, batch: int, length: int, before: int = 0) -> Tensor | None:
        """``b l`` bool of these tokens, from a mask that may tell of tokens before them too."""
        if attention_mask is None:
            return None
        if attention_mask.dim() != 2 or attention_mask.shape[0] != batch or attention_mask.shape[1] not in (length, before + length):
            raise ValueError(
                f"attention_mask must have shape (batch, length) = ({batch}, {length}), or {before} columns more for the tokens before; it "
                f"has {tuple(attention_mask.shape)}"
            )
        return attention_mask[:, -length:].bool()

    def _cache(self, past: Any, use_cache: bool | None) -> PermuteFormerCache | None:
        if self.sequence is not None:
            if past is not None or use_cache:
                raise ValueError(
                    "past_key_values and use_cache are for rows on one process: a model that is spread does not generate; "
                    "spread(model, None) takes it back"
                )
            return None
        if past is not None:
            if not self.has_state:
                raise ValueError("past_key_values is for causal models with a state; this one sees its whole sequence in one call")
            if not isinstance(past, PermuteFormerCache) or len(past.layers) != len(self.layers):
                raise ValueError(
                    f"past_key_values must be a PermuteFormerCache of {len(self.layers)} layers, as this model returns it; it is "
                    f"{type(past).__name__}"
                )
            return past
        has_state = self.has_state
        if use_cache and not has_state:
            why = "it is not causal" if not self.config.causal else f"attention {self.config.attention['name']!r} has no state"
            raise ValueError(f"use_cache=True is for models with a state, and this one has none: {why}")
        wanted = self.config.use_cache and not self.training if use_cache is None else use_cache
        return PermuteFormerCache(len(self.layers)) if wanted and has_state else None

    def positions(
        self,
        position_ids: Tensor | None,
        key_mask: Tensor | None,
        cache: PermuteFormerCache | None,
        segment_ids: Tensor | None,
        batch: int,
        length: int,
        device: torch.device,
    ) -> Tensor:
        """``b l a``: as given, or real tokens counted from the state's next position, and from 0 in every new segment."""
        if position_ids is not None:
            return position_ids.unsqueeze(-1) if position_ids.dim() == 2 else position_ids
        if self.config.axes > 1:
            raise ValueError(
                f"position_ids must be given where axes={self.config.axes}: int64 of shape ({batch}, {length}, {self.config.axes}), the "
                "coordinates of each token; see permuteformer.tokens"
            )
        layer = None if cache is None else cache.layers[0]
        start = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        going_on = None if segment_ids is None else segment_ids[:, :1]
        if self.sequence is not None:
            stretches = self.sequence.stretches(key_mask, segment_ids, batch, length, device)
            start = stretches.before_in_segment(self.sequence.rank).unsqueeze(-1)
            going_on = None if stretches.first is None else stretches.first[self.sequence.rank].unsqueeze(-1)
        if layer is not None and layer.next_position is not None:
            start = layer.next_position.unsqueeze(-1)
        shown = torch.ones(batch, length, dtype=torch.int64, device=device) if key_mask is None else key_mask.long()
        counted = shown.cumsum(-1)
        if segment_ids is not None:  # every segment counts from 0, but for one that goes on
            begins = torch.nn.functional.pad(segment_ids.diff(dim=1) != 0, (1, 0))
            offset = torch.where(begins, counted - shown, 0).cummax(-1).values
            counted = counted - offset
            if layer is not None and layer.last_segment is not None:
                going_on = layer.last_segment.unsqueeze(-1)
            assert going_on is not None
            start = torch.where(segment_ids == going_on, start, 0)
        counted = (counted - 1).clamp(min=0)
        return (start + counted).unsqueeze(-1)


def check_extra(arguments: dict[str, Any]) -> None:
    """Take out of further arguments of a model what says nothing, and raise for what is no argument at all.

    Left in are those for the loss. Tokenizers of other families give ``token_type_ids``, of one kind for one text.
    """
    types = arguments.pop("token_type_ids", None)
    if types is not None and can_look_at(types) and bool(types.any()):
        raise ValueError("token_type_ids other than 0 say which of two texts a token is of, which these models do not know: leave them out")
    if arguments.pop("output_attentions", None):
        raise ValueError("output_attentions=True is not supported: linear attention never forms its weights")
    for name in arguments:
        if name not in ("num_items_in_batch", "shift_labels"):
            known = [*inspect.signature(PermuteFormerModel.forward).parameters, "labels"]
            raise TypeError(unknown("argument of the model:", name, known[1:]))
