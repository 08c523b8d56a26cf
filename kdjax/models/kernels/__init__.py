"""Triton kernels through Pallas for operations that XLA does in too many passes over memory.

Kernels of the gated delta rule and its convolution have flash-linear-attention's names. Letters are
those of `models.delta`; A is (I + M)^-1, D a decay. `_fwd` and `_bwd` are forwards and backwards.

kernel                    equation                         inputs                   definition
softmax
  softmax_sums            sum e^x, e^(x/T), e^y (y - x/T)  logits [B, V]            losses.kd
  sum_blocks              sum e^x, e^(x/T) of each block   logits [B, V]            decoding
swiglu
  gate_and_round          silu(g) u as float8              g, u [N, F]              weights
cached_attention
  attend_and_keep         softmax(q k^T) v                 q [B, K, R, D], cache    attention
grouped_matmul
  widen_tiles             silu(x g^T) (x u^T)              x [N, D], g, u [E, F, D] experts
  narrow_tiles            x d^T                            x [P, F], d [E, D, F]    experts
convolution
  _causal_conv1d_fwd      l2norm(silu(conv(x)))            x [B, T, X], w [E, W]    delta.make_heads
  _causal_conv1d_bwd_*    its gradients                    x, w, dq, dk, dv         delta.make_heads
delta_rule
  _solve_tril             A, M = tril(beta D k k^T, -1)    k [B, T, G, K], g, beta  apply_delta_rule
  _chunk_fwd_h            v_new = A beta (v - D k S)       A, k, v, g, beta, S      pass_states
                          S <- D S + k^T D v_new
  _chunk_fwd_o            o = D q S + tril(D q k^T) v_new  q, k, S, v_new           apply_delta_rule
  _chunk_bwd_dv_local     dv = tril(D q k^T)^T do          q, k, do [B, T, H, V]    apply_delta_rule
  _chunk_bwd_dhu          dS, and du = A^T dv_new          A, k, dv, dS             apply_delta_rule
  _prepare_wy_repr_bwd    dv, dM, gradient of q k^T        v, v_new, du, do         apply_delta_rule
  _chunk_bwd_dqkg         dq, dk, dg, dbeta                all of these             apply_delta_rule
recurrent
  fused_recurrent_...     S <- D S + k v_new, o = S^T q    q, k, v, g, beta, S      delta.recur
  recur_with_pending_...  likewise; S stored at times   x [B, X], g, beta, S     read_and_keep

The definitions are plain JAX. They run wherever `Placement.kernels` is false: on other devices, if
`tensor` splits an array that a kernel needs in one piece, and once JAX drops Triton, deprecated
since 0.11. `make_heads` and `chunk_gated_delta_rule` have gradients; the others serve a frozen
teacher, or callers that compute gradients themselves.
"""
