"""Limits in tokens and in money."""

from __future__ import annotations

import threading
from dataclasses import dataclass, fields

from weakincentives.errors import BudgetExceededError

__all__ = ["Budget", "BudgetTracker", "TokenPrice", "TokenUsage"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenUsage:
    """Input and output tokens of a model."""

    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    """Those input tokens that the provider had in its cache, which cost less."""

    def __post_init__(self) -> None:
        if min(self.input_tokens, self.output_tokens, self.cached_tokens) < 0:
            raise ValueError(f"tokens cannot be negative, got {self}")

    @property
    def total_tokens(self) -> int:
        return self.input_tokens + self.output_tokens

    def __add__(self, other: TokenUsage) -> TokenUsage:
        return TokenUsage(
            input_tokens=self.input_tokens + other.input_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
        )


NO_TOKENS = TokenUsage()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPrice:
    """What a model costs, in US dollars per million tokens.

    >>> TokenPrice(input=3, output=15).of(TokenUsage(input_tokens=1000, output_tokens=200))
    0.006
    """

    input: float
    output: float
    cached_input: float | None = None
    """For input that the provider had in its cache; by default the price of other input."""

    def __post_init__(self) -> None:
        for field in fields(self):
            price = getattr(self, field.name)
            if price is not None and not 0 <= price < float("inf"):
                raise ValueError(f"{field.name} must be dollars per million tokens, got {price}")

    def of(self, usage: TokenUsage) -> float:
        """Return what tokens cost, in US dollars."""
        cached = min(usage.cached_tokens, usage.input_tokens)
        per_cached = self.input if self.cached_input is None else self.cached_input
        cost = (usage.input_tokens - cached) * self.input + cached * per_cached
        return (cost + usage.output_tokens * self.output) / 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What a run may use; None means no limit.

    A limit in money needs the price of the model: the adapter's, where it is known, or ``price``.
    """

    max_total_tokens: int | None = None
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    max_cost_usd: float | None = None
    price: TokenPrice | None = None
    """Takes precedence over the price that the adapter knows."""

    def __post_init__(self) -> None:
        for field in fields(self):
            limit = getattr(self, field.name)
            if field.name != "price" and limit is not None and not limit > 0:
                raise ValueError(f"{field.name} must be positive, got {limit}")

    def priced(self, known: TokenPrice | None, model: str) -> TokenPrice | None:
        """Return the price to use; raise ValueError if a limit in money could not be checked."""
        price = self.price or known
        if price is None and self.max_cost_usd is not None:
            raise ValueError(
                f"the limit of {self.max_cost_usd:g} dollars cannot be checked: the price of "
                f"{model} is unknown; give Budget(price=TokenPrice(input=..., output=...))"
            )
        return price


class BudgetTracker:
    """Adds up what a run uses and checks its budget. Thread-safe.

    Args:
        budget: The limits.
        spent_usd: What was spent before, such as by a run that is resumed.
    """

    def __init__(self, budget: Budget, *, spent_usd: float = 0.0) -> None:
        self.budget = budget
        self._used = NO_TOKENS
        self._cost = spent_usd
        self._lock = threading.Lock()

    @property
    def used(self) -> TokenUsage:
        return self._used

    @property
    def cost_usd(self) -> float:
        """What the tokens cost whose price is known."""
        return self._cost

    def record(self, usage: TokenUsage, price: TokenPrice | None = None) -> None:
        """Add the usage of one model turn."""
        price = self.budget.price or price
        with self._lock:
            self._used = self._used + usage
            self._cost += 0.0 if price is None else price.of(usage)

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
        if budget.max_cost_usd is not None and self._cost > budget.max_cost_usd:
            raise BudgetExceededError(
                f"Spent ${self._cost:.4f}; the budget is ${budget.max_cost_usd:g}"
            )
