"""`python -m bench [NAME …] [options]`: run benchmarks, all of them without a name. `make bench`."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path

from bench.machine import describe

# In this order when none is named: the quick ones first.
KNOWN = ("engine", "telemetry", "integrations", "origin", "ledger", "importer", "server", "console", "rls")


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
    asks_for_help = bool({"-h", "--help"} & set(options))
    if asks_for_help and not names:
        print(f"{__doc__}\nThere are {', '.join(present)}; `python -m bench NAME --help` describes one.")
        return 0
    if not asks_for_help:
        print(describe())
    failed = 0
    for name in names or present:
        module = importlib.import_module(f"bench.{name}")
        takes_options = bool(inspect.signature(module.main).parameters)
        if asks_for_help and not takes_options:
            print(f"{module.__doc__}\nIt has no options.")
            continue
        print(f"\n## {name}\n", flush=True)
        try:
            result = module.main(options) if takes_options else module.main()
        except SystemExit as reason:
            # What one benchmark lacks does not keep the others from running.
            print(f"{name}: not run to its end: {reason}", flush=True)
            result = 1
        failed |= bool(result)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
