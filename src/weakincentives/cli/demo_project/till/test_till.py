import unittest

from till import split, total


class TillTest(unittest.TestCase):
    def test_a_discount_is_taken_off(self) -> None:
        self.assertEqual(total([250, 150], discount=10), 360)

    def test_an_even_split(self) -> None:
        self.assertEqual(split(900, 3), [300, 300, 300])

    def test_no_cent_is_lost(self) -> None:
        self.assertEqual(sum(split(100, 3)), 100)
