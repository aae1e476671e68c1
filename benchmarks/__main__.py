"""python -m benchmarks [NAMES] [--json FILE] [--quick] [--list] [--gguf FILE] [--device]

Every speed and memory claim of the project as a row of one table. Correctness comes first: a row
whose two results differ by more than its tolerance is wrong, makes the exit status 1 and is not
timed. Then both sides take turns on the same cores. Columns:

    ours, theirs   median seconds of one call, the best in the JSON file
    ratio          ours / theirs, and what it should not exceed
    error          of the two results, or of ours from what is known
    compile        seconds that JAX traces, lowers and compiles before our first call
    peak           how far resident memory rises above what was held before a (second) call; on an
                   accelerator the device's peak since the start of the process
    !              others kept more than a quarter of a core busy meanwhile

Of a peer that says "timed 1/N" a part of the work was timed, and its seconds are those times N.
The JSON file holds `machine`, `quick`, `rows` (see `benchmarks.rows.measured`; `seconds` are those
of every call) and, with --device, `device`; it is written again after every row. Of a file that is
there already the rows that are not run again stay; one of another machine, of other versions or
sizes is refused. With --page too, all its rows are the tables of that page.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks import machine, rows, table
from benchmarks.pages import write_tables
from svflow.models.loading import opened


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; 0, 1 where a result is wrong, 2 for bad input."""
    given = _parser().parse_args(argv)
    try:
        if given.gguf is not None:
            if not given.gguf.is_file():
                raise FileNotFoundError(f"no file {given.gguf}")
            opened(given.gguf, "float32")
        if given.page is not None and given.json is None:
            raise ValueError("--page shows the rows of the file that --json names: give both")
        if given.rounds < 1:
            raise ValueError(f"--rounds must be at least 1, got {given.rounds}")
        chosen = rows.chosen(given.names)
    except (ValueError, FileNotFoundError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    if given.list:
        print(table.listing(chosen))
        return 0
    document: dict[str, Any] = dict(machine=machine.description(), quick=given.quick, rows=[])
    try:
        kept = _kept(given.json, document)
        if given.json is not None:
            rows.check_writable(given.json)
    except (ValueError, OSError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    print(table.machine(document["machine"]) + "\n")
    right = True
    if given.device:
        from benchmarks import device

        document["device"] = device.compare()
        print(table.device(document["device"]) + "\n", flush=True)
        right = all(line["right"] for line in document["device"]["lines"])
    for one in tqdm(chosen, desc="rows", disable=None, leave=False):
        found = rows.measured(one, quick=given.quick, gguf=given.gguf, rounds=given.rounds)
        document["rows"].append(found)
        tqdm.write(table.lines(found), file=sys.stdout)
        sys.stdout.flush()
        if given.json is not None:
            every = {row["name"]: row for row in [*kept, *document["rows"]]}
            whole = document | dict(rows=list(every.values()))
            given.json.write_text(json.dumps(whole, indent=1) + "\n")
            if given.page is not None:
                write_tables(given.page, table.page(whole))
    print("\n" + table.table(document["rows"]))
    return 0 if right and all(r["status"] != "wrong" for r in document["rows"]) else 1


def _kept(path: Path | None, document: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of an earlier run that may stand beside those of this one."""
    if path is None or not path.is_file():
        return []
    try:
        earlier = json.loads(path.read_text())
        kept = [row for row in earlier["rows"] if row["name"]]
        others = [name for name in ("machine", "quick") if earlier[name] != document[name]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no table of this command: {error!r}") from error
    if others:
        raise ValueError(f"{path} holds a table of another {others[0]}: give another file")
    return kept


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks", description="Every speed and memory claim as a row of one table."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="rows or groups; all by default")
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes every number")
    parser.add_argument(
        "--page", type=Path, metavar="FILE.md", help="whose tables are the JSON file's rows"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, correctness only")
    parser.add_argument("--list", action="store_true", help="names and claims, nothing is run")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="SmolLM2-135M, for its rows")
    parser.add_argument("--rounds", type=int, default=7, help="of the race, at most (default: 7)")
    parser.add_argument(
        "--device", action="store_true", help="first compares this device with the CPU in float64"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
