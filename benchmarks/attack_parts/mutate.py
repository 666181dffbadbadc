"""Seeded changes to bytes and to JSON-like trees."""

import copy
import random
from typing import Any

# What somebody could put into a config to have it run, should a value of it ever become part of a program.
INJECTED = 'x"+__import__("os").system("touch {canary}")+"'


def flip_bit(chance: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    place = chance.randrange(len(changed))
    changed[place] ^= 1 << chance.randrange(8)
    return bytes(changed)


def mutate_bytes(chance: random.Random, data: bytes) -> bytes:
    """One of: bytes changed, cut out, doubled, moved, inserted, or all after a place gone."""
    a, b = sorted(chance.randrange(len(data) + 1) for _ in range(2))
    b = min(b, a + chance.choice((1, 4, 64)))
    match chance.randrange(6):
        case 0:
            return data[:a] + chance.randbytes(b - a) + data[b:]
        case 1:
            return data[:a] + data[b:]
        case 2:
            return data[:b] + data[a:b] * chance.choice((1, 3, 1000)) + data[b:]
        case 3:
            c = chance.randrange(len(data) + 1)
            return data[:a] + data[c : c + b - a] + data[b:]
        case 4:
            return data[:a] + chance.choice((b"\xff\xfe", b"\0", b"NaN", b"9" * 5000, b"[" * 5000)) + data[a:]
    return data[:a]


def strange_value(chance: random.Random, canary: str) -> Any:
    """Something that is probably not what belongs there."""
    nested: Any = 1
    for _ in range(chance.choice((1, 30, 300))):
        nested = [nested] if chance.random() < 0.5 else {"a": nested}
    simple = [
        None,
        True,
        False,
        -1,
        0,
        1,
        2**31,
        2**63,
        2**64,
        10**30,
        1e308,
        -0.5,
        float("nan"),
        float("inf"),
    ]
    text = ["", "x", "auto", "../../etc/passwd", "x" * 10_000, "\0", "\ud800", "7", "1e400", "none"]
    text.append(INJECTED.format(canary=canary))
    return chance.choice([chance.choice(simple), chance.choice(text), [], {}, [1, 2], {"a": 1}, nested])


def mutate_tree(chance: random.Random, tree: Any, canary: str) -> Any:
    """A copy with one to three places changed, deleted, renamed, moved or doubled."""
    tree = copy.deepcopy(tree)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        places = list(_places(tree))
        if not places:
            return strange_value(chance, canary)
        parent, key = chance.choice(places)
        match chance.randrange(6):
            case 0 | 1 | 2:
                parent[key] = strange_value(chance, canary)
            case 3:
                del parent[key]
            case 4 if isinstance(parent, dict):
                parent[chance.choice(("x", "", "__class__", 7, INJECTED.format(canary=canary)))] = parent.pop(
                    key
                )
            case _:
                other, there = chance.choice(places)
                if there in other if isinstance(other, dict) else there < len(other):
                    parent[key] = copy.deepcopy(other[there])
    return tree


def _places(tree: Any) -> Any:
    """Every (container, key) in it."""
    level = [tree]
    while level:
        one = level.pop()
        for key in list(one) if isinstance(one, dict) else range(len(one)):
            yield one, key
            if isinstance(one[key], dict | list):
                level.append(one[key])
