"""The grammar of rehearsed failures."""

from __future__ import annotations

import pytest

from meshfire.errors import BadInput
from meshfire.worker.faults import Fault, HopFault, Trigger, parse_fault


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("decode:kill@token=17", Fault("decode", None, "kill", trigger=Trigger("token", 17))),
        ("expert-0:stop@layer=3", Fault("expert", 0, "stop", trigger=Trigger("layer", 3))),
        ("prefill:delay=2s", Fault("prefill", None, "delay", 2.0)),
        ("prefill-12:delay=250ms@chunk=1", Fault("prefill", 12, "delay", 0.25, Trigger("chunk", 1))),
        ("kv:corrupt", Fault("kv", None, "corrupt")),
        ("kv:corrupt@block=2", Fault("kv", None, "corrupt", trigger=Trigger("block", 2))),
    ],
)
def test_every_form_of_the_grammar_is_understood(text: str, fault: Fault) -> None:
    assert parse_fault(text) == fault


def test_an_empty_text_is_no_fault() -> None:
    assert parse_fault("") is None


@pytest.mark.parametrize(
    "text",
    [
        "decode",
        "decode:",
        "decode:explode",
        "gateway:kill",
        "decode:kill@",
        "decode:kill@token",
        "decode:kill@token=",
        "decode:kill@token=-1",
        "decode:kill@token=x",
        "decode:kill=3",
        "decode:kill ",
        "prefill:delay",
        "prefill:delay=",
        "prefill:delay=2",
        "prefill:delay=-2s",
        "prefill:delay=2h",
        "kv:kill",
        "decode:corrupt",
        "expert-x:kill",
        "decode:kill@token=1\n",
        "x" * 10_000,
    ],
)
def test_anything_else_is_bad_input_with_the_field_named(text: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse_fault(text)
    assert caught.value.field == "fault"
    assert len(caught.value.message) < 500


def test_a_fault_aims_at_its_role_and_instance() -> None:
    anyone, first = parse_fault("expert:kill"), parse_fault("expert-0:kill")
    assert anyone is not None
    assert first is not None
    assert anyone.aims_at("expert", "smollm2-expert-7")
    assert not anyone.aims_at("decode", "decode-0")
    assert first.aims_at("expert", "expert-0")
    assert not first.aims_at("expert", "expert-10")


def test_a_trigger_names_the_one_moment() -> None:
    fault = parse_fault("decode:kill@token=17")
    assert fault is not None
    assert fault.strikes(token=17)
    assert not fault.strikes(token=16)
    assert not fault.strikes(layer=17)
    always = parse_fault("decode:kill")
    assert always is not None
    assert always.strikes(token=5)


def test_a_hop_fault_is_told_once_and_only_at_its_layer() -> None:
    fault = parse_fault("expert-0:kill@layer=3")
    assert fault is not None
    hop = HopFault(fault)
    assert [hop.due(layer) for layer in (2, 3, 3, 4)] == ["", "expert-0:kill", "", ""]


@pytest.mark.parametrize("text", ["expert:kill", "expert-2:stop", "expert:delay=1.5s"])
def test_the_blow_is_a_fault_without_a_trigger(text: str) -> None:
    fault = parse_fault(f"{text}@token=4")
    assert fault is not None
    assert fault.blow == text
    assert parse_fault(fault.blow) == Fault(fault.role, fault.index, fault.action, fault.delay_s)
