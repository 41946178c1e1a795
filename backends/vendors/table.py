"""Table of the vendors' chips: one row of facts a vendor, and nothing that runs.

Must import nothing but the standard library: set-up (`deploy/install.py`) and the images read this file, by its path,
before torch is installed. A vendor outside this repository brings its own row (docs/new-backend.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path


@dataclass(frozen=True)
class Container:
    """Parts of the host that a vendor's container takes. Paths may hold `*`.

    `one_of`: the vendor's tool; the first path that exists is taken. `groups`: files whose groups the container's user
    must be in, by the variables of deploy/compose/.env. `runtime`: an option of `docker run`.
    """

    devices: tuple[str, ...] = ()
    optional_devices: tuple[str, ...] = ()
    mounts: tuple[str, ...] = ()
    one_of: tuple[str, ...] = ()
    groups: Mapping[str, str] = field(default_factory=dict)
    runtime: str = ""


@dataclass(frozen=True)
class Question:
    """Question to a vendor's tool: its command, and the pattern of trouble in an answer."""

    command: tuple[str, ...]
    trouble: str


@dataclass(frozen=True)
class Sample:
    """Properties of a simulated device: its name, the message of a fault, and the compute capability."""

    device: str
    fault: str
    capability: tuple[int, int] | None = None


@dataclass(frozen=True)
class Pair:
    """Two pieces of software that must fit: `software` and `other`, by the names of `anychip doctor`'s versions.

    These are packages, `cuda` (of torch's build), toolkits, and `driver:` with the vendor's word.
    `versions`: what each version of `software` needs, by the beginning of its number; `at_least`: newer ones will do,
    too. Without `versions` the first two numbers of both must be the same. `needs`: `other` must be there.
    """

    software: str
    other: str
    versions: Mapping[str, str] = field(default_factory=dict)
    at_least: bool = False
    needs: bool = False


@dataclass(frozen=True)
class Machine:
    """Facts of a vendor's machine: for set-up, `anychip doctor` and images. A service needs none of them.

    `libraries`: those that the vendor's stack loads first: driver, runtime, management. `driver`: files with the
    driver's version, each with the pattern of the version. `toolkit`: the name of its toolkit among versions;
    `toolkit_folders`: where it is, and variables that name its folder or a part of it (`$ROCM_PATH`), which come first;
    `toolkit_files`: patterns of files in it with its version, each with the pattern of the version. `pairs`: software
    that must fit each other. `health`, `users`: questions to its tool about ill cards, and about other people's
    processes on them. `compilers`: packages of its engines that are not those of the device. `constraints`: limits for
    pip that the vendor's software needs. `flavour`: its image; `container`: the parts of the host for that image.
    """

    libraries: tuple[str, ...] = ()
    driver: tuple[tuple[str, str], ...] = ()
    toolkit: str = ""
    toolkit_folders: tuple[str, ...] = ()
    toolkit_files: tuple[tuple[str, str], ...] = ()
    pairs: tuple[Pair, ...] = ()
    health: Question | None = None
    users: Question | None = None
    compilers: tuple[str, ...] = ()
    constraints: tuple[str, ...] = ()
    flavour: str = ""
    container: Container = Container()


@dataclass(frozen=True)
class PageLocks:
    """Functions that lock the host's memory, so that a device copies from it while it computes.

    `runtime`: the function of the device's module of torch that returns their holder; `lock` takes an address, a size
    in bytes and `flags`, and `unlock` an address. Both return 0, or an error's number.
    """

    runtime: str
    lock: str
    unlock: str
    flags: int = 0


@dataclass(frozen=True)
class Pretence:
    """Properties of a device that computes nothing: the precision gate skips it, and `auto` never takes it.

    `reads_pixels`: if False, its answers do not even depend on the images, which are not decoded. `ballast_bytes`:
    extra bytes sent to a worker with its models. `forks`: its workers may be forked.
    """

    reads_pixels: bool
    ballast_bytes: int
    forks: bool


