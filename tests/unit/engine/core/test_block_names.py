"""Names that are remembered are those that the tokens, their parent and the secret give."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from icehouse_server.domain.blocks import image_keys, key_hash
from icehouse_server.domain.ids import BlockHash, ImageDigest
from icehouse_server.engine.core import block_names
from icehouse_server.engine.core.block_names import BlockNames

PARENTS = (BlockHash(b"a" * 32), BlockHash(b"b" * 32))
KEYS = ((), (1,), (1, 2), (2, 1), image_keys(ImageDigest(b"i" * 32), (1, 2)))


@given(
    st.lists(st.tuples(st.sampled_from(PARENTS), st.sampled_from(KEYS))), st.sampled_from([b"", b"secret"])
)
def test_a_name_is_the_same_however_often_it_is_asked_for(
    asked: list[tuple[BlockHash, tuple[int, ...]]], secret: bytes
) -> None:
    names = BlockNames(secret)
    for parent, keys in asked:
        assert names.of(parent, keys) == key_hash(parent=parent, keys=keys, secret=secret)


def test_so_many_are_remembered_and_no_more() -> None:
    names = BlockNames()
    for number in range(block_names._KEPT_COUNT + 10):
        names.of(PARENTS[0], (number,))
    assert names._name.cache_info().currsize == block_names._KEPT_COUNT
