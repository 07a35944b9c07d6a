"""LUFFY: a trace of the data in each group; AMPO: where all attempts fail.

arXiv 2504.14945; ElliottYan/LUFFY. A trace is played in the place of one of the
G attempts and is rewarded as they are. Its tokens have the objective

    p / (p + 0.1) A,  p = pi, the policy's probability of the token

without a ratio or a bound, the others pi / pi_old A, without a bound. A is the
return less the mean of the group, trace included. LUFFY's loss is the sum over
tokens divided by the most that can be sampled; entropy 0.001, no KL. Arguments:

  arm      luffy
           ampo (arXiv 2510.02227; SII-Enigma/AMPO): where no attempt succeeds,
           at most two, those that make the golden answer most likely; ratios
           of other tokens within 1 -+ 0.2, and at most 10 where A < 0; the
           loss is the mean over trajectories of their means
  traces   where they are, see rollout/traces.py; '' = Question.meta.traces, or
           in a generated world a script that looks up each fact: one trace, so
           ampo has none to choose among
  most     traces of a group; 0: 1, and 2 of ampo

p is no ratio: a fork (ExGRPO) puts pi / pi_old in its place, 1 at the first
update, so that every token has the same weight.

Departs from both releases: LUFFY's sum is divided by the number of trajectories
too, and entropy is weighed as the loss is, where they add its mean over tokens.
Traces take the last places of a group, AMPO's random ones, which have failed
too. The release of AMPO pays a trace that earns less than 1 as if it were
right, and chooses by the mean probability of the answer's tokens; here it earns
what it earns, and the mean is geometric. What is logged of rewards has the
traces.
"""

import jax.numpy as jnp

from configs.methods import core

GAMMA = 0.1
ARMS = {
  'luffy': (core.UNCLIPPED, dict(trace_when='always', trace_most=1)),
  'ampo': (
    dict(clip_low=0.2, clip_high=0.2, clip_dual=10.0, aggregation='sequence'),
    dict(trace_when='failed', trace_most=2),
  ),
}


def get_config(arg=None):
  return core.on_base(arg, change, arm='luffy', traces='', most=0)


def change(c, a):
  clip, traces = core.chosen('arm', a.arm, ARMS)
  c.name = a.arm
  core.set_traces(c, a.traces, 'configs.methods.luffy.shaped')
  c.algorithm.update(clip)
  c.rollout.update(traces)
  c.rollout.trace_most = a.most or c.rollout.trace_most


def shaped(logps, old_logps, advantages):
  """p / (p + GAMMA) A of foreign tokens, [B, T]; see `losses.mixed`."""
  del old_logps  # a ratio to it would be 1 at the first update
  p = jnp.exp(logps)
  return p / (p + GAMMA) * advantages
