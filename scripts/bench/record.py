"""Record the routing traces that policies are tested on: one file for each kind of prompt, and one that mixes them.

    python -m scripts.bench.record models/sparkle-46m.store tests/data/traces

The whole model is in the pool meanwhile: which experts a token uses does not depend on it. Files that exist are kept.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from scripts.bench.pool import ASK_S, answer, pipeline
from scripts.bench.workloads import HELD_OUT, KINDS, SEEN, mixed
from sparkle.cli._ask import ask
from sparkle.messages import StartTrace, StopTrace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("store", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, default=48)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    workloads = {kind: SEEN[kind] + HELD_OUT[kind] for kind in KINDS} | {"topics": mixed(SEEN)}
    with (
        tempfile.TemporaryDirectory() as state,
        pipeline(args.store.absolute(), "100%", {"SPARKLE_PREFETCH": "off"}, Path(state)) as (run_dir, client),
    ):
        for name, prompts in workloads.items():
            path = args.out.absolute() / f"{name}.trace"
            if path.exists():
                continue
            ask(run_dir, "prefetch", StartTrace(name, str(path)), ASK_S)
            answer(client, prompts, args.tokens)
            ask(run_dir, "prefetch", StopTrace(name), ASK_S)


if __name__ == "__main__":
    main()
