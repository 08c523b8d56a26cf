"""The peer: the same distillation step in PyTorch and Transformers, as a careful user writes it.

    python -m scripts.bench.peer REQUEST.json RESULT.json     (started by scripts.bench.step)

Student: float32 weights under bf16 autocast, fused AdamW; teacher: bf16, frozen; attention: SDPA;
loss as in kdjax.losses. No gradient clipping and no schedule, which kdjax has. Teacher and student
are Qwen2, Qwen3, Qwen3-MoE or Qwen3.5 models of the same shapes with random weights, the tokens are
kdjax's; experts are Transformers' grouped products ("grouped_mm"). Delta rules are those of
flash-linear-attention where it is installed, which Transformers looks for itself, else its own in
torch; `delta_rule` says which.
"""

# pyright: reportMissingImports=false
# torch belongs to the extra "parity": types are checked without it too.

import functools
import json
import os
import resource
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from scripts.bench.rows import made_rows, timed_steps

# What each mode turns on: torch.compile, recomputed layers, logits in chunks that are recomputed.
MODES = {
    "eager": dict(compiled=False, checkpointed=True, chunked=False),
    "eager-plain": dict(compiled=False, checkpointed=False, chunked=False),
    "eager-chunked": dict(compiled=False, checkpointed=False, chunked=True),
    "compile": dict(compiled=True, checkpointed=False, chunked=False),
    "chunked": dict(compiled=True, checkpointed=False, chunked=True),
    # PEFT's adapters of rank 16 on a bf16 base.
    "lora": dict(compiled=True, checkpointed=True, chunked=True, adapted=True),
    "lora-eager": dict(compiled=False, checkpointed=True, chunked=True, adapted=True),
}

# Families by their names in Transformers' classes.
_CLASSES = {
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
    "qwen3_5_text": "Qwen3_5Text",
    "qwen3_5_moe_text": "Qwen3_5MoeText",
}


def kd_loss(student: Any, teacher: Any, labels: Any, temperature: float, alpha: float) -> Any:
    """Summed alpha * CE + (1 - alpha) * T^2 * KL(teacher_T || student_T) of logits `[N, V]`."""
    import torch.nn.functional as F

    student = student.float()
    teacher = teacher[:, : student.shape[1]].float()
    kl = F.kl_div(
        F.log_softmax(student / temperature, -1),
        F.log_softmax(teacher / temperature, -1),
        log_target=True,
        reduction="sum",
    )
    ce = F.cross_entropy(student, labels, reduction="sum")
    return alpha * ce + (1 - alpha) * temperature**2 * kl


def build(shape: dict[str, Any], dtype: Any, device: str) -> Any:
    """A random model of these sizes; their names are those of kdjax's ArchSpec."""
    import torch
    import transformers

    name = _CLASSES[shape["family"]]
    sizes, options, rope = {}, {}, {}
    if name.startswith("Qwen3_5"):
        sizes = dict(
            linear_num_key_heads=shape["delta_key_heads"],
            linear_num_value_heads=shape["delta_value_heads"],
            linear_key_head_dim=shape["delta_key_dim"],
            linear_value_head_dim=shape["delta_value_dim"],
        )
        rope = dict(partial_rotary_factor=0.25)
    if shape["experts"]:
        sizes |= dict(
            num_experts=shape["experts"],
            num_experts_per_tok=shape["experts_used"],
            moe_intermediate_size=shape["expert_size"],
            norm_topk_prob=shape["norm_experts"],
            shared_expert_intermediate_size=shape["shared_size"],
        )
        options = dict(experts_implementation="grouped_mm")
    config = getattr(transformers, f"{name}Config")(
        head_dim=shape["head_dim"],
        hidden_size=shape["hidden_size"],
        num_hidden_layers=shape["num_layers"],
        num_attention_heads=shape["num_heads"],
        num_key_value_heads=shape["num_kv_heads"],
        intermediate_size=shape["mlp_size"],
        vocab_size=shape["vocab_size"],
        tie_word_embeddings=shape["tied"],
        max_position_embeddings=shape["max_positions"],
        rope_parameters=dict(rope_type="default", rope_theta=shape["rope_theta"]) | rope,
        **sizes,
    )
    torch.set_default_dtype(dtype)
    with torch.device(device):
        kind = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")
        model = kind._from_config(config, attn_implementation="sdpa", **options)
    torch.set_default_dtype(torch.float32)
    return model


