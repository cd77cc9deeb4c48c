"""Budgets limit how many tokens a run may use."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from weakincentives.core.budget import Budget, BudgetTracker, TokenPrice, TokenUsage
from weakincentives.errors import BudgetExceededError, PromptEvaluationError


class TestUsage:
    def test_usages_add_up(self) -> None:
        usages = [TokenUsage(input_tokens=n, output_tokens=1) for n in (10, 20)]

        total = sum(usages, TokenUsage())

        assert total == TokenUsage(input_tokens=30, output_tokens=2)
        assert total.total_tokens == 32

    @pytest.mark.parametrize("name", ["input_tokens", "output_tokens"])
    def test_nothing_uses_fewer_than_no_tokens(self, name: str) -> None:
        with pytest.raises(ValueError, match="cannot be negative"):
            TokenUsage(**{name: -1})


class TestBudget:
    @pytest.mark.parametrize(
        "name", ["max_total_tokens", "max_input_tokens", "max_output_tokens", "max_cost_usd"]
    )
    @pytest.mark.parametrize("limit", [0, -5])
    def test_a_limit_must_be_positive(self, name: str, limit: int) -> None:
        with pytest.raises(ValueError, match=f"{name} must be positive, got {limit}"):
            Budget(**{name: limit})

    @pytest.mark.parametrize(
        ("budget", "what"),
        [
            (Budget(max_total_tokens=29), "30 total tokens; the budget is 29"),
            (Budget(max_input_tokens=19), "20 input tokens; the budget is 19"),
            (Budget(max_output_tokens=9), "10 output tokens; the budget is 9"),
        ],
    )
    def test_passing_any_limit_ends_the_run(self, budget: Budget, what: str) -> None:
        tracker = BudgetTracker(budget)
        tracker.check()
        tracker.record(TokenUsage(input_tokens=20, output_tokens=10))

        with pytest.raises(BudgetExceededError, match=what) as caught:
            tracker.check()

        assert isinstance(caught.value, PromptEvaluationError)

    def test_a_budget_may_be_used_to_the_last_token(self) -> None:
        tracker = BudgetTracker(
            Budget(max_total_tokens=30, max_input_tokens=20, max_output_tokens=10)
        )
        tracker.record(TokenUsage(input_tokens=20, output_tokens=10))

        tracker.check()

    def test_without_limits_nothing_is_too_much(self) -> None:
        tracker = BudgetTracker(Budget())
        tracker.record(TokenUsage(input_tokens=10**9))

        tracker.check()

    def test_usage_from_many_threads_is_all_counted(self) -> None:
        tracker = BudgetTracker(Budget())
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(tracker.record, [TokenUsage(input_tokens=2, output_tokens=1)] * 200))

        assert tracker.used == TokenUsage(input_tokens=400, output_tokens=200)


class TestMoney:
    def test_a_price_is_per_million_tokens_and_cached_input_costs_less(self) -> None:
        usage = TokenUsage(input_tokens=1_000_000, output_tokens=100_000, cached_tokens=400_000)

        assert TokenPrice(input=3, output=15).of(usage) == pytest.approx(4.5)
        assert TokenPrice(input=3, output=15, cached_input=0.3).of(usage) == pytest.approx(3.42)

    @pytest.mark.parametrize("name", ["input", "output", "cached_input"])
    @pytest.mark.parametrize("price", [-1, float("inf"), float("nan")])
    def test_a_price_is_an_amount(self, name: str, price: float) -> None:
        with pytest.raises(ValueError, match=f"{name} must be dollars per million tokens"):
            TokenPrice(**{"input": 1, "output": 1, name: price})

    def test_what_is_spent_is_compared_with_the_limit(self) -> None:
        tracker = BudgetTracker(Budget(max_cost_usd=0.01, price=TokenPrice(input=3, output=15)))
        tracker.record(TokenUsage(input_tokens=3_000))
        tracker.check()
        assert tracker.cost_usd == pytest.approx(0.009)

        tracker.record(TokenUsage(output_tokens=100))
        with pytest.raises(BudgetExceededError, match=r"Spent \$0\.0105; the budget is \$0\.01"):
            tracker.check()

    def test_the_price_of_the_budget_is_used_before_the_one_that_is_known(self) -> None:
        tracker = BudgetTracker(Budget(price=TokenPrice(input=1, output=1)))

        tracker.record(TokenUsage(input_tokens=1_000_000), TokenPrice(input=99, output=99))

        assert tracker.cost_usd == 1
