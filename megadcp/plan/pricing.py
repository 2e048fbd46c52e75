"""What a pack costs on a group, without pipelines, fast: seconds from its tokens and squares, with its cheapest kind and recompute.

L padded tokens of the group, Q sum of squared padded lengths, P = cp, t = L / P, N layers. The same formulas as cost.py and memory.py,
with everything that does not depend on the pack worked out beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, inf, lcm

from megadcp.plan.basis import Basis
from megadcp.plan.cost import BACKWARD_ATTENTION, BACKWARD_LINEAR, SELECTIVE_SHARE, CostModel, Load
from megadcp.plan.limits import Limits
from megadcp.plan.memory import LAST_BITS, LOGIT_BYTES, MemoryModel
from megadcp.plan.packing import pad
from megadcp.plan.step_plan import LEVELS, Microbatch, Recompute, round_bytes, round_seconds

MOST_COUNTS = 24  # of packs that a block is divided into, tried one by one


class Group:
    """Prices for groups of one size, in one node or not. `plain`, `most`: most tokens without recompute, and at all.

    With a recompute value that the run names, plain = most.
    """

    def __init__(self, prices: Prices, cp: int, inside: bool) -> None:
        cost, basis = prices.cost, prices.basis
        layers = basis.model.layers
        self.prices, self.cp, self.inside = prices, cp, inside
        self.step = 2 * cp if cp > 1 else 1  # documents are padded to this
        self.grain = lcm(cp * basis.align, self.step)  # and their sum to this
        self.fixed = layers * ((1 + BACKWARD_LINEAR) * cost.linear_second * cost.half + basis.profile.layer_overhead_seconds)
        self.fixed += cost.head_second * cost.half
        self.slope = (layers * ((1 + BACKWARD_LINEAR) * cost.linear_second + cost.tp_second) + cost.head_second) / cp
        self.attention = (1 + BACKWARD_ATTENTION) * layers * cost.attention_second / cp
        self.names = cost.legal_kinds(cp)
        self.kinds = [self._kind(cost, kind) for kind in self.names]
        choices = [Recompute()] if prices.limits.free else list(prices.limits.choices)
        self.plain = self._down(prices.tokens_of(choices[0]))
        self.most = max(self._down(prices.tokens_of(choice)) for choice in prices.limits.choices)
        self.cap = min(self.most, prices.limits.pack_tokens // self.grain * self.grain)  # of a pack with more than one document
        self.full = min(self.plain, self.cap)  # a pack of this many tokens has no recompute that it could do without

    def _down(self, local: int) -> int:
        return local * self.cp // self.grain * self.grain

    def _kind(self, cost: CostModel, kind: str) -> tuple[float, float, float, float, float]:
        """(half length, always exposed: constant and per token, hidden by attention: constant and per token), of all layers."""
        layers, profile = self.prices.basis.model.layers, self.prices.basis.profile
        ranks = self.cp if kind == "ring" else self.cp // cost.head_split(self.cp) if kind == "2d" else 1
        half = profile.attention_half_length * ranks
        nothing, token = Load(0.0, 0.0, self.cp, kind, self.inside), Load(1.0, 0.0, self.cp, kind, self.inside)
        if kind == "2d":  # its two parts: with attention that hides everything, what is left is the exchange
            exchange = cost.exposed(nothing, inf), cost.exposed(token, inf)
            both = cost.exposed(nothing, 0.0), cost.exposed(token, 0.0)
            ring = both[0] - exchange[0], both[1] - exchange[1]
            return half, layers * exchange[0], layers * (exchange[1] - exchange[0]), layers * ring[0], layers * (ring[1] - ring[0])
        constant, one = cost.exposed(nothing, 0.0), cost.exposed(token, 0.0)
        if kind == "ring":
            return half, 0.0, 0.0, layers * constant, layers * (one - constant)
        return half, layers * constant, layers * (one - constant), 0.0, 0.0

    def seconds(self, tokens: int, squares: float) -> float:
        """Seconds of a pack with its cheapest kind and recompute; inf when it fits at no level. Its sum is padded here."""
        grow = -tokens % self.grain
        if grow:
            tokens += grow
            squares += grow * grow
        if tokens > self.most:
            return inf
        least, attention = inf, 0.0
        for half, constant, each, hidden_constant, hidden_each in self.kinds:
            own = self.attention * (squares + half * tokens)
            hidden = hidden_constant + hidden_each * tokens
            total = constant + each * tokens + (own if own > hidden else hidden)
            if total < least:
                least, attention = total, own
        seconds = self.fixed + self.slope * tokens + least
        if tokens > self.plain or not self.prices.limits.free:
            seconds += self.prices.least_recompute(tokens / self.cp, attention / (1 + BACKWARD_ATTENTION), least - attention)[0]
        return seconds

    def choose(self, tokens: int, squares: float) -> tuple[float, str, Recompute] | None:
        """(seconds, kind, recompute) of a pack whose sum is padded: the cheapest, as `seconds` prices it; None when it fits at no level."""
        if tokens > self.most:
            return None
        found: list[tuple[float, float, str]] = []
        for (half, constant, each, hidden_constant, hidden_each), kind in zip(self.kinds, self.names, strict=True):
            own = self.attention * (squares + half * tokens)
            found.append((constant + each * tokens + max(own, hidden_constant + hidden_each * tokens), own, kind))
        total, own, kind = min(found, key=lambda one: one[0])
        seconds, choice = self.fixed + self.slope * tokens + total, Recompute()
        if tokens > self.plain or not self.prices.limits.free:
            extra, level, layers = self.prices.least_recompute(tokens / self.cp, own / (1 + BACKWARD_ATTENTION), total - own)
            seconds, choice = seconds + extra, Recompute(level, layers)
        return None if seconds == inf else (seconds, kind, choice)

    def divided(self, tokens: int, squares: float) -> tuple[int, float]:
        """(count, seconds): into how many equal packs so many tokens are best divided, and the sum of their times."""
        if tokens <= self.full:
            return 1, self.seconds(tokens, squares)
        full = self.full or 1
        enough = -(-tokens // full)
        fewest = max(1, -(-tokens // (self.cap or 1)), enough // 2)
        best, least = 0, inf
        step = max(1, (enough - fewest) // MOST_COUNTS)
        for count in range(fewest, max(fewest, enough) + 1 + step, step):
            seconds = count * self.seconds(-(-tokens // count), squares / count)
            if seconds < least:
                best, least = count, seconds
        return (best, least) if best else (1, self.seconds(tokens, squares))


class Prices:
    """Prices of packs under a run's limits when groups of the given sizes are allowed, all of which have communicators in memory."""

    def __init__(self, basis: Basis, limits: Limits, sizes: Sequence[int]) -> None:
        self.basis, self.limits, self.sizes = basis, limits, tuple(sizes)
        self.cost, self.memory = CostModel(basis), MemoryModel(basis)
        self.budget = self.memory.budget(0, sum(cp > 1 for cp in sizes))
        stored, model = self.memory.token_bytes, basis.model
        self._stored, self._saved = stored["none"], [(level, stored["none"] - stored[level]) for level in LEVELS[1:]]
        self._chunk, self._logit = basis.profile.loss_chunk, model.vocab * LOGIT_BYTES / basis.layout.tp
        self._rates = {"selective": SELECTIVE_SHARE * self.cost.linear_second, "mlp": self.cost.mlp_second}
        self._most: dict[Recompute, int] = {}
        self._groups: dict[tuple[int, bool], Group] = {}

    def tokens_of(self, choice: Recompute) -> int:
        """Most local tokens with this recompute."""
        if choice not in self._most:
            self._most[choice] = self.memory.most_tokens(choice.level, choice.layers, [self.budget])
        return self._most[choice]

    def group(self, cp: int, lane: int = 0) -> Group:
        """The prices of a group of `cp` lanes that starts at `lane`."""
        key = cp, self.cost.in_node(lane, cp)
        found = self._groups.get(key)
        if found is None:
            found = self._groups[key] = Group(self, *key)
        return found

    def least_recompute(self, local: float, attention: float, exposed: float) -> tuple[float, str, int]:
        """(seconds added, level, layers) of the cheapest recompute with which `local` tokens fit; inf seconds if they fit at none.

        attention, exposed: seconds of all layers, forward and forward + backward.
        """
        layers, ramped = self.basis.model.layers, local + self.cost.half
        full = self.cost.linear_second * ramped + (attention + 0.5 * exposed) / layers
        if not self.limits.free:
            choice = self.limits.choices[0]
            each = full if choice.level == "full" else self._rates.get(choice.level, 0.0) * ramped
            return each * choice.layers if local <= self.tokens_of(choice) else inf, choice.level, choice.layers
        over = local * layers * self._stored + min(local, self._chunk) * self._logit - self.budget
        least, best, most = inf, "none", 0
        for level, saved in self._saved:
            if level == "full":
                each, missing = full, over + local * self._stored  # a layer of none passes through memory
            else:
                each, missing = self._rates[level] * ramped, over
            count = ceil(missing / (local * saved) - LAST_BITS)
            if count < 1:
                count = 1
            if count <= layers and each * count < least:
                least, best, most = each * count, level, count
        return least, best, most

    def microbatch(self, documents: Sequence[int], lengths: Sequence[int], cp: int, lane: int, slot: int = 0) -> tuple[Microbatch, float] | None:
        """A finished pack, and its seconds unrounded; None when it fits at no level."""
        padded = pad([lengths[document] for document in documents], cp, self.basis.align)
        tokens = sum(padded)
        found = self.group(cp, lane).choose(tokens, sum([length * length for length in padded]))
        if found is None:
            return None
        seconds, kind, choice = found
        need = self.memory.need(0, tokens / cp, choice)
        return Microbatch(slot, lane, cp, tuple(documents), padded, choice, kind, round_seconds(seconds), round_bytes(need)), seconds
