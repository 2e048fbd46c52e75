"""Fixed texts of the evidence: what is compared, what may be compared with what was published, how each study is made."""

from __future__ import annotations

COMPARED = [
    "Gain = a baseline's predicted seconds / the plan's: makespans of the same documents under one cost model "
    "(docs/plan.md section 3, profile `h200`, bf16), without gradient reduction and optimizer, which are the same for all. "
    "Above 1 the plan is faster. **No GPU has run any of this**: the coefficients are published figures, and the "
    "predictions are as good as they are.",
    "A step holds the documents of a length distribution (docs/plan.md, appendix) until `tokens per lane` x lanes (x pp) "
    "tokens are reached; each seed is another step. GPUs = lanes x tp x pp. Medians, quartiles and ranges are over steps; "
    "n is given where fewer than all steps have a figure.",
    "Steps are fewer than they look: layouts with as many tokens share documents; all seeds of equal lengths are alike; mcore never exceeds 8k "
    "tokens and uniform never 32k, so that larger maximum lengths repeat their documents, and only baselines that must hold the longest "
    "document allowed change.",
]
BASELINES = [
    ("static-best", "one cp, one recompute level, packs of one size, all tuned by an oracle for every single step. Nobody can run it; "
        "packs of c, c/2 or c/4 tokens, c being the maximum length (docs/plan.md section 5). A plan is never predicted slower."),
    ("static-any", "static-best with packs of c, c/2 ... down to c/64 tokens, longer documents in packs of their own. Where c is large "
        "beside a lane's tokens, static-best can't make enough microbatches for a pipeline, and what a plan gains over it is then the "
        "size of microbatches and not the lengths of documents; this baseline has those sizes. A plan is never predicted slower where "
        "there are pipelines and at most 300 documents; elsewhere that is not guaranteed."),
    ("static-fixed", "one cp and level for the whole run, the best over its first eight steps that also holds the longest document allowed; "
        "packs of the maximum length, filled in arrival order. Without pipelines this is a well-tuned Megatron-style run with packing. With "
        "pipelines packs of the maximum length are far too few microbatches where it is large beside a lane's tokens: a real run would take "
        "smaller ones, and most of a ratio above 1.3 is owed to that (static-fixed-any, below, has them)."),
    ("bucket", "documents padded to powers of two, microbatches of one size, dealt round robin, the best cp and level for the step "
        "that holds the longest document allowed. It stands for the method's own published baseline, whose exact form isn't "
        "public. Its microbatches hold up to the maximum length, so with pipelines it suffers like static-fixed."),
    ("megatron", "`BalancedCPScheduler` of megatron-core 0.16.1, the real package: cp for each sample, one sample per microbatch, a "
        "barrier between its groups; its cap tuned for every step, recompute level alike. It knows no pipelines. Later "
        "versions pack, which this one does not."),
]  # fmt: skip
LIMITS = (
    "A scheduler that takes more than 10 s of CPU time for one step is entered as '> 10 s', this project's and "
    "megatron-core's alike (of the latter one call with one cap; tuning all its caps is our doing, and may take 30 s; "
    "where one call says that it would take much longer, it is not begun). "
    "Further seeds of such a cell are not run."
)
HEADLINES = [
    ["2.88x on 32 H200 (the abstract of Data-Centric Parallel)", "its models, data and baseline are not public",
     "with nothing here. The rows for 32 H200 have the number of GPUs in common with it, not the data, the model or the baseline"],
    ["1.55 to 2.48x, short-dominated; 1.23 to 1.78x, balanced; 1.07 to 1.28x, long-dominated (the project page, video model of 1.1B, 32 H100)",
     "video buckets; the shares of the three mixes are not public; baseline: fixed cp and batch size per bucket, documents padded",
     "nothing more than the kind of baseline with the column 'bucket' of the three mixes in (a): mixes of our own, of another modality, predicted. "
     "The page's steps of construction are near the rungs cp + batch, unequal and recompute of the ablation; it has no packing, no tp, no pp"],
    ["up to 1.98x over Megatron, 1.72x over DeepSpeed (FlexSP: 7B to 30B, 64 A100, 192k and 384k tokens, ZeRO)",
     "baselines packed; the gain is the best case", "the column 'static-fixed' is nearest; other hardware, no recompute choice there"],
    ["3.9 to 7.9x (ByteScale: 7B to 70B, 2M tokens, more than a thousand GPUs)", "baseline: static DP x CP; data of extreme skew; offloading",
     "no row: documents of 2M tokens and offloading are not in this grid"],
    ["1.23x mean (WLB-LLM: 7B to 70B, 4D)", "baseline packed, at most 128k tokens",
     "the column 'static-fixed', maximum length 128k; other data and hardware"],
    ["1.25 to 1.6x (Megatron's dynamic cp, as its authors report)", "baseline packed",
     "the column 'static-fixed'; the column 'megatron' is an older scheduler of theirs, without packing"],
]  # fmt: skip
MIXES = (
    "Percent of documents log-uniform in 256-2k, 2k-16k, 16k-128k: short-dominated 90/9/1, balanced 60/30/10, "
    "long-dominated 30/40/30. **These are not the project page's mixes**, whose shares are unpublished. Nor do they show its "
    "direction: there the gain falls from short- to long-dominated, here the gain over bucket does not, because most of it is padding "
    "removed (rung unpadded in (b))."
)
PACKS = (
    "static-fixed-any: static-fixed, its size of packs (c, c/2 ... c/64, c being the maximum length) tuned along with cp and "
    "level by the run's first eight steps. 32 H200, 32k tokens per lane, three seeds. Where the two columns differ, "
    "static-fixed is slow for its packs and not for what plans do about documents."
)
SHORT = (
    "A lane is tp x pp GPUs. 70b tp 8 pp 4 has one lane on 32 GPUs: nothing can be balanced or shared, and what is gained there is the size of "
    "microbatches, with equal lengths as with others. Read 'equal lengths' as what is gained without any difference between documents: "
    "recompute on some layers instead of all or none, slots that grow and fall in a pipeline, pack sizes that static layouts don't have, and "
    "(over static-fixed and bucket) the longest document that may come."
)
MEMORY = "A plan takes memory that is free where that saves time; nothing in it makes peaks small."
COSTS = (
    "Peak: of the fullest stage, by the memory model (docs/plan.md section 3). Planning: CPU time of one core; it runs in the background, steps "
    "ahead, and costs nothing as long as it is shorter than a step. Gains count as if it always were; where it is longer, the steps are counted "
    "in brackets and named in (g). A step whose planning was cut off is not in these columns."
)
ABLATION = [
    "Each rung adds one freedom to the one before, on the same documents; figures are seconds of bucket / seconds of the "
    "rung. A rung is the best that this program finds with what it allows, and never worse than the one before.",
    "bucket: the baseline. batch: microbatches of at most c, c/2, ... c/lanes tokens, one cp. cp: each microbatch with its "
    "own cp, lanes still run equally many. unequal: lanes run different numbers. unpadded: documents are not padded to "
    "powers of two, still one bucket per microbatch. packing: any documents share a microbatch (the planner, one recompute "
    "level on all layers; with pipelines its slots reordered longest first). recompute: any level on any number of layers per "
    "microbatch, slots alike. order: slots in the planner's order. batch to unpadded are made by list scheduling "
    "(tools/evidence_ablation.py has it exactly). A rung of +0.0% says that this search found nothing with that freedom, not that there is "
    "nothing to find. Every system that packs has the rung unpadded.",
]
SENSITIVITY = [
    "A step is planned with what the planner is told and scored with what is true. Gain over a static-best that is tuned "
    "with the truth, so that what the planner does not know counts against it alone. 8b on 32 H200, 32k tokens per lane, "
    "documents of at most 128k, five steps of each of nine distributions.",
    "NAME x FACTOR: the planner is told this coefficient times 0.8 or 1.2. all, coin: every coefficient is wrong at once, up or down by a seeded "
    "coin. network/2: bandwidths are half and latencies twice the profile's. slow lane: lane 0 runs at 0.9 of the others' speed. unaware, aware: "
    "planned without or with knowing it; static-best always knows.",
    "A gain below 1.00 is possible here: the guarantee to be no slower than static-best holds under the coefficients that the planner has.",
]
KNOWN_LOSSES = (
    "Earlier runs of 300 quickstart steps, their ends (no curves are kept): fp64, "
    "planned and static, one rank and two: 5.361405 for all. fp32 static: 5.3375 (1 rank), 5.3817 (2 ranks), in other "
    "orders 5.3369, 5.3379, 5.3380, 5.3820 and 5.3737 (2 ranks). fp32 planned: 5.3443 (1 rank), 5.3616 (2 ranks): within "
    "what the order of sums does to static runs."
)
REGROUP = (
    "Ratio: planned / the other, turn by turn, so below 1 planned is faster; interval: 95% of the mean over turns, by Student's t (none for fewer "
    "than four). All turns run the same steps of one seed, so an interval covers timing, not other data. Timed: groups, messages and schedule are "
    "real, ranks sleep the predicted seconds. Computed: a small model trains on CPUs; wall clock is left out where more ranks than cores compute."
)
REGROUP_ERROR = (
    "Timed ratios are better than regrouping alone would make them: ranks share cores, and messages of the large groups that "
    "static layouts use take long here (the last column has the steps without any sleep). Seconds against the prediction: small "
    "by construction where ranks sleep; where they compute, the CPU profile is not calibrated. On 2 ranks plans need as much CPU "
    "time as static-best: they balance work and don't make it less; on 4 ranks they need less where static-best shares more documents."
)
REGROUP_MEMORY = (
    "Memory on the ranks that compute: the most bytes alive at once in tensors that a step made, on the fullest rank, over "
    "the steps; beside it the activations that the memory model (docs/plan.md section 3, in fp32) gives the same plans. It "
    "describes a GPU's fused kernels, which these are not."
)
NO_MEMORY = "Memory measured on ranks: none is kept. The memory figures of (a) are the model's."
NO_HELP = (
    "Where all documents are alike there is nothing to balance, and where one document alone decides how long a step is, no "
    "arrangement of the others helps. static-best is tuned for every step by an oracle: without pipelines the gain over a real run is closer to "
    "the column 'static-fixed'. With more than 300 documents, or without pipelines, the planner does not try static-any and may be slower. "
    "static-fixed fills packs in arrival order, which by chance can be better than longest first."
)
