"""The suites of tests and the paths of the repository that choose them, as data.

Owns: which suite holds which test file, and which suites a changed path chooses beside `make test`. Every test file
stands in a suite, and every file of the repository matches a row of PATHS (tests/unit/test_suites.py). A file may stand
in several suites: a few of its tests in `make test`, all of it where a path chooses it. Tests marked `nightly` run in
`make nightly` alone, whatever chose their file.
"""

from __future__ import annotations

from dataclasses import dataclass

ONE_BY_ONE = 0
ALL_PROCESSORS = -1


@dataclass(frozen=True)
class Suite:
    """Files of tests that run together."""

    about: str
    tests: tuple[str, ...]
    """Folders, files, or single tests as pytest names them, in the order in which they begin: the longest first."""
    without: tuple[str, ...] = ()
    """Of these, files or single tests that it leaves to another suite."""
    at_a_time: int = 3
    """How many processes pytest-xdist starts. Three where two processors mostly wait for a service to start."""
    environment: str = ".venv"
    """Whose Python runs them. `make NAME-environment` makes `.venv-NAME`."""
    wants: tuple[str, ...] = ()
    """Further environments whose programs they start."""
    programs: tuple[str, ...] = ()
    """Debian's packages that they need, keys of PACKAGES."""
    by_its_paths_alone: bool = False
    """Whether a path that nobody knows leaves it out: with everything else it would take longer than `.ci/run` may."""


PACKAGES = {
    "prometheus": "command -v promtool",
    "chromium": "command -v chromium",
    "libegl1": "ls /usr/lib/*/libEGL.so.1",  # Qt of X-AnyLabeling loads it.
    "qemu-user-static": "command -v qemu-aarch64-static",
    "buildah": "command -v buildah",
    "debootstrap": "command -v debootstrap",
    "nginx-light": "ls /usr/sbin/nginx",
    "fonts-wqy-zenhei": "ls /usr/share/fonts/truetype/wqy/*.ttc",
}
"""A Debian package, and the command that succeeds where it is installed."""

FAULT_STORIES = tuple(
    f"tests/service/test_{name}"
    for name in (
        "ingresses.py::test_an_ingress_that_is_killed_costs_its_own_connections_alone",
        "faults.py::test_overload_is_refused_and_memory_stays_flat",
        "stalls.py::test_a_frozen_worker_holds_nobody_up",
        "faults.py::test_a_poisonous_image_fails_alone",
        "failure_domains.py::test_nothing_is_left_of_a_killed_server_whose_fork_servers_were_replaced",
        "faults.py::test_deadlines_end_to_end",
        "faults.py::test_killed_workers_under_load_cost_nobody_an_answer",
        "faults.py::test_hand_over_under_load_loses_nothing",
        "faults.py::test_sigterm_under_load_loses_no_accepted_request",
        "faults.py::test_out_of_memory_halves_the_batches_and_costs_nobody_an_answer",
        "faults.py::test_clients_that_leave_the_queue_leave_no_work_behind",
        "shutdown.py::test_a_second_signal_ends_a_hung_service_at_once_and_everybody_is_told",
    )
)

UNIT = (
    "tests/unit",
    "tests/virtual",
    "plugins/ascend/tests",
    "plugins/compat/tests",
    "plugins/grpc/tests",
    "plugins/tools/tests",
)

COMPUTING = tuple(
    f"tests/unit/test_{name}.py"
    for name in (
        "gate",
        "classification",
        "worker",
        "yolo11",
        "device_engines",
        "vendor_calls",
        "sample",
        "operators",
        "checkpoint",
        "detection",
        "checkpoint_fuzz",
        "gate_of_tasks",
        "catalog",
        "torchair_networks",
        "onnx_graph",
        "witness",
        "classifiers_by_pillow",
    )
)
"""Of UNIT, what makes networks and computes with them: more than half of its time."""

