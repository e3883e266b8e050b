"""PPO of SBX (JAX) on a workload."""

import json
import sys

from sbx import PPO
from work import learn

learn(PPO, json.loads(sys.argv[1]))
