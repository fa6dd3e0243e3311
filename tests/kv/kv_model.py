"""Operations on a manager, in any order; what each does is checked in kv_checked_manager.py."""

import pytest
from kv_arena import ids_of
from kv_checked_manager import MAX_SEQUENCES, CheckedManager
from kv_helpers import Model

from octavo.errors import InvalidArgumentError


class ModelledManager(CheckedManager):
    """Operations on a manager, each with what must come of it."""

    # ---- sequences come ----

    def add(self, tokens: list[int], salt: bytes, serve: bool, keep: bool) -> None:
        if len(self.models) < MAX_SEQUENCES:
            blocks = self.manager.new_sequence(salt, is_kept=keep)
            model = Model(blocks, salt, list(tokens), self.free_row())
            self.models.append(model)
            if serve:
                self.serve(model)

    def match(self, pick: int) -> None:
        model = self.pick(pick)
        if model.blocks.block_ids:
            with pytest.raises(InvalidArgumentError):
                self.manager.match_prefix(model.blocks, model.tokens, 0)
        else:
            self.attach(model)

    def fork(self, pick: int, length: int) -> None:
        parent = self.pick(pick)
        if len(self.models) < MAX_SEQUENCES:
            self.fork_at(parent, length % (parent.filled + 1))

    # ---- sequences grow ----

    def append(self, pick: int, tokens: list[int], serve: bool) -> None:
        model = self.pick(pick)
        if len(model.tokens) < 24:
            model.tokens.extend(tokens)
        if serve:
            self.serve(model)

    def compute(self, pick: int, chunk: int, reserve: int, commit: bool) -> None:
        model = self.pick(pick)
        stop = min(model.written + chunk, len(model.tokens))
        if self.allocate(model.blocks, stop + reserve):
            self.check_alone(model, stop)
            self.write(model, stop)
            if commit:
                self.commit_written(model)

    def commit(self, pick: int) -> None:
        self.commit_written(self.pick(pick))

    def prefill(self, pick: int, chunk: int, any_part: bool) -> None:
        """Compute a chunk of a prompt, with as much room in windows as that takes."""
        model = self.pick(pick)
        if not model.blocks.block_ids:
            self.attach(model)
        self.hide(model)
        stop = self.widen(model, chunk, any_part=any_part)
        if stop >= 0:
            self.publish(model, stop)
            self.write(model, stop)
            self.commit_written(model)

    def hide_some(self, pick: int) -> None:
        self.hide(self.pick(pick))

    def step(self, picks: list[int], chunk: int, ahead: bool) -> None:
        """Schedule several sequences, each of which may attach to what those before it are to compute.

        One step ahead, all hide what their next token does not see before anything is computed, and others
        may take the blocks.
        """
        models = list({self.pick(pick): None for pick in picks})
        scheduled: list[tuple[Model, int, list[list[int]]]] = []
        for model in models[: 2 if ahead else None]:
            self.schedule(model, chunk, scheduled)
        if ahead:
            for model, stop, _ in scheduled:
                self.hide_before(model, stop)
            for model in models[2:]:
                self.schedule(model, chunk, scheduled)
        for model, stop, ids in scheduled:
            self.write(model, stop, ids)
        for model, _, _ in scheduled:
            self.check_contents(model)
            self.commit_written(model)

    def schedule(self, model: Model, chunk: int, scheduled: list[tuple[Model, int, list[list[int]]]]) -> None:
        if not model.blocks.block_ids:
            self.attach(model)
            coming = {b for m, _, _ in scheduled for b in m.blocks.block_ids[m.written // self.size :]}
            self.seen["attached at once"] += not coming.isdisjoint(model.blocks.block_ids)
        stop = min(model.written + chunk, len(model.tokens))
        if self.allocate(model.blocks, stop):
            self.check_alone(model, stop)
            self.publish(model, stop)
            scheduled.append((model, stop, [list(ids) for ids in ids_of(model.blocks)]))
        self.manager.check_invariants()

    def fail_step(self, picks: list[int]) -> None:
        """Schedule sequences whose tokens are never computed: everyone has to start over."""
        for pick in picks:
            model = self.pick(pick)
            if self.allocate(model.blocks, len(model.tokens)):
                self.publish(model, len(model.tokens))
        num_evictions = self.manager.stats().num_evictions
        self.manager.reset()
        for model in self.models:
            model.blocks = self.manager.new_sequence(model.salt)
            model.written = model.filled = model.seen_from = model.known_from = 0
            for tables in self.tables:
                tables.release(model.row)
        assert self.manager.stats().num_free == self.manager.num_blocks
        assert self.manager.stats().num_evictions == num_evictions
        self.arena.cells.clear()

    # ---- sequences shrink and go ----

    def truncate(self, pick: int, length: int) -> None:
        model = self.pick(pick)
        num_tokens = length % (min(len(model.tokens), model.blocks.reach) + 1)
        before = self.snapshot()
        try:
            self.manager.truncate(model.blocks, num_tokens)
        except InvalidArgumentError:
            self.seen["truncate refused"] += 1
            assert num_tokens % self.size or num_tokens < model.seen_from
            assert num_tokens < max(model.filled, model.seen_from)
            assert self.snapshot() == before
            if self.fork_at(model, num_tokens):  # the way out that the message names
                self.drop(model)
            return
        if num_tokens < model.written:
            del model.tokens[num_tokens:]
        model.written = min(model.written, num_tokens)
        model.filled = min(model.filled, num_tokens)
        model.seen_from = min(model.seen_from, num_tokens)

    def preempt(self, pick: int) -> None:
        self.release(self.pick(pick))

    def finish_or_abort(self, pick: int) -> None:
        if len(self.models) > 1:
            self.drop(self.pick(pick))

    def evict(self, share: int) -> None:
        hog = self.manager.new_sequence()
        num_pages = self.manager.num_free_blocks // share
        tokens = self.layout.tokens_per_page
        assert self.manager.allocate_part(hog, num_pages * tokens, 0) == 0
        assert self.manager.num_free_blocks == self.manager.stats().num_free + self.manager.stats().num_cached
        if share == 1:
            assert self.manager.stats().num_cached == self.manager.num_free_blocks == 0
        assert not self.allocate(hog, (num_pages + self.manager.num_free_blocks + 1) * tokens)
        self.manager.free(hog)

    def reset(self) -> None:
        num_cached = self.manager.stats().num_cached
        assert self.manager.reset_prefix_cache() == num_cached
