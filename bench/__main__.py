"""`python -m bench [NAME …] [options]`: run benchmarks, all of them without a name. `make bench`."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path

from bench.machine import describe

# In this order when none is named: the quick ones first.
KNOWN = ("engine", "telemetry", "integrations", "origin", "ledger", "voice", "server", "console", "rls")


def main(arguments: list[str]) -> int:
    here = Path(__file__).parent
    present = [name for name in KNOWN if (here / f"{name}.py").exists()]
    # Names come first, so that an option may be followed by its value.
    split = next((place for place, one in enumerate(arguments) if one.startswith("-")), len(arguments))
    names, options = arguments[:split], arguments[split:]
    unknown = [name for name in names if name not in present]
    if unknown:
        print(f"no benchmark is named {', '.join(unknown)}; there are {', '.join(present)}", file=sys.stderr)
        return 2
    print(describe())
    failed = 0
    for name in names or present:
        print(f"\n## {name}\n", flush=True)
        run = importlib.import_module(f"bench.{name}").main
        result = run(options) if inspect.signature(run).parameters else run()
        failed |= bool(result)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
