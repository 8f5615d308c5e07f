"""Which policy shall order SGLang's queue, and whether that can be in the SGLang installed."""

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from headway.vllm.policy import PLUGIN_POLICIES, VARIABLE, make_policy
from simulator.build.policy_table import POLICIES, policy_name
from simulator.schedulers.sglang.queue_order import MORE_THAN_ORDER, check_orders
from simulator.util.errors import HeadwayError

ORDERS = [
    name
    for name in PLUGIN_POLICIES
    if not any(hasattr(POLICIES[name], hook) for hook in MORE_THAN_ORDER)
]
"""Headway's policies that only order the queue."""
RELEASE = "0.5.23"
"""The SGLang whose scheduler this fits: what is hooked is private and changes."""


def check_sglang() -> str:
    """Return the version of the SGLang installed; HeadwayError where this does not fit it."""
    try:
        found = version("sglang")
    except PackageNotFoundError:
        raise HeadwayError("headway.sglang: SGLang is not installed in this Python") from None
    if find_spec("sglang") is None or find_spec("sglang.srt.plugins") is None:
        raise HeadwayError(f"headway.sglang: SGLang {found} has no plug-ins (sglang.srt.plugins)")
    if found.partition("+")[0].partition(".post")[0] != RELEASE:
        raise HeadwayError(
            f"headway.sglang: fits SGLang {RELEASE}, and {found} is installed: what it hooks is "
            "private and another in each release"
        )
    return found


def make_order() -> Any:
    """Make the policy that HEADWAY_POLICY names; HeadwayError, in one line, where that fails."""
    policy = make_policy(None, "SGLang", ORDERS)
    try:
        check_orders(type(policy), policy_name(type(policy)))
    except ValueError as error:
        raise HeadwayError(f"{VARIABLE}: {error}") from error
    return policy
