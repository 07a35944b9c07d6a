"""The one schema: every field that any part of the system reads.

A recipe starts from `base()` and changes fields. Nothing in the library has
a default of its own (design 5.11): what a run did is what its config says.
`check` knows which values each field may have; rules that relate several fields
are in `checks.py` and beside the code that they protect.
"""

import ast
import contextlib
import operator

from ml_collections import ConfigDict

from searchrl_jax import lookup

_PARTS = (
  'model mesh data env source engine rollout judge algorithm teacher critic '
  'batch optim sft train checkpoint eval log'
)

DTYPES = 'float32', 'bfloat16', 'float16'
CHOICES = {
  'model.remat': ('none', 'block', 'attention', 'mlp', 'matmuls'),
  'model.attention': ('auto', 'xla', 'cudnn', 'splash'),
  'model.dtype': DTYPES,
  'model.lora.dtype': ('', *DTYPES),
  'data.prompt': ('template', 'as_is'),
  'env.information': ('source', 'policy'),
  'env.answer': ('tags', 'boxed'),
  'env.search_when': ('always', 'entropy'),
  'source.servers': ('each', 'one'),
  'engine.dtype': DTYPES,
  'engine.sync': ('full', 'delta'),
  'rollout.trace_when': ('always', 'failed'),
  'algorithm.ratio': ('token', 'sequence', 'product'),
  'algorithm.aggregation': ('token', 'sequence', 'sequence_sum'),
  'algorithm.kl': ('none', 'loss', 'reward'),
  'algorithm.kl_estimator': ('k1', 'k2', 'k3'),
  'algorithm.tis': ('none', 'token', 'sequence'),
  'algorithm.tis_mode': ('cap', 'mask'),
  'teacher.columns.distance': ('forward', 'reverse', 'js'),
  'teacher.weights': ('live', 'frozen', 'copy', 'ema'),
  'critic.schedule': ('constant', 'linear', 'cosine'),
  'optim.schedule': ('constant', 'linear', 'cosine'),
  'sft.schedule': ('constant', 'linear', 'cosine'),
  'log.wandb': ('disabled', 'offline', 'online'),
}

# Former names of fields, and their names now.
RENAMED = {'models.lora': 'model.lora'}

# (fields, whether a value is allowed, which are)
RANGES = (
  (
    'source.k source.attempts rollout.questions rollout.group batch.tokens '
    'rollout.search_attempts batch.head_chunk algorithm.epochs engine.slots '
    'engine.max_len engine.chunk engine.prefill_rows engine.attempts '
    'env.max_turn_tokens env.max_tokens env.max_contexts env.attempts '
    'sft.rows eval.n eval.bootstrap teacher.every '
    'judge.attempts judge.concurrency judge.max_tokens '
    'source.simulator.attempts '
    'source.simulator.concurrency source.simulator.max_tokens '
    'source.simulator.steps source.dials.depth checkpoint.keep',
    lambda x: x >= 1,
    'at least 1',
  ),
  (
    'env.max_turns env.keep_observations env.max_note_tokens '
    'rollout.concurrency rollout.refill rollout.max_staleness '
    'teacher.gold.aliases teacher.gold.swaps teacher.columns.k '
    'teacher.columns.coef '
    'rollout.mismatch_alarm critic.lr critic.clip critic.warmup optim.warmup '
    'sft.warmup eval.questions eval.temperature eval.every checkpoint.every '
    'train.seconds sft.seconds log.trajectories_every model.lora.rank '
    'source.simulator.temperature',
    lambda x: x >= 0,
    'at least 0',
  ),
  ('env.real_searches', lambda x: x >= -1, 'a number, or -1 for all'),
  (
    'optim.lr sft.lr source.timeout source.simulator.timeout judge.timeout '
    'model.lora.alpha algorithm.tis_cap teacher.gold.first',
    lambda x: x > 0,
    'above 0',
  ),
  ('source.simulator.base', lambda x: x >= 1.001, 'at least 1.001'),
  (
    'eval.top_p batch.loss_fraction teacher.rate',
    lambda x: 0 < x <= 1,
    'above 0 to 1',
  ),
  ('teacher.columns.alpha', lambda x: 0 < x < 1, 'between 0 and 1'),
  (
    'rollout.max_failed judge.max_failed algorithm.tis_floor '
    'source.simulator.noise_from source.simulator.noise_to '
    'source.dials.random source.dials.empty source.dials.missing '
    'source.dials.contradict source.dials.rank',
    lambda x: 0 <= x <= 1,
    '0 to 1',
  ),
  ('algorithm.clip_dual', lambda x: not x or x > 1, 'above 1, or 0 for none'),
  ('algorithm.clip_low', lambda x: 0 <= x <= 1, 'a distance from 1, 0 to 1'),
  ('algorithm.clip_high', lambda x: x >= 0, 'a distance from 1, at least 0'),
  (
    'batch.lengths',
    lambda x: x and list(x) == sorted(set(x)) and x[0] >= 2,
    'increasing lengths in tokens, each at least 2',
  ),
)


