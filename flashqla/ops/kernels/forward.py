"""WIP"""
import tilelang
import tilelang.language as T
from tilelang.layout import make_swizzled_layout
from flashqla.ops.kernels.common import *

QK_STAGES = 3
import os
SKEW = int(os.environ.get("FQ_SKEW", "0"))
PAIR = 2

@tilelang.jit(target=HOPPER, pass_configs=MANUAL_ROLES)
def build_forward(v_tile: int, dtype: str, state_dtype: str, output_h: bool):
    groups = v_tile // 64
    STATE_END = groups * WARP_GROUP
    SCORE_END = STATE_END + WARP_GROUP
    LOAD_END = SCORE_END + 32
    STORE_END = LOAD_END + 32
    THREADS = SCORE_END + WARP_GROUP
    STATE_REGS, SCORE_REGS = (192, 88) if groups == 2 else (232, 152)
    STATE_WARPS = 4 * groups
    V_STAGES = 2
    slices = HEAD_DIM // v_tile

    tokens, slots, hk, hv, sequences, offsets = (T.dynamic(x) for x in ("tokens", "slots", "hk", "hv", "sequences", "offsets"))
    q0, q1, k0, k1, v0, v1 = (T.dynamic(x) for x in ("q0", "q1", "k0", "k1", "v0", "v1"))
    h_chunks, h0, h1, h2, h3 = (T.dynamic(x) for x in ("h_chunks", "h0", "h1", "h2", "h3"))
    i0, i1, i2, i3, f0, f1, f2, f3 = (T.dynamic(x) for x in ("i0", "i1", "i2", "i3", "f0", "f1", "f2", "f3"))

    @T.macro
    def enter(i, leaving, w, head, chunks, chunk_base, h, v_first, q_smem, k_smem, v_smem, p_smem, o_smem, qk_ready, qk_free, va_ready, p_free, o_ready, o_free, S, S_in, X, O, V, O_out):
        """Start chunk i with X = S k, and while it runs move the output of the chunk before it out."""
        tx = T.get_thread_binding()
        s = i % QK_STAGES
        p = i % PAIR
        if leaving:
            T.wait_wgmma(1)
        T.copy(S, S_in)
        if output_h:
            if i < chunks:
                for vv, kk in T.Parallel(64, HEAD_DIM):
                    h[chunk_base + i, head, kk, v_first + w * 64 + vv] = S_in[vv, kk]
        T.barrier_wait(qk_ready[s], (i // QK_STAGES) & 1)
        T.wgmma_gemm(S_in, k_smem[s, :, :], X, transpose_B=True, clear_accum=True)
        if leaving:
            last = (i - 1) % PAIR
            T.barrier_wait(o_free[last], (((i - 1) // PAIR) & 1) ^ 1)
            T.wait_wgmma(1)
            T.copy(O, O_out)
            if tx % 32 == 0:
                T.barrier_arrive(qk_free[(i - 1) % QK_STAGES])
                T.barrier_arrive(p_free[last])
            T.call_extern("handle", "flashqla::store_transposed", T.address_of(o_smem[last, w, 0, 0]), O_out.data)
            T.fence_proxy_async()
            T.barrier_arrive(o_ready[last])
        T.barrier_wait(va_ready[p], (i // PAIR) & 1)
        T.call_extern("handle", "flashqla::load_transposed", V.data, T.address_of(v_smem[p, w, 0, 0]))
        T.wait_wgmma(0)

    @T.macro
    def state(w, n, head, chunks, chunk_base, h, v_first, initial_state, final_state, has_initial_state, has_final_state, q_smem, k_smem, v_smem, a_smem, p_smem, o_smem, r_smem, qk_ready, qk_free, va_ready, va_free, p_ready, p_free, o_ready, o_free):
        T.inc_max_nreg(STATE_REGS)
        tx = T.get_thread_binding()
        S = T.alloc_fragment((64, HEAD_DIM), "float32")
        S_in = T.alloc_fragment((64, HEAD_DIM), dtype)
        X = T.alloc_fragment((64, CHUNK), "float32")
        O = T.alloc_fragment((64, CHUNK), "float32")
        V = T.alloc_fragment((64, CHUNK), dtype)
        W = T.alloc_fragment((64, CHUNK), dtype)
        U = T.alloc_fragment((64, CHUNK), dtype)
        O_out = T.alloc_fragment((64, CHUNK), dtype)
        beta = T.alloc_fragment((CHUNK,), "float32")
        beta_decay = T.alloc_fragment((CHUNK,), "float32")
        out_scale = T.alloc_fragment((CHUNK,), "float32")
        key_decay = T.alloc_fragment((CHUNK,), "float32")
        if has_initial_state != 0:
            for vv, kk in T.Parallel(64, HEAD_DIM):
                S[vv, kk] = T.cast(initial_state[n, head, kk, v_first + w * 64 + vv], "float32")
        else:
            T.clear(S)
        if chunks > 0:
            enter(0, False, w, head, chunks, chunk_base, h, v_first, q_smem, k_smem, v_smem, p_smem, o_smem, qk_ready, qk_free, va_ready, p_free, o_ready, o_free, S, S_in, X, O, V, O_out)
            for i in T.unroll(chunks, unroll_factor=1):
                s = i % QK_STAGES
                p = i % PAIR
                T.copy(r_smem[s, BETA, :], beta)
                T.copy(r_smem[s, BETA_DECAY, :], beta_decay)
                for vv, t in T.Parallel(64, CHUNK):
                    W[vv, t] = V[vv, t] * beta[t] - X[vv, t] * beta_decay[t]
                T.wgmma_gemm(W, a_smem[p, :, :], X, transpose_B=True, clear_accum=True)
                T.wgmma_gemm(S_in, q_smem[s, :, :], O, transpose_B=True, clear_accum=True)
                for vv, kk in T.Parallel(64, HEAD_DIM):
                    S[vv, kk] = S[vv, kk] * r_smem[s, CHUNK_DECAY, 0]
                T.wait_wgmma(1)
                T.copy(r_smem[s, KEY_DECAY, :], key_decay)
                T.copy(X, U)
                for vv, t in T.Parallel(64, CHUNK):
                    W[vv, t] = X[vv, t] * key_decay[t]
                T.wgmma_gemm(W, k_smem[s, :, :], S)
                if tx % 32 == 0:
                    T.barrier_arrive(va_free[p])
                T.barrier_wait(p_ready[p], (i // PAIR) & 1)
                T.wait_wgmma(1)
                T.copy(r_smem[s, OUT_SCALE, :], out_scale)
                for vv, t in T.Parallel(64, CHUNK):
                    O[vv, t] = O[vv, t] * out_scale[t]
                T.wgmma_gemm(U, p_smem[p, :, :], O, transpose_B=True)
                enter(i + 1, True, w, head, chunks, chunk_base, h, v_first, q_smem, k_smem, v_smem, p_smem, o_smem, qk_ready, qk_free, va_ready, p_free, o_ready, o_free, S, S_in, X, O, V, O_out)
        if has_final_state != 0:
            for vv, kk in T.Parallel(64, HEAD_DIM):
                final_state[n, head, kk, v_first + w * 64 + vv] = S[vv, kk]

    @T.macro
    def state_paired(w, n, head, chunks, chunk_base, h, v_first, initial_state, final_state, has_initial_state, has_final_state, q_smem, k_smem, v_smem, a_smem, p_smem, o_smem, r_smem, qk_ready, qk_free, va_ready, va_free, p_ready, p_free, o_ready, o_free):
        T.inc_max_nreg(STATE_REGS)
        tx = T.get_thread_binding()
        S = T.alloc_fragment((64, HEAD_DIM), "float32")
        S_in = T.alloc_fragment((64, HEAD_DIM), dtype)
        X = T.alloc_fragment((64, CHUNK), "float32")
        O = T.alloc_fragment((64, CHUNK), "float32")
        V = T.alloc_fragment((64, CHUNK), dtype)
        W = T.alloc_fragment((64, CHUNK), dtype)
        U = T.alloc_fragment((64, CHUNK), dtype)
        O_out = T.alloc_fragment((64, CHUNK), dtype)
        beta = T.alloc_fragment((CHUNK,), "float32")
        beta_decay = T.alloc_fragment((CHUNK,), "float32")
        out_scale = T.alloc_fragment((CHUNK,), "float32")
        key_decay = T.alloc_fragment((CHUNK,), "float32")
        if has_initial_state != 0:
            for vv, kk in T.Parallel(64, HEAD_DIM):
                S[vv, kk] = T.cast(initial_state[n, head, kk, v_first + w * 64 + vv], "float32")
        else:
            T.clear(S)
        if w == 1 and SKEW:
            T.call_extern("handle", "flashqla::delay", SKEW)
        for i in T.unroll(chunks, unroll_factor=1):
            s = i % QK_STAGES
            p = i % PAIR
            T.copy(S, S_in)
            if output_h:
                for vv, kk in T.Parallel(64, HEAD_DIM):
                    h[chunk_base + i, head, kk, v_first + w * 64 + vv] = S_in[vv, kk]
            T.barrier_wait(qk_ready[s], (i // QK_STAGES) & 1)
            T.wgmma_gemm(S_in, k_smem[s, :, :], X, transpose_B=True, clear_accum=True)
            T.wgmma_gemm(S_in, q_smem[s, :, :], O, transpose_B=True, clear_accum=True)
            T.barrier_wait(va_ready[p], (i // PAIR) & 1)
            T.wait_wgmma(0)
            T.call_extern("handle", "flashqla::load_transposed", V.data, T.address_of(v_smem[p, w, 0, 0]))
            T.copy(r_smem[s, BETA, :], beta)
            T.copy(r_smem[s, BETA_DECAY, :], beta_decay)
            for vv, t in T.Parallel(64, CHUNK):
                W[vv, t] = V[vv, t] * beta[t] - X[vv, t] * beta_decay[t]
            T.wgmma_gemm(W, a_smem[p, :, :], X, transpose_B=True, clear_accum=True)
            T.copy(r_smem[s, OUT_SCALE, :], out_scale)
            for vv, t in T.Parallel(64, CHUNK):
                O[vv, t] = O[vv, t] * out_scale[t]
            for vv, kk in T.Parallel(64, HEAD_DIM):
                S[vv, kk] = S[vv, kk] * r_smem[s, CHUNK_DECAY, 0]
            T.wait_wgmma(0)
            T.copy(r_smem[s, KEY_DECAY, :], key_decay)
            if tx % 32 == 0:
                T.barrier_arrive(va_free[p])
            T.copy(X, U)
            for vv, t in T.Parallel(64, CHUNK):
                W[vv, t] = X[vv, t] * key_decay[t]
            T.wgmma_gemm(W, k_smem[s, :, :], S)
            T.barrier_wait(p_ready[p], (i // PAIR) & 1)
            T.wgmma_gemm(U, p_smem[p, :, :], O, transpose_B=True)
            T.wait_wgmma(0)
            if tx % 32 == 0:
                T.barrier_arrive(qk_free[s])
                T.barrier_arrive(p_free[p])
            T.copy(O, O_out)
            T.barrier_wait(o_free[p], ((i // PAIR) & 1) ^ 1)
            T.call_extern("handle", "flashqla::store_transposed", T.address_of(o_smem[p, w, 0, 0]), O_out.data)
            T.fence_proxy_async()
            T.barrier_arrive(o_ready[p])
        if has_final_state != 0:
            for vv, kk in T.Parallel(64, HEAD_DIM):
                final_state[n, head, kk, v_first + w * 64 + vv] = S[vv, kk]

    @T.prim_func
    def gated_delta_forward(
        q: T.StridedTensor((tokens, hk, HEAD_DIM), (q0, q1, 1), dtype),
        k: T.StridedTensor((tokens, hk, HEAD_DIM), (k0, k1, 1), dtype),
        v: T.StridedTensor((tokens, hv, HEAD_DIM), (v0, v1, 1), dtype),
        A: T.Tensor((tokens, hv, CHUNK), dtype),
        records: T.Tensor((slots, hv, RECORD, CHUNK), "float32"),
        cu_seqlens: T.Tensor((offsets,), "int32"),
        initial_state: T.StridedTensor((sequences, hv, HEAD_DIM, HEAD_DIM), (i0, i1, i2, i3), state_dtype),
        o: T.Tensor((tokens, hv, HEAD_DIM), dtype),
        final_state: T.StridedTensor((sequences, hv, HEAD_DIM, HEAD_DIM), (f0, f1, f2, f3), "float32"),
        group: T.int32,
        h: T.StridedTensor((h_chunks, hv, HEAD_DIM, HEAD_DIM), (h0, h1, h2, h3), dtype),
        scale: T.float32,
        offset_step: T.int32,
        has_initial_state: T.int32,
        has_final_state: T.int32,
    ):
        with T.Kernel(hv * slices, sequences, threads=THREADS) as (bx, n):
            T.import_source(DEVICE_FUNCTIONS)
            q_smem = T.alloc_shared((QK_STAGES, CHUNK, HEAD_DIM), dtype)
            k_smem = T.alloc_shared((QK_STAGES, CHUNK, HEAD_DIM), dtype)
            v_smem = T.alloc_shared((PAIR, groups, CHUNK, 64), dtype)
            a_smem = T.alloc_shared((PAIR, CHUNK, CHUNK), dtype)
            p_smem = T.alloc_shared((PAIR, CHUNK, CHUNK), dtype)
            o_smem = T.alloc_shared((PAIR, groups, CHUNK, 64), dtype)
            r_smem = T.alloc_shared((QK_STAGES, RECORD, CHUNK), "float32")
            T.annotate_layout({v_smem: make_swizzled_layout(v_smem), o_smem: make_swizzled_layout(o_smem)})

            qk_ready = T.alloc_barrier([32] * QK_STAGES)
            qk_free = T.alloc_barrier([STATE_WARPS + 4] * QK_STAGES)
            va_ready = T.alloc_barrier([32] * PAIR)
            va_free = T.alloc_barrier([STATE_WARPS] * PAIR)
            p_ready = T.alloc_barrier([WARP_GROUP] * PAIR)
            p_free = T.alloc_barrier([STATE_WARPS] * PAIR)
            o_ready = T.alloc_barrier([STATE_END] * PAIR)
            o_free = T.alloc_barrier([32] * PAIR)
            tail_ready = T.alloc_barrier(32)

            tx = T.get_thread_binding()
            head = bx // slices
            v_first = (bx % slices) * v_tile
            k_head: T.int32 = T.truncdiv(head, group)
            bos: T.int32 = T.max(T.min(cu_seqlens[n * offset_step], tokens), 0)
            eos: T.int32 = T.max(T.min(cu_seqlens[(n + 1) * offset_step], tokens), bos)
            T.assume(bos >= 0)
            T.assume(eos <= tokens)
            length: T.int32 = eos - bos
            chunks: T.int32 = T.ceildiv(length, CHUNK)
            slot: T.int32 = bos // CHUNK + n
            chunk_base = T.alloc_var("int32")
            chunk_base = 0
            if output_h:
                for m in T.serial(n):
                    chunk_base += T.ceildiv(cu_seqlens[(m + 1) * offset_step] - cu_seqlens[m * offset_step], CHUNK)

            if tx < WARP_GROUP:
                if groups == 1:
                    state(0, n, head, chunks, chunk_base, h, v_first, initial_state, final_state, has_initial_state, has_final_state, q_smem, k_smem, v_smem, a_smem, p_smem, o_smem, r_smem, qk_ready, qk_free, va_ready, va_free, p_ready, p_free, o_ready, o_free)
                else:
                    state_paired(0, n, head, chunks, chunk_base, h, v_first, initial_state, final_state, has_initial_state, has_final_state, q_smem, k_smem, v_smem, a_smem, p_smem, o_smem, r_smem, qk_ready, qk_free, va_ready, va_free, p_ready, p_free, o_ready, o_free)
            elif tx < STATE_END:
                state_paired(1, n, head, chunks, chunk_base, h, v_first, initial_state, final_state, has_initial_state, has_final_state, q_smem, k_smem, v_smem, a_smem, p_smem, o_smem, r_smem, qk_ready, qk_free, va_ready, va_free, p_ready, p_free, o_ready, o_free)
            elif tx < SCORE_END:
                T.dec_max_nreg(SCORE_REGS)
                P = T.alloc_fragment((CHUNK, CHUNK), "float32")
                P_out = T.alloc_fragment((CHUNK, CHUNK), dtype)
                row = T.alloc_fragment((CHUNK,), "float32")
                col = T.alloc_fragment((CHUNK,), "float32")
                for i in T.unroll(chunks, unroll_factor=1):
                    s = i % QK_STAGES
                    p = i % PAIR
                    T.barrier_wait(qk_ready[s], (i // QK_STAGES) & 1)
                    T.wgmma_gemm(q_smem[s, :, :], k_smem[s, :, :], P, transpose_B=True, clear_accum=True)
                    T.copy(r_smem[s, ROW_LOG, :], row)
                    T.copy(r_smem[s, COL_LOG, :], col)
                    T.wait_wgmma(0)
                    if tx % 32 == 0:
                        T.barrier_arrive(qk_free[s])
                    for t, u in T.Parallel(CHUNK, CHUNK):
                        P[t, u] = T.if_then_else(u <= t, P[t, u] * (T.exp2(row[t] - col[u]) * scale), 0.0)
                    T.barrier_wait(p_free[p], ((i // PAIR) & 1) ^ 1)
                    T.copy(P, P_out)
                    T.call_extern("handle", "flashqla::store_tile", T.address_of(p_smem[p, 0, 0]), P_out.data)
                    T.fence_proxy_async()
                    T.barrier_arrive(p_ready[p])
            else:
                T.dec_max_nreg(40)
                if tx < LOAD_END:
                    for i in T.unroll(chunks, unroll_factor=1):
                        s = i % QK_STAGES
                        p = i % PAIR
                        first: T.int32 = bos + i * CHUNK
                        T.barrier_wait(qk_free[s], ((i // QK_STAGES) & 1) ^ 1)
                        if i * CHUNK + CHUNK <= length:
                            T.tma_copy(q[first:first + CHUNK, k_head, :], q_smem[s, :, :], barrier=qk_ready[s])
                            T.tma_copy(k[first:first + CHUNK, k_head, :], k_smem[s, :, :], barrier=qk_ready[s])
                            T.tma_copy(records[slot + i, head, :, :], r_smem[s, :, :], barrier=qk_ready[s])
                            T.barrier_arrive(qk_ready[s])
                            T.barrier_wait(va_free[p], ((i // PAIR) & 1) ^ 1)
                            for w in T.unroll(groups):
                                T.tma_copy(v[first:first + CHUNK, head, v_first + w * 64:v_first + w * 64 + 64], v_smem[p, w, :, :], barrier=va_ready[p])
                            T.tma_copy(A[first:first + CHUNK, head, :], a_smem[p, :, :], barrier=va_ready[p])
                            T.barrier_arrive(va_ready[p])
                        else:
                            T.barrier_wait(va_free[p], ((i // PAIR) & 1) ^ 1)
                            T.tma_copy(q[first:first + CHUNK, k_head, :], q_smem[s, :, :], barrier=tail_ready)
                            T.tma_copy(k[first:first + CHUNK, k_head, :], k_smem[s, :, :], barrier=tail_ready)
                            T.tma_copy(records[slot + i, head, :, :], r_smem[s, :, :], barrier=tail_ready)
                            for w in T.unroll(groups):
                                T.tma_copy(v[first:first + CHUNK, head, v_first + w * 64:v_first + w * 64 + 64], v_smem[p, w, :, :], barrier=tail_ready)
                            T.tma_copy(A[first:first + CHUNK, head, :], a_smem[p, :, :], barrier=tail_ready)
                            T.barrier_arrive(tail_ready)
                            T.barrier_wait(tail_ready, 0)
                            rest = length - i * CHUNK
                            for w in T.unroll(2):
                                T.call_extern("handle", "flashqla::zero_rows", T.address_of(k_smem[s, 0, w * 64]), rest)
                            for w in T.unroll(groups):
                                T.call_extern("handle", "flashqla::zero_rows", T.address_of(v_smem[p, w, 0, 0]), rest)
                            T.call_extern("handle", "flashqla::zero_rows", T.address_of(a_smem[p, 0, 0]), rest)
                            T.fence_proxy_async()
                            T.barrier_arrive(qk_ready[s])
                            T.barrier_arrive(va_ready[p])
                    if groups == 1:
                        # State warpgroups enter one chunk more than there is.
                        T.barrier_wait(qk_free[chunks % QK_STAGES], ((chunks // QK_STAGES) & 1) ^ 1)
                        T.barrier_arrive(qk_ready[chunks % QK_STAGES])
                        T.barrier_wait(va_free[chunks % PAIR], ((chunks // PAIR) & 1) ^ 1)
                        T.barrier_arrive(va_ready[chunks % PAIR])
                elif tx < STORE_END:
                    for i in T.unroll(chunks, unroll_factor=1):
                        p = i % PAIR
                        first: T.int32 = bos + i * CHUNK
                        T.barrier_wait(o_ready[p], (i // PAIR) & 1)
                        if i * CHUNK + CHUNK <= length:
                            for w in T.unroll(groups):
                                T.tma_copy(o_smem[p, w, :, :], o[first:first + CHUNK, head, v_first + w * 64:v_first + w * 64 + 64])
                            T.tma_store_wait(0, read=True)
                        else:
                            for w in T.unroll(groups):
                                for b in T.unroll(CHUNK // 4, unroll_factor=1):
                                    for t, d in T.Parallel(4, 64):
                                        if i * CHUNK + b * 4 + t < length:
                                            o[first + b * 4 + t, head, v_first + w * 64 + d] = o_smem[p, w, b * 4 + t, d]
                        T.barrier_arrive(o_free[p])
                    T.tma_store_wait(0, read=False)

    return gated_delta_forward
