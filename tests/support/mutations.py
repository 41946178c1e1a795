"""Faults planted in the product, each of which a test finds.

    python -m tests.support.mutations [NUMBER …]

Owns: the list, and a run of it in copies of the tree, so that nothing is changed here. CONTRIBUTING names it; a unit
test checks that each fault can still be planted. Add one when you move code on which others' answers depend.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
_NO_PARTS = ("build", "*.egg-info", "__pycache__", ".*")
_AT_A_TIME = 2
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


MUTATIONS = (
    Mutation(
        "a client that leaves keeps its place in the queue",
        "app/serving/submissions.py",
        "            self._fleet.dispatcher.discard(item, error)\n",
        "            item.end(error)\n",
        "test_cancelling.py",
    ),
    Mutation(
        "the slot of an image whose client left while it was decoded is never free again",
        "app/serving/submissions.py",
        "        if item.status is ENDED:\n            item.give_slot()\n",
        "        if item.status is ENDED:\n            pass\n",
        "test_cancelling.py",
    ),
    Mutation(
        "a deadline that passes is answered when the worker is done",
        "app/serving/submissions.py",
        "self._withdraw(item, error, item.pool.metrics.expired)\n\n    def end",
        "pass\n\n    def end",
        "test_dispatcher.py",
    ),
    Mutation(
        "what a worker had not begun when it ended is lost",
        "app/fleet/dispatcher.py",
        "        for batch in lost.waiting:\n            self._again(batch.items, reason, suspects=False)\n",
        "",
        "test_dispatcher.py",
    ),
    Mutation(
        "the image to blame is tried for ever",
        "app/fleet/dispatcher.py",
        "elif suspects and item.attempt is ALONE and item.refill is None:",
        "elif False:",
        "test_dispatcher.py",
    ),
    Mutation(
        "what a lost batch had is not tried alone",
        "app/fleet/dispatcher.py",
        "                    item.attempt = ALONE\n",
        "                    pass\n",
        "test_dispatcher.py",
    ),
    Mutation(
        "what fills a queue counts twice",
        "app/scheduling/scheduler.py",
        "        queue.reserved -= 1\n",
        "",
        "test_scheduler.py::test_the_queue_is_bounded_exactly_and_reservations_count",
    ),
    Mutation(
        "a pause is charged to the model whose image was being decoded",
        "app/decoding/pool.py",
        "taken_s = min(now_s - max(image.sent_s, decoder.heard_s), credible_s)",
        "taken_s = now_s - max(image.sent_s, decoder.heard_s)",
        "test_decode_pool.py::test_whatever_the_pauses_each_model_is_decoded_within_a_bounded_number_of_images",
    ),
    Mutation(
        "what would come too late is decoded all the same",
        "app/decoding/pool.py",
        "if self._queue.waiting and self._is_hopeless(decoder, image, now_s):",
        "if False:",
        "test_decode_pool.py::test_what_would_come_too_late_is_not_decoded_where_others_wait",
    ),
    Mutation(
        "admission expects no wait for a decoder",
        "app/serving/submissions.py",
        "self._filling.wait_s(room.served, terms, 1)",
        "0.0",
        "test_overload.py::test_at_three_times_the_load_all_that_can_be_answered_is",
    ),
    Mutation(
        "a client that asks much goes before those that ask little",
        "app/decoding/waiting.py",
        "if own else now_s",
        "if own and False else now_s",
        "test_decode_queue.py::test_a_client_that_sends_much_stands_behind_itself_and_not_before_others",
    ),
    Mutation(
        "a task that was interrupted counts as cancelled for ever",
        "app/ingress/interrupt.py",
        "        task.uncancel()\n",
        "        pass\n",
        "test_interrupt.py::test_a_task_that_was_interrupted_can_wait_again",
    ),
    Mutation(
        "a caller may have any number of requests",
        "app/access/limits.py",
        "        usage.requests += 1\n",
        "",
        "test_client_limits.py::test_so_many_requests_at_a_time_of_each_caller",
    ),
    Mutation(
        "boxes found in tiles stay where the tile had them",
        "models/contract/task_adapter.py",
        '"x1": box["x1"] + x,',
        '"x1": box["x1"],',
        "test_tiles.py::test_an_object_on_a_seam_is_one_object",
    ),
    Mutation(
        "an ingress may know the scheduler",
        "app/ingress/items.py",
        "from app.link import ",
        "from app.scheduling.queue import Queue as _\nfrom app.link import ",
        "test_layers.py::test_ingress_and_owner_know_only_the_link_of_each_other",
    ),
    Mutation(
        "of two batch sizes that are equally fast the smaller one is taken",
        "app/scheduling/batching.py",
        "if below / max(seconds[below], 1e-9) > waiting",
        "if below / max(seconds[below], 1e-9) >= waiting",
        "test_latency.py::test_padding_is_paid_only_where_it_costs_less_than_a_second_batch",
    ),
    Mutation(
        "a deadline may be any time away",
        "app/protocols/parameters.py",
        "started_s + min(timeout_s, _MAX_TIMEOUT_S)",
        "started_s + timeout_s",
        "test_terms.py::test_a_deadline_is_at_most_ten_minutes_away",
    ),
    Mutation(
        "the header decides about the deadline where the query says another one",
        "app/http/routes/predict.py",
        "if timeout_ms is not None:",
        'if timeout_ms is not None and b"x-timeout-ms" not in self.headers:',
        "test_terms.py::test_a_deadline_is_of_the_query_else_of_the_header_else_the_services",
    ),
    Mutation(
        "who waits for much is overtaken for ever by those who wait for little",
        "app/ingress/budget.py",
        "                break\n",
        "                continue\n",
        "test_budget.py::test_who_waits_for_much_is_not_overtaken_by_those_who_came_later_for_little",
    ),
    Mutation(
        "a child is blamed for time in which the server stood still",
        "app/processes/place.py",
        "min(clock.monotonic() - self._looked_s, self._most_s)",
        "clock.monotonic() - self._looked_s",
        "test_place.py::test_nobody_is_blamed_for_time_in_which_this_process_stood_still",
    ),
    Mutation(
        "a child that hangs in its start is never replaced",
        "app/processes/place.py",
        "limit_s = self.start_s",
        "limit_s = math.inf",
        "test_place.py::test_a_child_that_hangs_in_its_start_is_replaced",
    ),
    Mutation(
        "the restart of a worker counts twice",
        "app/fleet/fleet.py",
        "labels(device, kind).inc()",
        "labels(device, kind).inc(2)",
        "test_replica.py::test_a_death_is_counted_once_by_its_kind_and_the_worker_is_gone_once",
    ),
    Mutation(
        "a worker that ends to give memory back counts as one that died",
        "app/processes/place.py",
        "return not self.has_served",
        "return True",
        "test_replica.py::test_a_worker_that_ends_to_give_memory_back_is_followed_at_once_however_often",
    ),
    Mutation(
        "what was cancelled counts as a client that left",
        "app/serving/submissions.py",
        "item.pool.metrics.cancelled if item.terms.recorder.abandoned else None",
        "item.pool.metrics.cancelled",
        "test_cancelling.py::test_an_item_ends_at_once_is_counted_once_at_its_stage_and_its_slot_comes_back_when_nobody_has_it",
    ),
    Mutation(
        "an image that nobody waits for is decoded all the same",
        "app/serving/submissions.py",
        "            self._filling.drop(item)\n",
        "            pass\n",
        "test_cancelling.py::test_an_item_ends_at_once_is_counted_once_at_its_stage_and_its_slot_comes_back_when_nobody_has_it",
    ),
    Mutation(
        "the owner does not hear that an ingress has cancelled",
        "app/ingress/remote.py",
        "            self._talk.say(Cancel(room.number, token, room.terms.recorder.abandoned))\n",
        "",
        "test_link.py::test_the_owner_hears_whether_the_client_has_left",
    ),
    Mutation(
        "an ingress takes memory back that the owner still reads",
        "app/ingress/remote.py",
        "if self._left and not self.missing:",
        "if self._left:",
        "test_link.py::test_a_request_that_was_cancelled_is_answered_at_once_and_once_and_leaves_the_owners_queue",
    ),
    Mutation(
        "of more than 512 candidates the later ones are not compared with those that are kept",
        "models/tasks/instances.py",
        "min(first + _WINDOW, len(boxes))), kept",
        "min(first + _WINDOW, len(boxes))), []",
        "test_instances.py::test_however_many_candidates_each_is_compared_with_all_that_are_kept",
    ),
    Mutation(
        "a box that overlaps by exactly the threshold goes",
        "models/tasks/instances.py",
        "- shared) > threshold",
        "- shared) >= threshold",
        "test_instances.py::test_two_boxes_that_overlap_by_exactly_the_threshold_both_stay",
    ),
    Mutation(
        "no time is left for an answer's way back to the client",
        "app/scheduling/scheduler.py",
        "(1 - WAY_BACK) * ",
        "",
        "test_scheduler.py::test_a_twenty_fifth_of_the_time_is_for_the_way_back",
    ),
    Mutation(
        "greedy clients take what is spared for modest ones",
        "app/ingress/budget.py",
        "_SHARE * (free - self._spare)",
        "_SHARE * free",
        "test_budget.py::test_what_is_spared_is_for_who_holds_little",
    ),
    Mutation(
        "any key administers the service",
        "app/access/access.py",
        'if role == "admin" and key.role != "admin":',
        "if False:",
        "test_access.py::test_who_asks_and_how_it_is_counted",
    ),
    Mutation(
        "what expired in the queue counts as expired while it was decoded",
        "app/fleet/dispatcher.py",
        'metrics.expired["queue"].inc()',
        'metrics.expired["decode"].inc()',
        "test_counts.py::test_what_has_become_hopeless_in_the_queue_is_counted_there_and_not_computed",
    ),
    Mutation(
        "TorchServe's clients may not put an image",
        "app/compat/torchserve.py",
        "@router.put(ROUTE, include_in_schema=False)\n",
        "",
        "test_terms.py::test_torchserves_clients_may_put_what_they_may_post",
    ),
    Mutation(
        "an error that is no number passes the gate",
        "app/precision/gate.py",
        "if not measured[name] <= limit:",
        "if measured[name] > limit:",
        "test_gate.py::test_an_error_that_is_no_number_is_over_every_limit",
    ),
    Mutation(
        "what was cancelled at an ingress is answered twice",
        "app/ingress/remote.py",
        "        if not silent:\n            self._on_reply(token, reply)",
        "        self._on_reply(token, reply)",
        "test_link.py::test_a_cancel_that_crosses_the_answer_is_answered_once",
    ),
    Mutation(
        "the owner does not hear that a client has left",
        "app/ingress/remote.py",
        "token, room.terms.recorder.abandoned)",
        "token, False)",
        "test_link.py::test_the_owner_hears_whether_the_client_has_left",
    ),
    Mutation(
        "a model is forgotten of which results may still come",
        "app/ingress/remote.py",
        "number - 2 * len(self._forms)",
        "number - len(self._forms)",
        "test_link.py::test_after_a_load_new_requests_are_of_the_new_model_and_results_of_the_one_before_still_arrive",
    ),
    Mutation(
        "the rooms of an ingress that has ended are never given back",
        "app/serving/ingresses.py",
        "            room.__exit__()\n        self._rooms.clear()",
        "            pass\n        self._rooms.clear()",
        "test_link.py::test_what_an_ingress_had_ends_with_it_and_another_one_is_begun",
    ),
    Mutation(
        "the connections of an ingress that has ended count for ever",
        "app/serving/ingresses.py",
        "                self._of.left(each)\n",
        "                pass\n",
        "test_link.py::test_what_an_ingress_had_ends_with_it_and_another_one_is_begun",
    ),
    Mutation(
        "an ingress may use a token twice",
        "app/serving/ingresses.py",
        " or len({*tokens} - self._tokens.keys()) < len(tokens)",
        "",
        "test_link.py::test_who_names_what_it_does_not_have_is_ended_and_costs_nobody_anything",
    ),
    Mutation(
        "a service that shuts down lets in what an ingress has not asked for",
        "app/serving/ingresses.py",
        "            if self._link.refusing:",
        "            if False:",
        "test_link.py::test_a_refusal_of_the_owner_arrives_with_its_code_and_is_counted_there",
    ),
    Mutation(
        "an ingress may name a model before the first",
        "app/serving/ingresses.py",
        "if not 0 <= index < self._step:",
        "if not index < self._step:",
        "test_link.py::test_who_names_what_it_does_not_have_is_ended_and_costs_nobody_anything",
    ),
    Mutation(
        "pixels that nobody waits for any more are queued",
        "app/decoding/pool.py",
        "case _ if not image.wanted:",
        "case _ if False:",
        "test_decode_pool.py::test_what_nobody_waits_for_any_more_is_no_pixels_though_a_decoder_has_made_them",
    ),
    Mutation(
        "who leaves takes the other parts of the image along",
        "app/decoding/pool.py",
        "        image.wanted -= 1\n",
        "        image.wanted = 0\n",
        "test_decode_pool.py::test_parts_of_an_image_are_made_as_long_as_one_of_them_is_wanted",
    ),
    Mutation(
        "the end of a request leaves what it has under way",
        "app/serving/submissions.py",
        "            if token in self._under_way:\n                self.cancel(token)\n",
        "            pass\n",
        "test_cancelling.py::test_a_request_that_ends_takes_all_of_its_images_along_whatever_their_stage",
    ),
    Mutation(
        "an answer that was cancelled while it was made counts as a client that left",
        "app/ingress/items.py",
        "            if recorder.abandoned:\n",
        "            if True:\n",
        "test_cancelling.py::test_who_leaves_while_its_answer_is_made_is_counted_once_and_the_item_is_not_answered",
    ),
    Mutation(
        "of a request that is refused one image counts",
        "app/serving/submissions.py",
        'rejected["queue_full"].inc(count)',
        'rejected["queue_full"].inc()',
        "test_counts.py::test_a_refusal_is_counted_by_its_images_and_its_reason",
    ),
    Mutation(
        "of a request that has ended one image is no longer under way",
        "app/fleet/submission.py",
        "        self.images -= count\n",
        "        self.images -= 1\n",
        "test_counts.py::test_images_under_way_are_those_of_all_requests_that_have_not_ended",
    ),
    Mutation(
        "what an ingress has counted is added twice",
        "app/observability/gained.py",
        "                    child.reset()\n",
        "",
        "test_link.py::test_what_an_ingress_has_counted_is_told_soon_and_added_once",
    ),
    Mutation(
        "a network that another runtime computes otherwise is served",
        "models/exports/witness.py",
        "        if found <= share:",
        "        if found <= 1e9:",
        "test_witness.py::test_a_misreading_is_refused_though_operators_cannot_be_compared",
    ),
    Mutation(
        "what another release has found of a file still holds",
        "models/exports/kept.py",
        ", architecture, _versions()]",
        ", architecture]",
        "test_kept_trials.py::test_another_release_of_what_reads_it_tries_it_again",
    ),
    Mutation(
        "int8 is refused for what it gains and not for what it loses",
        "app/precision/gate.py",
        "if before - after > limit",
        "if after - before > limit",
        "test_gate_rules.py::test_a_loss_is_what_float32_has_more_and_counts_in_one_direction",
    ),
    Mutation(
        "what int8 loses is told as a gain",
        "app/precision/gate.py",
        "return {name: before - after}",
        "return {name: after - before}",
        "test_gate_rules.py::test_a_loss_is_what_float32_has_more_and_counts_in_one_direction",
    ),
    Mutation(
        "float32 is right though the truth is known",
        "app/precision/gate.py",
        "held_out.truth or [",
        "[",
        "test_gate_rules.py::test_a_loss_is_what_float32_has_more_and_counts_in_one_direction",
    ),
    Mutation(
        "an accuracy that is no number passes the gate",
        "app/precision/gate.py",
        "np.nan_to_num(np.array([accuracy.of(truth, each) for each in (expected, given)]))",
        "np.array([accuracy.of(truth, each) for each in (expected, given)])",
        "test_gate_rules.py::test_an_accuracy_that_is_no_number_is_none_at_all",
    ),
    Mutation(
        "an answer that is no number passes where no measure sees it",
        "app/precision/gate.py",
        "if not self._model.may_be_infinite and not all(",
        "if False and not all(",
        "test_gate_rules.py::test_what_is_no_number_is_no_answer_though_no_measure_sees_it",
    ),
    Mutation(
        "the last batch size's errors count, and not the worst one's",
        "app/precision/gate.py",
        "max(error, measured[name])",
        "measured[name]",
        "test_gate_rules.py::test_the_worst_of_the_sizes_counts",
    ),
    Mutation(
        "a finished file is compared at each size with that size's own answers",
        "app/precision/gate.py",
        " and size == executable.batch_sizes[0]",
        "",
        "test_gate_rules.py::test_a_finished_file_has_to_answer_alike_at_every_size_and_is_compared_with_nothing_else",
    ),
    Mutation(
        "all batches have the answers of the last one",
        "app/precision/gate.py",
        ".copy() for output in outputs",
        "for output in outputs",
        "test_gate_rules.py::test_every_item_is_answered_once_and_by_its_own_answer_whatever_the_size",
    ),
    Mutation(
        "what fills the last batch up counts as answers",
        "app/precision/gate.py",
        "output[: count - first]",
        "output[:]",
        "test_gate_rules.py::test_every_item_is_answered_once_and_by_its_own_answer_whatever_the_size",
    ),
    Mutation(
        "a verdict holds though a library is another",
        "app/precision/verdicts.py",
        ' if each.endswith((".dist-info", ".egg-info"))',
        " if not each",
        "test_verdicts.py::test_a_verdict_is_that_of_the_same_network_device_and_software",
    ),
    Mutation(
        "what was accepted before is compared with nothing",
        "app/precision/gate.py",
        "else self._probes[:size]",
        "else self._probes[:0]",
        "test_verdicts.py::test_what_was_accepted_is_compared_again_with_one_batch_of_each_size",
    ),
    Mutation(
        "an earlier verdict alone keeps a network from being served",
        "backends/engines/engine.py",
        "    if known:",
        "    if False:",
        "test_verdicts.py::test_no_earlier_verdict_alone_keeps_a_network_from_being_served",
    ),
    Mutation(
        "a verdict holds though torch is another",
        "app/precision/gate.py",
        '"torch": torch.__version__, ',
        "",
        "test_gate_rules.py::test_a_verdict_is_kept_for_the_same_network_the_same_images_and_the_same_software",
    ),
    Mutation(
        "a verdict holds though the processor computes otherwise",
        "app/precision/gate.py",
        ', "cpu": torch.backends.cpu.get_cpu_capability()',
        "",
        "test_gate_rules.py::test_a_verdict_is_kept_for_the_same_network_the_same_images_and_the_same_software",
    ),
    Mutation(
        "a verdict holds though the compiler is another",
        "app/precision/gate.py",
        '            "version": report.version,\n',
        "",
        "test_gate_rules.py::test_a_verdict_is_kept_for_the_same_network_the_same_images_and_the_same_software",
    ),
    Mutation(
        "a verdict holds though the images are others",
        "app/precision/gate.py",
        '            "of": calibration.key,\n',
        "",
        "test_gate_rules.py::test_a_verdict_is_kept_for_the_same_network_the_same_images_and_the_same_software",
    ),
    Mutation(
        "colours that a device exchanges while it decodes are served",
        "app/precision/gate.py",
        "    _refuse_over(_coarsest(model), found, ",
        "    str((_coarsest(model), found)) or str(",
        "test_gate_rules.py::test_answers_to_what_a_device_decodes_are_those_of_the_host_within_the_coarsest_limits",
    ),
    Mutation(
        "an executable that was refused keeps its device's memory",
        "backends/engines/engine.py",
        "        executable.close()\n        raise",
        "        raise",
        "test_gate_rules.py::test_who_is_refused_leaves_nothing_behind_and_the_next_has_the_network_as_it_was",
    ),
    Mutation(
        "an engine is given the network as the one that was refused left it",
        "backends/engines/engine.py",
        "_copied(built(network))",
        "built(network)",
        "test_gate_rules.py::test_who_is_refused_leaves_nothing_behind_and_the_next_has_the_network_as_it_was",
    ),
    Mutation(
        "who stands in is told to compute in the precision that was refused",
        "backends/engines/engine.py",
        "partial(_ready, engine, given, device, precision, sizes",
        "partial(_ready, engine, given, device, precisions[0], sizes",
        "test_gate_rules.py::test_who_is_refused_leaves_nothing_behind_and_the_next_has_the_network_as_it_was",
    ),
    Mutation(
        "nobody is told which engines answered wrongly",
        "backends/engines/engine.py",
        "rejected.append((engine.name, precision))\n                elif",
        "pass\n                elif",
        "test_gate_rules.py::test_who_is_refused_leaves_nothing_behind_and_the_next_has_the_network_as_it_was",
    ),
    Mutation(
        "the next engine is tried on a device that is lost",
        "backends/engines/engine.py",
        "except (OutOfDeviceMemoryError, DeviceLostError):",
        "except OutOfDeviceMemoryError:",
        "test_gate_rules.py::test_who_cannot_compute_is_no_wrong_answer_and_who_has_lost_its_device_ends_the_walk",
    ),
    Mutation(
        "numbers that are all too small have no error of scale",
        "models/contract/measures.py",
        "return float(abs(divided((wanted * given).sum(), (wanted * wanted).sum()) - 1))",
        "return float(divided((wanted * given).sum(), (wanted * wanted).sum()) - 1)",
        "test_gate_rules.py::test_the_worst_of_all_outputs_is_measured_in_both_directions",
    ),
    Mutation(
        "the last output's errors count, and not the worst one's",
        "models/contract/measures.py",
        "max(value, errors.get(name, 0.0))",
        "errors.get(name, 0.0)",
        "test_gate_rules.py::test_the_worst_of_all_outputs_is_measured_in_both_directions",
    ),
)


def planted(mutation: Mutation, root: Path) -> str:
    """Return the file's text with the fault. Raises ValueError unless the text to change occurs there once."""
    text = (root / mutation.file).read_text()
    if text.count(mutation.was) != 1:
        raise ValueError(f"{mutation.file} has {mutation.was!r} {text.count(mutation.was)} times")
    return text.replace(mutation.was, mutation.becomes)


def _copy(folder: Path) -> None:
    shutil.copytree(ROOT, folder, symlinks=True, ignore=shutil.ignore_patterns(*_NO_PARTS), dirs_exist_ok=True)


def _path(copy: Path, test: str) -> str:
    """Find the path of a test, in any of the rooms."""
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
    """Yield the test that finds each fault, in order, two at a time; empty: none of those that it names.

    Raises RuntimeError if a test fails without a fault: it proves nothing then.
    """
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(_AT_A_TIME) as threads:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(_AT_A_TIME):
            (copy := Path(folder) / str(number)).mkdir()
            _copy(copy)
            copies.put(copy)
        if failed := _first_failure(copy, sorted({each.test for each in mutations})):
            raise RuntimeError(f"{failed} fails without a fault")

        def one(mutation: Mutation) -> str:
            copy = copies.get()
            try:
                return _found_by(mutation, copy)
            finally:
                copies.put(copy)

        yield from threads.map(one, mutations)


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