def parse_arg(arg: str | None, **known):
  """Parses 'a=1,b=x' (what follows `config.py:`) against typed defaults.

  Only for knobs that move several fields; one field is `--config.optim.lr=`.
  A bare word is a flag set to True. Values take the type of the default.

  Raises:
    ValueError: an unknown name (with near ones) or a value of another type.
  """
  out = ConfigDict(known)
  for item in filter(None, (arg or '').split(',')):
    name, _, value = (item if '=' in item else f'{item}=True').partition('=')
    lookup.require(
      name in known,
      f'config argument {name!r} is unknown; {lookup.near(name, known)}',
    )
    if not isinstance(known[name], str):
      with contextlib.suppress(ValueError, SyntaxError):
        value = ast.literal_eval(value)
    kind = type(known[name])
    lookup.require(
      type(value) is kind or kind is float and type(value) is int,
      f'config argument {name}={value!r}: not of type {kind.__name__}',
      ValueError,
    )
    out[name] = value
  return out


def base() -> ConfigDict:
  """Every field with its neutral value. Units are in the comments."""
  c = ConfigDict({part: {} for part in _PARTS.split()})
  c.name = 'base'
  c.seed = 0

  c.model.path = ''  # a Hugging Face folder; '' = from scratch, by `arch`
  # A Hugging Face folder; '' = model.path; 'world': the generated worlds'
  # words; 'bpe': trained on source.corpus.
  c.model.tokenizer = ''
  c.model.bpe_vocab = 4096  # entries of a trained one
  c.model.arch = ConfigDict()  # fields of a Hugging Face config.json
  c.model.init_scale = 0.02  # std of fresh weights
  c.model.embed_scale = 0.02  # std of fresh embeddings
  c.model.dtype = 'float32'  # of activations; parameters are float32
  # What of a layer is computed again in the backward pass: none, all (block),
  # or all but the results of attention, of mlp or of both (matmuls).
  c.model.remat = 'none'
  c.model.scan_unroll = 1  # layers unrolled in a step of the scan
  c.model.attention = 'auto'  # auto, xla, cudnn, splash

  # Adapters of the policy and its critic, trained in place of the parameters,
  # which stay as they started (models/lora.py).
  c.model.lora = ConfigDict()
  c.model.lora.rank = 0  # 0 = every parameter is trained
  c.model.lora.alpha = 32.0  # an adapter is scaled by alpha / rank
  # A regex of the names of projections that get one, matched whole.
  c.model.lora.target = 'q|k|v|o|gate|up|down'
  c.model.lora.dtype = ''  # of the frozen parameters; '' = model.dtype
  c.model.lora.path = ''  # a PEFT folder to start from; '' = fresh ones

  # Devices on each axis; one may be -1, the rest
  c.mesh.data = -1
  c.mesh.fsdp = 1
  c.mesh.tensor = 1

  c.data.dir = ''  # '' = SEARCHRL_DATA, else ../shared/data
  c.data.world_module = 'searchrl_jax.worlds.microworld'  # generates them
  c.data.world_seed = 0  # of a generated world, for `microworld` sets
  c.data.world = ConfigDict()  # its other settings (microworld.generate)
  c.data.prompt = 'template'  # template, as_is (the data's own messages)
  c.data.train = ConfigDict()  # name -> {module, ...its own fields}
  c.data.eval = ConfigDict()  # name -> {module, ...its own fields}
  c.data.shuffle = True

  # The class of the environment; called like `text.env.SearchEnv`.
  c.env.module = 'searchrl_jax.text.env.SearchEnv'
  # A name in text/templates, or a file. Those with `calls` (qwen_tools,
  # llama_tools) need a chat template that shows tools.
  c.env.template = 'base'
  c.env.max_turns = 4  # turns that may search, then one that may not
  c.env.max_turn_tokens = 256  # sampled tokens in one turn
  c.env.max_tokens = 1024  # tokens in all, prompt and observations included
  c.env.max_observation_tokens = 256  # of one observation, tags included
  c.env.information = 'source'  # source, policy (SSRL)
  c.env.answer = 'tags'  # tags; boxed: in the last \\boxed{...} (mathematics)
  # Of information='policy': what it wrote as information in the loss.
  c.env.train_information = False
  # Evaluation of information='policy': how many of a trajectory's searches
  # are real, the first ones; -1 = all.
  c.env.real_searches = 0
  c.env.search_when = 'always'  # always; entropy: where the policy is unsure
  # All that the environment wrote in the loss too: observations, feedback and
  # notes (Search-R1's state_masking=false), with the
  # trainer's old log-probs and weight 1.
  c.env.train_observations = False
  # Contexts of a trajectory, at most. 1: what it holds only grows. Then what
  # begins a new one (`text.env`); limits of tokens hold for each.
  c.env.max_contexts = 1
  c.env.keep_observations = 0  # the newest that stay; 0 = all
  c.env.dropped = ''  # what older ones show instead
  c.env.on_full = ''  # the block that is asked for, to go on with; '' = end
  c.env.on_answer = ''  # the block that is asked for between two attempts
  c.env.attempts = 1  # at the question, one after another; the last one counts
  c.env.max_note_tokens = 0  # sampled tokens of such a block

  c.source.module = 'service'
  c.source.url = ''  # of a running server; '' = start one over `corpus`
  # Which processes of several start one: each for itself, or one for all.
  c.source.servers = 'each'  # each, one
  c.source.corpus = ''  # JSONL(.gz), or 'world': the generated one
  c.source.k = 3  # passages for a query
  c.source.timeout = 10.0  # seconds for one attempt
  c.source.deadline = 60.0  # seconds for all attempts at one request
  c.source.attempts = 4  # HTTP requests for one search of the environment
  c.source.batch_ms = 3.0  # wait to gather queries of other trajectories
  # What results are made worse by, with these probabilities: sources/dials.py.
  c.source.dials = ConfigDict()
  c.source.dials.random = 0.0  # the passages of another question
  c.source.dials.empty = 0.0  # no passages
  c.source.dials.missing = 0.0  # of a passage: it is not in the corpus
  c.source.dials.contradict = 0.0  # of a passage: a false copy beside it
  c.source.dials.rank = 0.0  # candidates in random order
  c.source.dials.depth = 10  # candidates, for `missing` and `rank`
  # Of module='simulated': a language model writes the passages (ZeroSearch).
  c.source.simulator = ConfigDict()
  c.source.simulator.path = ''  # run or HF folder; '' = the policy's engine
  c.source.simulator.engine = ConfigDict()  # fields that differ from `engine`
  # An OpenAI-compatible server instead; the token is OPENAI_API_KEY.
  c.source.simulator.url = ''
  c.source.simulator.model = ''  # '' = the one that is served
  c.source.simulator.timeout = 60.0  # seconds for one attempt
  c.source.simulator.concurrency = 64  # requests in flight
  # At one request to a server, and at a reply with documents in it.
  c.source.simulator.attempts = 4
  c.source.simulator.chat = True  # the prompt is a user's message, else text
  # Prompts with {query}, and {question}, {answers}, {k} (documents asked for).
  c.source.simulator.useful = ''
  c.source.simulator.noisy = ''
  # A regular expression; its first group, or that named text, is a document,
  # a group named title its title.
  c.source.simulator.document = ''
  c.source.simulator.stops = ()  # strings that end a reply and belong to it
  c.source.simulator.max_tokens = 512  # of a reply
  c.source.simulator.temperature = 1.0
  # The share of noisy documents grows between these, see sources/simulated.py.
  c.source.simulator.noise_from = 0.0
  c.source.simulator.noise_to = 0.0
  c.source.simulator.base = 4.0
  c.source.simulator.steps = 100  # after which it is noise_to

  # Tools besides `search`, which is `source`: name -> {module, ...its own
  # fields}. A block of the template calls one by name; where the template has
  # calls, the policy does. Those of the package, with their fields:
  #   calculator  cost
  #   open        found: only documents that a search of the trajectory found;
  #               chars of a piece
  #   mcp         command or url of a server, allow (names of its tools),
  #               timeout in seconds, max_bytes of a result
  c.tools = ConfigDict()

  c.engine.module = 'jax'
  c.engine.slots = 64  # sequences decoded together
  c.engine.max_len = 1024  # tokens in a slot's cache
  c.engine.chunk = 8  # tokens decoded on the device per call
  # Sequences of 32 tokens prefilled together; of longer ones fewer: for n
  # observations at a time, n * env.max_observation_tokens / 32.
  c.engine.prefill_rows = 8
  # GiB of host memory for the caches of sequences that wait for a search. It
  # and slots limit the sequences in flight, of env.max_tokens tokens each.
  c.engine.host_gib = 16.0
  c.engine.dtype = 'float32'  # of activations and cache
  # In process: no bit depends on what else is sampled, and a step takes as long
  # as it has slots. False, on a CPU: as long as it has active ones.
  c.engine.exact = True
  # Of a model with experts: records which ones each token used, and trains with
  # these (routing replay, R3: Ma et al., arXiv 2510.11370).
  c.engine.record_routes = False
  # The difference of engine and trainer that stops a run: of a log-prob, or of
  # its relative error where that is below -1.
  c.engine.canary_tolerance = 1e-3
  # The following fields are for servers (module = 'vllm'). Their URLs,
  # separated by commas; '' = start servers that end with the run.
  c.engine.url = ''
  c.engine.venv = '.venv-sidecar'  # where vLLM is installed (make sidecar)
  # 'cpu', or GPUs: 'gpus:0' one server, 'gpus:0,1' one over both, 'gpus:0;1'
  # one on each; numbers count those of CUDA_VISIBLE_DEVICES, if it is set.
  c.engine.device = 'cpu'
  c.engine.gpu_memory = 0.9  # share of a GPU's memory that a server takes
  c.engine.kv_cache_gib = 1.0  # GiB of cache on CPU
  c.engine.block_size = 32  # tokens of a cached block; shorter prefixes miss
  # Folder in memory for the weights on their way to servers of this machine;
  # without room for three copies, or '': 'published' in the run folder.
  c.engine.memory = '/dev/shm'
  # 'delta': a sync publishes what changed since the last one, in a dtype of 16
  # bits, for servers on this machine; in doubt, and at first, everything.
  c.engine.sync = 'full'
  c.engine.sleep = False  # lends its GPU to the update (one GPU for both)
  c.engine.start_seconds = 600.0  # that a server may take to start
  c.engine.timeout = 120.0  # seconds for one attempt at one completion
  c.engine.deadline = 900.0  # seconds after which no further one is made
  c.engine.attempts = 4  # of a completion

  c.rollout.questions = 32  # questions in a step
  c.rollout.group = 8  # trajectories of one question
  # What samples the groups in training: a module of searchrl_jax.rollout, or
  # the dotted path of a function. Evaluation always samples chains.
  c.rollout.sampler = 'chains'  # chains, tree, sessions, traces, revise
  c.rollout.program = ''  # that plays (sampler='sessions'): a.function, or ./it
  c.rollout.program_seconds = 600.0  # of one trajectory
  c.rollout.trees = 2  # of a group (sampler='tree')
  c.rollout.rounds = 1  # of expansions of a tree, see rollout/tree.py
  # The template in which the policy reads attempts (sampler='revise').
  c.rollout.refiner = ''
  # Where the traces of a question are (sampler='traces', and SEELE's): a field
  # of Question.meta, or the dotted path of a function. See rollout/traces.py.
  c.rollout.traces = ''
  c.rollout.trace_most = 1  # traces in a group
  c.rollout.trace_when = 'always'  # always; failed: where no attempt succeeds
  c.rollout.temperature = 1.0
  c.rollout.top_p = 1.0
  c.rollout.top_k = 0
  # Trajectories of a step in flight; 0 = as many as the engine can serve
  # without computing twice: those that slots and engine.host_gib hold, or, of
  # servers, two for each of their slots.
  c.rollout.concurrency = 0
  # Times that a search is tried, each with up to source.attempts requests.
  c.rollout.search_attempts = 2
  c.rollout.max_failed = 0.2  # fraction of failed trajectories that stops
  # Rounds of further questions while groups of equal rewards leave a step
  # short (DAPO's dynamic sampling, with algorithm.drop_zero_variance).
  c.rollout.refill = 0
  # Versions that a step's rollouts may begin ahead of it: 0 = synchronous.
  c.rollout.max_staleness = 0
  # Mean |log-prob difference| of trainer and engine in a step that pauses the
  # run (what staleness adds counts too); 0 = no alarm.
  c.rollout.mismatch_alarm = 0.0

  c.reward = ConfigDict()  # name -> {fn, weight, ...its own fields}

  # A language model that judges answers, behind an OpenAI-compatible server:
  # for the reward judge.correct, and beside EM and F1 in every evaluation.
  c.judge.url = ''  # '' = there is none; the token is OPENAI_API_KEY's
  # '' = the one that is served; name it where the URL may change.
  c.judge.model = ''
  c.judge.timeout = 30.0  # seconds for one attempt
  c.judge.attempts = 4
  c.judge.concurrency = 32  # requests in flight
  c.judge.max_tokens = 32  # of a reply; a judge that thinks needs some hundreds
  c.judge.max_failed = 0.2  # fraction of missing verdicts that stops

  c.algorithm.advantage = 'grpo'  # in advantages.py, or a dotted path
  c.algorithm.advantage_kw = ConfigDict()  # that function's own fields
  c.algorithm.loss = 'clip'  # in losses.py, or a dotted path
  # The dotted path of the objective of tokens that the policy did not sample
  # (loss='mixed').
  c.algorithm.foreign_objective = ''
  c.algorithm.clip_low = 0.2
  c.algorithm.clip_high = 0.2
  c.algorithm.clip_dual = 0.0  # largest ratio where advantages are negative
  c.algorithm.ratio = 'token'  # token, sequence, product
  c.algorithm.aggregation = 'token'  # token, sequence, sequence_sum
  c.algorithm.horizon = 0  # divisor of sequence_sum, in tokens (Dr.GRPO)
  c.algorithm.kl = 'none'  # none, loss, reward
  c.algorithm.kl_estimator = 'k3'  # k1, k2, k3
  c.algorithm.kl_coef = 0.0
  c.algorithm.entropy_coef = 0.0
  c.algorithm.tis = 'token'  # none, token, sequence
  c.algorithm.tis_cap = 2.0  # largest importance weight
  c.algorithm.tis_mode = 'cap'  # cap; mask: weight 0 outside floor..cap
  c.algorithm.tis_floor = 0.0  # smallest weight that is not masked
  c.algorithm.minibatches = 1  # optimizer updates in a step (per epoch)
  c.algorithm.epochs = 1  # passes over a step's trajectories
  c.algorithm.drop_zero_variance = False  # leave such groups out of the batch

  # The policy, or a copy of it, that is asked about a step's rows
  # (learn/teacher.py): with a prompt that tells it more, for advantages that
  # take `delta` and for `columns`.
  c.teacher.context = ''  # in teacher.py, or a dotted path; '' = there is none
  c.teacher.context_kw = ConfigDict()  # that function's own fields
  c.teacher.frame = '{text} {hint}'  # the question's text with the hint
  c.teacher.others = False  # the hint of another question: a control
  # Its distributions in the loss.
  c.teacher.columns = ConfigDict()
  c.teacher.columns.k = 0  # ids of a token, the policy's likeliest; 0 = none
  c.teacher.columns.distance = 'reverse'  # forward, reverse, js
  c.teacher.columns.alpha = 0.5  # of js
  c.teacher.columns.coef = 1.0
  c.teacher.columns.kinds = ()  # of segments; () = all of the policy's
  # What it makes of the golden answer, for advantages that take `gold`
  # (learn/potential.py).
  c.teacher.gold = ConfigDict()
  c.teacher.gold.frame = ''  # before the answer; '' = the template's tag
  c.teacher.gold.aliases = 1  # golden answers; 0 = all
  c.teacher.gold.first = 1.0  # weight of its first three tokens
  c.teacher.gold.swaps = 0  # replacements of each observation
  c.teacher.weights = 'live'  # live, frozen, copy, ema
  c.teacher.every = 50  # steps between two copies; a shorter run has none
  c.teacher.rate = 0.05  # of 'ema', which each step takes

  # The critic of advantage='gae': a backbone and a value head of its own.
  c.critic.path = ''  # a Hugging Face folder; '' = as the policy starts
  c.critic.lr = 0.0  # 0 = there is none
  c.critic.schedule = 'constant'  # as optim.schedule
  c.critic.warmup = 0  # updates
  c.critic.weight_decay = 0.0
  c.critic.clip = 0.5  # largest step of a value, in returns; 0 = not clipped
  c.critic.pretrain_steps = 0  # first steps, which train only the critic

  # Rows that trajectories are packed into, in tokens. The last is the limit of
  # a trajectory and takes most of them, the others what is left.
  c.batch.lengths = (256, 512, 1024)
  c.batch.tokens = 8192  # of one device in the largest microbatch
  # Tokens of one device in a microbatch whose trajectories are computed once
  # where they begin alike, with XLA's attention, in rows of one length;
  # batch.tokens is then not read. 0 = each trajectory is computed.
  c.batch.prefix_tokens = 0
  c.batch.loss_fraction = 0.5  # loss tokens a microbatch holds, of its tokens
  c.batch.head_chunk = 1024  # loss tokens of one device scored at once

  c.optim.lr = 1e-6
  c.optim.schedule = 'constant'  # constant, linear, cosine
  c.optim.warmup = 0  # updates
  c.optim.b1 = 0.9
  c.optim.b2 = 0.999
  c.optim.eps = 1e-8
  c.optim.weight_decay = 0.0
  c.optim.clip_norm = 1.0

  c.sft.data = ConfigDict()  # {module, ...its own fields}: scripted traces
  c.sft.steps = 0
  c.sft.rows = 32  # sequences in an update
  # 'length': shuffled, and traces of like length share an update (less
  # padding). 'given': as config.sft.data has them, so that each update has its
  # mixture, or for a curriculum.
  c.sft.order = 'length'
  c.sft.lr = 1e-3
  c.sft.schedule = 'cosine'
  c.sft.warmup = 20
  c.sft.weight_decay = 0.0
  c.sft.good_only = False  # leave out traces marked as not good (a control)
  c.sft.seconds = 0.0  # stop after this time; 0 = no limit
  c.sft.save_every = 0  # steps; 0 = only at the end

  # Rollouts; optimizer updates = steps x minibatches x epochs.
  c.train.steps = 100
  c.train.seconds = 0.0  # stop after this time; 0 = no limit
  c.train.init = ''  # run folder or HF folder to start from; '' = the model

  c.checkpoint.every = 50  # steps; 0 = only at the end
  c.checkpoint.keep = 2  # the last k
  # Write while training goes on, from a copy in host memory. False: wait.
  c.checkpoint.background = True
  # Also keep the best by this metric (then every evaluated step is saved):
  # eval/set=NAME/em, where NAME of data.eval is only used for the selection
  # and is not reported. '' = no.
  c.checkpoint.best = ''

  c.eval.every = 50  # steps; 0 = only at the end
  c.eval.questions = 0  # of each set; 0 = all
  c.eval.n = 1  # samples of a question
  c.eval.temperature = 0.0  # 0 = greedy
  c.eval.top_p = 1.0
  c.eval.k = ()  # pass@k for these k
  # What makes answers equal: 'text', or a function's dotted name, such as
  # experiments.ttrl.mathematics.equal.
  c.eval.match = 'text'
  c.eval.bootstrap = 2000  # resamples behind an interval
  c.eval.seed = 0
  # Questions of each set that are also asked at rollout.temperature before the
  # first step; 0 = none. RL learns from such samples.
  c.eval.sampled = 64

  c.log.tensorboard = True
  c.log.wandb = 'disabled'  # disabled, offline, online
  c.log.project = 'searchrl'
  c.log.progress = True
  # Steps between those whose trajectories are written; 1 = all, 0 = none.
  # Evaluations, and what an error leaves, are written in any case.
  c.log.trajectories_every = 1
  return c


def check(config: ConfigDict) -> None:
  """Refuses values that a field cannot have, whatever the others are.

  Raises:
    ConfigError: names the field, its value and what is allowed, or the new
      name of a renamed field.
  """
  for old, new in RENAMED.items():
    part, _, name = old.rpartition('.')
    message = f'config.{old} has been renamed: use config.{new}'
    lookup.require(name not in config.get(part, ()), message)
  for field, choices in CHOICES.items():
    value = operator.attrgetter(field)(config)
    hint = lookup.near(str(value), choices)
    lookup.require(value in choices, f'config.{field}={value!r}: {hint}')
  for fields, allowed, what in RANGES:
    for field in fields.split():
      value = operator.attrgetter(field)(config)
      lookup.require(allowed(value), f'config.{field}={value}: {what}')
