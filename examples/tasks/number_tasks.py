"""Tasks that need a machine that counts: the `calculator` and `python` servers."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

from drafts import NUMBER, Call, Draft


def calculator(rng: random.Random, complexity: str) -> Iterator[Draft]:
    """Sums that are too long to do in one's head."""
    make = {"easy": _product, "medium": _chain, "hard": _story}[complexity]
    while True:
        question, expression, value = make(rng)
        calls = [Call("calculator__evaluate", {"expression": expression}, r"(-?\d+)")]
        yield Draft(question, str(value), NUMBER, calls, complexity)


def _product(rng: random.Random) -> tuple[str, str, int]:
    left, right = rng.randint(1203, 9899), rng.randint(1203, 9899)
    return f"What is {left} times {right}?", f"{left}*{right}", left * right


def _chain(rng: random.Random) -> tuple[str, str, int]:
    a, b, c, d = rng.randint(4001, 9899), rng.randint(103, 3999), rng.randint(23, 98), rng.randint(13, 89)
    e = d * rng.randint(211, 4999)
    expression = f"({a} - {b}) * {c} + {e} / {d}"
    return f"Work out {expression}.", expression, (a - b) * c + e // d


def _story(rng: random.Random) -> tuple[str, str, int]:
    days, crates, weight = rng.randint(17, 88), rng.randint(113, 987), rng.randint(14, 96)
    lost, price = rng.randint(1001, 9999), rng.randint(12, 87)
    question = (
        f"A quay loads {crates} crates of {weight} kg on each of {days} days. {lost} kg are lost on the way. "
        f"The rest is sold at {price} dral a kg. How many dral does it bring?"
    )
    return question, f"({days}*{crates}*{weight} - {lost})*{price}", (days * crates * weight - lost) * price


Program = tuple[str, str, int]
"""A question, the program that answers it, and the answer."""


def python(rng: random.Random, complexity: str) -> Iterator[Draft]:
    """Questions that a short program answers."""
    makers: dict[str, list[Callable[[random.Random], Program]]] = {
        "easy": [_digits, _multiples],
        "medium": [_primes, _hailstone],
        "hard": [_coins, _climb],
    }
    while True:
        for make in makers[complexity]:
            question, program, value = make(rng)
            yield Draft(question, str(value), NUMBER, [Call("python__run", {"code": program}, r"(-?\d+)")], complexity)


def _digits(rng: random.Random) -> Program:
    base, power = rng.randint(12, 98), rng.randint(41, 187)
    program = f"print(sum(int(digit) for digit in str({base} ** {power})))"
    return f"What is the sum of the decimal digits of {base} to the power of {power}?", program, _digit_sum(base**power)


def _digit_sum(number: int) -> int:
    total = 0
    while number:
        number, digit = divmod(number, 10)
        total += digit
    return total


def _multiples(rng: random.Random) -> Program:
    top, (a, b, c) = rng.randint(20_000, 90_000), rng.sample([3, 5, 7, 11, 13, 17, 19], 3)
    test = f"(n % {a} == 0 or n % {b} == 0) and n % {c} != 0"
    value = top // a + top // b - top // (a * b)
    value -= top // (a * c) + top // (b * c) - top // (a * b * c)
    question = f"How many whole numbers from 1 to {top} are divisible by {a} or {b}, but not by {c}?"
    return question, f"print(sum(1 for n in range(1, {top} + 1) if {test}))", value


def _primes(rng: random.Random) -> Program:
    """By trial division; the truth comes from a sieve."""
    low = rng.randint(5_000, 40_000)
    high = low + rng.randint(900, 4_000)
    test = "all(n % d for d in range(2, int(n ** 0.5) + 1))"
    program = f"print(sum(1 for n in range({low}, {high} + 1) if {test}))"
    return f"How many prime numbers lie between {low} and {high}?", program, _sieve(low, high)


def _sieve(low: int, high: int) -> int:
    flags = bytearray([1]) * (high + 1)
    for n in range(2, math.isqrt(high) + 1):
        flags[n * n :: n] = bytes(len(range(n * n, high + 1, n)))
    return sum(flags[low:])


def _hailstone(rng: random.Random) -> Program:
    start = rng.randint(10_001, 99_999)
    question = (
        f"Start with {start}. Halve an even number; triple an odd one and add 1. "
        "After how many steps is 1 reached for the first time?"
    )
    program = f"n, steps = {start}, 0\nwhile n != 1:\n    n, steps = n // 2 if n % 2 == 0 else 3 * n + 1, steps + 1\n"
    steps, number = 0, start
    while number > 1:
        number = 3 * number + 1 if number & 1 else number >> 1
        steps += 1
    return question, program + "print(steps)", steps


def _coins(rng: random.Random) -> Program:
    coins, total = sorted(rng.sample(range(2, 30), 4)), rng.randint(180, 420)
    program = (
        f"ways = [1] + [0] * {total}\nfor coin in {coins}:\n    for amount in range(coin, {total} + 1):\n"
        f"        ways[amount] += ways[amount - coin]\nprint(ways[{total}])"
    )
    named = ", ".join(map(str, coins))
    question = f"In how many ways can {total} dral be paid with coins of {named} dral, if their order does not matter?"
    return question, program, _ways(tuple(coins), total)


def _ways(coins: tuple[int, ...], total: int) -> int:
    if len(coins) == 1:
        return int(total % coins[0] == 0)
    return sum(_ways(coins[:-1], rest) for rest in range(total, -1, -coins[-1]))


def _climb(rng: random.Random) -> Program:
    heights = [rng.randint(100, 999) for _ in range(28)]
    program = (
        f"heights = {heights}\nbest = []\nfor i, h in enumerate(heights):\n"
        "    best.append(1 + max([best[j] for j in range(i) if heights[j] < h], default=0))\nprint(max(best))"
    )
    piles: list[int] = []
    for height in heights:  # patience sorting, where the program compares all pairs
        at = next((i for i, top in enumerate(piles) if top >= height), len(piles))
        piles[at : at + 1] = [height]
    named = ", ".join(map(str, heights))
    return f"How long is the longest strictly increasing subsequence of {named}?", program, len(piles)
