"""Small scripts, run by Python and by the interpreter for scripts. Prints where they differ."""

from __future__ import annotations

import contextlib
import io
import json

from weakincentives.contrib.tools import _asteval_child as child
from weakincentives.contrib.tools.asteval import MODULES

SNIPPETS = r'''
x = [1,2,3]; x[1:2] = [9,8]; print(x, x[::-1], x[-1])
---
a, b = 1, 2; a, b = b, a; print(a, b)
---
(a, (b, c)) = (1, (2, 3)); print(a, b, c)
---
a = b = [1]; a.append(2); print(b)
---
def f(*args, **kw):
    return args, sorted(kw.items())
print(f(1, 2, z=3, a=4))
---
def f(a, b=2):
    return a + b
print(f(1), f(1, b=5), f(a=2))
---
def outer(n):
    total = n
    return [total + i for i in range(3)]
print(outer(3))
---
def f():
    pass
print(f())
---
out = []
def f(i):
    out.append(i)
f(1); f(2)
print(out)
---
x = 1
def f():
    x = 2
    return x
print(f(), x)
---
i = 10
y = [i for i in range(3)]
print(i, y)
---
print([(a, b) for a in range(3) for b in range(a)])
---
print({k: v for k, v in zip("ab", [1, 2])}, {x % 2 for x in range(5)} == {0, 1})
---
print([[j for j in range(i)] for i in range(3)])
---
for i in range(3):
    if i == 5:
        break
else:
    print("else")
---
for i in range(3):
    if i == 1:
        break
else:
    print("else")
print(i)
---
n = 0
while n < 3:
    n += 1
    if n == 2:
        continue
    print(n)
else:
    print("done")
---
for i in range(2):
    for j in range(3):
        if j == 1:
            break
        print(i, j)
---
for i in range(2):
    for j in range(3):
        if j == 1:
            continue
        print(i, j)
---
print(1 < 2 < 3, 1 < 3 < 2, not 1 == 2, 1 in [1], 2 not in [1], None is None)
---
print(0 or "a", 1 and "b", "" or None, [] and 1)
---
print(f"{3.14159:.2f} {'x':>5} {10:04d} {1+1} {'a'!r}")
---
w = 7
print(f"{'x':>{w}}|")
---
print("%s %d %.1f" % ("a", 1, 2.5))
---
d = {"a": 1}
d["b"] = d.get("b", 0) + 1
del d["a"]
print(d, len(d), "b" in d)
---
x = [3, 1, 2]
x.sort(key=lambda v: -v)
print(x, sorted(x), max(x, key=lambda v: v % 3))
---
print(list(map(lambda v: v * 2, [1, 2])), list(filter(None, [0, 1])), list(enumerate("ab", 1)))
---
for n, ch in enumerate("ab"):
    print(n, ch)
---
print(list(zip([1, 2], "ab")), dict(a=1), list(reversed([1, 2])))
---
x = 5
print("big" if x > 3 else "small")
---
print(7 // 2, 7 % 3, 2 ** 10, 1 << 4, 5 & 3, 5 | 2, 5 ^ 1, ~5, -3 // 2)
---
s = "a,b;c"
print(s.split(","), s.replace(";", ","), s.upper(), ",".join(["x", "y"]), s[1:3])
---
def fact(n):
    return 1 if n < 2 else n * fact(n - 1)
print(fact(20))
---
def fib(n, memo={}):
    if n in memo:
        return memo[n]
    if n < 2:
        return n
    memo[n] = fib(n - 1, memo) + fib(n - 2, memo)
    return memo[n]
print(fib(30))
---
def f(n):
    for i in range(n):
        if i == 3:
            return i
    return -1
print(f(10), f(2))
---
def f(n):
    while True:
        n -= 1
        if n < 0:
            return "neg"
print(f(3))
---
counter = {}
for w in "a b a".split():
    counter[w] = counter.get(w, 0) + 1
print(sorted(counter.items(), key=lambda kv: (-kv[1], kv[0])))
---
x = [1, 2, 3]
x[0] += 5
x[1:] = []
print(x)
---
import collections
c = collections.Counter("aab")
print(c.most_common(1), c["z"])
---
import re
m = re.search(r"(\d+)-(\d+)", "a 10-20")
print(m.group(1), m.groups())
---
import itertools
print(list(itertools.chain([1], [2])), list(itertools.islice(itertools.count(), 3)))
---
import functools
print(functools.reduce(lambda a, b: a * b, [1, 2, 3]))
---
import json
print(json.loads('{"a": [1, 2.5, null]}'))
---
print(any(x > 2 for x in [1, 3]), all(x for x in [1, 0]), min(x for x in [3, 2]))
---
print(type(1) == type(2))
---
print(isinstance(1, int), isinstance("a", (int, str)))
---
x = None
print(x is None, x == None, str(x), repr("a"))
---
a = [1, 2]
b = a[:]
b.append(3)
print(a, b, a + b, a * 2)
---
print("a" "b", 'it\'s', """x
y""", r"\n", b"ab")
---
print(1_000, 0x1f, 1e3, 3j * 2)
---
def f():
    """doc"""
    return 1
print(f())
---
if 0:
    print("a")
elif 1:
    print("b")
else:
    print("c")
---
x = 3
x -= 1; x *= 4; x //= 3; x **= 2; x %= 3
print(x)
---
def gen(n):
    return [i ** 2 for i in range(n) if i % 2]
print(gen(6))
---
add = lambda a, b=2: a + b
print(add(1), add(1, 5))
---
fs = [lambda i=i: i for i in range(3)]
print([f() for f in fs])
---
def f(x):
    def g(y):
        return y * 2
    return g(x) + 1
print(f(3))
---
print(sorted({3, 1, 2}), len("abc"), abs(-1), round(2.567, 2), divmod(7, 2))
---
m = [[1, 2], [3, 4]]
print([row[0] for row in m], [list(t) for t in zip(m[0], m[1])], sum([sum(r) for r in m]))
---
text = "line1\nline2"
for line in text.splitlines():
    print(line.strip())
---
total = 0
for a, (b, c) in [(1, (2, 3)), (4, (5, 6))]:
    total += a * b * c
print(total)
---
x = y = 0
x += 1
print(x, y)
---
import datetime
d = datetime.date(2024, 2, 29)
print(d.isoformat(), (d + datetime.timedelta(days=1)).day, d.strftime("%Y"))
---
import math
print(math.sqrt(16), round(math.pi, 3), sqrt(9)) if 0 else print(math.sqrt(16))
---
print([x for x in range(10) if x % 2 if x > 3])
---
print("abc"[::-1], "abc"[-2:], (1, 2, 3)[1:])
---
print(dict([("a", 1)]), list({"a": 1}), set([1, 1]))
---
def f(a, *rest):
    return a, rest
print(f(1, 2, 3))
---
e = ValueError("x")
print(e, e.args)
---
s = set()
s.add(1); s |= {2}
print(s, s & {1}, s - {1})
---
i = 0
while True:
    i += 1
    if i > 3: break
print(i)
---
x = [i for i in range(3)]
for i in x:
    pass
print(i)
---
def f(n):
    if n > 0:
        r = f(n - 1)
        return r + n
    return 0
print(f(10))
---
def f(n):
    loc = n * 10
    if n:
        f(n - 1)
    return loc
print(f(3))
---
print(str([1, 'a', None, True]), bool([]), int("12"), float("1.5"))
---
try:
    print("a")
    1 / 0
    print("b")
except ZeroDivisionError as e:
    print(e)
---
try:
    {}["a"]["b"] = 1
except KeyError as e:
    print("key", e)
---
try:
    x = [1]
    x[5] = 1
except (KeyError, IndexError) as e:
    print(e)
---
try:
    try:
        1 / 0
    except KeyError:
        print("no")
    finally:
        print("f")
except Exception as e:
    print("outer", e)
---
try:
    print("a")
except ValueError:
    print("no")
else:
    print("else")
finally:
    print("f")
---
def f():
    try:
        return 1
    finally:
        print("f")
print(f())
---
def f():
    try:
        1 / 0
    except ZeroDivisionError:
        return 2
    return 3
print(f())
---
def f():
    try:
        return 1
    finally:
        return 4
print(f())
---
for i in range(3):
    try:
        if i == 1:
            continue
        print(i)
    finally:
        print("f")
---
for i in range(3):
    try:
        if i == 1:
            break
    finally:
        print("f", i)
print(i)
---
def f(n):
    if n == 0:
        raise ValueError("deep")
    f(n - 1)
try:
    f(3)
except ValueError as e:
    print(e)
print("on")
---
try:
    raise KeyError
except LookupError as e:
    print(repr(e))
---
try:
    b"\xff".decode()
except UnicodeDecodeError as e:
    print(e.reason)
---
try:
    assert 1 > 2, f"{1} {2}"
except AssertionError as e:
    print(e)
---
import decimal
with decimal.localcontext() as c:
    c.prec = 3
    print(decimal.Decimal(1) / 3)
print(decimal.Decimal(1) / 3)
---
while True:
    try:
        int("x")
    except ValueError:
        print("b")
        break
'''


def by_python(code: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    return printed.getvalue()


def by_interpreter(code: str) -> str:
    evaluate = child.prepare([name for name in MODULES if name in code], False, 10_000)
    answer = evaluate(code)
    return answer["stdout"] if answer["error"] is None else str(answer["error"])


def main() -> None:
    differing: list[dict[str, str]] = []
    snippets = SNIPPETS.strip("\n").split("\n---\n")
    for code in snippets:
        expected, found = by_python(code), by_interpreter(code)
        if found != expected:
            differing.append({"code": code, "expected": expected, "found": found})
    print(json.dumps({"tried": len(snippets), "differing": differing}))  # noqa: T201


if __name__ == "__main__":
    main()
