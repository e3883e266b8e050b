"""Arguments: bad ones are answered in one line that says what would work, and exit status 2."""

from dataclasses import fields
from typing import Any

import pytest

from cleanba import impala_atari, ppo, ppo_atari
from cleanba.core.args import CoreArgs, MachineArgs, parse
from cleanba.core.topology import Topology, TopologyError

BAD: list[tuple[Any, str, list[str]]] = [
    # An unknown environment is answered with one that looks like it.
    (ppo, "--env-id CartPol-v1", ["--env-id", "CartPol-v1", "CartPole-v1"]),
    (ppo, "--env-id nowhere:Thing-v0", ["nowhere", "Thing-v0", "CartPole-v1"]),
    (ppo, "--env-id Pong", ["Pong", "Pong-v5"]),
    (ppo, "--env-id a:b:c", ["a:b:c", "CartPole-v1"]),
    (ppo, "--env-id=", ["--env-id", "CartPole-v1"]),
    (ppo, "--env-id Pendulum-v1", ["Pendulum-v1", "discrete actions"]),
    (ppo, "--env-id FrozenLake-v1", ["FrozenLake-v1", "Box"]),
    (ppo_atari, "--env-id CartPole-v1", ["CartPole-v1", "(4, 84, 84)", "Pong-v5"]),
    # Sizes that do not divide.
    (ppo, "--num-envs 60", ["--num-envs 60", "--num-shards 8", "56 or 64"]),
    (ppo, "--num-envs 4", ["--num-envs 4", "--num-shards 8", "8 would do"]),
    (ppo, "--num-minibatches 7", ["256 rows", "7 parts"]),
    (ppo, "--gradient-accumulation-steps 3", ["256 rows", "12 parts"]),
    (ppo, "--num-minibatches 0", ["minibatches"]),
    (impala_atari, "--num-minibatches 32", ["16", "32 parts"]),
    (ppo, "--total-timesteps 100", ["--total-timesteps 100", "2048"]),
    (ppo, "--num-steps 0", ["--num-steps", "at least 1"]),
    (ppo, "--num-shards 0", ["--num-shards", "at least 1"]),
    (ppo, "--num-envs 0", ["--num-envs", "at least 1"]),
    (ppo, "--update-epochs 0", ["--update-epochs"]),
    (ppo, "--save-model --eval-episodes 0", ["--eval-episodes"]),
    (ppo, "--eval-every -1", ["--eval-every -1", "not negative"]),
    (ppo, "--upload-model", ["--upload-model", "--hf-entity NAME"]),
    (ppo, "--capture-video", ["--capture-video", "--save-model or --eval-every"]),
    # Topologies.
    (ppo, "--topology a0", ["a0", "a<ids>-l<ids>-d<processes>", "a0-l1,2,3-d1"]),
    (ppo, "--topology l0-a0-d1", ["l0-a0-d1", "a0-l1,2,3-d1"]),
    (ppo, "--topology a0-l1,,2-d1", ["a0-l1,,2-d1", "a0-l1,2,3-d1"]),
    (ppo, "--topology a0-l1,1-d1", ["a0-l1,1-d1", "twice"]),
    (ppo, "--topology a0-l0-d0", ["a0-l0-d0", "-d1"]),
    (ppo, "--topology a0-l0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15", ["16 learners", "--num-shards 8", "at most 8"]),
    (ppo, "--learner-device-ids 0 1 2 --num-shards 2", ["3 learners", "--num-shards 2", "at most 2"]),
    (ppo, "--actor-device-ids 0 0", ["twice"]),
    (ppo, "--actor-device-ids -1", ["-1"]),
    (ppo, "--topology a0-l0 --actor-device-ids 0", ["--topology", "--actor-device-ids", "not both"]),
    (ppo, "--topology a0-l5000", ["5000", "ids go up to 7"]),
    (ppo, "--num-actor-threads 9", ["9 actor threads", "--num-shards 8", "--num-actor-threads"]),
    (ppo, "--topology a0,1-l0 --num-actor-threads 5", ["10 actor threads", "--num-shards 8"]),
    (ppo, "--num-actor-threads 0", ["--num-actor-threads", "at least 1"]),
    # Negative numbers and wrong types.
    (ppo, "--seed -1", ["--seed -1", "not negative"]),
    (ppo, "--seed 4294967296", ["--seed 4294967296", "4294967295"]),
    (ppo, "--learning-rate -0.1", ["--learning-rate -0.1", "not negative"]),
    (ppo, "--gamma nan", ["--gamma", "number"]),
    (ppo, "--learning-rate inf", ["--learning-rate", "number"]),
    (ppo, "--num-envs -8", ["--num-envs -8", "not negative"]),
    (ppo, "--total-timesteps -1", ["--total-timesteps -1", "not negative"]),
    (ppo, "--num-envs many", ["--num-envs", "int"]),
    (ppo, "--num-envs 1.5", ["--num-envs", "int"]),
    (ppo, "--learning-rate fast", ["--learning-rate", "float"]),
    (ppo, "--seed", ["--seed"]),
    (ppo, "--collect never", ["--collect", "auto", "fused", "stepwise"]),
    (ppo, "--collect fused --engine gymnasium", ["--collect fused", "use auto"]),
    # Flags that do not exist, or not any more.
    (ppo, "--num-env 8", ["--num-env", "--num-envs"]),
    (ppo, "--no-such-flag", ["--no-such-flag"]),
    (ppo, "stray", ["stray"]),
    (ppo, "--local-num-envs 60", ["--local-num-envs", "--num-envs"]),
    (ppo, "--local_num_envs=60", ["--local-num-envs", "--num-envs"]),
    (ppo, "--distributed", ["--distributed", "--topology"]),
]


