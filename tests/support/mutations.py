"""Faults planted in the product, each of which a test finds.

    python -m tests.support.mutations [NUMBER …]

They are planted in copies of the tree. Add one when you move code on which others' answers depend.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
_NO_PARTS = ("build", "*.egg-info", "__pycache__", ".*")
_TEST_LIMIT_S, _LIMIT_S = 120, 600
"""Time limits: of one test, which without the fault takes seconds; of all tests of one fault."""


class Mutation(NamedTuple):
    """Fault: in `file`, `was`, which occurs there once, becomes `becomes`; `test` fails then: a file of tests/unit, or
    one test of it (`test_budget.py::test_name`).
    """

    fault: str
    file: str
    was: str
    becomes: str
    test: str


_LIST = r"""
app/serving/submissions.py
test_cancelling.py
a client that leaves keeps its place in the queue
-            self._fleet.dispatcher.discard(item, error)
+            item.end(error)
the slot of an image whose client left while it was decoded is never free again
-        if item.status is ENDED:
-            item.give_slot()
+        if item.status is ENDED:
+            pass
test_dispatcher.py
a deadline that passes is answered when the worker is done
-self._withdraw(item, error, item.pool.metrics.expired)
-
-    def _withdraw
+pass
+
+    def _withdraw
test_overload.py::test_at_three_times_the_load_all_that_can_be_answered_is
admission expects no wait for a decoder
-self._filling.wait_s(room.served, terms, now_s, 1)
+0.0
test_cancelling.py::test_an_item_ends_at_once_is_counted_once_at_its_stage_and_its_slot_comes_back_when_nobody_has_it
what was cancelled counts as a client that left
-item.pool.metrics.cancelled if item.terms.recorder.abandoned else None
+item.pool.metrics.cancelled
an image that nobody waits for is decoded all the same
-            self._filling.drop(item)
+            pass
test_cancelling.py::test_a_request_that_ends_takes_all_of_its_images_along_whatever_their_stage
the end of a request leaves what it has under way
-            if token in link._under_way:
-                link.cancel(token)
+            pass
test_counts.py::test_a_refusal_is_counted_by_its_images_and_its_reason
of a request that is refused one image counts
-rejected["queue_full"].inc(count)
+rejected["queue_full"].inc()
app/fleet/dispatcher.py
test_dispatcher.py
what a worker had not begun when it ended is lost
-        for batch in lost.waiting:
-            self._again(batch.items, reason, suspects=False)
the image to blame is tried for ever
-elif suspects and item.attempt is ALONE and item.refill is None:
+elif False:
what a lost batch had is not tried alone
-                    item.attempt = ALONE
+                    pass
test_counts.py::test_what_has_become_hopeless_in_the_queue_is_counted_there_and_not_computed
what expired in the queue counts as expired while it was decoded
-metrics.expired["queue"].inc()
+metrics.expired["decode"].inc()
app/scheduling/scheduler.py
test_scheduler.py::test_the_queue_is_bounded_exactly_and_reservations_count
what fills a queue counts twice
-        queue.reserved -= 1
test_scheduler.py::test_a_twenty_fifth_of_the_time_is_for_the_way_back
no time is left for an answer's way back to the client
-(1 - WAY_BACK) * (
+(
app/decoding/pool.py
test_decode_pool.py::test_whatever_the_pauses_each_model_is_decoded_within_a_bounded_number_of_images
a pause is charged to the model whose image was being decoded
-taken_s = min(now_s - max(image.sent_s, decoder.received_s), credible_s)
+taken_s = now_s - max(image.sent_s, decoder.received_s)
test_decode_pool.py::test_what_would_come_too_late_is_not_decoded_where_others_wait
what would come too late is decoded all the same
-if self.queue.waiting and self.queue.is_hopeless(image, len(decoder.sent), now_s):
+if False:
test_decode_pool.py::test_what_nobody_waits_for_any_more_is_no_pixels_though_a_decoder_has_made_them
pixels that nobody waits for any more are queued
-case _ if not image.wanted:
+case _ if False:
test_decode_pool.py::test_parts_of_an_image_are_made_as_long_as_one_of_them_is_wanted
who leaves takes the other parts of the image along
-        image.wanted -= 1
+        image.wanted = 0
app/decoding/waiting.py
test_decode_queue.py::test_a_client_that_sends_much_stands_behind_itself_and_not_before_others
a client that asks much goes before those that ask little
-if own else now_s
+if own and False else now_s
app/ingress/context.py
test_interrupt.py::test_a_task_that_was_interrupted_can_wait_again
a task that was interrupted counts as cancelled for ever
-        task.uncancel()
+        pass
app/access/access.py
test_access.py::test_so_many_requests_at_a_time_of_each_caller
a caller may have any number of requests
-        usage.requests += 1
test_access.py::test_who_asks_and_how_it_is_counted
any key administers the service
-if role == "admin" and key.role != "admin":
+if False:
models/contract/task_adapter.py
test_tasks.py::test_an_object_on_a_seam_is_one_object
boxes found in tiles stay where the tile had them
-"x1": box["x1"] + x,
+"x1": box["x1"],
app/ingress/prediction.py
test_layers.py::test_ingress_and_owner_know_only_the_link_of_each_other
an ingress may know the scheduler
-from app.link import C
+from app.scheduling.queue import Queue as _
+from app.link import C
app/scheduling/workers.py
test_latency.py::test_padding_is_paid_only_where_it_costs_less_than_a_second_batch
of two batch sizes that are equally fast the smaller one is taken
-if below / max(seconds[below], 1e-9) > waiting
+if below / max(seconds[below], 1e-9) >= waiting
app/protocols/parameters.py
test_terms.py::test_a_deadline_is_at_most_ten_minutes_away
a deadline may be any time away
-started_s + min(timeout_s, _MAX_TIMEOUT_S)
+started_s + timeout_s
app/http/routes/predict.py
test_terms.py::test_a_deadline_is_of_the_query_else_of_the_header_else_the_services
the header decides about the deadline where the query says another one
-if timeout_ms is not None:
+if timeout_ms is not None and b"x-timeout-ms" not in self.headers:
app/ingress/budget.py
test_budget.py::test_who_waits_for_much_is_not_overtaken_by_those_who_came_later_for_little
who waits for much is overtaken for ever by those who wait for little
-                break
+                continue
test_budget.py::test_what_is_spared_is_for_who_holds_little
clients with many requests take memory that is kept for clients with few
-        return max(self._least, _SHARE * (free - self._spare))
+        return max(self._least, _SHARE * free)
app/processes/place.py
test_place.py::test_nobody_is_blamed_for_time_in_which_this_process_stood_still
a child is blamed for time in which the server stood still
-            self.forgive(stood_still_s, now_s)
+            pass
test_place.py::test_a_child_that_hangs_in_its_start_is_replaced
a child that hangs in its start is never replaced
-limit_s = self.start_s
+limit_s = math.inf
test_handover.py::test_a_worker_that_ends_to_give_memory_back_is_followed_at_once_however_often
a worker that ends to give memory back counts as one that died
-return not self.has_served
+return True
app/fleet/fleet.py
test_handover.py::test_a_death_is_counted_once_by_its_kind_and_the_worker_is_gone_once
the restart of a worker counts twice
-labels(replica.device, kind).inc()
+labels(replica.device, kind).inc(2)
app/ingress/remote.py
test_link.py::test_the_owner_hears_whether_the_client_has_left
the owner does not hear that an ingress has cancelled
-            self._talk.say(Cancel(room.number, token, room.terms.recorder.abandoned))
the owner does not hear that a client has left
-token, room.terms.recorder.abandoned)
+token, False)
test_link.py::test_a_request_that_was_cancelled_is_answered_at_once_and_once_and_leaves_the_owners_queue
an ingress takes memory back that the owner still reads
-if self._left and not self.missing:
+if self._left:
test_link.py::test_a_cancel_that_crosses_the_answer_is_answered_once
what was cancelled at an ingress is answered twice
-        if not silent:
-            self._on_reply(token, reply)
+        self._on_reply(token, reply)
test_link.py::test_after_a_load_new_requests_are_of_the_new_model_and_results_of_the_one_before_still_arrive
an ingress forgets a model before its last results come
-number - 2 * len(self._forms)
+number - len(self._forms)
models/tasks/instances.py
test_instances.py::test_however_many_candidates_each_is_compared_with_all_that_are_kept
of more than 512 candidates the later ones are not compared with those that are kept
-min(first + _WINDOW, len(boxes))), kept
+min(first + _WINDOW, len(boxes))), []
test_instances.py::test_two_boxes_that_overlap_by_exactly_the_threshold_both_stay
a box that overlaps by exactly the threshold goes
-- shared) > threshold
+- shared) >= threshold
app/compat/torchserve.py
test_access.py::test_every_route_has_a_rule_and_every_rule_a_route
TorchServe's clients may not put an image
-@router.put(ROUTE, include_in_schema=False)
app/precision/gate.py
test_gate_rules.py::test_an_error_that_is_no_number_is_over_every_limit
an error that is no number passes the gate
-if not measured[name] <= limit:
+if measured[name] > limit:
test_gate_rules.py::test_a_loss_is_what_float32_has_more_and_counts_in_one_direction
int8 is refused for what it gains and not for what it loses
-if before - after > limit
+if after - before > limit
what int8 loses is told as a gain
-return {name: before - after}
+return {name: after - before}
test_gate_rules.py::test_an_accuracy_that_is_no_number_is_none_at_all
an accuracy that is no number passes the gate
-np.nan_to_num(np.array([accuracy.of(truth, each) for each in (expected, given)]))
+np.array([accuracy.of(truth, each) for each in (expected, given)])
test_gate_rules.py::test_what_is_no_number_is_no_answer_though_no_measure_sees_it
an answer that is no number passes where no measure sees it
-if not self._model.may_be_infinite and not all(
+if False and not all(
test_gate_rules.py::test_the_worst_of_the_sizes_counts
the last batch size's errors count, and not the worst one's
-max(error, measured[name])
+measured[name]
test_gate_rules.py::test_a_finished_file_has_to_answer_alike_at_every_size_and_is_compared_with_nothing_else
a finished file is compared at each size with that size's own answers
- and size == executable.batch_sizes[0]
test_gate_rules.py::test_every_item_is_answered_once_and_by_its_own_answer_whatever_the_size
all batches have the answers of the last one
-.copy() for output in outputs
+for output in outputs
what fills the last batch up counts as answers
-output[: count - first]
+output[:]
test_verdicts.py::test_a_verdict_is_that_of_the_same_network_device_and_software
a verdict holds though a library is another
- if each.endswith((".dist-info", ".egg-info"))
+ if not each
test_verdicts.py::test_what_was_accepted_is_compared_again_with_one_batch_of_each_size
what was accepted before is compared with nothing
-else self._probes[:size]
+else self._probes[:0]
test_gate_rules.py::test_a_verdict_is_kept_for_the_same_network_the_same_images_and_the_same_software
a verdict holds though torch is another
-"torch": torch.__version__, "
+"
a verdict holds though the processor computes otherwise
-, "cpu": torch.backends.cpu.get_cpu_capability()
a verdict holds though the compiler is another
-            "version": report.version,
a verdict holds though the images are others
-            "of": calibration.key,
test_gate_rules.py::test_answers_to_what_a_device_decodes_are_those_of_the_host_within_the_coarsest_limits
colours that a device exchanges while it decodes are served
-    _refuse_over(_coarsest(model), found, "
+    str((_coarsest(model), found)) or str("
app/serving/ingresses.py
test_link.py::test_what_an_ingress_had_ends_with_it_and_another_one_is_begun
the rooms of an ingress that has ended are never given back
-            room.__exit__()
-        self._rooms.clear()
+            pass
+        self._rooms.clear()
the connections of an ingress that has ended count for ever
-            each.end()
+            pass
test_link.py::test_who_names_what_it_does_not_have_is_ended_and_costs_nobody_anything
an ingress may use a token twice
- or len({*tokens} - self._tokens.keys()) < len(tokens)
an ingress may name a model before the first
-if not 0 <= index < self._step:
+if not index < self._step:
test_link.py::test_a_refusal_of_the_owner_arrives_with_its_code_and_is_counted_there
a service that shuts down lets in what an ingress has not asked for
-            if self._link.refusing:
+            if False:
app/ingress/ingress.py
test_cancelling.py::test_who_leaves_while_its_answer_is_made_is_counted_once_and_the_item_is_not_answered
an answer that was cancelled while it was made counts as a client that left
-            if recorder.abandoned:
+            if True:
app/serving/submissions.py
test_counts.py::test_images_under_way_are_those_of_all_requests_that_have_not_ended
of a request that has ended one image is no longer under way
-        self.served.images -= self.images
+        self.served.images -= 1
app/observability/counter_deltas.py
test_link.py::test_what_an_ingress_has_counted_is_told_soon_and_added_once
what an ingress has counted is added twice
-                    child.reset()
models/exports/witness.py
test_witness.py::test_a_misreading_is_refused_though_operators_cannot_be_compared
a network that another runtime computes otherwise is served
-        if found <= share:
+        if found <= 1e9:
models/exports/exported.py
test_kept_trials.py::test_another_release_of_what_reads_it_tries_it_again
what another release has found of a file still holds
-, architecture, _versions()]
+, architecture]
backends/engines/engine.py
test_verdicts.py::test_no_earlier_verdict_alone_keeps_a_network_from_being_served
an earlier verdict alone keeps a network from being served
-    if staged or known:
+    if staged:
test_gate_rules.py::test_who_is_refused_leaves_nothing_behind_and_the_next_has_the_network_as_it_was
an executable that was refused keeps its device's memory
-        executable.close()
-        raise
+        raise
an engine is given the network as the one that was refused left it
-_copied(built(network))
+built(network)
who stands in is told to compute in the precision that was refused
-partial(_ready, engine, given, device, precision, sizes
+partial(_ready, engine, given, device, precisions[0], sizes
nobody is told which engines answered wrongly
-rejected.append((engine.name, precision))
-                elif
+pass
+                elif
test_gate_rules.py::test_who_cannot_compute_is_no_wrong_answer_and_who_has_lost_its_device_ends_the_walk
the next engine is tried on a device that is lost
-except (OutOfDeviceMemoryError, DeviceLostError):
+except OutOfDeviceMemoryError:
models/contract/measures.py
test_gate_rules.py::test_the_worst_of_all_outputs_is_measured_in_both_directions
numbers that are all too small have no error of scale
-return float(abs(divided((wanted * given).sum(), (wanted * wanted).sum()) - 1))
+return float(divided((wanted * given).sum(), (wanted * wanted).sum()) - 1)
the last output's errors count, and not the worst one's
-max(value, errors.get(name, 0.0))
+errors.get(name, 0.0)
"""
"""A file, a test, and each of its faults that this test finds: what goes, what comes; whole lines, or parts of one."""


def _listed() -> Iterator[Mutation]:
    file = test = ""
    for line, was, becomes in re.findall(r"^([^-+\n].*)\n((?:-.*\n)*)((?:\+.*\n)*)", _LIST, re.MULTILINE):
        if was:
            gone, come = ("\n".join(each[1:] for each in text.splitlines()) for text in (was, becomes))
            yield Mutation(line, file, gone, come, test)
        elif line.startswith("test_"):
            test = line
        else:
            file = line


MUTATIONS = tuple(_listed())


def planted(mutation: Mutation, root: Path) -> str:
    """Return the file's text with the fault. Raises ValueError unless the text to change occurs there once."""
    text = (root / mutation.file).read_text()
    if text.count(mutation.was) != 1:
        raise ValueError(f"{mutation.file} has {mutation.was!r} {text.count(mutation.was)} times")
    return text.replace(mutation.was, mutation.becomes)


def _path(copy: Path, test: str) -> str:
    file, *names = test.split("::")
    path = next(path for room in ("unit", "virtual") if (path := copy / "tests" / room / file).exists())
    return "::".join([str(path.relative_to(copy)), *names])


def _first_failure(copy: Path, tests: Sequence[str]) -> str:
    """Return the first of these tests that fails in a copy of the tree; empty if all pass.

    Raises RuntimeError if they cannot be run, TimeoutExpired.
    """
    paths = [_path(copy, each) for each in tests]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=no", "-p", "no:cacheprovider", *paths]
    ran = subprocess.run(
        [*command, f"--timeout={_TEST_LIMIT_S}"],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    if ran.returncode not in (0, 1):
        raise RuntimeError(ran.stdout[-2000:] + ran.stderr[-2000:])
    failed = re.search(r"^(?:FAILED|ERROR) \S*?([\w/]+\.py::\S+)", ran.stdout, re.MULTILINE)
    return failed[1] if failed else "one of them" if ran.returncode else ""


def _found_by(mutation: Mutation, copy: Path) -> str:
    """Plant the fault, return the test that fails, or "" if none does, and remove the fault."""
    path = copy / mutation.file
    before, text = path.read_text(), planted(mutation, copy)
    path.write_text(text)  # Its new time of change makes Python compile it again.
    try:
        return _first_failure(copy, [mutation.test])
    finally:
        path.write_text(before)


def found_by(mutations: Sequence[Mutation]) -> Iterator[str]:
    """Yield the test that finds each fault, in order; empty: none of those that it names.

    Raises RuntimeError if a test fails without a fault: it proves nothing then.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(*_NO_PARTS), dirs_exist_ok=True)
        if failed := _first_failure(copy, sorted({each.test for each in mutations})):
            raise RuntimeError(f"{failed} fails without a fault")
        for mutation in mutations:
            yield _found_by(mutation, copy)


def main() -> None:
    """Plant each, or those of these numbers; exit with the number of faults that no test has found."""
    numbers = [int(each) for each in sys.argv[1:]] or range(1, len(MUTATIONS) + 1)
    chosen = [MUTATIONS[number - 1] for number in numbers]
    missed = 0
    for number, mutation, test in zip(numbers, chosen, found_by(chosen), strict=True):
        missed += not test
        print(f"{number:2} {'found ' if test else 'MISSED'} {mutation.fault}{test and f': {test}'}", flush=True)
    sys.exit(missed)


if __name__ == "__main__":
    main()
