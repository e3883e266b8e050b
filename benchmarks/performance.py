"""`cleanba bench` on the workloads of docs/performance.md, whose tables it writes.

Run:   python benchmarks/performance.py [--rounds 3] [--no-peers]
Makes: benchmarks/results/bench-*.json, and the part between the marks in docs/performance.md
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from cleanba.tools.bench import table

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "performance.md"
MARKS = "<!-- tables: python benchmarks/performance.py -->", "<!-- end of tables -->"
WORKLOADS = {  # name: script, arguments, what is said about peers, updates of each part in a round
    "cartpole": ("ppo.py", "--env-id CartPole-v1 --num-envs 64 --num-steps 128 --cpu-threads 2", "--peers", 20),
    "breakout-nature": (
        "ppo_atari.py",
        "--env-id Breakout-v5 --network nature --num-envs 32 --cpu-threads 2",
        "--peers --without sbx_ppo",
        1,
    ),
    "breakout-impala": ("impala_atari.py", "--env-id Breakout-v5 --num-envs 32 --cpu-threads 2", "", 2),
}


def main() -> None:
    """Measure what is asked for, and write all tables anew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workloads", nargs="*", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    for name in options.workloads:
        script, arguments, peers, updates = WORKLOADS[name]
        command = [sys.executable, "-m", "cleanba.tools.cli", "bench", str(ROOT / "cleanba" / script)]
        command += [
            "--rounds",
            str(options.rounds),
            "--updates",
            str(updates),
            "--out",
            str(RESULTS / f"bench-{name}.json"),
        ]
        command += peers.split() if options.peers else []
        subprocess.run([*command, "--", *arguments.split()], check=True)
    reports = [json.loads(path.read_text()) for name in WORKLOADS if (path := RESULTS / f"bench-{name}.json").exists()]
    tables = [line for report in reports for line in ["", *table(report)]]
    before, _, rest = PAGE.read_text().partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    PAGE.write_text("\n".join([before + MARKS[0], *tables, "", MARKS[1]]) + after)


if __name__ == "__main__":
    main()
