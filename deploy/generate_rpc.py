"""Make plugins/grpc's open_inference.binpb, the description of anychip's gRPC interface, from the .proto beside it.

Owns: the compilation. Needs grpcio-tools (one of the developers' packages); example: python deploy/generate_rpc.py

It writes a descriptor and no Python: protoc's Python refuses every protobuf older than itself and warns of newer ones,
and vendors' images have whatever protobuf their other packages need. All of these read a descriptor.
"""

from __future__ import annotations

import argparse
import sys
from importlib.resources import files
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "plugins" / "grpc" / "anychip_grpc"
PROTO, DESCRIPTOR = FOLDER / "open_inference.proto", FOLDER / "open_inference.binpb"


def compile_to(target: Path) -> None:
    """Write the descriptor set of `PROTO`. Raises RuntimeError with protoc's messages above it."""
    from grpc_tools import protoc

    common = str(files("grpc_tools") / "_proto")
    arguments = ["protoc", f"-I{FOLDER}", f"-I{common}", f"--descriptor_set_out={target}", str(PROTO)]
    if protoc.main(arguments):
        raise RuntimeError(f"{PROTO.name} cannot be compiled")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.parse_args()
    try:
        compile_to(DESCRIPTOR)
    except (ImportError, RuntimeError) as error:
        sys.exit(f"anychip: {error}")
    print(DESCRIPTOR)


if __name__ == "__main__":
    main()
