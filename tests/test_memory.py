"""How much memory there is: limits of control groups, of both versions."""

from svflow import memory


def test_limits_are_those_of_the_own_group_and_of_all_above(tmp_path):
    groups, own = tmp_path / "cgroup", tmp_path / "self"
    for folder, name, text in (
        ("jobs/one", "memory.max", "3000\n"),
        ("jobs", "memory.max", "2000\n"),
        ("other", "memory.max", "1\n"),
        ("", "memory.max", "max\n"),
        ("memory/a/b", "memory.limit_in_bytes", "500"),
        ("memory/a", "memory.limit_in_bytes", "700"),
    ):
        (groups / folder).mkdir(parents=True, exist_ok=True)
        (groups / folder / name).write_text(text)
    for lines, limits in (
        ("0::/jobs/one\n", [3000, 2000]),
        ("0::/\n", []),
        ("7:blkio:/a\n5:cpu,memory:/a/b\n0::/\n", [500, 700]),
        ("", []),
    ):
        own.write_text(lines)
        assert memory._group_limits(groups, own) == limits
    assert memory._group_limits(groups, tmp_path / "none") == []
    assert memory._host() > 0
