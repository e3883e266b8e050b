"""Fingerprints of the same small experiments on many topologies, thread counts, cores and processes.

Run:   python benchmarks/topologies.py [--experiments TEXT ...] [--places TEXT ...]    (those that contain a text)
Makes: benchmarks/results/topologies.md, and exits with 1 if any two of an experiment differ
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
ATARI = "--env-id Breakout-v5 --num-envs 16 --num-steps 8 --total-timesteps 512 --num-minibatches 2 --seed 3"
EXPERIMENTS = [
    "ppo.py --env-id CartPole-v1 --seed 3 --total-timesteps 65536",
    "ppo.py --env-id LunarLander-v3 --seed 3 --total-timesteps 65536",
    "ppo.py --env-id MountainCar-v0 --engine gymnasium --seed 3 --num-envs 16 --total-timesteps 4096",
    f"ppo_atari.py --network nature {ATARI}",
    f"impala_atari.py {ATARI}",
]
PLACES = [
    "--topology a0-l0",
    "--topology a0-l1,2,3",
    "--topology a0-l0,1",
    "--topology a0,1-l2,3 --num-actor-threads 2",
    "--topology a0,1,2-l3,4,5,6,7,8,9,10",
    "--topology a0-l0 --collect stepwise --env-threads 2",
    "taskset -c 0 --topology a0-l1,2",
    "--topology a0-l0-d2",
    "--topology a0-l1,2-d3",
    "--topology a0,1-l0-d4",
]


def fingerprint(experiment: str, place: str) -> str:
    """The first 16 digits of one run's."""
    prefix, _, topology = place.rpartition("--topology")
    script, arguments = experiment.split(maxsplit=1)
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [*prefix.split(), sys.executable, str(ROOT / "cleanba" / script), *arguments.split()]
        where = ["--topology", *topology.split(), "--run-dir", str(run_dir)]
        subprocess.run([*command, *where], check=True, stdout=subprocess.DEVNULL)
        return json.loads((run_dir / "result.json").read_text())["fingerprint"][:16]


def main() -> int:
    """Run everything and write the table; the exit status tells whether all agree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiments", nargs="+", default=[""])
    parser.add_argument("--places", nargs="+", default=[""])
    options = parser.parse_args()
    experiments = [x for x in EXPERIMENTS if any(text in x for text in options.experiments)]
    places = [x for x in PLACES if any(text in x for text in options.places)]
    lines = [f"Made by `{shlex.join(['python', 'benchmarks/topologies.py', *sys.argv[1:]])}`.", ""]
    status = 0
    for experiment in experiments:
        found = {place: fingerprint(experiment, place) for place in places}
        status |= len(set(found.values())) > 1
        lines += [f"`{experiment}`", "", "| where | fingerprint |", "| --- | --- |"]
        lines += [f"| `{place}` | {value} |" for place, value in found.items()] + [""]
        print("\n".join(lines[-len(found) - 5 :]), flush=True)
    (ROOT / "benchmarks" / "results" / "topologies.md").write_text("\n".join(lines))
    return status


if __name__ == "__main__":
    sys.exit(main())
