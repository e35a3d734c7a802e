// rm_trigger lets dependent kernels start, rm_after waits until those this one depends on have finished and their results are
// visible (programmatic dependent launch, from compute capability 9.0 on). Every kernel calls the second.
// rm_pdl is the switch of rammer_cuda.pdl.
extern "C" { __constant__ int rm_pdl = 0; }
__device__ __forceinline__ void rm_trigger() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ __forceinline__ void rm_after() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (rm_pdl) rm_trigger();
#endif
}