MAKE_TEST = {
    "acceptance": Suite(
        "the installed command, from an empty folder, on files as libraries write them",
        ("tests/acceptance",),
        at_a_time=2,
    ),
    "unit": Suite("what starts no process and computes no network", UNIT, without=COMPUTING, at_a_time=ALL_PROCESSORS),
    "service": Suite(
        "the protocols and who may ask, with one service for most of them",
        (
            "tests/service/test_http.py",
            "tests/service/test_open_inference.py",
            "tests/service/test_rpc.py",
            "tests/service/test_torchserve.py",
            "tests/service/test_access.py",
        ),
    ),
    "stories": Suite("twelve stories of faults", FAULT_STORIES),
    "devices": Suite(
        "the engines on the CPU, the contract of devices on the CPU, the null device and one simulated device",
        (
            "tests/simulated/test_device_contract.py::test_a_device_that_is_here",
            "tests/simulated/test_device_contract.py::test_the_first_simulated_device",
            "tests/cpu/test_engines.py",
            "tests/simulated/test_detection_in_a_child.py",
        ),
        without=tuple(
            f"tests/cpu/test_engines.py::{name}"
            for name in (
                "TestInt8ByInductor::test_what_is_compiled_is_the_network_in_int8_and_is_kept",
                "TestInductor::test_keeps_one_package_a_size_and_loads_it_at_the_next_start",
            )
        ),
        at_a_time=2,
    ),
    "manifests": Suite(
        "manifests, settings and pages of the deployment, as far as files say it",
        (
            "tests/deploy/test_deploy_manifests.py",
            "tests/deploy/test_deploy_closed.py",
            "tests/deploy/test_deploy_docs.py",
            "tests/deploy/test_upstream.py",
        ),
        at_a_time=2,
    ),
}
"""What `make test` runs, in this order: a change must pass it whatever it touches."""

REPRESENTATIVES = tuple(
    f"tests/cpu/test_libraries.py::test_a_folder_of_{name}"
    for name in (
        "timm_is_a_classifier_with_timms_pixels[resnet18]",
        "timm_is_a_classifier_with_timms_pixels[vit_tiny_patch16_224]",
        "transformers_is_a_classifier_with_its_pixels[vit]",
        "transformers_is_a_detector[detr]",
    )
)
"""Of the networks of two libraries."""

