"""Every key of a configuration, with its default; the other configs change what they need.

    python -m experiments.train --config=configs/default.py --workdir=DIR

trains the character-level `calculator` with the defaults below. An unknown key is an error. Written by `make pages`
from the rooms' declarations (estr_jax/*/keys.py, and each loss for itself); a test fails where they differ.
"""

from ml_collections import ConfigDict, FieldReference


def _number_or_word(value: float) -> FieldReference:
  """A key that takes numbers and strings."""
  return FieldReference(value, field_type=object)


def get_config() -> ConfigDict:
  c = ConfigDict()
  c.seed = 0  # from which prompts, new weights, sampling and evaluation are drawn [at least 0, below 4,294,967,296]
  # async: learner and samplers are processes joined by gRPC. sync: one process, each batch sampled by the newest
  # weights. simulated: one process, each token sampled by the version that `staleness` asks for [one of async, sync,
  # simulated]
  c.mode = "async"
  c.steps = 100  # length of the run [optimizer updates; above 0]
  c.cache_dir = "~/.cache/estr_jax"  # prepared prompts, warm starts and compiled programs, shared by all runs

  c.task = ConfigDict()
  c.task.name = "calculator"  # what is learnt [one of arithmetic, calculator, sums]

  c.model = ConfigDict()
  # a Hugging Face style folder (config.json, safetensors, tokenizer.json); empty: a random model of the shape below,
  # with the task's own alphabet
  c.model.folder = ""
  # size of the vocabulary; 0: the tokenizer's; a plan without model.folder needs it [tokens; at least 0]
  c.model.vocabulary = 0
  c.model.width = 64  # width of the residual stream [above 0]
  c.model.layers = 2  # decoder layers [above 0]
  c.model.heads = 4  # query heads [above 0]
  c.model.kv_heads = 2  # key and value heads [above 0]
  c.model.head_dim = 16  # width of a head [above 0]
  c.model.mlp_width = 192  # width inside the MLP of a dense layer [above 0]
  c.model.rope_theta = 10000.0  # base of the rotary positions (RoPE) [above 0]
  c.model.norm_eps = 1e-06  # added to the mean square in a norm [above 0]
  c.model.qkv_bias = False  # whether queries, keys and values have a bias
  c.model.qk_norm = True  # whether queries and keys are normed
  c.model.tied_head = True  # whether the head is the embedding
  c.model.experts = 0  # experts of every layer; 0: dense layers of mlp_width [at least 0]
  c.model.experts_per_token = 0  # experts that a token goes through [at least 0]
  c.model.expert_mlp_width = 0  # width inside the MLP of an expert [at least 0]
  c.model.norm_topk_prob = False  # whether the weights of a token's experts sum to 1
  c.model.dtype = "float32"  # type of the computation; parameters and scoring are float32 [one of float32, bfloat16]
  # what the backward pass keeps of each layer, the rest being recomputed [one of attention, dots, full, none]
  c.model.remat = "none"

  c.warm_start = ConfigDict()
  # supervised training on the task's demonstrations before the first update; 0: none [updates; at least 0]
  c.warm_start.steps = 0
  c.warm_start.batch = 64  # demonstrations of a supervised update [above 0]
  c.warm_start.learning_rate = 0.003  # learning rate of the supervised updates [above 0]
  c.warm_start.demonstrations = 20000  # how many demonstrations are made [above 0]

  c.loss = ConfigDict()
  # the method; docs/methods.md describes them [one of a3po, asympo, bandpo, cispo, clip_cov, decoupled, dppo_kl,
  # dppo_tv, dual_clip, estr, estr_gini, estr_learner_entropy, estr_one_sided, estr_power, estr_soft, fixed_width, gapo,
  # gipo, gmpo, gspo, icepop, ipo, kl_cov, kpop, m2po, mis, opsm, ppo, sapo, sat, score_centering, stable_reinforce,
  # stare, tis, trm, vcpo, vespo]
  c.loss.name = "estr"
  # direct: the clip acts on pi / mu. proximal: on pi / q, q recomputed before each update. Some losses fix theirs [one
  # of direct, proximal]
  c.loss.edge = "direct"
  c.loss.clip_low = 0.2  # a ratio is cut at 1 - this; BRACE's [above 0, or inf]
  c.loss.clip_high = 0.28  # a ratio is cut at 1 + this; BRACE's [above 0, or inf]
  # how tokens are weighed (docs/methods.md); sequence_sum divides by sampling.context [one of sequence_mean,
  # sequence_sum, token_mean]
  c.loss.aggregation = "token_mean"
  c.loss.entropy = ConfigDict()
  # coefficient of a bonus on the learner's entropy; with a target, the first [at least 0]
  c.loss.entropy.coefficient = 0.0
  # target of the entropy; above 0 the coefficient is adapted, and acts only while the batch's recorded entropy is below
  # it [nats; at least 0]
  c.loss.entropy.target = 0.0
  c.loss.entropy.step = 0.0001  # change of the adapted coefficient in an update; Skywork-OR1's [above 0]
  c.loss.entropy.largest = 0.005  # largest adapted coefficient; Skywork-OR1's [above 0]
  c.loss.kl = ConfigDict()
  c.loss.kl.coefficient = 0.0  # coefficient of a penalty on the KL from loss.kl.anchor [at least 0]
  # how the KL is estimated; as a loss only k2 has the gradient of KL(pi || anchor) [one of k1, k2, k3]
  c.loss.kl.estimator = "k2"
  # from what the KL is taken. reference: the weights before the first update. proximal: q. direct: mu [one of
  # reference, proximal, direct]
  c.loss.kl.anchor = "reference"
  # of a mixture of experts: coefficient of a penalty on uneven load, the mean over layers of experts x sum (share of
  # choices x mean probability), which is 1 where the load is even [at least 0]
  c.loss.router_balance = 0.0
  c.loss.estr = ConfigDict()
  # the largest S that is kept; ours. [above 0, or inf; or calibrate:FRACTION with a fraction between 0 and 1]
  c.loss.estr.tau = _number_or_word(1.0)
  c.loss.estr.eps = 0.01  # added to H, so that a token of no entropy has a width too; the paper's. [nats; above 0]
  c.loss.estr_learner_entropy = ConfigDict()
  # the largest S that is kept; ours. [above 0, or inf; or calibrate:FRACTION with a fraction between 0 and 1]
  c.loss.estr_learner_entropy.tau = _number_or_word(1.0)
  c.loss.estr_learner_entropy.eps = 0.01  # added to the entropy of pi; the paper's for H. [nats; above 0]
  c.loss.estr_gini = ConfigDict()
  # the largest S that is kept; ours. [above 0, or inf; or calibrate:FRACTION with a fraction between 0 and 1]
  c.loss.estr_gini.tau = _number_or_word(1.0)
  c.loss.estr_gini.eps = 0.01  # added to the Gini impurity, which has no unit; the paper's for H. [above 0]
  c.loss.estr_power = ConfigDict()
  # the largest S that is kept; ours. [above 0, or inf; or calibrate:FRACTION with a fraction between 0 and 1]
  c.loss.estr_power.tau = _number_or_word(1.0)
  c.loss.estr_power.eps = 0.01  # added to H before the power is taken; the paper's. [nats; above 0]
  c.loss.estr_power.power = 0.5  # the exponent of H + eps: the smaller, the less the width follows H. [above 0]
  c.loss.estr_one_sided = ConfigDict()
  c.loss.estr_one_sided.tau = 1.0  # the largest S that is kept of outward moves; ours. [above 0, or inf]
  # added to H, so that a token of no entropy has a width too; the paper's. [nats; above 0]
  c.loss.estr_one_sided.eps = 0.01
  c.loss.estr_soft = ConfigDict()
  # the S at which the weight has fallen to exp(-1/2); nothing is cut off there. Ours. [above 0, or inf]
  c.loss.estr_soft.tau = 1.0
  c.loss.estr_soft.eps = 0.01  # added to H, so that a token of no entropy has a width too; the paper's. [nats; above 0]
  c.loss.fixed_width = ConfigDict()
  c.loss.fixed_width.width = 0.5  # the largest |delta| that is kept; ours. [nats; above 0, or inf]
  c.loss.dual_clip = ConfigDict()
  # the largest ratio that counts at A < 0; above 1, or it would cut ratios of 1. [above 1, or inf]
  c.loss.dual_clip.dual = 3.0
  c.loss.gspo = ConfigDict()
  c.loss.gspo.clip_low = 0.0003  # the lower end of the clip of s is 1 - clip_low. [above 0, or inf]
  c.loss.gspo.clip_high = 0.0004  # the upper end of the clip of s is 1 + clip_high. [above 0, or inf]
  c.loss.gmpo = ConfigDict()
  # the largest |log r| of a token, on the side to which its advantage pushes it. [nats; above 0, or inf]
  c.loss.gmpo.band = 0.4
  c.loss.sapo = ConfigDict()
  c.loss.sapo.positive = 1.0  # the gate's temperature where A > 0; the higher, the narrower. [above 0]
  c.loss.sapo.negative = 1.05  # the gate's temperature where A <= 0. [above 0]
  c.loss.stable_reinforce = ConfigDict()
  c.loss.stable_reinforce.ratio_low = 0.001  # what smaller ratios are raised to. [above 0]
  c.loss.stable_reinforce.ratio_high = 1000.0  # what larger ratios are cut to. [above 0]
  # the largest distance of a kept advantage from the mean, in standard deviations. [above 0]
  c.loss.stable_reinforce.sigmas = 3.0
  c.loss.sat = ConfigDict()
  c.loss.sat.clip_low = 0.2  # the lower end of the clip is 1 - clip_low before it shrinks. [above 0, or inf]
  c.loss.sat.clip_high = 0.2  # the upper end of the clip is 1 + clip_high before it shrinks. [above 0, or inf]
  c.loss.sat.quantile = 0.9  # the fraction of the tokens whose clip does not shrink. [above 0, below 1]
  c.loss.bandpo = ConfigDict()
  c.loss.bandpo.divergence = "kl"  # the f-divergence of the ball. [one of kl, tv, chi2]
  # the largest divergence in the ball; in nats for "kl", without a unit for the others. [above 0, or inf]
  c.loss.bandpo.radius = 0.05
  c.loss.gapo = ConfigDict()
  # the lower end of the clip is 1 - clip_low; the upper one is 1 + clip_low where all are right. [above 0]
  c.loss.gapo.clip_low = 0.2
  # the upper end of the clip is 1 + clip_high where one of the group is right, or none. [above 0]
  c.loss.gapo.clip_high = 0.28
  c.loss.clip_cov = ConfigDict()
  c.loss.clip_cov.share = 0.0002  # the fraction of the tokens that is dropped. [above 0, below 1]
  c.loss.clip_cov.low = 1.0  # the covariance above which a token may be dropped. [above 0]
  c.loss.clip_cov.high = 5.0  # the covariance below which a token may be dropped. [above 0, or inf]
  c.loss.kl_cov = ConfigDict()
  c.loss.kl_cov.share = 0.0002  # the fraction of the tokens that is penalised. [above 0, below 1]
  c.loss.kl_cov.coefficient = 0.1  # the weight of the penalty |log r|. [above 0]
  c.loss.icepop = ConfigDict()
  c.loss.icepop.low = 0.5  # the smallest ratio that is kept. [above 0]
  c.loss.icepop.high = 5.0  # the largest ratio that is kept. [above 0, or inf]
  c.loss.kpop = ConfigDict()
  # the largest KL that is kept; ours, since public code runs from 0.1 to 2. [nats; above 0, or inf]
  c.loss.kpop.phi = 0.1
  c.loss.ipo = ConfigDict()
  c.loss.ipo.bound = 0.3  # the largest change of the token's probability that is kept. [above 0, or inf]
  c.loss.dppo_tv = ConfigDict()
  c.loss.dppo_tv.bound = 0.15  # the largest outward change of the token's probability that is kept. [above 0, or inf]
  c.loss.dppo_tv.cap = 20.0  # the largest weight; above it the weight is cut. [above 0, or inf]
  c.loss.dppo_kl = ConfigDict()
  # the largest KL of an outward move that is kept; public ports take 0.05. [nats; above 0, or inf]
  c.loss.dppo_kl.bound = 0.15
  c.loss.dppo_kl.cap = 20.0  # the largest weight; above it the weight is cut. [above 0, or inf]
  c.loss.m2po = ConfigDict()
  c.loss.m2po.bound = 0.04  # the largest mean of (log r)^2 over the outward tokens that are kept. [above 0, or inf]
  c.loss.trm = ConfigDict()
  c.loss.trm.divergence = "k3"  # how a token's divergence is measured. [one of k3, vocabulary]
  c.loss.trm.bound = 0.5  # the largest divergence that a token of a kept sequence has; ours. [nats; above 0, or inf]
  c.loss.opsm = ConfigDict()
  # the largest mean -log r, over its tokens, of a sequence of A < 0 that is kept; public ports take 1e-4. [nats; above
  # 0, or inf]
  c.loss.opsm.bound = 0.1
  c.loss.tis = ConfigDict()
  # what rho is taken over: the token, its sequence's product, or its sequence's geometric mean. [one of token,
  # sequence, geometric]
  c.loss.tis.scope = "token"
  c.loss.tis.cap = 2.0  # the largest weight; above it the weight is cut. [above 0, or inf]
  c.loss.mis = ConfigDict()
  # what rho is taken over: the token, its sequence's product, or its sequence's geometric mean. [one of token,
  # sequence, geometric]
  c.loss.mis.scope = "token"
  c.loss.mis.low = 0.5  # the smallest rho that is kept; 0.999 goes with scope "geometric". [above 0]
  c.loss.mis.high = 2.0  # the largest rho that is kept; 1.001 goes with scope "geometric". [above 0, or inf]
  c.loss.cispo = ConfigDict()
  c.loss.cispo.clip_low = 1.0  # the smallest weight is 1 - clip_low; 1.0: no lower bound. [above 0, or inf]
  c.loss.cispo.clip_high = 0.28  # the largest weight is 1 + clip_high; ours. [above 0, or inf]
  c.loss.gipo = ConfigDict()
  # the Gaussian's standard deviation in log r; the source's run from 0.1 to 2. [nats; above 0, or inf]
  c.loss.gipo.width = 0.5
  c.loss.vespo = ConfigDict()
  c.loss.vespo.positive_power = 2.0  # the exponent k of W where A >= 0. [above 0]
  c.loss.vespo.positive_decay = 3.0  # l, by which a large W is damped, where A >= 0. [above 0]
  c.loss.vespo.negative_power = 3.0  # the exponent k of W where A < 0. [above 0]
  c.loss.vespo.negative_decay = 2.0  # l, by which a large W is damped, where A < 0. [above 0]
  c.loss.vcpo = ConfigDict()
  c.loss.vcpo.cap = 8.0  # the largest weight of a sequence; above it the weight is cut. [above 0, or inf]
  c.loss.stare = ConfigDict()
  # the largest ratio that counts at A < 0; above 1, or it would cut ratios of 1. [above 1, or inf]
  c.loss.stare.dual = 10.0
  c.loss.stare.boost = 1.1  # the weight of the surprising tokens; that of the others is 1. [above 0]
  c.loss.stare.share = 0.1  # the fraction of the tokens of A > 0 that is boosted. [above 0, below 1]
  c.loss.stare.target = 0.3  # the mean entropy of pi below which tokens are boosted. [nats; above 0]
  c.loss.score_centering = ConfigDict()
  # how w is bounded: "tis" cuts it, "mis" drops it, and "one" puts 1 in its place. [one of tis, mis, one]
  c.loss.score_centering.weight = "tis"
  c.loss.score_centering.low = 0.5  # the smallest p / m that "mis" keeps; the others do not read it. [above 0]
  # the largest p / m, beyond which "tis" cuts and "mis" drops; 5 goes with "mis". [above 0, or inf]
  c.loss.score_centering.high = 2.0

  c.advantage = ConfigDict()
  # how rewards become advantages (docs/methods.md) [one of dr_grpo, grpo, loo_normalised, reinforce_pp,
  # reinforce_pp_baseline, rloo]
  c.advantage.name = "grpo"
  c.advantage.eps = 1e-06  # added to the standard deviation [above 0]

  c.batch = ConfigDict()
  c.batch.groups = 16  # prompts of an update [above 0]
  c.batch.group_size = 8  # samples of a prompt [above 0]
  c.batch.microbatches = 1  # parts in which a batch's gradient is computed, to save memory [above 0]

  c.optimizer = ConfigDict()
  c.optimizer.name = "adamw"  # the optimizer [one of adamw, sgd]
  c.optimizer.learning_rate = 0.001  # learning rate after the warm-up [above 0]
  c.optimizer.warmup_steps = 0  # how long the learning rate rises to that [updates; at least 0]
  # how the learning rate falls from there to 0 at the last update; constant: not at all [one of constant, cosine,
  # linear]
  c.optimizer.decay = "constant"
  c.optimizer.b1 = 0.9  # decay of the mean of gradients, or momentum [at least 0, below 1]
  c.optimizer.b2 = 0.95  # decay of the mean of squared gradients [at least 0, below 1]
  c.optimizer.eps = 1e-08  # added to the root of the mean of squared gradients [above 0]
  # share of a weight that an update takes off, times the learning rate; norms and biases are exempt [at least 0]
  c.optimizer.weight_decay = 0.0
  c.optimizer.clip_norm = 1.0  # largest global norm of the gradient [above 0, or inf]
  # whether the learning rate is multiplied by sqrt(effective sample size / sequences), as in VCPO
  c.optimizer.ess_step = False

  c.sampling = ConfigDict()
  c.sampling.slots = 64  # sequences that grow side by side in one sampler [above 0]
  c.sampling.context = 36  # length of a sequence, prompt included [tokens; above 0]
  c.sampling.chunk = 8  # decode steps between two looks of the host; new weights are taken there [above 0]
  c.sampling.temperature = 1.0  # by which logits are divided, in sampler and learner [above 0]
  c.sampling.top_p = 1.0  # anything but 1 is refused for training
  c.sampling.top_k = 0  # 0 is off; anything else is refused for training
  # whether log mu of the whole vocabulary travels with every token, as some losses need; for vocabularies of up to
  # 1,024
  c.sampling.record_vocabulary = False
  # of a mixture of experts: whether a token's experts travel with it, layers x experts_per_token bytes, and the learner
  # takes them in place of its own routers' choice, which rounding and new weights move elsewhere
  c.sampling.record_routing = False
  # whether the attention cache of unfinished sequences is recomputed when new weights arrive
  c.sampling.rebuild_cache = False
  c.sampling.mesh = ConfigDict()
  c.sampling.mesh.data = 1  # devices with a copy of the weights each [above 0]
  c.sampling.mesh.fsdp = 1  # devices that share out rows and weights [above 0]
  c.sampling.mesh.tensor = 1  # devices that share out heads and widths [above 0]
  c.sampling.mesh.expert = 1  # devices that share out experts [above 0]

  c.staleness = ConfigDict()
  c.staleness.intra = 0  # simulated: versions crossed inside one trajectory [versions; at least 0]
  c.staleness.inter = 0  # simulated: versions between its end and the update [versions; at least 0]
  c.staleness.segment_tokens = 8  # simulated: policy tokens under one version [tokens; above 0]
  c.staleness.max = 4  # async: no token trained on is older than this [versions; at least 0]
  c.staleness.admission = "wait"  # async: wait for groups that would grow too old, or drop them [one of wait, drop]

  c.queue = ConfigDict()
  c.queue.capacity = 64  # groups leased to samplers or waiting for the learner [groups; above 0]
  c.queue.lease_timeout_s = 30.0  # a sampler silent for longer gives its groups back [seconds; above 0]
  # the longest wait of the learner for a batch, and of a sampler for the learner [seconds; above 0]
  c.queue.deadline_s = 900.0

  c.transport = ConfigDict()
  c.transport.address = "127.0.0.1:0"  # HOST:PORT of the learner; port 0 picks a free one
  c.transport.weights_dtype = "float32"  # of the weights on the wire and in the sampler [one of float32, bfloat16]
  c.transport.tls_certificate = ""  # PEM file; beyond loopback needed, with the token
  c.transport.tls_key = ""  # PEM file; learner only
  c.transport.token_file = ""  # file with the secret that learner and samplers share

  c.mesh = ConfigDict()
  c.mesh.data = 1  # devices with a copy of the weights each [above 0]
  c.mesh.fsdp = 1  # devices that share out rows and weights [above 0]
  c.mesh.tensor = 1  # devices that share out heads and widths [above 0]
  c.mesh.expert = 1  # devices that share out experts [above 0]

  c.slices = ConfigDict()
  c.slices.learner = ""  # TPU slice of the learner, such as v5p:4x4x4
  c.slices.sampler = ""  # TPU slice of one group of sampler hosts
  c.slices.samplers = 1  # groups of sampler hosts [above 0]

  c.learner = ConfigDict()
  # entries of the vocabulary whose logits are in memory at once; a multiple of 128 on a TPU [above 0]
  c.learner.score_chunk = 2048
  c.learner.diagnostics = True  # whether every row of metrics has the diagnostics of the objective

  c.checkpoint = ConfigDict()
  c.checkpoint.every = 20  # updates between two checkpoints [above 0]

  c.eval = ConfigDict()
  c.eval.prompts = 512  # held-out prompts of the evaluations before the first update and after the last [above 0]
  c.eval.every = 20  # updates between two evaluations during the run; 0: none [at least 0]
  c.eval.every_prompts = 128  # held-out prompts of an evaluation during the run [above 0]
  c.eval.slots = 128  # sequences that are evaluated side by side [above 0]
  return c
