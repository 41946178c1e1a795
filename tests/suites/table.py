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
    by_itself: bool = False
    """Whether it is a pytest of its own: all others that run alike are one."""
    programs: tuple[str, ...] = ()
    """Debian's packages that they need, keys of PACKAGES."""
    by_its_paths_alone: bool = False
    """Whether only what it is about chooses it: `make nightly` runs it after any other change. So are the suites that
    need other people's programs."""


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


def of(room: str, *names: str) -> tuple[str, ...]:
    """Return files of a room: `of("unit", "gate worker")`."""
    return tuple(f"tests/{room}/test_{name}.py" for several in names for name in several.split())


FAULT_STORIES = tuple(
    f"tests/service/test_{name}"
    for name in (
        "ingresses.py::test_an_ingress_that_is_killed_costs_its_own_connections_alone",
        "faults.py::test_overload_is_refused_and_memory_stays_flat",
        "faults.py::test_a_poisonous_image_fails_alone",
        "faults.py::test_nothing_is_left_of_a_killed_server_whose_fork_servers_were_replaced",
        "faults.py::test_deadlines_end_to_end",
        "faults.py::test_fork_servers_end_alone_and_others_take_their_place",
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

COMPUTING = of(
    "unit",
    "classification worker device_engines vendor_calls operators checkpoint detection",
    "checkpoint_fuzz gate_of_tasks catalog onnx_graph witness",
)
"""Of UNIT, what makes networks and computes with them: more than half of its time."""

MAKE_TEST = {
    "acceptance": Suite(
        "the installed command, from an empty folder, on files as libraries write them",
        ("tests/acceptance",),
        at_a_time=2,
        by_itself=True,  # It has a pytest.ini.
    ),
    "unit": Suite("what starts no process and computes no network", UNIT, without=COMPUTING, at_a_time=ALL_PROCESSORS),
    "service": Suite(
        "the protocols and who may ask, with one service for most of them",
        of("service", "http open_inference rpc access"),
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
        at_a_time=2,
    ),
    "manifests": Suite(
        "manifests, settings and pages of the deployment, as far as files say it",
        of("deploy", "deploy_manifests deploy_closed deploy_docs"),
        at_a_time=2,
    ),
}
"""What `make test` runs, in this order: a change must pass it whatever it touches."""

BY_PATH = {
    "libraries": Suite(
        "networks of other libraries",
        ("tests/cpu/test_zoo.py", "tests/cpu/test_libraries.py", "tests/cpu/test_library_pixels.py"),
        at_a_time=2,
    ),
    "protocols": Suite(
        "the API as it is described, and tensors in and out",
        ("tests/service/test_open_inference_tensors.py", "tests/service/test_api_description.py"),
        at_a_time=2,
    ),
    "faults": Suite(
        "everything that can go wrong beside a request: workers, queues, hand-overs, limits, ends",
        of("service", "faults limits shutdown"),
    ),
    "processes": Suite(
        "worker, decoder and fork-server processes as the event loop sees them, and what confines them",
        (
            *of("simulated", "decoders worker_process fork_server"),
            *of("cpu", "confinement imports"),
        ),
    ),
    "ingress": Suite(
        "connections, ingress processes, TLS, several services behind one port",
        of("service", "ingresses doors converter opening no_torch"),
    ),
    "connections": Suite(
        "thousands of connections and what one client can take",
        ("tests/service/test_connections.py", "tests/cpu/test_newest.py"),
        at_a_time=ONE_BY_ONE,
    ),
    "observability": Suite(
        "logs, traces and statistics, as a running service shows them",
        (
            "tests/service/test_tracing.py",
            "tests/service/test_tools.py::test_the_numbers_are_those_of_the_metrics_and_top_shows_them",
            "tests/simulated/test_telemetry_tools.py",
        ),
    ),
    "prometheus": Suite(
        "alerts and the dashboard in a Prometheus of their own",
        ("tests/service/test_monitoring.py",),
        programs=("prometheus",),
    ),
    "serving": Suite(
        "models that come, go and change while the service runs, and stages of models under one name",
        (
            "tests/simulated/test_rollout.py",
            *of("service", "stages changes tasks_of_images"),
        ),
    ),
    "simulated": Suite(
        "every simulated device: the contract, leaks, memory, operators, decoding, verify",
        (
            "tests/simulated/test_device_contract.py::test_every_other_simulated_device_has_its_names",
            "tests/simulated/test_device_contract.py::test_ascend_without_torch_npu",
            *of(
                "simulated",
                "leaks model_memory simulation verify operators_on_devices device_decoding external_backend null",
                "openreg",
            ),
            "tests/service/test_om.py",
            "tests/cpu/test_om.py",
        ),
    ),
    "vendors": Suite(
        "vendors' own packages over stub drivers, and our calls against their sources",
        (
            "tests/simulated/test_device_contract.py::test_a_refusal_to_lock_memory_is_nobody_elses_error",
            "tests/simulated/test_device_contract.py::test_the_service_on_the_stub_cuda_runtime",
            "tests/simulated/test_device_contract.py::test_torch_npu_without_cann_stops_torch_but_not_us",
            "tests/simulated/test_device_contract.py::test_a_vendors_own_package_over_a_stub_driver",
            "tests/simulated/test_device_contract.py::test_torch_npu_that_waits_for_every_kernel",
            "tests/simulated/test_vendor_sources.py",
        ),
    ),
    "engines": Suite(
        "every engine in every precision on the CPU",
        of("cpu", "backends engines exported models_on_demand fused"),
        at_a_time=2,
    ),
    "models": Suite(
        "networks against their references: torchvision, Ultralytics, OpenVINO, rfdetr",
        of(
            "cpu",
            "exported_images ultralytics_files openvino_networks rfdetr_files sample_quality",
            "forms_of_files onnx_node_tests",
        ),
        at_a_time=2,
    ),
    "networks": Suite(
        "networks, engines and the gate in this process: geometry, numbers, refusals",
        COMPUTING,
        at_a_time=ALL_PROCESSORS,
    ),
    "tools": Suite(
        "the commands: predict, bench, tune, validate, doctor, demo",
        (
            *of("cpu", "gpu_kit bench predict fetched_command validation doctor_here"),
            "tests/service/test_tools.py",
        ),
    ),
    "clients": Suite(
        "other people's clients, in other languages and for other servers",
        (*of("service", "other_clients tritonclient"),),
        wants=("clients",),
        programs=("libegl1",),
        by_its_paths_alone=True,
    ),
    "browser": Suite(
        "the page in a browser",
        ("tests/service/test_playground.py", "tests/cpu/test_playground_words.py"),
        wants=("clients",),
        programs=("chromium",),
        by_its_paths_alone=True,
    ),
    "install": Suite(
        "environments that the set-up makes",
        ("tests/cpu/test_install_here.py",),
    ),
    "deployment": Suite(
        "charts and manifests, rendered and checked by their tools; Ray",
        of("deploy", "deploy_ray deploy_manifests deploy_closed deploy_docs"),
        at_a_time=2,
        environment=".venv-deploy",
        by_its_paths_alone=True,
    ),
    "proxy": Suite(
        "nginx in front of three services",
        ("tests/deploy/test_three_machines.py",),
        at_a_time=2,
        programs=("nginx-light",),
        by_its_paths_alone=True,
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
}
"""What `.ci/run` adds where a changed path chooses it."""

NIGHTLY = {
    "alone": Suite(
        "what measures seconds, memory or a machine's share: ten minutes of faults, slow clients, models on demand",
        (
            *of("service", "chaos faults ingresses shutdown connections"),
            "tests/service/test_api_description.py::test_no_request_that_is_described_or_not_is_a_fault",
            "tests/simulated/test_verify.py",
            "tests/cpu/test_models_on_demand.py",
            "tests/virtual/test_loop_guard.py",
        ),
        at_a_time=ONE_BY_ONE,
        wants=("audit",),
    ),
    "arm": Suite(
        "the service on ARM, by qemu",
        ("tests/cpu/test_arm.py",),
        wants=("arm",),
        programs=("qemu-user-static",),
    ),
    "least": Suite(
        "packages in the least versions that pyproject.toml admits: pure logic, the protocols, a network of timm",
        (
            *of("service", "http open_inference"),
            "tests/cpu/test_libraries.py::test_a_folder_is_read_by_a_process_that_may_read_nothing_else[timm]",
            "tests/unit",
            "tests/virtual/test_hot.py",
        ),
        without=(*COMPUTING, "tests/unit/test_docs.py::test_the_page_of_troubles_is_the_one_that_the_tables_make"),
        at_a_time=2,
        environment=".venv-least",
    ),
    "next": Suite(
        "the torch that comes after ours: engines, operators' names, the contract of devices on the CPU",
        (
            "tests/cpu/test_engines.py",
            "tests/simulated/test_device_contract.py::test_a_device_that_is_here",
            *of("unit", "device_engines vendor_calls operators vendors"),
        ),
        at_a_time=2,
        environment=".venv-next",
    ),
}
"""What `make nightly` runs beside what these leave of BY_PATH."""

SUITES = {**MAKE_TEST, **BY_PATH, **NIGHTLY}

CHECK_LEAVES_OUT = (
    "tests/virtual",
    *COMPUTING,
    *of(
        "unit",
        "scheduler residency images cli telemetry fuzz device_decoding vendors link_messages install",
        "metrics wire weights guard arena instances latency decode_queue",
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
    ("app/prepared.py", ("processes", "faults")),
    ("app/access/", ("ingress", "connections")),
    ("app/compat/", ("protocols", "clients")),
    ("app/config/", ("faults",)),
    ("app/decoder/", ("processes", "simulated")),
    ("app/decoding/", ("processes", "faults")),
    ("app/fleet/", ("faults", "simulated")),
    ("app/http/*.py", ("protocols", "ingress", "connections")),
    ("app/http/routes/", ("protocols", "ingress", "connections")),
    ("app/http/playground/", ("browser",)),
    ("app/images/", ("processes", "tools")),
    ("app/ingress/", ("protocols", "ingress", "connections", "faults")),
    ("app/ingress/cascade*", ("serving",)),
    ("app/observability/", ("observability", "prometheus")),
    ("app/precision/", ("networks", "engines", "simulated")),
    ("app/processes/", ("processes", "faults", "ingress")),
    ("app/protocols/", ("protocols", "ingress")),
    ("app/scheduling/", ("faults",)),
    ("app/serving/", ("faults", "serving")),
    ("app/worker/", ("networks", "processes", "faults", "simulated", "vendors")),
    # Networks
    ("models/*.py", ("networks", "models", "engines")),
    ("models/confinement.py", ("processes", "engines")),
    ("models/contract/", ("networks", "models", "engines", "serving")),
    ("models/exports/", ("protocols", "networks", "models", "engines", "libraries")),
    ("models/onnx/", ("networks", "models", "engines")),
    ("models/sample/", ("networks", "models")),
    ("models/tasks/", ("networks", "models", "serving")),
    ("models/weights/", ("networks", "models", "serving")),
    ("models/yolo/", ("networks", "models")),
    # Chips
    ("backends/*.py", ("networks", "simulated", "vendors")),
    ("backends/contract/", ("networks", "engines", "simulated", "vendors")),
    ("backends/engines/", ("networks", "engines", "simulated", "vendors")),
    ("backends/telemetry/", ("observability",)),
    ("backends/vendors/", ("networks", "simulated", "vendors", "install")),
    # What is not for everybody
    ("plugins/ascend/", ("networks", "simulated", "vendors")),
    ("plugins/compat/", ("clients", "libraries", "models")),
    ("plugins/grpc/", ("protocols", "ingress", "connections")),
    ("plugins/hosting/", ("deployment",)),
    ("plugins/ocr/", ("ocr",)),
    ("plugins/samples/", ("networks", "models")),
    ("plugins/tools/", ("tools",)),
    ("plugins/tools/anychip_tools/null/", ("simulated",)),
    ("plugins/tools/anychip_tools/operator_tables/", ("simulated",)),
    ("plugins/tools/anychip_tools/simulated/", ("simulated",)),
    ("plugins/tools/anychip_tools/verify/", ("simulated",)),
    ("benchmarks/", ("networks", "tools")),
    ("benchmarks/zoo/", ("networks", "libraries")),
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
    ("pyproject.toml", ("install",)),
    ("constraints.txt", ("networks", "install", "engines", "models", "libraries", "simulated")),
    # What make test itself runs, reads or is
    ("*.md", ()),
    ("docs/", ()),
    ("Makefile", ()),
    ("mkdocs.yml", ()),
    (".gitignore", ()),
    (".ci/", ()),
    ("tests/conftest.py", ()),
    ("tests/suites/", ()),
    ("tests/environments/cached.py", ()),
    # Shared by tests that name them in no way that choice.py sees
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
