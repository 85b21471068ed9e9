"""Bias, penalties, constraints and bans on the device: one scatter each for the whole batch.

Inference thread. Rows that ask for nothing keep their logits bit for bit, and a row gets the same
values in any batch: everything here is elementwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from service.engine.grammar import fill_masks
from service.engine.sampling_row import SamplingRow

_BITS = 32


def shape_logits(logits: mx.array, rows: Sequence[SamplingRow]) -> mx.array:
    """Return [rows, vocabulary] logits as each row wants them, in float32 once one row wants any change."""
    if all(row.is_plain for row in rows):
        return logits
    shaped = _constrain(_edit(logits.astype(mx.float32), rows), rows)
    return _ban(shaped, rows)


def _edit(logits: mx.array, rows: Sequence[SamplingRow]) -> mx.array:
    tables = [(index, row.edits.table()) for index, row in enumerate(rows) if row.edits is not None]
    counts = [len(table.token_ids) for _, table in tables]
    if not sum(counts):
        return logits
    row_indices = np.repeat(np.array([index for index, _ in tables], dtype=np.int32), counts)
    where = mx.array(row_indices), mx.array(np.concatenate([table.token_ids for _, table in tables]))
    bias = mx.array(np.concatenate([table.bias for _, table in tables]))
    divisor = mx.array(np.concatenate([table.divisor for _, table in tables]))
    shift = mx.array(np.concatenate([table.shift for _, table in tables]))
    values = logits[where] + bias
    values = mx.where(values < 0, values * divisor, values / divisor) - shift
    logits[where] = values
    return logits


def _constrain(logits: mx.array, rows: Sequence[SamplingRow]) -> mx.array:
    """Leave constrained rows what their masks allow."""
    bound = [
        (index, row.constraint)
        for index, row in enumerate(rows)
        if row.constraint is not None and not row.constraint.is_finished
    ]
    if not bound:
        return logits
    masks = fill_masks([constraint for _, constraint in bound])
    allowed = _unpacked(masks, vocabulary_size=logits.shape[-1])
    if len(bound) == len(rows):
        return mx.where(allowed, logits, -math.inf)
    where = mx.array([index for index, _ in bound])
    logits[where] = mx.where(allowed, logits[where], -math.inf)
    return logits


def _unpacked(masks: Sequence[npt.NDArray[np.uint32]], *, vocabulary_size: int) -> mx.array:
    """Return [masks, vocabulary] booleans; tokens behind a mask's last word are not allowed."""
    word_count = -(-vocabulary_size // _BITS)
    words = np.zeros((len(masks), word_count), dtype=np.uint32)
    for index, mask in enumerate(masks):
        words[index, : len(mask)] = mask[:word_count]
    bits = (mx.array(words)[:, :, None] >> mx.arange(_BITS, dtype=mx.uint32)) & 1
    return bits.reshape(len(masks), -1)[:, :vocabulary_size].astype(mx.bool_)


def _ban(logits: mx.array, rows: Sequence[SamplingRow]) -> mx.array:
    """Take away what the rows ban, but never a row's last possible token: then its bans yield."""
    banned = [
        (index, token_id)
        for index, row in enumerate(rows)
        if row.bans is not None
        for token_id in row.bans.tokens(row.drawn_count)
    ]
    if not banned:
        return logits
    left = logits + 0.0  # an array of its own: where bans yield, the values before them are needed
    left[mx.array([index for index, _ in banned]), mx.array([token_id for _, token_id in banned])] = -math.inf
    return mx.where(mx.max(left, axis=-1, keepdims=True) == -math.inf, logits, left)
