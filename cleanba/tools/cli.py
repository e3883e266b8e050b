"""The command `cleanba`: each of its commands is a dataclass of arguments with a `main`, in a module of its own."""

import importlib
import sys

from cleanba.core.usage import read, usage_error

COMMANDS = {
    "eval": ("cleanba.core.evaluate", "Eval", "play episodes with a saved model"),
    "diff": ("cleanba.tools.diff", "Diff", "name the first update at which two runs differ"),
    "plot": ("cleanba.tools.plot", "Plot", "draw the learning curves of runs"),
    "report": ("cleanba.tools.report", "Report", "compare runs on one page: curves, scores, intervals"),
    "push": ("cleanba.tools.hub", "Push", "put a saved model on the Hugging Face Hub"),
    "pull": ("cleanba.tools.hub", "Pull", "bring a model from the Hugging Face Hub"),
    "fork": ("cleanba.tools.fork", "Fork", "start a new run from a checkpoint, with other arguments"),
    "torture": ("cleanba.tools.torture", "Torture", "kill a run again and again, and see that its numbers do not move"),
    "bench": ("cleanba.tools.bench", "Bench", "measure how fast a workload trains, and what limits it"),
    "benchmark": ("cleanba.tools.benchmark", "Benchmark", "train on several environments with several seeds"),
    "tune": ("cleanba.tools.tune", "Tune", "search for hyper-parameters over several environments"),
    "launch": ("cleanba.tools.launch", "Launch", "start a run here, or as a job of Slurm or Kubernetes"),
    "doctor": ("cleanba.tools.doctor", "Doctor", "say what this machine has for training, and what it lacks"),
    "completion": ("cleanba.tools.completion", "Completion", "print what makes bash or zsh complete this command"),
}
WIDTH = max(map(len, COMMANDS))
HELP = "\n".join(
    [
        "usage: cleanba COMMAND ...  (cleanba COMMAND --help says more)",
        "",
        *(f"  {name:{WIDTH}}  {summary}" for name, (_, _, summary) in COMMANDS.items()),
        "",
        "To train, run an algorithm's file: python cleanba/ppo.py --help",
    ]
)


def main(argv: list[str] | None = None) -> int | None:
    """Run one command and return its exit status. Only its own module is imported, so that help comes at once."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(HELP)
        return 0 if argv else 2
    name, *rest = argv
    if name not in COMMANDS:
        usage_error(f"there is no command {name!r}; use {', '.join(COMMANDS)}")
    module, command, _ = COMMANDS[name]
    cls = getattr(importlib.import_module(module), command)
    return read(cls, rest, prog=f"cleanba {name}").main()


if __name__ == "__main__":
    sys.exit(main())