BY_PATH = {
    "protocols": Suite(
        "the API as it is described, and tensors in and out",
        ("tests/service/test_open_inference_tensors.py", "tests/service/test_api_description.py"),
        at_a_time=2,
    ),
    "faults": Suite(
        "everything that can go wrong beside a request: workers, queues, hand-overs, limits, ends",
        tuple(
            f"tests/service/test_{name}.py"
            for name in (
                "lifecycle",
                "faults",
                "limits",
                "failure_domains",
                "taken_over",
                "resources",
                "stalls",
                "shutdown",
                "guard",
            )
        ),
    ),
    "processes": Suite(
        "worker, decoder and fork-server processes as the event loop sees them, and what confines them",
        (
            "tests/simulated/test_decoders.py",
            "tests/simulated/test_worker_process.py",
            "tests/simulated/test_fork_server.py",
            "tests/cpu/test_confinement.py",
            "tests/cpu/test_imports.py",
        ),
    ),
    "ingress": Suite(
        "connections, ingress processes, TLS, several services behind one port",
        tuple(
            f"tests/service/test_{name}.py"
            for name in ("ingresses", "doors", "reuse_port", "converter", "opening", "tls", "no_torch")
        ),
    ),
    "connections": Suite(
        "thousands of connections and what one client can take",
        ("tests/service/test_connections.py", "tests/service/test_rpc_limits.py", "tests/cpu/test_newest.py"),
        at_a_time=ONE_BY_ONE,
    ),
    "observability": Suite(
        "logs, traces and statistics, as a running service shows them",
        (
            "tests/service/test_tracing.py",
            "tests/service/test_top.py",
            "tests/service/test_logs.py",
            "tests/simulated/test_telemetry_tools.py",
        ),
    ),
    "prometheus": Suite(
        "alerts and the dashboard in a Prometheus of their own",
        ("tests/service/test_monitoring.py", "tests/service/test_promtool.py"),
        programs=("prometheus",),
    ),
    "serving": Suite(
        "models that come, go and change while the service runs, and stages of models under one name",
        (
            "tests/simulated/test_rollout.py",
            "tests/service/test_stages.py",
            "tests/service/test_staged_start.py",
            "tests/service/test_repository.py",
            "tests/service/test_tiles.py",
            "tests/service/test_tasks_of_images.py",
            "tests/service/test_task_adapter.py",
            "tests/service/test_exchanged_files.py",
        ),
    ),
    "simulated": Suite(
        "every simulated device: the contract, leaks, memory, operators, decoding, verify",
        (
            "tests/simulated/test_device_contract.py::test_every_other_simulated_device",
            "tests/simulated/test_device_contract.py::test_every_other_simulated_device_has_its_names",
            "tests/simulated/test_device_contract.py::test_ascend_without_torch_npu",
            "tests/simulated/test_leaks.py",
            "tests/simulated/test_model_memory.py",
            "tests/simulated/test_simulation.py",
            "tests/simulated/test_verify.py",
            "tests/simulated/test_operators_on_devices.py",
            "tests/simulated/test_device_decoding.py",
            "tests/simulated/test_recorded_failures.py",
            "tests/simulated/test_external_backend.py",
            "tests/simulated/test_null.py",
            "tests/simulated/test_ops_command.py",
            "tests/service/test_om.py",
            "tests/cpu/test_om.py",
            "tests/cpu/test_dvpp.py",
        ),
    ),
    "vendors": Suite(
        "vendors' own packages over stub drivers, and our calls against their sources",
        (
            "tests/simulated/test_stub_drivers.py",
            "tests/simulated/test_device_contract.py::test_a_vendors_own_package_over_a_stub_driver",
            "tests/simulated/test_device_contract.py::test_torch_npu_that_waits_for_every_kernel",
            "tests/simulated/test_torchair_cache.py",
            "tests/simulated/test_vendor_sources.py",
        ),
        wants=("npu",),
    ),
    "engines": Suite(
        "every engine in every precision on the CPU",
        (
            "tests/cpu/test_backends.py",
            "tests/cpu/test_engines.py",
            "tests/cpu/test_exported.py",
            "tests/cpu/test_models_on_demand.py",
            "tests/cpu/test_normalised_engines.py",
            "tests/cpu/test_fused.py",
        ),
        at_a_time=2,
    ),
    "models": Suite(
        "networks against their references: torchvision, Ultralytics, OpenVINO, rfdetr",
        (
            "tests/cpu/test_exported_images.py",
            "tests/cpu/test_classification_reference.py",
            "tests/cpu/test_ultralytics_files.py",
            "tests/service/test_torchvision_detectors.py",
            "tests/cpu/test_openvino_networks.py",
            "tests/cpu/test_rfdetr_files.py",
            "tests/cpu/test_torchvision_files.py",
            "tests/cpu/test_sample_quality.py",
            "tests/cpu/test_tasks_of_images.py",
            "tests/cpu/test_inputs_of_files.py",
            "tests/cpu/test_scores_of_files.py",
            "tests/cpu/test_onnx_node_tests.py",
            *REPRESENTATIVES,
        ),
        at_a_time=2,
    ),
    "networks": Suite(
        "networks, engines and the gate in this process: geometry, numbers, refusals",
        COMPUTING,
        at_a_time=ALL_PROCESSORS,
    ),
    "libraries": Suite(
        "networks of timm and transformers",
        ("tests/cpu/test_libraries.py", "tests/cpu/test_library_pixels.py"),
        at_a_time=2,
    ),
    "tools": Suite(
        "the commands: predict, bench, tune, validate, doctor, demo",
        (
            "tests/cpu/test_gpu_kit.py",
            "tests/cpu/test_bench.py",
            "tests/cpu/test_predict.py",
            "tests/cpu/test_fetched_command.py",
            "tests/cpu/test_validation.py",
            "tests/cpu/test_doctor_here.py",
            "tests/service/test_tune.py",
            "tests/service/test_bench.py",
            "tests/service/test_predict_url.py",
        ),
    ),
    "clients": Suite(
        "other people's clients, in other languages and for other servers",
        (
            "tests/service/test_other_clients.py",
            "tests/service/test_clients.py",
            "tests/service/test_tritonclient.py",
            "tests/service/test_generated_clients.py",
        ),
        wants=("clients",),
        programs=("libegl1",),
    ),
    "browser": Suite(
        "the page in a browser",
        ("tests/service/test_playground.py", "tests/cpu/test_playground_words.py"),
        wants=("clients",),
        programs=("chromium",),
    ),
    "install": Suite(
        "environments that the set-up makes and that are kept beside clones, and how suites run",
        (
            "tests/cpu/test_python_path.py",
            "tests/cpu/test_install_environments.py",
            "tests/cpu/test_install_index.py",
            "tests/cpu/test_kept_environments.py",
            "tests/cpu/test_suites_run.py",
        ),
    ),
    "deployment": Suite(
        "charts and manifests, rendered and checked by their tools; Ray",
        (
            "tests/deploy/test_deploy_ray.py",
            "tests/deploy/test_deploy_manifests.py",
            "tests/deploy/test_deploy_closed.py",
            "tests/deploy/test_deploy_docs.py",
            "tests/deploy/test_upstream.py",
        ),
        at_a_time=2,
        environment=".venv-deploy",
    ),
    "proxy": Suite(
        "nginx in front of three services",
        ("tests/deploy/test_three_machines.py",),
        at_a_time=2,
        programs=("nginx-light",),
    ),
    "images": Suite(
        "images, built and run, and what set-up would install into vendors'",
        ("tests/deploy/test_deploy_images.py", "tests/deploy/test_deploy_base_images.py"),
        at_a_time=2,
        environment=".venv-deploy",
        programs=("buildah", "debootstrap"),
        by_its_paths_alone=True,
    ),
    "ocr": Suite(
        "text in images, compared with RapidOCR",
        ("plugins/ocr/tests",),
        at_a_time=2,
        environment=".venv-ocr",
        programs=("fonts-wqy-zenhei",),
        by_its_paths_alone=True,
    ),
    "arm": Suite(
        "the service on ARM, by qemu",
        ("tests/cpu/test_arm.py",),
        wants=("arm",),
        programs=("qemu-user-static",),
        by_its_paths_alone=True,
    ),
}
"""What `.ci/run` adds where a changed path chooses it."""