@pytest.mark.parametrize(("module", "line", "wanted"), BAD, ids=[line for _, line, _ in BAD])
def test_bad_arguments_are_answered_in_one_line(
    module: Any, line: str, wanted: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(module.Args, line.split())
    assert caught.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1, said.err
    assert said.err.endswith("\n")
    assert not set(said.err) & set("│╭╰─"), said.err
    for word in wanted:
        assert word in said.err, said.err


def test_good_arguments_are_read() -> None:
    line = "--env-id Acrobot-v1 --num-envs 32 --topology a0-l0,1 --no-anneal-lr --seed 4"
    args = parse(ppo.Args, line.split())
    assert (args.env_id, args.num_envs, args.seed, args.anneal_lr) == ("Acrobot-v1", 32, 4, False)
    assert args.layout == Topology((0,), (0, 1))
    assert args.envs_per_shard == 4
    assert args.steps_per_update == 32 * args.num_steps
    assert args.num_updates == args.total_timesteps // args.steps_per_update


def test_device_ids_say_the_same_as_a_topology() -> None:
    line = "--actor-device-ids 0 1 --learner-device-ids 2 3"
    args = parse(ppo.Args, line.split())
    assert args.layout == Topology.parse("a0,1-l2,3-d1")


def test_the_defaults_are_good(capsys: pytest.CaptureFixture[str]) -> None:
    for module in (ppo, ppo_atari, impala_atari):
        assert parse(module.Args, []).num_updates > 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("text", ["a0-l0-d1", "a0-l1,2,3-d2", "a0,1-l2,3-d1", "a3-l10,2-d16"])
def test_a_topology_is_written_as_it_is_read(text: str) -> None:
    assert str(Topology.parse(text)) == text
    assert Topology.parse(str(Topology.parse(text))) == Topology.parse(text)


def test_one_process_may_be_left_out() -> None:
    assert str(Topology.parse("a0-l1,2")) == "a0-l1,2-d1"
    assert Topology.parse("a0-l1,2,3-d2") == Topology((0,), (1, 2, 3), 2)


@pytest.mark.parametrize(
    "text", ["", "a-l0-d1", "a0-l-d1", "a0-l0-d", "a0 -l0", "a0-l0-d1 ", "A0-L0", "a0-l0-d1-x", "a-1-l0"]
)
def test_what_is_no_topology_is_refused(text: str) -> None:
    with pytest.raises(TopologyError, match="is not of the form"):
        Topology.parse(text)


@pytest.mark.parametrize("module", [ppo, ppo_atari, impala_atari])
def test_every_argument_is_the_experiments_or_the_machines(module: Any) -> None:
    args = module.Args()
    names = {field.name for field in fields(args)}
    assert args.experiment.keys() | args.machine.keys() == names
    assert not args.experiment.keys() & args.machine.keys()
    assert args.machine.keys() == {field.name for field in fields(MachineArgs)}
    assert {"seed", "env_id", "num_shards", "concurrency", "cpu_threads", "learning_rate"} <= args.experiment.keys()
    assert {"topology", "num_actor_threads", "env_threads", "collect", "run_dir"} <= args.machine.keys()


@pytest.mark.parametrize("cls", [CoreArgs, ppo.Args, ppo_atari.Args, impala_atari.Args])
def test_help_explains_every_argument(cls: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(cls, ["--help"])
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for field in fields(cls):
        assert f"--{field.name.replace('_', '-')}" in text
    assert "(required)" not in text
