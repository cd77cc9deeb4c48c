"""Limits in tokens."""

from __future__ import annotations

import threading
from dataclasses import dataclass, fields

from weakincentives.errors import BudgetExceededError

__all__ = ["Budget", "BudgetTracker", "TokenUsage"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenUsage:
    """Input and output tokens of a model."""

    input_tokens: int = 0
    output_tokens: int = 0

    def __post_init__(self) -> None:
        if self.input_tokens < 0 or self.output_tokens < 0:
            raise ValueError(f"tokens cannot be negative, got {self}")

    @property
    def total_tokens(self) -> int:
        return self.input_tokens + self.output_tokens

    def __add__(self, other: TokenUsage) -> TokenUsage:
        return TokenUsage(
            input_tokens=self.input_tokens + other.input_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
        )


NO_TOKENS = TokenUsage()


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How many tokens a run may use; None means no limit."""

    max_total_tokens: int | None = None
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            limit = getattr(self, field.name)
            if limit is not None and limit <= 0:
                raise ValueError(f"{field.name} must be positive, got {limit}")


class BudgetTracker:
    """Adds up the tokens of a run and checks its budget. Thread-safe."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self._used = NO_TOKENS
        self._lock = threading.Lock()

    @property
    def used(self) -> TokenUsage:
        return self._used

    def record(self, usage: TokenUsage) -> None:
        """Add the usage of one model turn."""
        with self._lock:
            self._used = self._used + usage

    def check(self) -> None:
        """Raise BudgetExceededError if a limit is exceeded."""
        used, budget = self._used, self.budget
        for name, spent, limit in (
            ("total", used.total_tokens, budget.max_total_tokens),
            ("input", used.input_tokens, budget.max_input_tokens),
            ("output", used.output_tokens, budget.max_output_tokens),
        ):
            if limit is not None and spent > limit:
                raise BudgetExceededError(f"Used {spent} {name} tokens; the budget is {limit}")
