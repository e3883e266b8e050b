"""What passes between environment, policy and update, and the only place that decides time alignment.

The letters, here and everywhere: T steps, B environments of a shard, S shards, M minibatches, A actions. Time-major.

An engine resets on the step after the end of an episode: the step that ends it returns the true last observation, the
next one ignores the action and returns the first observation of the next episode. So `obs[t + 1]` always is what
followed `action[t]`, also at an end, and the reset step is a row of its own with `valid = False`:

    row            t-1            t (ends)        t+1 (reset)     t+2
    obs            s5             s6              s7 = last       s0' = first
    action         a5             a6              ignored         a0'
    reward         r5             r6              0               r0'
    terminated     False          True            False           False
    valid          True           True            False           True
    first          False          False           False           True
"""

from typing import Any, NamedTuple

Array = Any  # a NumPy or a JAX array: the functions here serve both


class EnvStep(NamedTuple):
    """What a policy sees before it acts."""

    obs: Array  # [B, ...]
    reward: Array  # [B] of the step before
    first: Array  # [B] the first observation of an episode: a recurrent policy forgets


class Acted(NamedTuple):
    """What a policy answers."""

    action: Array  # [B, ...]
    carry: Any = ()  # recurrent state, [B, ...]; () when feed-forward, and what a policy is given to begin with
    extras: Any = ()  # whatever the update wants to know about the moment of acting, [B, ...]


class Outcome(NamedTuple):
    """What an engine answers to an action."""

    obs: Array  # [B, ...]
    reward: Array  # [B] what is learned from
    terminated: Array  # [B]
    truncated: Array  # [B]
    score: Array  # [B] what is reported: the reward before clipping
    over: Array  # [B] the reported episode ended; a lost life may end the learner's episode but not this one


class Rollout(NamedTuple):
    """T steps of one shard; with a leading axis of shards when it reaches an update."""

    obs: Array  # [T + 1, B, ...] the last row bootstraps
    first: Array  # [T + 1, B]
    action: Array  # [T, B, ...] acting on obs[t]; the next five are its consequence
    reward: Array  # [T, B]
    terminated: Array  # [T, B] ended: no value follows
    truncated: Array  # [T, B] cut off: bootstraps from obs[t + 1]
    valid: Array  # [T, B] False on the reset step: masked out of every loss and statistic
    extras: Any  # [T, B, ...]
    carry: Any  # [B, ...] recurrent state before the first row


class Episodes(NamedTuple):
    """Return and length of each episode up to and including row t; they count where `over`."""

    returns: Array  # [T, B]
    lengths: Array  # [T, B]
    over: Array  # [T, B]


class Cursor(NamedTuple):
    """Where a shard stands between two steps."""

    step: EnvStep
    carry: Any
    ended: Array  # [B] the step before ended the episode, so the next one resets
    returns: Array  # [B] of the episode so far
    lengths: Array  # [B]


class Row(NamedTuple):
    """One time step of a rollout and of its episodes."""

    step: EnvStep
    action: Array
    extras: Any
    reward: Array
    terminated: Array
    truncated: Array
    valid: Array
    episodes: Episodes


def advance(cursor: Cursor, acted: Acted, outcome: Outcome) -> tuple[Cursor, Row]:
    """One step: from what was seen, done and answered to the row that records it and the place after it."""
    valid = ~cursor.ended
    terminated = outcome.terminated & valid
    truncated = outcome.truncated & valid & ~outcome.terminated
    reward = outcome.reward * valid
    returns, lengths = cursor.returns + outcome.score * valid, cursor.lengths + valid
    over = outcome.over & valid
    consequence = (reward, terminated, truncated, valid, Episodes(returns, lengths, over))
    row = Row(cursor.step, acted.action, acted.extras, *consequence)
    step = EnvStep(outcome.obs, reward, first=cursor.ended)
    return Cursor(step, acted.carry, terminated | truncated, returns * ~over, lengths * ~over), row


def assemble(start: Cursor, rows: Row, end: Cursor, numpy: Any) -> tuple[Rollout, Episodes]:
    """The rollout of T stacked rows, with `numpy` the module whose arrays these are."""
    obs = numpy.concatenate([rows.step.obs, end.step.obs[None]])
    first = numpy.concatenate([rows.step.first, end.step.first[None]])
    consequence = (rows.reward, rows.terminated, rows.truncated, rows.valid)
    return Rollout(obs, first, rows.action, *consequence, rows.extras, start.carry), rows.episodes
