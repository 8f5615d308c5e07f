"""Which images and clips are encoded in a step, and whose encoder outputs are kept.

As vLLM's `_try_schedule_encoder_inputs` and `EncoderCacheManager` (0.33; the names of the methods
in brackets are theirs). An item is encoded, whole, in the first step that computes a token of it.
That takes encoder tokens of the step's compute budget, and as many places in a cache of encoder
outputs; where either lacks, the request computes the tokens before the item and no more. An output
is kept for the requests that refer to it until the item is in their KV caches, and then until its
place is wanted, the longest unused going first: an item whose output is there is not encoded again.

Outputs that were made elsewhere are `stored` (an ECConnector's has_cache_item). One that is wanted
is loaded in place of being encoded. It takes its places in the cache, and none of the budget; but
an item that is larger than what is left of the budget waits, stored or not.
"""

from collections import Counter
from collections.abc import Collection, Container, Sequence
from typing import Any, NamedTuple, Self

from simulator.core.engine_config import EngineConfig
from simulator.core.request import Media, Request, Step, by_admission, items_of
from simulator.costs.cost_model import CostModel
from simulator.features.images.work import KEY, EncoderWork, work_of
from simulator.models.gpus import Gpu
from simulator.models.spec import ModelSpec
from simulator.schedulers.feature import Feature
from simulator.schedulers.interface import SchedulerInterface


class EncoderLimits(NamedTuple):
    """What an engine's encoder has, by vLLM's names; the two sizes in encoder tokens."""

    encoder_cache_size: int
    max_num_encoder_input_tokens: int  # of a step
    disable_chunked_mm_input: bool = False
    limit_mm_per_prompt: Sequence[
        tuple[str, int]
    ] = ()  # by modality; one that is not there has none


