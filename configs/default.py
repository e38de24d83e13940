"""Every key of a configuration, with its default; the other configs change what they need.

    python -m experiments.train --config=configs/default.py --workdir=DIR

trains the character-level `calculator` with the defaults below. An unknown key is an error.
"""

from ml_collections import ConfigDict, FieldReference


def _number_or_word(value: float) -> FieldReference:
  """A key that takes numbers and strings; experiments.settings says which."""
  return FieldReference(value, field_type=object)


def _mesh() -> ConfigDict:
  """Devices along each axis of estr_jax.model.sharding."""
  return ConfigDict({"data": 1, "fsdp": 1, "tensor": 1, "expert": 1})


def get_config() -> ConfigDict:
  c = ConfigDict()
  c.seed = 0
  # async: learner and samplers are processes joined by gRPC. sync: one process, each batch sampled by the newest
  # weights. simulated: one process, each token sampled by the version that `staleness` asks for.
  c.mode = "async"
  c.steps = 100  # optimizer updates
  c.cache_dir = "~/.cache/estr_jax"  # prepared prompts, warm starts and compiled programs; shared by all runs

  c.task = ConfigDict()
  c.task.name = "calculator"  # of estr_jax.tasks.TASKS

  c.model = ConfigDict()
  # A Hugging Face style folder (config.json, safetensors, tokenizer.json), or "" for a random model of the shape below
  # with the task's own alphabet.
  c.model.folder = ""
  c.model.vocabulary = 0  # entries; 0: as many as the tokenizer has. A plan for a shape without a folder needs it
  c.model.width = 64
  c.model.layers = 2
  c.model.heads = 4
  c.model.kv_heads = 2
  c.model.head_dim = 16
  c.model.mlp_width = 192
  c.model.rope_theta = 10_000.0
  c.model.norm_eps = 1e-6
  c.model.qkv_bias = False
  c.model.qk_norm = True
  c.model.tied_head = True
  c.model.experts = 0  # of every layer; 0 = dense layers of mlp_width
  c.model.experts_per_token = 0
  c.model.expert_mlp_width = 0
  c.model.norm_topk_prob = False  # whether the weights of a token's experts sum to 1
  c.model.dtype = "float32"  # of the computation; parameters and scoring are float32
  c.model.remat = "none"  # none, dots, attention, full: what the backward pass keeps of each layer

  c.warm_start = ConfigDict()  # supervised, on the task's demonstrations; cached
  c.warm_start.steps = 0
  c.warm_start.batch = 64  # demonstrations a step
  c.warm_start.learning_rate = 3e-3
  c.warm_start.demonstrations = 20_000

  c.loss = ConfigDict()
  c.loss.name = "estr"  # of estr_jax.objective.losses.LOSSES
  # direct: the clip acts on pi / mu. proximal: on pi / q, q recomputed before each update. Some losses fix theirs.
  c.loss.edge = "direct"
  c.loss.clip_low = 0.2  # the sibling paper's values, as is clip_high
  c.loss.clip_high = 0.28
  c.loss.aggregation = "token_mean"  # token_mean, sequence_mean, sequence_sum (over sampling.context)
  c.loss.entropy = ConfigDict()  # a bonus on the learner's entropy
  c.loss.entropy.coefficient = 0.0  # before the first update
  # Nats; above 0 the coefficient is adapted, and acts only while the batch's recorded entropy is below the target.
  c.loss.entropy.target = 0.0
  c.loss.entropy.step = 1e-4  # of the adapted coefficient in an update; this and `largest` are Skywork-OR1's
  c.loss.entropy.largest = 0.005
  c.loss.kl = ConfigDict()  # a penalty on the KL from an anchor
  c.loss.kl.coefficient = 0.0
  c.loss.kl.estimator = "k2"  # k1, k2, k3; as a loss only k2 has the gradient of KL(pi || anchor)
  c.loss.kl.anchor = "reference"  # reference: the weights before the first update. proximal: q. direct: mu
  # Of a mixture of experts: x the mean over layers of experts x sum (share of choices x mean probability), which is 1
  # where the load is even; added to the loss.
  c.loss.router_balance = 0.0
  # What each loss has of its own; it may take over a key above. Where docs/methods.md names a source, the values are
  # that source's, except those marked "ours", which no public source gives.
  own = {
    # eps is the paper's; tau is ours. tau=calibrate:0.01 is the tau that masks 1 % of the first batch that is stale.
    "estr": {"tau": _number_or_word(1.0), "eps": 0.01},
    "estr_learner_entropy": {"tau": _number_or_word(1.0), "eps": 0.01},
    "estr_gini": {"tau": _number_or_word(1.0), "eps": 0.01},
    "estr_power": {"tau": _number_or_word(1.0), "eps": 0.01, "power": 0.5},
    "estr_one_sided": {"tau": 1.0, "eps": 0.01},
    "estr_soft": {"tau": 1.0, "eps": 0.01},
    "fixed_width": {"width": 0.5},  # nats; ours
    "ppo": {},
    "dual_clip": {"dual": 3.0},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "gmpo": {"band": 0.4},  # of log r
    "sapo": {"positive": 1.0, "negative": 1.05},
    "stable_reinforce": {"ratio_low": 1e-3, "ratio_high": 1e3, "sigmas": 3.0},
    "sat": {"clip_low": 0.2, "clip_high": 0.2, "quantile": 0.9},
    "bandpo": {"divergence": "kl", "radius": 0.05},  # kl, tv, chi2
    "gapo": {"clip_low": 0.2, "clip_high": 0.28},
    "clip_cov": {"share": 2e-4, "low": 1.0, "high": 5.0},
    "kl_cov": {"share": 2e-4, "coefficient": 0.1},
    "icepop": {"low": 0.5, "high": 5.0},
    "kpop": {"phi": 0.1},  # nats; ours, since public code runs from 0.1 to 2
    "ipo": {"bound": 0.3},  # of a probability
    "dppo_tv": {"bound": 0.15, "cap": 20.0},
    "dppo_kl": {"bound": 0.15, "cap": 20.0},  # public ports take 0.05
    "m2po": {"bound": 0.04},
    "trm": {"divergence": "k3", "bound": 0.5},  # k3, vocabulary; nats; bound is ours
    "opsm": {"bound": 0.1},  # nats a token; public ports take 1e-4
    "tis": {"scope": "token", "cap": 2.0},  # token, sequence, geometric
    "mis": {"scope": "token", "low": 0.5, "high": 2.0},  # geometric: 0.999 and 1.001
    "decoupled": {},
    "a3po": {},
    "cispo": {"clip_low": 1.0, "clip_high": 0.28},  # 1.0: no lower bound; clip_high is ours
    "gipo": {"width": 0.5},  # of log r; the source's run from 0.1 to 2
    "vespo": {"positive_power": 2.0, "positive_decay": 3.0, "negative_power": 3.0, "negative_decay": 2.0},
    "vcpo": {"cap": 8.0},
    "asympo": {},
    "stare": {"dual": 10.0, "boost": 1.1, "share": 0.1, "target": 0.3},  # target: nats
    "score_centering": {"weight": "tis", "low": 0.5, "high": 2.0},  # one, tis, mis (then high = 5)
  }
  for name, hyper in own.items():
    c.loss[name] = ConfigDict(hyper)

  c.advantage = ConfigDict()
  c.advantage.name = "grpo"  # of estr_jax.objective.advantages.ESTIMATORS
  c.advantage.eps = 1e-6  # added to the standard deviation, where there is one

  c.batch = ConfigDict()
  c.batch.groups = 16  # prompts an update
  c.batch.group_size = 8  # samples a prompt
  c.batch.microbatches = 1  # gradient accumulation

  c.optimizer = ConfigDict()
  c.optimizer.name = "adamw"  # adamw, sgd
  c.optimizer.learning_rate = 1e-3
  c.optimizer.warmup_steps = 0
  c.optimizer.decay = "constant"  # constant, cosine, linear
  c.optimizer.b1 = 0.9
  c.optimizer.b2 = 0.95
  c.optimizer.eps = 1e-8
  c.optimizer.weight_decay = 0.0
  c.optimizer.clip_norm = 1.0  # global norm of the gradient
  c.optimizer.ess_step = False  # VCPO: the learning rate times sqrt(effective sample size / sequences)

  c.sampling = ConfigDict()
  c.sampling.slots = 64  # sequences that grow side by side in one sampler
  c.sampling.context = 36  # tokens of a sequence, prompt included
  c.sampling.chunk = 8  # decode steps between two looks of the host; new weights are taken there
  c.sampling.temperature = 1.0
  c.sampling.top_p = 1.0  # anything else is refused for training
  c.sampling.top_k = 0  # 0 is off; anything else is refused for training
  # log mu of the whole vocabulary travels with every token: for vocabularies of up to 1,024, and what asks for it.
  c.sampling.record_vocabulary = False
  # Of a mixture of experts: a token's experts travel with it, layers x experts_per_token bytes, and the learner takes
  # them in place of its own routers' choice, which rounding and new weights move elsewhere.
  c.sampling.record_routing = False
  c.sampling.rebuild_cache = False  # recompute the keys of unfinished sequences when new weights arrive
  # Of a sampler of mode async, over its own devices; who samples in the learner's process does it on its mesh.
  c.sampling.mesh = _mesh()

  c.staleness = ConfigDict()
  c.staleness.intra = 0  # simulated: versions crossed inside one trajectory
  c.staleness.inter = 0  # simulated: versions between its end and the update
  c.staleness.segment_tokens = 8  # simulated: policy tokens under one version
  c.staleness.max = 4  # async: no token trained on is older than this many versions
  c.staleness.admission = "wait"  # async: wait for groups that would grow too old, or drop them

  c.queue = ConfigDict()
  c.queue.capacity = 64  # groups leased to samplers or waiting for the learner
  c.queue.lease_timeout_s = 30.0  # a sampler silent for longer gives its groups back
  c.queue.deadline_s = 900.0  # the longest wait of the learner for a batch, and of a sampler for the learner

  c.transport = ConfigDict()
  c.transport.address = "127.0.0.1:0"  # the learner's; port 0 picks a free one
  c.transport.weights_dtype = "float32"  # of the weights on the wire and in the sampler
  c.transport.tls_certificate = ""  # PEM files; needed beyond loopback, with the token
  c.transport.tls_key = ""  # learner only
  c.transport.token_file = ""

  c.mesh = _mesh()  # of the learner; the product is the number of its devices

  c.slices = ConfigDict()  # TPU slices, such as v5p:4x4x4; what experiments.plan and experiments.launch read
  c.slices.learner = ""
  c.slices.sampler = ""  # of one group of sampler hosts
  c.slices.samplers = 1  # such groups

  c.learner = ConfigDict()
  c.learner.score_chunk = 2048  # entries of the vocabulary whose logits live at once; a multiple of 128 on a TPU
  c.learner.diagnostics = True  # the means of objective.diagnostics in every row

  c.checkpoint = ConfigDict()
  c.checkpoint.every = 20  # updates

  c.eval = ConfigDict()
  c.eval.prompts = 512  # held out; before the first update and after the last
  c.eval.every = 20  # updates between two evaluations in between; 0 = none
  c.eval.every_prompts = 128  # held-out prompts of those
  c.eval.slots = 128
  return c
