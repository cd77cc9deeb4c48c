"""The words of a refusal, for the model: every place that refuses a call takes them from here.

A policy's own reason is shown as the policy gives it.
"""

from __future__ import annotations


def not_approved(by: str = "", reason: str = "") -> str:
    """Return what a person has answered, for the note in a call's record.

    >>> not_approved("ops", "not on a Friday")
    'not approved by ops: not on a Friday'
    """
    return f"not approved{f' by {by}' if by else ''}{f': {reason}' if reason else ''}"


def by_person(tool_name: str, by: str = "", reason: str = "") -> str:
    """Return the refusal of a call that a person was asked about."""
    return f"Call to '{tool_name}' was {not_approved(by, reason)}"


def by_rule(tool_name: str) -> str:
    """Return the refusal of a tool that the settings deny by its name."""
    return f"'{tool_name}' is not allowed here. Do without it, or explain why you need it"


def by_policy(policy_name: str) -> str:
    """Return the refusal of a policy that gives no reason."""
    return f"Denied by policy '{policy_name}'"


def by_failed_policy(policy_name: str, error: Exception) -> str:
    """Return the refusal of a policy that raised: policies fail closed."""
    return f"Policy '{policy_name}' could not decide and denies the call: {error!r}"


def by_editing_policy(policy_name: str) -> str:
    """Return the refusal of a policy that would change arguments which a person has approved."""
    return f"Policy '{policy_name}' wants other arguments than were approved"