def forward_of(
    request: dict[str, Any], mode: dict[str, bool], models: Any, total: int
) -> Callable[[Any, Any], Any]:
    """The loss of tokens and labels, divided by `total`, to be called and compiled."""
    import contextlib

    import torch
    from torch.utils.checkpoint import checkpoint

    teacher, student = models
    options, half = (request["temperature"], request["alpha"]), request["dtype"] == "bfloat16"
    kind = next(student.parameters()).device.type

    def autocast() -> Any:
        return torch.autocast(kind, torch.bfloat16) if half else contextlib.nullcontext()

    def whole(tokens: Any, labels: Any) -> Any:
        count = labels.numel()
        with torch.no_grad():
            theirs = teacher(input_ids=tokens, use_cache=False).logits.reshape(count, -1)
        with autocast():
            ours = student(input_ids=tokens, use_cache=False).logits.reshape(count, -1)
        return kd_loss(ours, theirs, labels, *options) / total

    def chunked(tokens: Any, labels: Any) -> Any:
        count = labels.numel()
        with torch.no_grad():
            theirs = teacher.model(input_ids=tokens, use_cache=False).last_hidden_state
        theirs = theirs.reshape(count, -1)

        def part(a: Any, b: Any, wanted: Any) -> Any:
            return kd_loss(student.lm_head(a), teacher.lm_head(b), wanted, *options)

        with autocast():
            ours = student.model(input_ids=tokens, use_cache=False).last_hidden_state
            ours, added, size = ours.reshape(count, -1), 0.0, request["chunk_tokens"]
            for i in range(0, count, size):
                pieces = (x[i : i + size] for x in (ours, theirs, labels))
                added = added + checkpoint(part, *pieces, use_reentrant=False)
        return added / total

    return chunked if mode["chunked"] else whole


def measure(request: dict[str, Any]) -> list[dict[str, Any]]:
    """The figures of every length, named as scripts.bench.program names them."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    processes = int(os.environ.get("WORLD_SIZE", "1"))  # of DDP, which share the rows
    if processes > 1:
        torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo")
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    request = request | {"rows": request["rows"] // processes}
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    dtype, mode = getattr(torch, request["dtype"]), MODES[request["mode"]]
    teacher = build(request["teacher"], dtype, device).eval().requires_grad_(False)
    adapted = mode.get("adapted", False)
    student = build(request["student"], dtype if adapted else torch.float32, device).train()
    if mode["checkpointed"]:
        student.gradient_checkpointing_enable(dict(use_reentrant=False))
    if adapted:
        add_adapters(student)
    trained = [x for x in student.parameters() if x.requires_grad]
    adamw = torch.optim.AdamW(trained, lr=1.5e-5, betas=(0.9, 0.95), fused=True)
    found = []
    for length in request["lengths"]:
        made = made_rows(request["rows"], length, request["vocab"])
        tokens = torch.from_numpy(made.tokens).long().to(device)
        total, parts = tokens[:, 1:].numel(), request.get("microbatches", 1)
        forward = forward_of(request, mode, (teacher, student), total)
        if mode["compiled"]:
            torch._dynamo.reset()
            forward = torch.compile(forward)
        forwards = [
            functools.partial(forward, x[:, :-1].contiguous(), x[:, 1:].reshape(-1).contiguous())
            for x in tokens.chunk(parts)
        ]
        if processes > 1:
            forwards = [averaged(student, forward) for forward in forwards]
        figures = {"length": length} | timed(forwards, adamw, request, device, length)
        if teacher.config.model_type.startswith("qwen3_5"):
            figures["delta_rule"] = find_delta_rule()
        figures["tokens_per_s"] *= processes
        found.append(figures)
    return found


def find_delta_rule() -> str:
    """Name of the library whose delta rule Transformers runs."""
    try:
        import fla
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # noqa: F401
    except Exception as error:
        return f"torch (flash-linear-attention: {str(error)[:80]})"
    return f"flash-linear-attention {fla.__version__}"


def add_adapters(student: Any) -> None:
    """PEFT's adapters into the model itself, float32; all else is frozen."""
    import peft

    student.enable_input_require_grads()  # else a recomputed layer has no gradient to pass on
    peft.get_peft_model(student, peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))


def averaged(student: Any, forward: Callable[[], Any]) -> Callable[[], Any]:
    """The loss as a module of DDP, which averages the student's gradients over processes."""
    import torch

    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = student

        def forward(self) -> Any:
            return forward()

    return torch.nn.parallel.DistributedDataParallel(Loss())


def timed(
    forwards: Sequence[Callable[[], Any]],
    adamw: Any,
    request: dict[str, Any],
    device: str,
    length: int,
) -> dict[str, Any]:
    """The clock of steps of forward, backward and update, as a row of figures."""
    import torch

    cuda = device == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()

    def step() -> Any:
        value = 0.0
        for forward in forwards:
            part = forward()
            part.backward()
            value = value + part.detach()
        adamw.step()
        adamw.zero_grad()
        return value

    def wait(value: Any) -> float:
        if cuda:
            torch.cuda.synchronize()
        return float(value)

    clock = timed_steps(step, wait, request["steps"])
    peak = (
        torch.cuda.max_memory_allocated()
        if cuda
        else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    )
    return {
        "step_ms": clock.median * 1e3,
        "spread_ms": clock.spread * 1e3,
        "processor_ms": clock.processor * 1e3,
        "tokens_per_s": request["rows"] * length / clock.median,
        "peak_gb": peak / 1e9,
        "first_step_s": clock.first,
        "loss": clock.value,
    }


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    found = measure(request)
    if os.environ.get("RANK", "0") == "0":
        Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
