"""Who may be admitted: rules of free blocks, and vLLM's interval between steps with prompts."""

from collections.abc import Sequence

from simulator.core.request import Request
from simulator.kv_cache.block_manager import BlockCounter
from simulator.schedulers.limits import Limits
from simulator.schedulers.running_requests import RunningRequests
from simulator.util.errors import ScenarioError


class Admission:
    """Admission by free blocks.

    - A request needs blocks for its whole prompt (`scheduler_reserve_full_isl`, as vLLM), or else
      for its first chunk.
    - While others run, a share `watermark` of all blocks stays free (vLLM), and `min_decode_blocks`
      for each request that runs, the new one included: room to decode. With
      `min_decode_blocks_scope` newcomer they stay free for the new one alone, which is a watermark
      in blocks.
    - With `reserve_output_tokens` a request is admitted only if prompt and answer fit beside all
      that is reserved for the running ones, so that nobody need be preempted: `max_tokens` is what
      its client allows, or where that says nothing the very length of the answer (Orca,
      OSDI 2022, section 4.2; TGI; TensorRT-LLM's GUARANTEED_NO_EVICT), `max_model_len` as much as
      the engine lets anybody generate, a number the same for all. Blocks are reserved, not taken,
      which admits the same requests. A request whose answer outgrows its reservation goes on as
      without one. No reservation is of more than the whole cache.

    Raises ValueError where a number is below 0.
    """

    def __init__(self, blocks: BlockCounter, limits: Limits) -> None:
        for name in ("min_decode_blocks", "reserve_output_tokens"):
            value = getattr(limits, name)
            if isinstance(value, int) and value < 0:
                raise ScenarioError(f"engine.{name}", f"must be at least 0, not {value}")
        self.blocks = blocks
        self.max_model_len = limits.max_model_len
        self.whole_prompt = limits.scheduler_reserve_full_isl
        self.watermark_blocks = int(limits.watermark * (blocks.usable + 1))
        self.min_decode_blocks = limits.min_decode_blocks
        self.for_all = limits.min_decode_blocks_scope == "running"
        self.output_tokens = limits.reserve_output_tokens

    def lacking(
        self, request: Request, hits: Sequence[int], tokens: int, running: int, need: int = 0
    ) -> int:
        """Count the blocks that lack to admit a request beside so many others; 0: it may run.

        It begins with `tokens` tokens; `hits` is what `blocks.match` has just found of it, `need`
        what the others will take before.
        """
        blocks = self.blocks
        spare = need
        if running:
            many = running + 1 if self.for_all else 1
            spare += self.watermark_blocks + self.min_decode_blocks * many
        if self.whole_prompt:
            known = request.padding + request.prompt_tokens + request.generated
            missing = blocks.missing_whole(known, tokens, hits)
        else:
            missing = blocks.missing(tokens, hits)
        lacking = missing + spare - blocks.free
        if self.output_tokens is not None:
            whole = blocks.missing(self._reservation(request), hits)
            lacking = max(lacking, whole - blocks.unreserved)
        return lacking if lacking > 0 else 0

    def reserve(self, request: Request) -> None:
        """Reserve blocks for a request that is admitted, if answers are reserved for."""
        if self.output_tokens is not None:
            self.blocks.reserve(request, self._reservation(request))

    def _reservation(self, request: Request) -> int:
        """Return the tokens for which a request has blocks reserved."""
        answer = self.output_tokens
        if answer == "max_tokens":
            answer = request.max_tokens or request.output_limit
        elif answer == "max_model_len" or answer is None:
            answer = self.max_model_len
        tokens = min(request.prompt_tokens + answer, self.max_model_len)
        whole = self.blocks.usable * self.blocks.block_size
        return max(request.known, min(tokens, whole))


class PrefillInterval:
    """vLLM's `prefill_schedule_interval`: so many steps lie between two that carry prefill.

    So decodes run undisturbed for a while, unless that would keep requests waiting that do not fit
    anyway. Ranks in lock-step carry prefill in the same steps, every `interval`th of all of them:
    their loop sets `joint_steps` before each step (`DPEngineCoreProc._should_throttle_prefills`).
    """

    def __init__(self, interval: int, *, admits_cached: bool = True) -> None:
        self.interval = interval
        self.admits_cached = admits_cached  # a prompt that lacks one token is no prefill
        self.joint_steps: int | None = None  # of all ranks before this one; None: no lock-step
        self.held = False  # in this step, prefill is held back
        self.executed = 0  # steps with tokens
        self._carries = False  # this step, prefill
        self._backed_up = False  # the last round of admissions left somebody waiting
        self._last = -interval  # number of the last step that carried prefill

    @property
    def left(self) -> int:
        """Steps for which prefill is held, the one just scheduled among them."""
        if self.joint_steps is not None:
            return self.interval - self.joint_steps % self.interval
        return self.interval - self.executed + self._last

    def begin(self, running: RunningRequests) -> None:
        """Decide for a step whether prefill is held."""
        self._carries = False
        if self.joint_steps is not None:
            early = self.joint_steps % self.interval > 0
        else:
            early = self.executed + 1 - self._last < self.interval
        self.held = early and not self._backed_up and running.may_decode()

    def holds(self, request: Request) -> bool:
        """Say whether a running request must wait because prefill is held."""
        return self.held and request.mid_prefill

    def refuses(self, request: Request, start: int) -> bool:
        """Say whether one that waits, its first `start` tokens cached, must wait on for that."""
        return self.held and (start < request.known - 1 or not self.admits_cached)

    def scheduled(self, request: Request, prefill: bool) -> None:
        """Take note that this step computes tokens of a request; `prefill`: of its prompt."""
        self._carries |= prefill
        request.mid_prefill = request.pending > 0

    def end(self, executed: bool, admitted: bool, waiting: bool) -> None:
        """Take note of the step; `admitted`: it could admit somebody.

        `waiting`: somebody who may be admitted was left.
        """
        self.executed += executed
        if admitted and not self.held:
            self._backed_up = waiting
        if self._carries:
            self._last = self.executed
