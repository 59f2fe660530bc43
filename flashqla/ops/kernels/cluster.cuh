// Barriers and copies between the CTAs of a cluster.
namespace flashqla {
__device__ __forceinline__ unsigned of_cta(const void* own, int rank) {
  unsigned theirs;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(theirs) : "r"(static_cast<unsigned>(__cvta_generic_to_shared(own))), "r"(rank));
  return theirs;
}
__device__ __forceinline__ void gate_init(void* gate, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(static_cast<unsigned>(__cvta_generic_to_shared(gate))), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void gates_made() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// Waits for a phase of this parity.
__device__ __forceinline__ void gate_wait(void* gate, int parity) {
  asm volatile("{\n.reg .pred done;\nwait_%=:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra wait_%=;\n}" ::"r"(
                   static_cast<unsigned>(__cvta_generic_to_shared(gate))), "r"(parity) : "memory");
}
// One lane arrives for its warp, at a barrier of its own CTA that waits for so many bytes, too.
__device__ __forceinline__ void gate_expect(void* gate, int bytes) {
  if ((threadIdx.x & 31) == 0)
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(static_cast<unsigned>(__cvta_generic_to_shared(gate))), "r"(bytes) : "memory");
}
// One lane arrives for its warp, whose lanes have met, at the same barrier of the CTA of this rank.
__device__ __forceinline__ void gate_arrive(void* gate, int rank) {
  if ((threadIdx.x & 31) == 0)
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(of_cta(gate, rank)) : "memory");
}
// Copies to shared memory of the CTA of this rank, whose barrier gets the bytes; by one lane.
__device__ __forceinline__ void push(void* to, const void* from, int bytes, void* gate, int rank) {
  if ((threadIdx.x & 31) == 0)
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(of_cta(to, rank)),
                 "r"(static_cast<unsigned>(__cvta_generic_to_shared(from))), "r"(bytes), "r"(of_cta(gate, rank)) : "memory");
}
}  // namespace flashqla
