"""PPO of Stable-Baselines3 (PyTorch) on a workload."""

import json
import sys

from stable_baselines3 import PPO
from work import learn

learn(PPO, json.loads(sys.argv[1]))