@dataclass(frozen=True)
class Facts:
    """Facts of a backend that are known before any device is touched: all that a service needs.

    Names. `name`: for `--device`. `vendor`: the vendor in metrics and reports, one word. `title`: the vendor's name for
    people. `aliases`: other words for `--device`. `device_type`: PyTorch's name of the device type.

    Detection. `packages`: the Python packages that bring the device type, any of them will do; none if it is part of
    torch. `torch_build`: the attribute of torch.version in a build for this vendor, if its name is not the device type.
    `build_tags`: parts of a torch version by which the vendor's own build is recognised (`2.9.0+das.opt1.dtk2604`).
    `stand_in`: `module:function`, which makes a substitute for torch's module of the device where PyTorch does not
    reach the cards. `install`: the remedy for missing software, as the end of a sentence. `device_files`: patterns of
    the driver's files; any of them will do. `pci_vendor`: the vendor's number in /sys/bus/pci, empty if unknown.
    `visibility_variable`: the environment variable that limits a process to some devices.

    Processes. `environment`: variables of a worker process, which the vendor's libraries read when they load;
    `{cache}` in it is the cache directory. `switches`: values to set in the process that owns the device, by the dotted
    name in the device's module of torch, or in torch if it begins with `torch.`. `page_locks`: how memory is locked.
    `telemetry`: the vendor's tool in backends.telemetry, or a module that reads one.

    Networks. `engines` and `precisions` are in order of preference, and `--precision auto` means the first precision;
    `by_name`: engines that `auto` does not try, as they take long to start or are no faster. `onnx`: ONNX Runtime's
    execution providers for its devices, best first, each with the package that has it: they share one folder, so that
    only one of them may be installed. `channels_last`: True for this layout of networks; None: as measured, when a
    network is loaded. `fused_layers`: True to try
    cuDNN's fused kernels for convolutions (backends.engines.fused).

    Faults. `lost`: parts of messages (lower case) after which the device does not answer any more. `out_of_memory`:
    parts of messages that mean too little memory, beside PyTorch's own. `remedies`: advice, by part of a message.

    Others. `machine`: what set-up, `anychip doctor` and images need. `sample`: properties of its simulated device, if
    any. `pretence`: of the devices of tests, which compute nothing.
    """

    vendor: str
    device_type: str
    engines: tuple[str, ...]
    precisions: tuple[str, ...]
    name: str = ""
    title: str = ""
    aliases: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    torch_build: str = ""
    build_tags: tuple[str, ...] = ()
    stand_in: str = ""
    install: str = ""
    device_files: tuple[str, ...] = ()
    pci_vendor: str = ""
    visibility_variable: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    switches: Mapping[str, bool] = field(default_factory=dict)
    page_locks: PageLocks | None = None
    telemetry: str = ""
    by_name: tuple[str, ...] = ()
    onnx: tuple[tuple[str, str], ...] = ()
    channels_last: bool | None = True
    fused_layers: bool = False
    lost: tuple[str, ...] = ()
    out_of_memory: tuple[str, ...] = ()
    remedies: Mapping[str, str] = field(default_factory=dict)
    machine: Machine = Machine()
    sample: Sample | None = None
    pretence: Pretence | None = None

    @property
    def computes(self) -> bool:
        """Return False if its answers mean nothing."""
        return self.pretence is None

    @property
    def reads_pixels(self) -> bool:
        """Return False if nothing need be decoded for it."""
        return self.pretence is None or self.pretence.reads_pixels

    @property
    def forks(self) -> bool:
        """Return True if no driver is loaded in its workers, so that they may be forked of a loaded process."""
        return self.host_memory if self.pretence is None else self.pretence.forks

    @property
    def graph_class(self) -> str:
        """Return the class of captured graphs in the device's module of torch; all vendors' names have this form."""
        return f"{self.device_type.upper()}Graph"

    @property
    def host_memory(self) -> bool:
        """Return True if the device's memory is the host's, so that others add to its used memory."""
        return self.device_type == "cpu"

    def variables(self, surroundings: Mapping[str, str], cache_dir: Path) -> dict[str, str]:
        """Return `environment` for a process in these surroundings, which win.

        Only one allocator setting is allowed: torch_npu ends a process that has both PYTORCH_NPU_ALLOC_CONF and
        PYTORCH_ALLOC_CONF (NPUAllocatorConfig.cpp), and a user who sets one means it.
        """
        allocator = any(name.endswith("_ALLOC_CONF") for name in surroundings)
        return {
            name: text.replace("{cache}", str(cache_dir))
            for name, text in self.environment.items()
            if name not in surroundings and not (allocator and name.endswith("_ALLOC_CONF"))
        }


