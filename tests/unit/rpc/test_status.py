"""Errors survive the wire: type, field, metadata and retry delay."""

from __future__ import annotations

import grpc
import pytest

from meshfire import errors
from meshfire.rpc import status


def constructible() -> list[type[errors.MeshfireError]]:
    return list(errors.all_errors().values())


@pytest.mark.parametrize("kind", constructible(), ids=lambda kind: kind.__name__)
def test_every_error_of_the_tree_comes_back_as_itself(kind: type[errors.MeshfireError]) -> None:
    sent = kind("seen 3, expected 4", field="a.b", retry_after_s=1.5, metadata={"k": "v"})
    got = status.from_status(status.to_status(sent))
    assert type(got) is kind
    assert (got.message, got.field, got.retry_after_s, got.metadata) == ("seen 3, expected 4", "a.b", 1.5, {"k": "v"})


def test_every_code_is_a_grpc_status_code() -> None:
    for kind in errors.all_errors().values():
        assert grpc.StatusCode[kind.code]


def test_an_unknown_reason_falls_back_to_the_class_of_its_code() -> None:
    wire = status.to_status(errors.StaleEpoch("old"))
    wire.ClearField("details")
    assert type(status.from_status(wire)) is errors.Refused


def test_a_reason_in_a_message_keeps_its_type_and_an_unknown_one_keeps_whether_it_is_retryable() -> None:
    assert type(status.from_reason("KV_EXPIRED", "gone", {}, retryable=True)) is errors.KvExpired
    assert type(status.from_reason("NEW_TROUBLE", "?", {}, retryable=True)) is errors.Unavailable
    assert type(status.from_reason("NEW_TROUBLE", "?", {}, retryable=False)) is errors.InternalError
