"""What the emulation itself reports, on kernels of a few lines that each do one thing a GPU forbids."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from backends.kernels.launch import pointer
from backends.kernels.variants import SOURCES, Variant
from tests.cuda_emulation.module import EmulatedModule, EmulationError, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

SOURCE = """
#include "prim.cuh"

extern "C" __global__ void __launch_bounds__(64)
neighbour(int* out) {
  SHARED_MEMORY(memory);
  int* slots = reinterpret_cast<int*>(memory);
  slots[threadIdx.x] = threadIdx.x;
  __syncthreads();
  out[blockIdx.x * 64 + threadIdx.x] = slots[(threadIdx.x + 1) % 64] + blockIdx.x * 1000;
}

extern "C" __global__ void __launch_bounds__(64)
neighbour_without_barrier(int* out) {
  SHARED_MEMORY(memory);
  int* slots = reinterpret_cast<int*>(memory);
  slots[threadIdx.x] = threadIdx.x;
  out[blockIdx.x * 64 + threadIdx.x] = slots[(threadIdx.x + 32) % 64];
}

extern "C" __global__ void __launch_bounds__(64)
barrier_in_a_branch(int* out) {
  if (threadIdx.x < 40) __syncthreads();
  out[threadIdx.x] = 1;
}

extern "C" __global__ void __launch_bounds__(32)
shuffle_in_a_branch(int* out) {
  int value = threadIdx.x;
  if (threadIdx.x < 8) value = __shfl_xor_sync(ALL_LANES, value, 1);
  out[threadIdx.x] = value;
}

extern "C" __global__ void __launch_bounds__(32)
shuffles_that_differ(int* out) {
  int value = threadIdx.x;
  if (threadIdx.x % 2) value = __shfl_xor_sync(ALL_LANES, value, 1);
  else value = __shfl_xor_sync(ALL_LANES, value, 2);
  out[threadIdx.x] = value;
}

extern "C" __global__ void __launch_bounds__(32)
write_past_shared_memory(int* out) {
  SHARED_MEMORY(memory);
  reinterpret_cast<int*>(memory)[threadIdx.x + 1] = 1;
}

extern "C" __global__ void __launch_bounds__(32)
copy_without_wait(const char* in, int* out) {
  SHARED_MEMORY(memory);
  copy16_async(memory + threadIdx.x * 16, in + threadIdx.x * 16, 16);
  copy_commit();
}

extern "C" __global__ void __launch_bounds__(32)
copy_seen_too_early(const char* in, int* out) {
  SHARED_MEMORY(memory);
  copy16_async(memory + threadIdx.x * 16, in + threadIdx.x * 16, 16);
  copy_commit();
  out[threadIdx.x] = *reinterpret_cast<int*>(memory + threadIdx.x * 16);
  copy_wait<0>();
  out[threadIdx.x + 32] = *reinterpret_cast<int*>(memory + threadIdx.x * 16);
}

extern "C" __global__ void __launch_bounds__(32)
load_one_chunk_too_many(const char* in, int* out) { out[threadIdx.x] = load16(in + threadIdx.x * 16 + 16).x; }

extern "C" __global__ void __launch_bounds__(32)
load_misaligned(const char* in, int* out) { out[threadIdx.x] = load16(in + 8).x; }
"""


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> EmulatedModule:
    folder = tmp_path_factory.mktemp("sources")
    (folder / "faults.cu").write_text(SOURCE)
    (folder / "prim.cuh").write_text((SOURCES / "prim.cuh").read_text())
    return EmulatedModule(Variant("faults.cu", torch.float32, torch.float32, None), folder)


def run(
    module: EmulatedModule, kernel: str, threads: int, shared: int = 512, seed: int = 0, blocks: int = 1
) -> torch.Tensor:
    """Run a kernel over 512 bytes of input, all of them 1, and return its output."""
    source = torch.ones(512, dtype=torch.uint8)
    out = torch.full((256,), -7, dtype=torch.int32)
    arguments = [pointer(out)] if kernel in _WITHOUT_INPUT else [pointer(source), pointer(out)]
    module.get_function(kernel)((blocks,), (threads,), arguments, shared, seed, [source, out])
    return out


_WITHOUT_INPUT = [
    "neighbour",
    "neighbour_without_barrier",
    "barrier_in_a_branch",
    "shuffle_in_a_branch",
    "shuffles_that_differ",
    "write_past_shared_memory",
]


@pytest.mark.parametrize("seed", range(4))
def test_threads_of_a_block_share_memory_and_blocks_do_not(module: EmulatedModule, seed: int) -> None:
    """The plain case, in every kind of schedule."""
    out = run(module, "neighbour", 64, seed=seed, blocks=3)
    thread = torch.arange(64, dtype=torch.int32)
    assert torch.equal(out[:192].view(3, 64), (thread + 1) % 64 + 1000 * torch.arange(3).view(3, 1).int())


def test_what_another_warp_has_not_written_yet_is_not_a_plausible_number(module: EmulatedModule) -> None:
    """Shared memory starts as 0xFF, and a schedule runs warps one after another: a missing barrier shows."""
    first = run(module, "neighbour_without_barrier", 64, seed=0)
    last = run(module, "neighbour_without_barrier", 64, seed=1)
    assert (first[:32] == -1).all()
    assert (last[32:64] == -1).all()


@pytest.mark.parametrize(
    ("kernel", "threads", "shared", "report"),
    [
        ("barrier_in_a_branch", 64, 0, "deadlock"),
        ("shuffle_in_a_branch", 32, 0, "deadlock"),
        ("shuffles_that_differ", 32, 0, "divergent warp collective"),
        ("write_past_shared_memory", 32, 128, "past the end of shared memory"),
        ("copy_without_wait", 32, 512, "cp.async pending"),
        ("copy_without_wait", 32, 0, "cp.async outside shared memory"),
        ("load_one_chunk_too_many", 32, 0, "outside every tensor"),
        ("load_misaligned", 32, 0, "misaligned global load"),
    ],
)
def test_what_a_gpu_forbids_is_reported(
    module: EmulatedModule, kernel: str, threads: int, shared: int, report: str
) -> None:
    """Each with the kernel's name and the block and thread that did it."""
    with pytest.raises(EmulationError, match=rf"{kernel}: .*{report}.*block 0,0,0 thread"):
        run(module, kernel, threads, shared)


def test_an_asynchronous_copy_is_seen_only_after_the_wait(module: EmulatedModule) -> None:
    """Copies move at the wait: reading before it gives what was there, never the new value by luck."""
    out = run(module, "copy_seen_too_early", 32)
    assert (out[:32] == -1).all()
    assert (out[32:64] == 0x01010101).all()


def test_arguments_of_the_wrong_number_or_size_are_refused(module: EmulatedModule) -> None:
    """On a GPU the kernel would read past them."""
    kernel = module.get_function("neighbour")
    for arguments in ([], [np.int32(3)], [np.uint64(0), np.uint64(0)]):
        with pytest.raises(EmulationError, match="the kernel's parameters have"):
            kernel((1,), (64,), arguments, 512)


def test_a_kernel_that_does_not_exist_or_compile_is_an_error(module: EmulatedModule, tmp_path: Path) -> None:
    """With the names that exist, and with the compiler's words."""
    with pytest.raises(EmulationError, match="neighbour"):
        module.get_function("absent")
    (tmp_path / "broken.cu").write_text("this is not C++\n")
    with pytest.raises(EmulationError, match="this is not"):
        EmulatedModule(Variant("broken.cu", torch.float32, torch.float32, None), tmp_path)