# The texts (libcudart 13.0) of those errors after which, says driver_types.h, "the process must be terminated". HIP and
# the vendors that answer to torch.cuda word theirs alike.
_CUDA_LOST = (
    "uncorrectable ecc",
    "uncorrectable nvlink",
    "illegal memory access",
    "invalid access of peer gpu memory",
    "launch timed out",
    "unspecified launch failure",
    "device-side assert",
    "hardware stack error",
    "illegal instruction",
    "misaligned address",
    "not supported on global/shared address space",
    "invalid program counter",
    "tensor memory not completely freed",
    "mps client has been terminated",
    "external entity outside of cuda",
)

# Packages for numpy 1, which Huawei's, Cambricon's and Hygon's base images have. CANN 8 fails with numpy 2
# (remedies, below); OpenCV 4.12 and ml-dtypes 0.6, which onnx needs, are the first that need numpy 2.
NUMPY_1 = ("numpy<2", "opencv-python<4.12", "opencv-python-headless<4.12", "ml-dtypes<0.6")

# fp32 means float32. Every torch whose device type is cuda has them, and its vendor's libraries are asked to obey: a
# ROCm torch hands the first to MIOpen.
_FLOAT32 = {"torch.backends.cudnn.allow_tf32": False, "torch.backends.cuda.matmul.allow_tf32": False}

_CUDA_LOCKS = PageLocks("cudart", "cudaHostRegister", "cudaHostUnregister")  # HIP's have the same names.

# npurt is in torch_npu from 2.12 on (csrc/npu/npurt.cpp), ACL_HOST_REG_MAPPED, 2, in CANN's acl_rt.h. Memory that is
# pinned and not mapped is copied at 9 GB/s instead of 23, measured DeepSpeed (accelerator/npu_accelerator.py).
_NPU_LOCKS = PageLocks("npurt", "npuHostRegister", "npuHostUnregister", flags=0x2)

