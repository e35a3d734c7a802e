"""Distribution of a host's units over its processes."""

from __future__ import annotations

import numpy as np

from rammer.distributed.runtime.distributed_session import numbered
from rammer_testing.nonempty import some


def test_processes_of_a_host_get_units_in_order() -> None:
    assert numbered(["gpu"] * 4, [0, 0, 2, 2], [2] * 4) == ("gpu:0", "gpu:1", "gpu:0", "gpu:1")
    assert numbered(["gpu"] * 4, [0, 1, 0, 1], [2] * 4) == ("gpu:0", "gpu:0", "gpu:1", "gpu:1")
    assert numbered(["gpu:0", "gpu", "cpu"], [0] * 3, [4, 4, 1]) == ("gpu:0", "gpu:1", "cpu")
    assert numbered(["cpu", "gpu", "gpu"], [0] * 3, [1, 2, 2]) == ("cpu", "gpu:0", "gpu:1")
    assert numbered(["gpu"] * 3, [0] * 3, [2] * 3) == ("gpu:0", "gpu:1", "gpu:0")
    assert numbered(["gpu:1", "gpu"], [0] * 2, [1, 1]) == ("gpu:1", "gpu")
    assert numbered(["gpu"] * 2, [0, 0], [1, 1]) == ("gpu", "gpu")  # each process sees only one unit


def test_no_unit_twice_where_there_are_enough(rng: np.random.Generator) -> None:
    for _ in some(range(100)):
        count = int(rng.integers(1, 9))
        hosts = [int(h) for h in rng.integers(0, 3, count)]
        kinds = [str(k) for k in rng.choice(["a", "b"], count)]
        units = {"a": int(rng.integers(2, 9)), "b": int(rng.integers(2, 9))}
        fixed = {(h, k): int(rng.integers(units[k])) for h in range(3) for k in "ab"}
        named = [int(rng.integers(count)) if rng.random() < 0.5 else -1]
        names = [f"{k}:{fixed[h, k]}" if n in named else k for n, (h, k) in enumerate(zip(hosts, kinds, strict=True))]
        found = numbered(names, hosts, [units[k] for k in kinds])
        for host in range(3):
            for kind in "ab":
                here = [f for f, h, k in zip(found, hosts, kinds, strict=True) if (h, k) == (host, kind)]
                places = [int(f.partition(":")[2]) for f in here]
                assert all(p < units[kind] for p in places)
                assert len(set(places)) == len(places) or len(places) > units[kind]
        assert all(f == n for f, n in zip(found, names, strict=True) if ":" in n)