class Images(Feature):
    """The encoder's budget in each step and its cache.

    With `_longest_chunk`, in tokens, an item at which a chunk begins is not chunked, either, where
    none is; so none may be longer. 0: it is, as in vLLM before 0.33.
    """

    key = KEY
    lacking = "has no encoder", "has"
    live = "encodes no images"

    def __init__(self, limits: EncoderLimits) -> None:
        self._longest_chunk, self._overlaps = 0, False
        size, budget, self.whole, self.most = limits
        self.size, self.budget = size, budget
        self.left = budget  # of this step
        self.free = size
        self.reclaimable = size  # free, or of outputs that nobody refers to
        self.stored: Container[Media] = ()  # outputs that need but be loaded
        self.alone = False  # no language model runs beside it
        self.held: dict[Request, set[int]] = {}
        """Items, by their numbers, to whose outputs a request refers."""
        self._users: dict[Media, set[Request]] = {}  # of each output in the cache
        self._unused: dict[Media, int] = {}  # tokens of those without one, the oldest first
        self._evicted: list[Media] = []  # in this step
        self._encoded: dict[Request, list[int]] = {}  # in this step
        self._loaded: dict[Request, list[int]] = {}  # likewise
        self._cut = 0  # requests that got fewer tokens in this step
        self._wanted: list[int] = []  # of the request asked for last: items to be encoded,
        self._there: list[int] = []  # those to be loaded,
        self._repeated: list[int] = []  # those that are another time in its prompt,
        self._left = budget  # and what is left of the budget then

    @classmethod
    def requires(cls, engine: EngineConfig) -> str:
        takes_any = engine.multimodal_config is not None and engine.multimodal_config.takes_any
        return cls.key if takes_any else ""

    @classmethod
    def of(cls, engine: EngineConfig, model: ModelSpec) -> Self:
        keys = engine.multimodal_config
        assert keys is not None
        tokens = max(engine.max_num_batched_tokens, model.largest_image)
        limits = EncoderLimits(
            keys.encoder_cache_size or tokens,
            keys.max_num_encoder_input_tokens or tokens,
            keys.disable_chunked_mm_input,
            tuple(keys.limit_mm_per_prompt.items()),
        )
        return cls(limits)

    @classmethod
    def cost(cls, inner: CostModel, engine: EngineConfig, model: ModelSpec, gpu: Gpu) -> CostModel:
        """Put what encoding takes on a cost: by a table of the user's, else by roofline."""
        from simulator.features.images.cost import EncoderCost, encoder_cost

        keys = engine.multimodal_config
        if keys is None or not keys.takes_any:
            return inner
        if keys.encoder_seconds is None:
            return encoder_cost(inner, model, gpu, engine.tensor_parallel_size)
        tokens, seconds = zip(*keys.encoder_seconds, strict=True)
        return EncoderCost(inner, tuple(map(int, tokens)), seconds)

    def attach(self, scheduler: Any) -> None:
        rules = scheduler.rules
        if rules.keeps_first_item_whole:
            longest = scheduler.long_prefill_token_threshold or scheduler.max_num_batched_tokens
            self._longest_chunk = longest
        self.passes_over = rules.passes_over_items and not scheduler.keeps_books
        self._overlaps = scheduler.traits.overlaps

    @property
    def room(self) -> str:
        return "with images too large or too many for the encoder"

    @property
    def pending(self) -> bool:
        return bool(self.held)

    def fits(self, request: Request) -> bool:
        """Say whether a prompt's items are few enough, and each can ever be encoded."""
        items = items_of(request.segments)
        most, counts = min(self.size, self.budget), Counter(item.media.modality for item in items)
        if self.whole and self._longest_chunk:
            most = min(most, self._longest_chunk)
        return all(item.end - item.start <= most for item in items) and all(
            counts[modality] <= limit for modality, limit in self.most
        )

    def on_add(self, request: Request) -> None:
        request.items = items_of(request.segments)

    def walks(self, partial: Sequence[Request]) -> bool:
        """Say whether a part of an image or a clip is in no KV cache."""
        return any(one.items and one.items[-1].end > one.computed for one in partial)

    def tokens(self, request: Request, start: int, tokens: int) -> int:
        self._wanted, self._repeated = wanted, repeated = [], []
        self._there = there = []
        asked: set[Media] = set()
        self._left, end, needed = self.left, start + tokens, 0
        for number, item in enumerate(request.items):
            if item.end <= start:
                continue
            if item.start >= end:
                break
            first = start if self._longest_chunk else start + 1
            if self.whole and first <= item.start and end < item.end:
                return item.start - start
            if item.media in asked:
                repeated.append(number)
            elif not self._refer(request, number):
                size = item.end - item.start
                if size > self._left or not self._make_room(needed + size):
                    self._cut += 1
                    return max(item.start - start, 0)
                needed += size
                asked.add(item.media)
                if item.media in self.stored:
                    there.append(number)
                else:
                    self._left -= size
                    wanted.append(number)
        return tokens

    def _refer(self, request: Request, number: int) -> bool:
        """Let a request refer to an output, if that is there (check_and_update_cache)."""
        media = request.items[number].media
        users = self._users.get(media)
        if users is None:
            return False
        if not users:
            self.reclaimable -= self._unused.pop(media)
        users.add(request)
        self.held.setdefault(request, set()).add(number)
        return True

    def _make_room(self, tokens: int) -> bool:
        """Evict outputs that nobody refers to, if that makes room (can_allocate)."""
        if tokens > max(self.free, self.reclaimable):
            return False
        while tokens > self.free:
            media = next(iter(self._unused))
            self.free += self._unused.pop(media)
            del self._users[media]
            self._evicted.append(media)
        return True

    def on_schedule(self, request: Request) -> None:
        """Encode or load what `tokens` has found of a request (_allocate_encoder_inputs)."""
        for number in (*self._wanted, *self._there):
            item = request.items[number]
            size = item.end - item.start
            self._users.setdefault(item.media, set()).add(request)
            self.held.setdefault(request, set()).add(number)
            self.free -= size
            self.reclaimable -= size
        if self._wanted:
            self._encoded[request] = self._wanted
            self.left = self._left  # as in vLLM, also where a victim's was given back meanwhile
        if self._there:
            self._loaded[request] = self._there
        for number in self._repeated:
            self._refer(request, number)

    def on_withdraw(self, request: Request) -> None:
        """Give back the budget of a victim that was to compute in this step."""
        for number in self._encoded.pop(request, ()):
            item = request.items[number]
            self.left += item.end - item.start

    def on_leave(self, request: Request) -> None:
        """Let a request refer to nothing any more (free)."""
        for number in list(self.held.get(request, ())):
            self._let_go(request, number)

    def _let_go(self, request: Request, number: int) -> None:
        """Let a request refer to an item no more (free_encoder_input)."""
        held, item = self.held[request], request.items[number]
        held.discard(number)
        if not held:
            del self.held[request]
        users = self._users.get(item.media)
        if not users or any(request.items[other].media == item.media for other in held):
            return
        users.discard(request)
        if not users:
            self._unused[item.media] = item.end - item.start
            self.reclaimable += item.end - item.start

    def annotate(self, step: Step) -> None:
        """Let the step just scheduled say what it encodes, and begin the next."""
        chunks = (*step.prefills, *(step.singles or ()))
        users = [chunk.request for chunk in chunks if chunk.request.items]
        if step.decodes > len(step.singles or ()):
            users += [request for request in self.held if request.joined >= 0]
        users.sort(key=by_admission)
        if users or self._evicted or self._cut:
            evicted = [media for media in self._evicted if media not in self._users]
            work = EncoderWork(self._encoded, evicted, users, self._cut, self._loaded)
            step.add_work(KEY, work)
        self._encoded, self._loaded, self._evicted = {}, {}, []
        self._cut, self.left = 0, self.budget

    def count(self, step: Step, tokens: int) -> int:
        if not self.alone or (work := work_of(step)) is None:
            return tokens
        return sum(work.sizes())  # what is stored already goes through no model

    def on_commit(self, step: Step, ending: Collection[Request]) -> None:
        """Let go of what is in the KV cache, as a step's outcome is known (_free_encoder_inputs).

        `ending` are those whose last token it brings. Where steps overlap, the last token of a
        prompt counts when the token after it has come out.
        """
        work = work_of(step)
        for request in work.users if work else ():
            if request in ending:
                self.on_leave(request)
                continue
            computed = request.computed
            if self._overlaps and request.first_token < 0:
                computed = min(computed, request.prompt_tokens - 1)
            for number in list(self.held.get(request, ())):
                if request.items[number].end <= computed:
                    self._let_go(request, number)


def encoder_of(scheduler: SchedulerInterface) -> Images:
    """Return the encoder of an engine that has one."""
    return next(one for one in scheduler.features if isinstance(one, Images))
