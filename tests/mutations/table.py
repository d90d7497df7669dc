"""One-line mutations and the test that must notice each.

Numbers are the invariants of DESIGN section 3. Those of decode's own half (2, 4) have more in tests/actors.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    """A line of a file (from the repository's root), what it becomes, and the pytest id that must fail."""

    what: str
    file: str
    line: str
    mutant: str
    test: str


ENGINE = "runtime/engine/engine.py"
FLIGHT = "runtime/engine/flight.py"
PROBE = "runtime/engine/probe.py"
THREAD = "runtime/mlx_thread.py"
BATCH = "runtime/engine/kv/batch.py"
GROUP = "runtime/engine/kv/group.py"
PLANE = "runtime/engine/kv/plane.py"
SOLO = "runtime/engine/kv/solo.py"
STAGED = "runtime/engine/kv/staged.py"
STORES = "runtime/engine/kv/stores.py"
VIEW = "runtime/engine/kv/view.py"
DECODE = "actors/decode_core.py"
SHELF = "runtime/engine/page_shelf.py"
PAGES = "runtime/engine/kv/pages.py"
TREE = "runtime/prefix_tree.py"
MATCH = "runtime/prefix_match.py"
PAGE_FILE = "runtime/disk/page_file.py"
TIER = "runtime/disk/tier.py"

MUTATIONS = (
    Mutation(
        "1: lengths do not advance at launch",
        GROUP,
        "        self.lengths[self.live] += tokens\n",
        "        self.lengths[self.live] += 0\n",
        "engine/test_invariants.py::test_invariant_1_lengths_advance_at_launch_and_tokens_are_filled_at_commit",
    ),
    Mutation(
        "1: tokens are read before the next launch",
        ENGINE,
        "        order = self._batch.order\n        if not order:\n",
        "        order, _ = self._batch.order, self._read(emit)\n        if not order:\n",
        "engine/test_invariants.py::test_invariant_1_lengths_advance_at_launch_and_tokens_are_filled_at_commit",
    ),
    Mutation(
        "1: a failed row gets a legal token",
        FLIGHT,
        "by_row.get(row, PLACEHOLDER)",
        "by_row.get(row, 0)",
        "engine/test_invariants.py::test_invariant_1_rows_that_failed_get_the_placeholder_and_it_is_no_token",
    ),
    Mutation(
        "1: the placeholder is a legal token",
        "runtime/request.py",
        "PLACEHOLDER = -1\n",
        "PLACEHOLDER = 3\n",
        "engine/test_invariants.py::test_invariant_1_rows_that_failed_get_the_placeholder_and_it_is_no_token",
    ),
    Mutation(
        "2: a finished row's last token in flight counts",
        DECODE,
        "            if self._rows.get(request.row) is not row:\n                continue\n"
        "            if request.state is finished:\n",
        "            if request is None:\n",
        "actors/test_decode_invariants.py"
        "::test_invariant_2_a_stopped_row_is_in_flight_once_more_and_that_token_is_dropped",
    ),
    Mutation(
        "3: a row that is not there may leave",
        ENGINE,
        "        if row in self._batch.order:\n            self._batch.leave(row)\n",
        "        self._batch.leave(row)\n",
        "engine/test_invariants.py::test_invariant_1_rows_that_failed_get_the_placeholder_and_it_is_no_token",
    ),
    Mutation(
        "3: a row gets the token of the one whose place it took",
        ENGINE,
        "        if not self._fresh and order == self._token_order:\n",
        "        if len(order) == len(self._token_order):\n",
        "engine/test_invariants.py"
        "::test_invariant_3_a_row_that_leaves_keeps_the_token_in_flight_though_another_takes_its_place",
    ),
    Mutation(
        "3: a page is freed twice",
        SHELF,
        "            self._pages.pop(page, None)\n",
        "            self._pages.pop(page)\n",
        "engine/test_invariants.py::test_invariant_3_pages_are_freed_once_and_their_readers_keep_them",
    ),
    Mutation(
        "4: cancels do not wait for the commit",
        DECODE,
        "        if not any(flight.rows for flight in self._flights):\n",
        "        if rows is not None:\n",
        "actors/test_decode_invariants.py::test_invariant_4_a_cancel_takes_effect_between_launch_and_commit_only",
    ),
    Mutation(
        "5: a join waits for the step under way",
        ENGINE,
        "                self._join(join)\n",
        "                _ = self._commit(emit), self._join(join)\n",
        "engine/test_invariants.py::test_invariant_5_a_row_joins_without_a_barrier",
    ),
    Mutation(
        "6: the forward waits too",
        ENGINE,
        "        self._submit([logits], emit)\n",
        "",
        "engine/test_constraints.py::test_invariant_6_only_the_sample_waits",
    ),
    Mutation(
        "6: build ahead submits before it has read",
        ENGINE,
        "            self._read(emit)\n        mx.async_eval(*arrays)\n",
        "            pass\n        mx.async_eval(*arrays)\n",
        "engine/test_constraints.py::test_invariant_6_only_the_sample_waits",
    ),
    Mutation(
        "6: masks are filled before the last token is accepted",
        ENGINE,
        "        self._commit(emit)\n        allowed = self._allowed(order, plan, emit)\n",
        "        allowed = self._allowed(order, plan, emit)\n",
        "engine/test_constraints.py::test_invariant_6_tokens_respect_the_masks_and_neighbours_do_not_notice",
    ),
    Mutation(
        "6: masks are not used",
        ENGINE,
        "                words[place] = mask\n",
        "                pass\n",
        "engine/test_constraints.py::test_invariant_6_tokens_respect_the_masks_and_neighbours_do_not_notice",
    ),
    Mutation(
        "6: a row whose constraint failed is sampled still",
        ENGINE,
        "        return allowed, [row if row in alive else None for row in order]\n",
        "        return allowed, order\n",
        "engine/test_constraints.py::test_invariant_6_a_failing_constraint_ends_only_its_row",
    ),
    Mutation(
        "7: inputs are taken by the places of today",
        ENGINE,
        "        known_rows = [*self._token_order, *self._fresh]\n",
        "        known_rows = [*order[: len(self._token_order)], *self._fresh]\n",
        "engine/test_overlap_modes.py::test_invariant_7_overlap_changes_no_token",
    ),
    Mutation(
        "7: a window is one token too narrow",
        VIEW,
        "            visible = np.minimum(visible, plane.window - 1)\n",
        "            visible = np.minimum(visible, plane.window - 2)\n",
        "engine/test_equality.py::test_busy_batch_equals_mlx_lm[gemma3_text-launch]",
    ),
    Mutation(
        "7: off commits a step late",
        ENGINE,
        '            if plan.chunks or self.facts.overlap == "off":\n',
        "            if plan.chunks:\n",
        "engine/test_invariants.py::test_invariant_1_off_fills_tokens_in_the_same_plan",
    ),
    Mutation(
        "8: jobs run on the caller's thread",
        THREAD,
        "        self._jobs.put(job)\n",
        "        job()\n",
        "engine/test_mlx_thread.py::test_invariant_8_jobs_run_in_order_on_one_thread_that_is_not_ours",
    ),
    Mutation(
        "8: arrays leave the thread",
        FLIGHT,
        "self.sampled.tokens.tolist()",
        "list(self.sampled.tokens)",
        "engine/test_threads.py::test_invariant_8_only_plain_values_leave",
    ),
    Mutation(
        "8: the closed engine keeps its weights",
        ENGINE,
        "        del self._batch, self._new_batch, self._sampler, self._tokens, self._model, self._chunks\n",
        "        del self._batch, self._sampler, self._tokens\n",
        "engine/test_threads.py::test_invariant_8_arrays_die_on_the_thread",
    ),
    Mutation(
        "8: the closed engine keeps pages",
        ENGINE,
        "            held.clear()\n",
        "            held = None\n",
        "engine/test_threads.py::test_invariant_8_rows_in_flight_are_freed_by_close",
    ),
    Mutation(
        "all or nothing: a buffer grows layer by layer",
        GROUP,
        "            made = [self._move_only(store, moves) for store in self.stores]\n",
        "            made = [store.adopt(self._move_only(store, moves)) for store in self.stores]\n",
        "engine/test_all_or_nothing.py::test_grow[llama]",
    ),
    Mutation(
        "all or nothing: slots move layer by layer",
        GROUP,
        "        made = [store.selected(slots) for store in self.stores]\n",
        "        made = [store.adopt(each := store.selected(slots)) or each for store in self.stores]\n",
        "engine/test_all_or_nothing.py::test_leave_and_compaction",
    ),
    Mutation(
        "all or nothing: a failed replay is not rolled back",
        BATCH,
        "                group.roll_back(old)\n",
        "                pass\n",
        "engine/test_all_or_nothing.py::test_rewind_of_recurrent_rows",
    ),
    Mutation(
        "all or nothing: one class is taken back before another refuses",
        BATCH,
        "            group.check_rewind(own)\n",
        "            pass\n",
        "engine/test_rewind.py::test_a_window_layer_refuses_to_go_back_further_than_it_holds",
    ),
    Mutation(
        "rewind: the cursor goes back over a row's entries",
        PLANE,
        "        return newest.shape[1] - (int(used[-1]) + 1 if len(used) else 0)\n",
        "        return newest.shape[1] if len(used) else 0\n",
        "engine/test_geometry.py::TestGroup::runTest",
    ),
    Mutation(
        "rewind: more may be taken back than a window holds",
        PLANE,
        "        needed = length if self.window is None else min(length, self.window - 1)\n",
        "        needed = length if self.window is None else 0\n",
        "engine/test_rewind.py::test_a_window_layer_refuses_to_go_back_further_than_it_holds",
    ),
    Mutation(
        "rewind: chunked caches are trimmed",
        SOLO,
        "    return bool(cache.start_position <= length // cache.chunk_size * cache.chunk_size)\n",
        "    return True\n",
        "engine/test_rewind.py::test_chunked_caches_go_back_as_far_as_they_hold",
    ),
    Mutation(
        "holes: rejected tokens stay visible",
        PLANE,
        "            row[row >= int(lengths[slot]) - count] = -1\n",
        "            row[row > int(lengths[slot]) - count] = -1\n",
        "engine/test_rewind.py::test_speculation_with_random_acceptance_changes_nothing[llama]",
    ),
    Mutation(
        "slots: a new row inherits what was there",
        STORES,
        "    twin[slot : slot + 1] = mx.pad(new, [(0, 0), (0, 0), (place, behind), (0, 0)])\n",
        "    twin[slot : slot + 1, :, place : place + new.shape[2]] = new\n",
        "engine/test_faults.py::test_a_row_of_nan_poisons_neither_its_neighbours_nor_its_successor",
    ),
    Mutation(
        "pages: exported in the evaluation of the step",
        PAGES,
        "    mx.eval(list(page.arrays()))\n    return page\n",
        "    return page\n",
        "engine/test_pages.py::test_exporting_does_not_make_the_next_step_copy_the_buffers",
    ),
    Mutation(
        "pages: views of the row's buffers",
        GROUP,
        "            (copied(part[0]), copied(part[1]))\n",
        "            part\n",
        "engine/test_pages.py::test_memory_returns_when_pages_are_dropped",
    ),
    Mutation(
        "pages: caches in lists are skipped",
        PAGES,
        "        if isinstance(cache, CacheList):\n",
        "        if False:\n",
        "engine/test_pages.py::test_caches_in_lists_can_be_cut_and_restored",
    ),
    Mutation(
        "pages: a missing one goes unnoticed",
        SHELF,
        "        return found if len(found) == len(pages) else None\n",
        "        return found\n",
        "engine/test_pages.py::test_a_missing_page_is_a_miss_and_nothing_runs",
    ),
    Mutation(
        "pages: those not listed are freed",
        SHELF,
        "        aside = self._aside.get(row, {})\n        lost = []\n",
        "        aside = self._aside.pop(row, {})\n        lost = []\n",
        "engine/test_pages.py::test_adopting_names_frees_and_leaves_aside",
    ),
    Mutation(
        "cache: a checkpoint's position is not checked",
        PAGES,
        "    if elsewhere:\n",
        "    if False:\n",
        "engine/test_checkpoints.py::test_a_checkpoint_is_never_mislabelled",
    ),
    Mutation(
        "cache: a checkpoint shares the row's memory",
        PAGES,
        "    return mx.where(mx.array(True), array, mx.array(0, array.dtype))\n",
        "    return array\n",
        "engine/test_checkpoints.py::test_stored_pages_alias_nothing",
    ),
    Mutation(
        "cache: a match takes a page without its checkpoint",
        MATCH,
        "        if count and node.state:\n",
        "        if count:\n",
        "actors/test_prefix_tree.py::test_a_match_with_checkpoints_ends_at_one",
    ),
    Mutation(
        "cache: all namespaces are one",
        TREE,
        "        root = self._roots.get(namespace)\n        if root is None:\n",
        "        root = next(iter(self._roots.values()), None)\n        if root is None:\n",
        "actors/test_prefix_tree.py::test_namespaces_share_nothing",
    ),
    Mutation(
        "disk: a digest is not compared",
        PAGE_FILE,
        "    if hasher.digest() != digest:\n",
        "    if False:\n",
        "disk/test_tier.py::test_every_flipped_byte_is_noticed",
    ),
    Mutation(
        "disk: a page of another model is taken",
        PAGE_FILE,
        "    if header.root != root or header.chain != chain:\n",
        "    if header.chain != chain:\n",
        "disk/test_tier.py::test_another_models_page_is_a_miss",
    ),
    Mutation(
        "disk: orphans stay",
        TIER,
        "        for name in sizes.keys() - names:\n            self._unlink(name)\n",
        "",
        "disk/test_tier.py::test_rows_without_files_and_files_without_rows_go",
    ),
    Mutation(
        "faults: a row that did not join cannot be forgotten",
        ENGINE,
        "        with suppress(KeyError):\n",
        "        with suppress(IndexError):\n",
        "engine/test_faults.py::test_a_join_that_raises_fails_that_row_only",
    ),
    Mutation(
        "faults: nobody answers for a step that cannot be read",
        ENGINE,
        '            emit(RowsFailed(lost.step, lost.rows, _text(error), fault_of(error, "step")))\n',
        "",
        "engine/test_faults.py::test_a_step_that_cannot_be_read_fails_its_rows_under_its_number",
    ),
    Mutation(
        "probe: NaN agrees with anything",
        PROBE,
        "        if not apart <= allowed:\n",
        "        if apart > allowed:\n",
        "engine/test_probe.py::test_a_wrong_model_runs_row_by_row",
    ),
    Mutation(
        "donation: every step copies the keys",
        STORES,
        "        self.keys[:, :, plane.cursor : plane.high] = keys\n",
        "        self.old, self.keys = self.keys, "
        "mx.slice_update(self.keys, keys, mx.array([plane.cursor]), axes=(2,))\n",
        "engine/test_donation.py::test_no_step_copies_a_layer",
    ),
    Mutation(
        "flatness: discarded KV stays",
        ENGINE,
        "            self._staged.pop(row, None)\n",
        "            self._staged.get(row)\n",
        "engine/test_flatness.py::test_a_few_hundred_steps_stay_flat",
    ),
)
