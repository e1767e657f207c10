"""The command that says what there is: versions, machine, and what computes linear attention here."""

from __future__ import annotations

from rich.table import Table

from permuteformer.cli.terminal import console, errors_in_words


def info() -> None:
    """Say what is installed, what this machine has, and which code computes linear attention.

    The CPU kernel does, where it was built and can; else PyTorch. PERMUTEFORMER_BACKEND=torch chooses PyTorch, native refuses what the
    kernel cannot do, and auto is what happens otherwise.
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
        shown.add_row("linear attention", _backend())
        console.print(shown)


def _gpu() -> str:
    import torch

    count = torch.cuda.device_count()
    return ", ".join(torch.cuda.get_device_name(n) for n in range(count)) or "none"


def _backend() -> str:
    import torch  # noqa: F401  the kernel takes its threads

    from permuteformer.ops.backend import MAPS, VARIABLE, asked
    from permuteformer.ops.native import load

    wanted, kernel = asked(None), load()
    if isinstance(kernel, str):
        return f"PyTorch, in blocks; there is no CPU kernel: {kernel}"
    if wanted == "torch":
        return f"PyTorch, in blocks, as {VARIABLE} says"
    sets = ", ".join(name for name in kernel.instruction_sets if name != kernel.instruction_set)
    where = "always" if wanted == "native" else f"on the CPU in float32 and below, with the feature maps {', '.join(MAPS)}"
    return f"CPU kernel, {kernel.instruction_set}{f' (also there: {sets})' if sets else ''}, {where}; PyTorch in blocks for the rest"