NIGHTLY = {
    "long": Suite(
        "ten minutes of faults, clients that are slow, every route by its description",
        ("tests/service/test_chaos.py", "tests/service/test_described_api.py"),
        at_a_time=ONE_BY_ONE,
        wants=("audit",),
    ),
    "least": Suite(
        "packages in the least versions that pyproject.toml admits: pure logic, the protocols, a network of timm",
        (
            "tests/service/test_http.py",
            "tests/service/test_open_inference.py",
            REPRESENTATIVES[0],
            "tests/unit",
        ),
        without=COMPUTING,
        at_a_time=2,
        environment=".venv-least",
    ),
}
"""What `make nightly` has beside the tests marked `nightly` of all others."""

SUITES = {**MAKE_TEST, **BY_PATH, **NIGHTLY}

CHECK_LEAVES_OUT = (
    "tests/virtual",
    *COMPUTING,
    *(
        f"tests/unit/test_{name}.py"
        for name in (
            "pauses",
            "scheduler",
            "residency",
            "images",
            "cli",
            "telemetry",
            "fuzz",
            "geometry",
            "device_decoding",
            "vendors",
            "link_messages",
            "install",
            "metrics",
            "wire",
            "weights",
            "guard",
            "arena",
            "instances",
            "latency",
            "model_archive",
            "sbom",
            "decode_queue",
        )
    ),
)
"""Of UNIT, what takes more than a second of a processor: `make check` is for while one works."""

SERVICE = ("faults", "ingress", "connections")
"""Of what requests pass on their way."""

