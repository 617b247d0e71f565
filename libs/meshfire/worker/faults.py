"""Test hook: a failure that one request rehearses on itself, and its grammar.

    fault    = target ":" action [ "=" argument ] [ "@" trigger "=" number ]
    target   = "prefill" | "decode" | "expert" | "kv", each optionally with "-" number (one instance of several)
    action   = "kill" | "stop" | "delay" "=" duration | "corrupt"      corrupt belongs to kv and only to it
    duration = number ( "ms" | "s" )
    trigger  = "token" | "layer" | "chunk" | "block"                   without one: at the first chance;
               of an expert: "layer" while the prompt is computed, or "token"

Examples: `decode:kill@token=17`, `expert-0:stop@layer=3`, `prefill:delay=2s`, `kv:corrupt`. Owns parsing, matching and
the blow itself; whether hooks are allowed, and when a trigger's moment has come, is the caller's business.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from dataclasses import dataclass

from meshfire.errors import BadInput, TestHooksOff

_FAULT = re.compile(
    r"(?P<role>prefill|decode|expert|kv)(?:-(?P<index>\d{1,6}))?"
    r":(?P<action>kill|stop|delay|corrupt)(?:=(?P<argument>[^@]*))?"
    r"(?:@(?P<trigger>token|layer|chunk|block)=(?P<at>\d{1,9}))?"
)
_DURATION = re.compile(r"(\d{1,6}(?:\.\d{1,6})?)(ms|s)")
FIRST_EPOCH = 1
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


@dataclass(frozen=True)
class Trigger:
    """The moment at which a fault acts: the `at`-th token, layer, chunk or block, counted from 0."""

    name: str
    at: int


@dataclass(frozen=True)
class Fault:
    """One rehearsed failure."""

    #: prefill, decode, expert or kv
    role: str
    #: one instance of the role (`expert-0` → 0); None = any
    index: int | None
    #: kill, stop, delay or corrupt
    action: str
    #: seconds of a delay; 0 for the others
    delay_s: float = 0.0
    #: None = at the first chance
    trigger: Trigger | None = None

    def aims_at(self, role: str, instance_id: str) -> bool:
        """Whether it is meant for this worker; `expert-0` is the instance whose id ends in `-0`."""
        return self.role == role and (self.index is None or instance_id.endswith(f"-{self.index}"))

    @property
    def blow(self) -> str:
        """What is told to the process that shall do it: the text without its trigger."""
        target = self.role if self.index is None else f"{self.role}-{self.index}"
        return f"{target}:{self.action}" + (f"={self.delay_s}s" if self.action == "delay" else "")

    def strikes(self, **moment: int) -> bool:
        """Whether it acts now, e.g. `strikes(chunk=1)`. Without a trigger always: the caller asks until it acted."""
        return self.trigger is None or moment.get(self.trigger.name) == self.trigger.at


@dataclass
class HopFault:
    """A fault for an expert shard on its way there: told once, with the first hop at which it strikes.

    Told again when an unanswered hop is sent anew, it would kill the shard that has just come back."""

    fault: Fault
    told: bool = False

    def due(self, layer: int) -> str:
        """The blow, if it is to be told with a hop of `layer`; else an empty text."""
        trigger = self.fault.trigger
        if self.told or (trigger is not None and trigger.name == "layer" and trigger.at != layer):
            return ""
        self.told = True
        return self.fault.blow


def parse_fault(text: str) -> Fault | None:
    """The fault in `text`; None for an empty one. Raises BadInput with field `fault`."""
    if not text:
        return None
    match = _FAULT.fullmatch(text)
    if match is None:
        raise _bad(text, "expected e.g. decode:kill@token=17, expert-0:stop@layer=3, prefill:delay=2s, kv:corrupt")
    role, action, argument = match["role"], match["action"], match["argument"]
    if (action == "corrupt") != (role == "kv"):
        raise _bad(text, "kv can only be corrupted, and nothing else can")
    trigger = Trigger(match["trigger"], int(match["at"])) if match["trigger"] else None
    if role == "expert" and trigger and trigger.name not in ("layer", "token"):
        raise _bad(text, "an expert shard strikes at a layer (of the prompt) or at a token (of the output)")
    index = int(match["index"]) if match["index"] else None
    return Fault(role, index, action, _delay_s(text, action, argument), trigger)


def rehearsed(text: str, *, epoch: int, hooks_on: bool) -> Fault | None:
    """The fault that a lease carries. Raises TestHooksOff where hooks are off, BadInput.

    None from the second epoch on: what has failed once must be able to recover.
    """
    if text and not hooks_on:
        raise TestHooksOff("this worker runs without test hooks; a fault is refused", field="fault")
    fault = parse_fault(text)
    return fault if epoch <= FIRST_EPOCH else None


async def strike(fault: Fault) -> None:
    """Do it to this process: SIGKILL, SIGSTOP, or sleep. A corruption is done by whoever holds the bytes."""
    if fault.action in _SIGNALS:
        os.kill(os.getpid(), _SIGNALS[fault.action])
    elif fault.action == "delay":
        await asyncio.sleep(fault.delay_s)


def _delay_s(text: str, action: str, argument: str | None) -> float:
    if action != "delay":
        if argument is not None:
            raise _bad(text, f"{action} takes no argument")
        return 0.0
    duration = _DURATION.fullmatch(argument or "")
    if duration is None:
        raise _bad(text, "a delay needs a duration like 2s or 250ms")
    return float(duration[1]) * (0.001 if duration[2] == "ms" else 1.0)


def _bad(text: str, hint: str) -> BadInput:
    return BadInput(f"fault {text[:100]!r} is not understood: {hint}", field="fault")
