"""The check of token ids that a caller sends."""

from __future__ import annotations

from collections.abc import Sequence

from service.domain.model import ModelInfo
from service.errors import InvalidRequest, Reason


def check_token_ids(token_ids: Sequence[int], info: ModelInfo, *, field: str) -> None:
    """Refuse an id that the model's vocabulary does not have."""
    for index, token_id in enumerate(token_ids):
        if not 0 <= token_id < info.vocabulary_size:
            place = f"{field}[{index}]"
            raise InvalidRequest(
                Reason.TOKEN_OUT_OF_RANGE,
                f"{place} is {token_id}; token ids of this model are 0 to {info.vocabulary_size - 1}",
                field=place,
                metadata={"index": index, "token_id": token_id, "vocabulary_size": info.vocabulary_size},
            )
