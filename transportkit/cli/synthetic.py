"""A model to move where the user gives none; nothing is moved here."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

#: The parts of a layer and their shares of its bytes, much as in a decoder of a large language model.
_PARTS = {
    "self_attn.q_proj": 16,
    "self_attn.k_proj": 4,
    "self_attn.v_proj": 4,
    "self_attn.o_proj": 16,
    "mlp.gate_proj": 44,
    "mlp.up_proj": 44,
    "mlp.down_proj": 44,
    "input_layernorm": 0,
    "post_attention_layernorm": 0,
}
_WIDTH = 2048
_LAYER_BYTES = 2 * _WIDTH * (sum(_PARTS.values()) * 128 + 2)


def synthetic_model(nbytes: int) -> Iterator[tuple[str, Tensor]]:
    """Tensors of random bfloat16 bits under the names of a transformer, of ``nbytes`` (made even) together."""
    left = max(nbytes // 2 * 2, 2)
    layer = 0
    while left >= _LAYER_BYTES:
        for part, share in _PARTS.items():
            shape = (share * 128, _WIDTH) if share else (_WIDTH,)
            yield f"model.layers.{layer}.{part}.weight", _random(shape)
        left -= _LAYER_BYTES
        layer += 1
    rows, rest = divmod(left // 2, _WIDTH)
    if rows:
        yield "lm_head.weight", _random((rows, _WIDTH))
    if rest:
        yield "lm_head.bias", _random((rest,))


def _random(shape: tuple[int, ...]) -> Tensor:
    import math

    import torch

    count = math.prod(shape)
    words = torch.empty(-(-count // 4), dtype=torch.int64).random_()
    return words.view(torch.bfloat16)[:count].view(shape)
