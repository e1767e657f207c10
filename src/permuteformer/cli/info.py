"""The command that says what there is: versions, machine, and what computes linear attention here."""

from __future__ import annotations

from rich.table import Table

from permuteformer.cli.terminal import console, errors_in_words


def info() -> None:
    """Say what is installed, what this machine has, and which code computes linear attention.

    On a CPU its kernel does, where it was built and can, on a GPU those of Triton and fla, where they are installed; else PyTorch.
    PERMUTEFORMER_BACKEND=torch chooses PyTorch, native and cuda refuse what the kernels cannot do, and auto is what happens otherwise.
    """
    from permuteformer.train.environment import environment

    with errors_in_words():
        found = environment()
        shown = Table(show_header=False)
        shown.add_column(no_wrap=True)
        shown.add_column(overflow="fold")
        for name, version in found["versions"].items():
            shown.add_row(name, version)
        shown.add_row("python", found["python"])
        shown.add_row("machine", f"{found['platform']}, {found['cpu']}, {found['cores']} cores, {found['threads']} threads of torch")
        shown.add_row("GPU", _gpu())
        shown.add_row("linear attention", _on_cpu())
        shown.add_row("on a GPU", _on_gpu())
        console.print(shown)


def _gpu() -> str:
    import torch

    count = torch.cuda.device_count()
    return ", ".join(torch.cuda.get_device_name(n) for n in range(count)) or "none"


def _on_cpu() -> str:
    import torch  # noqa: F401  the kernel takes its threads

    from permuteformer.ops.backend import MAPS, VARIABLE, asked
    from permuteformer.ops.native import load

    wanted, kernel = asked(None), load()
    if wanted == "torch":
        return f"PyTorch, in blocks, as {VARIABLE} says"
    if wanted == "cuda":
        return f"none, as {VARIABLE} says"
    if isinstance(kernel, str):
        return f"PyTorch, in blocks; there is no CPU kernel: {kernel}"
    sets = ", ".join(name for name in kernel.instruction_sets if name != kernel.instruction_set)
    where = "always" if wanted == "native" else f"on the CPU in float32 and below, with the feature maps {', '.join(MAPS)}"
    return f"CPU kernel, {kernel.instruction_set}{f' (also there: {sets})' if sets else ''}, {where}; PyTorch in blocks for the rest"


def _on_gpu() -> str:
    import torch

    from permuteformer.ops.backend import VARIABLE, asked
    from permuteformer.ops.gpu import why_not

    wanted, device = asked(None), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if wanted == "torch":
        return f"PyTorch, in blocks, as {VARIABLE} says"
    if wanted == "native":
        return f"none, as {VARIABLE} says"
    if reason := why_not(device, torch.float32, causal=False, gated=False):
        return f"PyTorch, in blocks; there are no kernels: {reason}"
    parts = ["bidirectional by Triton and batched products"]
    for dtype in (torch.bfloat16, torch.float32):
        reason = why_not(device, dtype, causal=True, gated=True)
        parts.append(f"causal {str(dtype).removeprefix('torch.')} by " + (f"PyTorch, in blocks ({reason})" if reason else "Triton and fla"))
    return "; ".join(parts)
