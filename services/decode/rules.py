"""Rules of outputs: opened when a lease comes, turned into masks beside the model's step.

    lease ──▶ compile thread ──▶ OutputRuler ──step──▶ mask thread: tokens taken, next mask ──▶ sampling

Owns this worker's compiler and its two threads, so that neither a hostile schema nor a mask holds up a step or the
event loop. Knows no leases. Where an output goes on after a failover, its first mask replays the tokens so far.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias

from meshfire.errors import BadInput, CheckpointError, MeshfireError
from meshfire.grammar.compiler import GrammarCompiler
from meshfire.grammar.constraint import Constraint, Mask
from meshfire.grammar.rules import OutputRule
from meshfire.text.tokenizer import load_tokenizer
from meshfire.text.vocabulary import Vocabulary
from services.decode.ending import Ending
from services.decode.wanted import WantedText, Wish

NextMask: TypeAlias = "Future[Mask | None]"


class OutputRuler:
    """Masks of one output. `may_break`: tokens are forced on it (test hook); one that breaks the rule ends it."""

    def __init__(
        self, constraint: Constraint, vocabulary: Vocabulary, thread: ThreadPoolExecutor, *, may_break: bool
    ) -> None:
        self._constraint = constraint
        self._vocabulary = vocabulary
        self._thread = thread
        self._may_break = may_break
        self._broken = False

    def next_mask(self, output_ids: Sequence[int]) -> NextMask:
        """Soon: which tokens may follow these, which are the whole output; asking twice is no error."""
        return self._thread.submit(self._mask_after, output_ids)

    def masks_along(self, output_ids: Sequence[int], draft_ids: Sequence[int]) -> Future[list[Mask | None]]:
        """Soon: the masks before each draft and after the last, up to the first draft that is forbidden."""
        return self._thread.submit(self._masks_along, output_ids, draft_ids)

    def wish(self, wanted: WantedText, output_ids: Sequence[int]) -> Wish:
        """Test hook: what the model would like to say next."""
        rest = wanted.rest_after(self._vocabulary, output_ids)
        return Wish(self._vocabulary, rest, self._constraint.end_token_ids)

    def wish_ends_before(self, wanted: WantedText, output_ids: Sequence[int]) -> Ending | None:
        """Test hook: the end for length, once all is said."""
        return wanted.ending_before(self._vocabulary, output_ids)

    def _mask_after(self, output_ids: Sequence[int]) -> Mask | None:
        return None if self._is_broken_by(output_ids) else self._constraint.mask()

    def _masks_along(self, output_ids: Sequence[int], draft_ids: Sequence[int]) -> list[Mask | None]:
        if self._is_broken_by(output_ids):
            return [None] * (len(draft_ids) + 1)
        return self._constraint.masks_along(draft_ids)

    def _is_broken_by(self, output_ids: Sequence[int]) -> bool:
        """Take the tokens that are new."""
        try:
            for token_id in output_ids[self._constraint.num_tokens :] if not self._broken else ():
                self._constraint.accept(token_id)
        except MeshfireError:
            if not self._may_break:
                raise
            self._broken = True
        return self._broken


class RuleBook:
    """`compiler` None: a model without a tokenizer of its own, for which every rule is refused."""

    def __init__(self, compiler: GrammarCompiler | None) -> None:
        self._compiler = compiler
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="rules-compile")
        self._masking = ThreadPoolExecutor(1, thread_name_prefix="rules-mask")

    @classmethod
    def load(cls, model_dir: Path, vocab_size: int) -> RuleBook:
        """Read the model's vocabulary. Blocking; takes a second for a large one, so it comes before any stream."""
        try:
            compiler = GrammarCompiler(load_tokenizer(model_dir), vocab_size)
        except CheckpointError:
            return cls(None)
        compiler.warm_up()
        return cls(compiler)

    async def open(self, rule: OutputRule, *, in_reasoning: bool, may_break: bool) -> OutputRuler:
        """A rule at its start. Raises BadInput for one that cannot be enforced."""
        if self._compiler is None:
            raise BadInput("this worker's model has no tokenizer, so no rule can bind its outputs", field="rule")
        loop = asyncio.get_running_loop()
        program = await loop.run_in_executor(self._compiling, self._compiler.compile, rule)
        constraint = Constraint(program, in_reasoning=in_reasoning)
        return OutputRuler(constraint, self._compiler.vocabulary, self._masking, may_break=may_break)

    def close(self) -> None:
        """End the threads; a rule that compiles now is finished first."""
        self._compiling.shutdown(wait=True, cancel_futures=True)
        self._masking.shutdown(wait=True, cancel_futures=True)