NVIDIA = Facts(
    name="cuda",
    vendor="nvidia",
    title="NVIDIA",
    aliases=("nvidia",),
    device_type="cuda",
    install="pip install torch from PyTorch's index for CUDA",
    device_files=("/dev/nvidiactl", "/dev/nvidia[0-9]*", "/dev/nvmap", "/dev/dxg"),  # nvmap: Jetson; dxg: WSL
    pci_vendor="0x10de",
    visibility_variable="CUDA_VISIBLE_DEVICES",
    telemetry="nvidia",
    onnx=(("CUDAExecutionProvider", "onnxruntime-gpu"),),
    page_locks=_CUDA_LOCKS,
    # cuDNN keeps 10,000 plans a thread by default (pytorch#104701).
    # PCI_BUS_ID: CUDA then numbers its devices as NVIDIA's tools do; by default the fastest card comes first.
    environment={"TORCH_CUDNN_V8_API_LRU_CACHE_LIMIT": "256", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
    switches={
        **_FLOAT32,
        # Shapes are fixed and every batch size is run before it serves: cuDNN may measure its kernels then.
        "torch.backends.cudnn.benchmark": True,
    },
    engines=("tensorrt", "graph", "eager"),
    by_name=("onnxruntime",),
    precisions=("fp16", "bf16", "int8", "fp32"),
    fused_layers=True,
    # The two further ones are what a process gets once the driver was reset or reloaded under it.
    lost=(*_CUDA_LOST, "cuda error: unknown error", "driver shutting down"),
    remedies={
        "busy or unavailable": "another process has the card for itself: end it, or let several share the card "
        "(nvidia-smi --compute-mode=0)",
    },
    machine=Machine(
        libraries=("libcuda.so.1", "libnvidia-ml.so.1"),
        driver=(("/proc/driver/nvidia/version", r"(?:Kernel Module.*?|Module for \S+ +)(\d+\.[\d.]+)"),),
        toolkit_folders=("$CUDA_HOME", "$CUDA_PATH", "/usr/local/cuda"),
        pairs=(
            # docs.nvidia.com/deploy/cuda-compatibility, minor version compatibility.
            Pair("cuda", "driver:nvidia", {"11": "450.80.02", "12": "525.60.13", "13": "580.65.06"}, at_least=True),
            Pair("torch_tensorrt", "torch"),
            Pair("torch_tensorrt", "tensorrt", {"2.14": "11.1", "2.13": "11.0"}, needs=True),  # As the wheels pin it.
        ),
        health=Question(
            ("nvidia-smi", "--query-gpu=index,ecc.errors.uncorrected.volatile.total", "--format=csv,noheader"),
            r"^\d+, [1-9]\d*$",
        ),
        users=Question(
            ("nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"), r"^(\d+), (.+)$"
        ),
        compilers=("torch_tensorrt", "tensorrt"),
        flavour="cuda",
        container=Container(runtime="--gpus all"),
    ),
)
ASCEND = Facts(
    name="npu",
    vendor="ascend",
    title="Huawei Ascend",
    aliases=("ascend", "huawei"),
    device_type="npu",
    packages=("torch_npu",),
    install="ANYCHIP_TORCH=ascend make install, in anychip's sources, beside CANN",
    onnx=(("CANNExecutionProvider", "onnxruntime-cann"),),
    page_locks=_NPU_LOCKS,
    device_files=("/dev/davinci[0-9]*",),
    pci_vendor="0x19e5",
    # Its numbers must ascend, else the driver sees no device.
    visibility_variable="ASCEND_RT_VISIBLE_DEVICES",
    environment={
        # Against fragmentation; needs HDK 23.0.0 (of 2023). For an older one, set the variable yourself.
        "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
        # Executors kept on the host, one for each operator and shape; the default is 10000.
        "ACLNN_CACHE_LIMIT": "2000",
        # If operators are compiled after all (310P, 910A), they are kept.
        "ACL_OP_COMPILER_CACHE_MODE": "enable",
        "ACL_OP_COMPILER_CACHE_DIR": "{cache}/ascend",
        # torch_npu runs operators that it lacks on the CPU and only tells standard error. As an error they are known:
        # backends.operators then runs them on the CPU, counts them and shows them.
        "TORCH_NPU_FALLBACK_CPU_DISABLE": "1",
    },
    switches={
        "config.allow_internal_format": False,  # Private layouts pad tensors and change answers.
        "conv.allow_hf32": False,  # torch_npu's default is True.
        "matmul.allow_hf32": False,
    },
    engines=("graph", "eager"),
    by_name=("onnxruntime",),
    precisions=("fp16", "bf16", "fp32"),
    channels_last=False,  # torch_npu refuses contiguous(memory_format=channels_last).
    # Ascend's faults are plain RuntimeErrors with a number: those of its runtime and driver begin with 507. Too little
    # memory, outside torch_npu's allocator: of the runtime, of ACL, of GE (acl_base.h, rt_ and ge_error_codes.h).
    lost=("error code is 507", "error code is 107022", "error code is 500004", "multi bit ecc", "device is lost"),
    out_of_memory=tuple(f"error code is {code}" for code in (207001, 200000, 245000, 245002)),
    remedies={
        # vllm-ascend#472 and #2210: the compiler of operators in CANN 8 fails with numpy 2.
        "500001": "CANN's compiler of operators does not run; with CANN 8 this is numpy 2: pip install 'numpy<2'",
        "cannot run aclop operators during npu graph capture": "the network needs operators that cannot be captured: "
        "choose --engine eager",
    },
    sample=Sample(
        "Ascend910B3",
        # Error of torch_npu 2.13 over a driver that answers 507015.
        "npuSynchronizeDevice:../torch_npu/csrc/core/npu/NPUStream.cpp:748 NPU function error: "
        "AclrtSynchronizeDeviceWithTimeout, error code is 507015\n[ERROR] ERR00100 PTA call acl api failed\n"
        "[Error]: The aicore execution is abnormal.",
    ),
    machine=Machine(
        libraries=("libascend_hal.so", "libascendcl.so", "libhccl.so"),
        driver=(("/usr/local/Ascend/driver/version.info", r"(?im)^version=(\S+)"),),  # As its package installs it.
        toolkit="cann",
        toolkit_folders=(
            *("$ASCEND_HOME_PATH", "$ASCEND_TOOLKIT_HOME"),
            *("/usr/local/Ascend/cann", "/usr/local/Ascend/ascend-toolkit/latest"),
            *("/usr/local/Ascend/nnae/latest", "/usr/local/Ascend/nnrt/latest"),
        ),
        # As Huawei's pages read them: of the toolkit, and of installations for inference alone. There may be only
        # version.cfg, which begins `# version: 1.0` and says `runtime_running_version=[7.6.0.1.220:8.0.0]`: the
        # runtime's version, then CANN's.
        toolkit_files=(
            ("*/ascend_toolkit_install.info", r"(?m)^version=(\S+)"),
            ("*/ascend_nnrt_install.info", r"(?m)^version=(\S+)"),
            ("ascend_nnae_install.info", r"(?m)^version=(\S+)"),
            ("version.cfg", r"(?m)^runtime_running_version=\[[^:\]]*:([^\]]+)\]"),
        ),
        pairs=(Pair("torch_npu", "torch"),),
        health=Question(("npu-smi", "info"), r"\|\s*\d+\s+\S+\s*\|\s*(?:Warning|Alarm|Critical|UNKNOWN)"),
        users=Question(("npu-smi", "info"), r"^\|\s*\d+\s+\d+\s*\|\s*(\d+)\s*\|\s*(\S+)\s*\|\s*\d+\s*\|"),
        constraints=NUMPY_1,
        flavour="ascend",
        container=Container(
            devices=("/dev/davinci[0-9]*", "/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc"),
            optional_devices=("/dev/davinci_manager_docker",),
            mounts=("/usr/local/Ascend/driver", "/usr/local/dcmi", "/etc/ascend_install.info"),
            one_of=("/usr/local/sbin/npu-smi", "/usr/local/bin/npu-smi"),
            groups={"ASCEND_GID": "/dev/davinci_manager"},
        ),
    ),
)
AMD = Facts(
    name="rocm",
    vendor="amd",
    title="AMD",
    aliases=("amd", "hip"),  # `hip` is what ROCm calls itself, though torch takes it nowhere.
    device_type="cuda",
    torch_build="hip",
    install="pip install torch from PyTorch's index for ROCm",
    build_tags=("rocm",),
    device_files=("/dev/kfd",),
    pci_vendor="0x1002",
    visibility_variable="HIP_VISIBLE_DEVICES",
    telemetry="amd",
    onnx=(("MIGraphXExecutionProvider", "onnxruntime-migraphx"),),
    page_locks=_CUDA_LOCKS,
    # Shapes are fixed and warmed before anything is served: HYBRID measures the kernels for a shape that its database
    # lacks, once, where FAST would take one unmeasured. What is found and compiled is kept: minutes on some cards.
    environment={
        "MIOPEN_FIND_MODE": "HYBRID",
        "MIOPEN_USER_DB_PATH": "{cache}/miopen",
        "MIOPEN_CUSTOM_CACHE_DIR": "{cache}/miopen",
    },
    engines=("migraphx", "graph", "eager"),
    by_name=("onnxruntime",),
    precisions=("fp16", "bf16", "fp32"),
    # MIOpen's faster layout differs by architecture and version; gfx11 was slower in NHWC (pytorch#170947).
    channels_last=None,
    switches=_FLOAT32,
    lost=_CUDA_LOST,
    machine=Machine(  # No libraries: torch's wheels bring HIP's runtime, and ROCm 10 has no ROCm SMI any more.
        driver=(("/sys/module/amdgpu/version", r"([\d.]+)"),),
        toolkit="rocm",
        toolkit_folders=("$ROCM_PATH", "$ROCM_HOME", "/opt/rocm"),  # torch obeys both (utils/cpp_extension.py).
        # ROCm 7.12 and newer is in a folder below /opt/rocm: AMD's RFC on TheRock's packages, and its image of 10.0.0.
        toolkit_files=tuple((file, r"^(1?\d\.[\d.]+)") for file in (".info/version", "core/.info/version")),
        compilers=("torch_migraphx",),
        flavour="rocm",
        container=Container(
            ("/dev/kfd", "/dev/dri"), groups={"KFD_GID": "/dev/kfd", "RENDER_GID": "/dev/dri/renderD*"}
        ),
    ),
)
HYGON = replace(  # Its build of torch is derived from AMD's.
    AMD,
    name="dcu",
    vendor="hygon",
    title="Hygon",
    aliases=("hygon",),
    install="install the vendor's torch wheel for your DTK (developer.sourcefind.cn)",
    build_tags=("das", "dtk"),
    device_files=("/dev/mkfd", "/dev/kfd"),
    pci_vendor="0x1d94",
    telemetry="hygon",
    machine=Machine(
        libraries=("libgalaxyhip.so", "librocm_smi64.so.2"),
        # Kernel modules as gpustack/runtime reads them (detector/*.py), Kunlunxin's, too.
        driver=(("/sys/module/hycu/version", r"([\d.]+)"), ("/sys/module/hydcu/version", r"([\d.]+)")),
        toolkit="dtk",
        toolkit_folders=("$ROCM_PATH", "$ROCM_HOME", "/opt/dtk"),  # Its env.sh sets the first.
        # DTK's versions are years. People read either file.
        toolkit_files=tuple((f".info/{name}", r"^\D*(2\d\.[\d.]+)") for name in ("version", "rocm_version")),
        constraints=NUMPY_1,
        flavour="dcu",
        # Without /opt/hyhal `import torch` fails.
        container=replace(AMD.machine.container, optional_devices=("/dev/mkfd",), mounts=("/opt/hyhal",)),
    ),
)
CAMBRICON = Facts(
    name="mlu",
    vendor="cambricon",
    title="Cambricon",
    aliases=("cambricon",),
    device_type="mlu",
    packages=("torch_mlu",),
    install="install the vendor's wheel for your version of torch; it is on no public index",
    device_files=("/dev/cambricon_dev[0-9]*",),
    pci_vendor="0xcabc",
    visibility_variable="MLU_VISIBLE_DEVICES",
    telemetry="cambricon",
    engines=("graph", "eager"),
    precisions=("fp16", "bf16", "fp32"),
    channels_last=None,
    # torch_mlu adds these (its backends/__init__.py); the first is True by default.
    switches={"torch.backends.cnnl.allow_tf32": False, "torch.backends.mlu.matmul.allow_tf32": False},
    # TORCH_CNRT_CHECK of the public torch_mlu words it so; Biren's and Moore Threads' words are ours.
    sample=Sample("MLU370-X8", "CNRT error: MLU kernel execution failed", (5, 0)),
    machine=Machine(
        libraries=("libcndrv.so", "libcnrt.so", "libcndev.so"),
        toolkit="neuware",
        toolkit_folders=("$NEUWARE_HOME", "/usr/local/neuware"),
        toolkit_files=(("version.txt", r"Neuware Version (\d[\d.]*)"),),  # As Cambricon's mlu-ops reads it.
        pairs=(Pair("torch_mlu", "torch"),),
        constraints=NUMPY_1,
        flavour="mlu",
        container=Container(
            ("/dev/cambricon_dev[0-9]*", "/dev/cambricon_ctl"),
            optional_devices=("/dev/cambricon_ipcm[0-9]*",),
            one_of=("/usr/bin/cnmon",),
        ),
    ),
)
BIREN = Facts(
    name="supa",
    vendor="biren",
    title="Biren",
    aliases=("biren",),
    device_type="supa",
    packages=("torch_br", "torch_supa"),  # torch_br for BR1xx, torch_supa for BR2xx: the device type is the same.
    install="install the vendor's wheel: torch_supa for BR2xx, torch_br for BR1xx",
    device_files=("/dev/biren/card_[0-9]*",),
    visibility_variable="SUPA_VISIBLE_DEVICES",
    telemetry="biren",
    engines=("graph", "eager"),
    channels_last=None,
    precisions=("bf16", "fp16", "fp32"),
    sample=Sample("Biren166", "SUPA error: the kernel did not end", (1, 0)),
    machine=Machine(
        toolkit="supa",
        toolkit_folders=("$SUPA_PATH", "/usr/local/birensupa/sdk/latest/supa", "/usr/local/birensupa"),
        toolkit_files=(("version.txt", r"(\d[\w.]*)"),),  # Variable, folder and file as torch_supa reads them.
    ),
)
MOORE_THREADS = Facts(
    name="musa",
    vendor="moorethreads",
    title="Moore Threads",
    aliases=("mthreads", "moorethreads"),
    device_type="musa",
    packages=("torch_musa",),
    install="install the vendor's wheel for your version of torch",
    build_tags=("musa",),
    device_files=("/dev/mtgpu.[0-9]*",),
    pci_vendor="0x1ed5",
    visibility_variable="MUSA_VISIBLE_DEVICES",
    telemetry="moorethreads",
    engines=("graph", "eager"),
    channels_last=None,
    precisions=("fp16", "fp32"),
    switches={"torch.backends.mudnn.allow_tf32": False},  # torch_musa adds it (its __init__.py).
    sample=Sample("MTT S4000", "MUSA error: the kernel did not end", (2, 2)),
    machine=Machine(
        toolkit="musa",
        toolkit_folders=("$MUSA_HOME", "/usr/local/musa"),
        # The vendor's word for what decides: docs.mthreads.com, ONNXRuntime-MUSA-M1000, environment_setup.
        toolkit_files=(("version.json", r'"musa_toolkits":\s*\{\s*"version":\s*"([^"]+)"'),),
        pairs=(Pair("torch_musa", "torch"),),
    ),
)
# Vendors whose own builds of torch answer to torch.cuda, in NVIDIA's place. Served with what every torch.cuda has.
METAX = Facts(
    name="metax",
    vendor="metax",
    title="MetaX",
    aliases=("maca",),
    device_type="cuda",
    install="install the vendor's torch wheel for MACA",
    build_tags=("metax",),
    device_files=("/dev/mxcd",),
    pci_vendor="0x9999",
    # As public deployers set it; whether MACA obeys CUDA_VISIBLE_DEVICES as well only a card can show.
    visibility_variable="MACA_VISIBLE_DEVICES",
    telemetry="metax",
    engines=("graph", "eager"),
    channels_last=None,
    precisions=("fp16", "bf16", "fp32"),
    switches=_FLOAT32,
    page_locks=_CUDA_LOCKS,
    lost=_CUDA_LOST,
)
ILUVATAR = replace(
    METAX,
    name="iluvatar",
    vendor="iluvatar",
    title="Iluvatar CoreX",
    aliases=("corex",),
    install="install the vendor's torch wheel for CoreX",
    build_tags=("corex",),
    device_files=("/dev/iluvatar[0-9]*",),
    pci_vendor="0x1e3e",
    visibility_variable="CUDA_VISIBLE_DEVICES",
    telemetry="iluvatar",
)
KUNLUN = replace(
    METAX,
    name="kunlun",
    vendor="kunlun",
    title="Kunlunxin",
    aliases=("kunlunxin",),
    packages=("torch_xmlir",),  # Must be imported before the first call of torch.cuda.
    install="install the vendor's torch and torch_xmlir; where torch then finds no device, preload its libcudart.so.12",
    build_tags=(),
    device_files=("/dev/xpuctrl",),
    pci_vendor="0x1d22",
    visibility_variable="XPU_VISIBLE_DEVICES",
    telemetry="kunlun",
    machine=Machine(driver=(("/proc/kunlun/version", r"([\d.]+)"),)),
)
INTEL = Facts(
    name="xpu",
    vendor="intel",
    title="Intel",
    aliases=("intel",),
    device_type="xpu",
    install="pip install torch from PyTorch's index for XPU",
    device_files=("/dev/dri/renderD*",),
    pci_vendor="0x8086",
    visibility_variable="ZE_AFFINITY_MASK",
    telemetry="intel",
    switches={"torch.backends.mkldnn.allow_tf32": False},  # Newer than torch 2.5, where it changes nothing.
    engines=("graph", "eager"),
    precisions=("fp16", "bf16", "fp32"),
    machine=Machine(libraries=("libze_loader.so.1",)),
)
CPU = Facts(
    name="cpu",
    vendor="cpu",
    title="CPU",
    onnx=(("CPUExecutionProvider", "onnxruntime"),),
    device_type="cpu",
    engines=("openvino", "onnxruntime", "eager"),
    precisions=("bf16", "int8", "fp32"),
    # Bounds what eager keeps for shapes it has seen, whatever the surroundings say (pytorch#98688); several models
    # at every batch size fit.
    environment={"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "1024"},
    machine=Machine(compilers=("openvino", "onnxruntime"), flavour="cpu"),
)

# `switches`: fp32 means float32, whatever a vendor's default is: precisions that round more are chosen by name.

ACCELERATORS: tuple[Facts, ...] = (
    NVIDIA,
    ASCEND,
    AMD,
    HYGON,
    CAMBRICON,
    BIREN,
    MOORE_THREADS,
    METAX,
    ILUVATAR,
    KUNLUN,
    INTEL,
)
"""Rows of this repository, in the order in which `auto` tries them; the CPU comes last."""

_known = {row.name: row for row in (*ACCELERATORS, CPU)}


def software(rows: Iterable[Facts]) -> tuple[str, ...]:
    """Return the packages of these rows whose versions decide how a network is computed."""
    named = (name for row in rows for name in (*row.packages, *row.machine.compilers, *dict(row.onnx).values()))
    return tuple(dict.fromkeys(("torch", "torchvision", *named)))


def learn(facts: Facts) -> None:
    """Add the row of another package, in place of the row with its name."""
    _known[facts.name] = facts


def known() -> Iterable[Facts]:
    """Return every row of this process."""
    return tuple(_known.values())


def of_type(device_type: str) -> tuple[Facts, ...]:
    """Return the rows of a PyTorch device type: `cuda` has several."""
    return tuple(facts for facts in known() if facts.device_type == device_type)
