"""The example in the allocator's README runs as printed."""

import re
from pathlib import Path

import allocator


def test_the_readme_example_runs_and_its_assertions_hold() -> None:
    text = (Path(allocator.__file__).parent / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert example.count("assert ") >= 3
    names: dict[str, object] = {}
    exec(compile(example, "allocator/README.md", "exec"), names)
    pool = names["pool"]
    assert isinstance(pool, allocator.BlockPool)
    pool.check([])


def test_the_readme_drawing_of_fork_append_copy_is_what_happens() -> None:
    pool = allocator.BlockPool(num_blocks=8, block_size=4)
    a = allocator.BlockTable(pool)
    a.append(6)
    b = a.fork()
    assert (a.snapshot(), b.snapshot()) == ((1, 2), (1, 2))
    assert [pool.ref_count(block) for block in (1, 2)] == [2, 2]
    growth = b.append(1)
    assert growth == allocator.Growth(new_blocks=(), copies=((2, 3),))
    assert (a.snapshot(), b.snapshot()) == ((1, 2), (1, 3))
    assert [pool.ref_count(block) for block in (1, 2, 3)] == [2, 2, 2]
    assert a.append(1) == allocator.NO_GROWTH
    pool.finish_copies(growth.copies)
    assert [pool.ref_count(block) for block in (1, 2, 3)] == [2, 1, 1]
