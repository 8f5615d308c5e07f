"""Paged attention in plain torch: the only one on CPU, and the yardstick everywhere.

It first writes the new keys and values of *all* sequences into their pages and then attends,
reading everything from the pages: a sequence may share a page that another one fills in the same
step.
"""

import torch
from torch import Tensor
from torch.nn import functional

from gpu_backend.batch import Batch
from gpu_backend.cache import KVCache


class GatherAttention:
    """Gather each sequence's pages and attend with torch's SDPA, one sequence at a time.

    Padding the batch to one length instead would cost batch size times the longest context.
    """

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """Store the new keys and values of a layer and attend over each sequence's pages.

        q is [T, n_q, D], k and v are [T, n_kv, D], normalised and rotated; returns [T, n_q * D].
        """
        scratch = batch.scratch
        if "slots" not in scratch:
            self._prepare(batch)
        slots = scratch["slots"]
        self.cache.keys[layer].index_copy_(0, slots, k)
        self.cache.values[layer].index_copy_(0, slots, v)
        pages, masks = scratch["pages"], scratch["masks"]
        out = torch.empty_like(q)
        bounds = batch.host.query_starts.tolist()
        for i, length in enumerate(batch.host.lengths.tolist()):
            one = slice(bounds[i], bounds[i + 1])
            key, value = self.cache.gather(layer, pages[i], length)
            out[one] = attend(q[one], key, value, masks[i])
        return out.flatten(1)

    def _prepare(self, batch: Batch) -> None:
        """Make the index tensors and masks that all layers share."""
        size = self.cache.block_size
        batch.scratch["slots"] = batch.slots.long()
        batch.scratch["pages"] = [
            batch.tables[i, : -(-length // size)]
            for i, length in enumerate(batch.host.lengths.tolist())
        ]
        batch.scratch["masks"] = [
            None if count == 1 else causal_mask(count, start + count, batch.ids.device)
            for start, count in zip(
                batch.host.starts.tolist(), batch.host.counts.tolist(), strict=True
            )
        ]


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """Say which of `keys` tokens each of the last `queries` of them may see: bool [q, k]."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attend with [t, n_q, D] queries over [c, n_kv, D] keys and values; returns [t, n_q, D].

    `mask` is None where t is 1: the query heads of a group then take the place of the tokens,
    so that no key is copied.
    """
    heads, width = k.shape[1], q.shape[2]
    key, value = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
    if mask is None:
        query = q.view(1, heads, -1, width)
        return functional.scaled_dot_product_attention(query, key, value).view(1, -1, width)
    query = q.transpose(0, 1)[None]
    out = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, enable_gqa=True
    )
    return out[0].transpose(0, 1)