PATHS: tuple[tuple[str, tuple[str, ...]], ...] = (
    # The service
    ("anychip_base/", ("install", "processes", "faults", "tools")),
    ("*/py.typed", ("install",)),
    ("app/*.py", SERVICE),
    ("app/ingress_main.py", ("ingress",)),
    ("app/converter_main.py", ("ingress",)),
    ("app/prepared.py", ("processes", "faults")),
    ("app/access/", ("ingress", "connections")),
    ("app/compat/", ("protocols", "clients")),
    ("app/config/", ("deployment", "faults")),
    ("app/decoder/", ("processes", "simulated")),
    ("app/decoding/", ("processes", "faults")),
    ("app/fleet/", ("faults", "simulated")),
    ("app/http/*.py", ("protocols", "ingress", "connections", "clients")),
    ("app/http/routes/", ("protocols", "ingress", "connections", "clients")),
    ("app/http/playground/", ("browser",)),
    ("app/images/", ("processes", "tools", "arm")),
    ("app/ingress/", ("protocols", "ingress", "connections", "faults")),
    ("app/ingress/cascade*", ("serving", "ocr")),
    ("app/observability/", ("observability", "prometheus")),
    ("app/precision/", ("networks", "engines", "simulated")),
    ("app/processes/", ("processes", "faults", "ingress")),
    ("app/protocols/", ("protocols", "ingress", "clients")),
    ("app/scheduling/", ("faults",)),
    ("app/serving/", ("faults", "serving")),
    ("app/serving/cascades.py", ("serving", "ocr")),
    ("app/worker/", ("networks", "processes", "faults", "simulated", "vendors")),
    # Networks
    ("models/*.py", ("networks", "models", "engines")),
    ("models/confinement.py", ("processes", "engines")),
    ("models/contract/", ("networks", "models", "engines", "serving")),
    ("models/exports/", ("protocols", "networks", "models", "engines", "libraries", "ocr")),
    ("models/onnx/", ("networks", "models", "engines", "ocr")),
    ("models/sample/", ("networks", "models")),
    ("models/tasks/", ("networks", "models", "serving")),
    ("models/weights/", ("networks", "models", "serving")),
    ("models/yolo/", ("networks", "models")),
    # Chips
    ("backends/*.py", ("networks", "simulated", "vendors")),
    ("backends/contract/", ("networks", "engines", "simulated", "vendors")),
    ("backends/engines/", ("networks", "engines", "simulated", "vendors")),
    ("backends/operators/", ("networks", "simulated")),
    ("backends/telemetry/", ("observability",)),
    ("backends/vendors/", ("networks", "simulated", "vendors", "install")),
    # What is not for everybody
    ("plugins/ascend/", ("networks", "simulated", "vendors")),
    ("plugins/compat/", ("clients", "libraries", "models")),
    ("plugins/grpc/", ("protocols", "ingress", "connections", "clients")),
    ("plugins/hosting/", ("deployment",)),
    ("plugins/ocr/", ("ocr",)),
    ("plugins/samples/", ("networks", "models")),
    ("plugins/tools/", ("tools",)),
    ("plugins/tools/anychip_tools/null/", ("simulated",)),
    ("plugins/tools/anychip_tools/operator_tables/", ("simulated",)),
    ("plugins/tools/anychip_tools/simulated/", ("simulated",)),
    ("plugins/tools/anychip_tools/verify/", ("simulated",)),
    ("benchmarks/", ("networks", "tools")),
    # How it is set up and deployed
    ("deploy/*.py", ("install",)),
    ("deploy/install.py", ("install", "images")),
    ("deploy/compose/", ("deployment",)),
    ("deploy/grafana/", ("prometheus",)),
    ("deploy/helm/", ("deployment",)),
    ("deploy/image/", ("images",)),
    ("deploy/kserve/", ("deployment",)),
    ("deploy/prometheus/", ("prometheus", "deployment")),
    ("deploy/ray/", ("deployment",)),
    ("deploy/systemd/", ()),
    ("deploy/three-machines/", ("proxy", "deployment")),
    ("deploy/upstream/", ("deployment",)),
    ("deploy/upstream/frigate/", ("clients",)),
    ("deploy/upstream/mlflow/", ("clients",)),
    ("Dockerfile.*", ("images",)),
    (".dockerignore", ("images",)),
    ("docker-bake.hcl", ("images",)),
    ("pyproject.toml", ("install", "images")),
    ("constraints.txt", ("networks", "install", "images", "arm", "engines", "models", "libraries", "simulated")),
    # What make test itself runs, reads or is
    ("*.md", ()),
    ("docs/", ()),
    ("Makefile", ()),
    ("mkdocs.yml", ()),
    (".gitignore", ()),
    (".ci/", ()),
    ("tests/conftest.py", ()),
    ("tests/suites/", ("install",)),
    ("tests/environments/cached.py", ("install",)),
    # Shared by tests that name them in no way that choice.py sees
    ("tests/support/older_cpu.py", ()),
    ("tests/support/planted_stalls.py", ("faults",)),
    ("tests/support/other_clients.py", ("clients",)),
    ("tests/support/tritonclient_session.py", ("clients",)),
    ("tests/support/frigate_client.py", ("clients",)),
    ("tests/support/torchair_networks.json", ()),
)
"""Paths, and the suites of BY_PATH that a change there chooses. What ends in `/` is a folder and all that is in it; a
star stands for letters of one name. All rows that match count; a path that none matches chooses everything, but for
what is chosen by its paths alone. Tests, what they share and their environments need no row: choice.py sees who uses
them.
"""
