"""Responses: facts of the domain as messages."""

from __future__ import annotations

import dataclasses

from icehouse.v1.model_service_pb2 import PassSplit as PassSplitMessage
from icehouse_server.domain.model import PassSplit
from icehouse_server.rpc.messages.responses import model_proto

from tests.fixtures.rpc.fake_engine import MODEL_INFO


def test_every_split_of_a_pass_is_told_by_its_name() -> None:
    told = model_proto(dataclasses.replace(MODEL_INFO, pass_splits=tuple(PassSplit)))
    names = [PassSplitMessage.Name(split) for split in told.pass_splits]
    assert names == [f"PASS_SPLIT_{split.name}" for split in PassSplit]
    assert set(PassSplitMessage.keys()) == {"PASS_SPLIT_UNSPECIFIED", *names}


def test_a_model_tells_whether_images_run_whole() -> None:
    assert model_proto(dataclasses.replace(MODEL_INFO, runs_images_whole=True)).runs_images_whole
    assert not model_proto(MODEL_INFO).runs_images_whole
