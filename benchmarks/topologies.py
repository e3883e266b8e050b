"""Fingerprints of the same small experiments on many topologies, thread counts, cores and processes.

Run:   python benchmarks/topologies.py [--experiments TEXT ...] [--places TEXT ...]    (those that contain a text)
Makes: benchmarks/results/topologies.md, and exits with 1 if any two of an experiment differ

Tables of experiments that are not asked for stay.
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
HOPPER = "--env-id Hopper-v4 --num-envs 16 --num-steps 64 --total-timesteps 8192 --seed 3"
REPLAY = "--num-envs 8 --num-steps 8 --num-shards 8 --learning-starts 256 --total-timesteps 1024 --seed 3"
SMALL = f"{REPLAY} --buffer-size 512 --batch-size 64 --train-frequency 8"
EXPERIMENTS = [
    "ppo.py --env-id CartPole-v1 --seed 3 --total-timesteps 65536",
    "ppo.py --env-id LunarLander-v3 --seed 3 --total-timesteps 65536",
    "ppo.py --env-id MountainCar-v0 --engine gymnasium --seed 3 --num-envs 16 --total-timesteps 4096",
    f"ppo_atari.py --network nature {ATARI}",
    f"impala_atari.py {ATARI}",
    f"ppo_continuous_action.py {HOPPER}",
    f"ppo_continuous_action.py {HOPPER} --concurrency",
    "ppo_atari_lstm.py --network mlp --observe 0 2 --env-id CartPole-v1 --num-envs 32 --total-timesteps 16384 --seed 3",
    f"dqn.py --env-id CartPole-v1 {SMALL}",
    f"c51.py --env-id CartPole-v1 {SMALL}",
    f"dqn_atari.py --env-id Pong-v5 {SMALL}",
    f"c51_atari.py --env-id Pong-v5 {SMALL}",
    f"ddpg_continuous_action.py --env-id Pendulum-v1 {SMALL} --cpu-threads 16",
    f"td3_continuous_action.py --env-id Pendulum-v1 {SMALL} --cpu-threads 16",
    f"sac_continuous_action.py --env-id Pendulum-v1 {SMALL} --cpu-threads 16",
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
    target, status = ROOT / "benchmarks" / "results" / "topologies.md", 0
    tables = {text.split("`")[1]: f"{text.strip()}\n" for text in target.read_text().split("\n## ")[1:]}
    call = shlex.join(["python", "benchmarks/topologies.py", *sys.argv[1:]])
    for experiment in experiments:
        found = {place: fingerprint(experiment, place) for place in places}
        status |= len(set(found.values())) > 1
        lines = [f"`{experiment}`", "", f"Made by `{call}`.", "", "| where | fingerprint |", "| --- | --- |"]
        tables[experiment] = "\n".join([*lines, *(f"| `{place}` | {value} |" for place, value in found.items()), ""])
        print(tables[experiment], flush=True)
        ordered = [f"\n## {tables[known]}" for known in EXPERIMENTS if known in tables]
        target.write_text("\n".join(["# The same experiments in many places", *ordered]))
    return status


if __name__ == "__main__":
    sys.exit(main())
