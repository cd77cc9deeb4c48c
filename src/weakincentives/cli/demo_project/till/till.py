"""What guests pay, in cents."""


def total(prices: list[int], discount: int = 0) -> int:
    """Return the sum, with so many percent off."""
    return sum(prices) * (100 - discount) // 100


def split(amount: int, people: int) -> list[int]:
    """Return what each of them pays: as even as can be, and together the amount."""
    share = amount // people
    return [share] * people
