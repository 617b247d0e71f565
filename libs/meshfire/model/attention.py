"""Causal softmax attention of one sequence over its cached context.

Owns masking and precision. The core runs in float64 and is rounded once: then its result does not depend on how a
prompt was cut into chunks, on how many keys lie behind the mask, or on which of MLA's two forms was used (beyond a
rounding boundary hit with probability of about 1e-8 per number). Knows nothing of projections, heads' meaning or pages.
"""

from __future__ import annotations

import torch
from torch import Tensor

ATTENTION_DTYPE = torch.float64
#: scores held at a time (64 MiB); longer chunks run in tiles of queries
_MAX_SCORES = 2**23


def attend(queries: Tensor, keys: Tensor, values: Tensor, scale: float, window_tokens: int = 0) -> Tensor:
    """The last T positions of a context of C attend to it: [T, N, D], [C, G, D], [C, G, Dv] → [T, N, Dv].

    N = G x R: consecutive R query heads share a key head. Query row t sees keys 0 .. C - T + t, of these only the last
    `window_tokens` (itself included) unless that is 0. All float64.
    """
    if window_tokens and (unseen := keys.shape[0] - queries.shape[0] - window_tokens + 1) > 0:
        keys, values = keys[unseen:], values[unseen:]
    num_queries, num_heads = queries.shape[:2]
    first_position = keys.shape[0] - num_queries
    tile = max(1, _MAX_SCORES // (num_heads * keys.shape[0]))
    if num_queries <= tile:
        return _attend_tile(queries, keys, values, scale, window_tokens)
    outputs = []
    for start in range(0, num_queries, tile):
        rows = queries[start : start + tile]
        seen = first_position + start + rows.shape[0]
        first = max(0, first_position + start - window_tokens + 1) if window_tokens else 0
        outputs.append(_attend_tile(rows, keys[first:seen], values[first:seen], scale, window_tokens))
    return torch.cat(outputs)


def _attend_tile(queries: Tensor, keys: Tensor, values: Tensor, scale: float, window_tokens: int) -> Tensor:
    num_queries, num_heads, dim = queries.shape
    num_keys, num_groups = keys.shape[:2]
    grouped = queries.view(num_queries, num_groups, -1, dim).permute(1, 2, 0, 3)  # [G, R, T, D]
    scores = torch.bmm(grouped.reshape(num_groups, -1, dim), keys.permute(1, 2, 0)) * scale  # [G, R·T, C]
    if num_queries > 1:
        hidden = torch.ones(num_queries, num_keys, dtype=torch.bool).triu_(num_keys - num_queries + 1)
        if window_tokens:
            hidden |= torch.ones_like(hidden).tril_(num_keys - num_queries - window_tokens)
        scores.view(num_groups, -1, num_queries, num_keys).masked_fill_(hidden, float("-inf"))
    output = torch.bmm(torch.softmax(scores, dim=-1), values.transpose(0, 1))  # [G, R·T, Dv]
    output = output.view(num_groups, -1, num_queries, values.shape[-1]).permute(2, 0, 1, 3)
    return output.reshape(num_queries, num_heads, -1)
