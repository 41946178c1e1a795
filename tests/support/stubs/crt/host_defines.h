// Owns what the CUDA headers want of a compiler, for plain g++ (pip's CUDA headers come without crt/).
#pragma once
#define __host__
#define __device__
#define __global__
#define __shared__
#define __constant__
#define __managed__
#define __device_builtin__
#define __cudart_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __builtin_align__(n) __attribute__((aligned(n)))
#define __align__(n) __attribute__((aligned(n)))
#define __specialization_static
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define CUDA_CB
