# All images at once, for the processors that each base has: docker buildx bake, or docker buildx bake ascend --push
#   IMAGE=registry.example.com/anychip docker buildx bake cuda ascend --push
# Ascend hosts are often Kunpeng (arm64). Building for another processor needs QEMU or a builder of that kind.
variable "IMAGE" { default = "anychip" }
variable "VERSION" { default = "0.1.0" }
variable "REVISION" { default = "unknown" }

group "default" { targets = ["cpu", "cuda", "cuda-slim", "rocm", "ascend", "dcu"] }

target "common" {
  context = "."
  args = { VERSION = VERSION, REVISION = REVISION }
  # The list of what is in the image, and how it was built, beside the image in the registry.
  attest = ["type=sbom", "type=provenance,mode=max"]
}

target "cpu" {
  inherits = ["common"]
  dockerfile = "Dockerfile.cpu"
  tags = ["${IMAGE}:${VERSION}-cpu"]
  platforms = ["linux/amd64", "linux/arm64"]
}

target "cuda" {
  inherits = ["common"]
  dockerfile = "Dockerfile.cuda"
  tags = ["${IMAGE}:${VERSION}-cuda"]
  platforms = ["linux/amd64", "linux/arm64"]
}

target "cuda-slim" {
  inherits = ["common"]
  dockerfile = "Dockerfile.cuda-slim"
  tags = ["${IMAGE}:${VERSION}-cuda-slim"]
  platforms = ["linux/amd64"]
}

target "rocm" {
  inherits = ["common"]
  dockerfile = "Dockerfile.rocm"
  tags = ["${IMAGE}:${VERSION}-rocm"]
  platforms = ["linux/amd64"]
}

target "ascend" {
  inherits = ["common"]
  dockerfile = "Dockerfile.ascend"
  tags = ["${IMAGE}:${VERSION}-ascend"]
  platforms = ["linux/amd64", "linux/arm64"]
}

# Not in the default: the vendor's base must be loaded and named, MLU_BASE_IMAGE=… docker buildx bake mlu
variable "MLU_BASE_IMAGE" { default = "" }
target "mlu" {
  inherits = ["common"]
  dockerfile = "Dockerfile.mlu"
  args = { BASE_IMAGE = MLU_BASE_IMAGE }
  tags = ["${IMAGE}:${VERSION}-mlu"]
  platforms = ["linux/amd64"]
}

target "dcu" {
  inherits = ["common"]
  dockerfile = "Dockerfile.dcu"
  tags = ["${IMAGE}:${VERSION}-dcu"]
  platforms = ["linux/amd64"]
}
