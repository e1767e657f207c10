"""The command that shows versions, the machine, and the backends of linear attention."""

from __future__ import annotations

from rich.table import Table

from permuteformer.cli.console import console


def info() -> None:
    """Show what is installed, what this machine has, and which backend runs linear attention.

    The variable PERMUTEFORMER_BACKEND chooses a backend: torch, native (the CPU kernel) or cuda, which refuse calls they do not support, or
    auto, the default, which takes the first that supports a call.
    """
    import torch

    from permuteformer.machine import environment

    found = environment()
    shown = Table(show_header=False)
    shown.add_column(no_wrap=True)
    shown.add_column(overflow="fold")
    for name, version in found["versions"].items():
        shown.add_row(name, version)
    shown.add_row("python", found["python"])
    shown.add_row("revision", f"{found['revision'] or 'unknown'}{'' if found['clean'] in (True, None) else ', with changes'}")
    shown.add_row("machine", f"{found['platform']}, {found['cpu']}, {found['cores']} cores, {found['threads']} threads of torch")
    gpus = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    shown.add_row("GPU", ", ".join(gpus) or "none")
    for name, support in _backends().items():
        shown.add_row(f"backend {name}", support)
    console.print(shown)


def _backends() -> dict[str, str]:
    """Which calls each backend supports on this machine, or why it supports none."""
    import torch

    from permuteformer.ops.call import LinearCall
    from permuteformer.ops.feature_map import relu_eps
    from permuteformer.ops.linear import BACKENDS, VARIABLE, requested_backend
    from permuteformer.ops.native import load

    requested = requested_backend()
    found = {"in use": "the first below that supports a call" if requested == "auto" else f"{requested}, by {VARIABLE}"}
    for name, backend in BACKENDS.items():
        device = "cuda" if name == "cuda" and torch.cuda.is_available() else "cpu"
        parts: dict[str | None, list[str]] = {}
        for kind, options in {"bidirectional": {}, "causal": {"causal": True}, "two-sided": {"log_decay": torch.zeros(1)}}.items():
            x = torch.zeros(1, 1, 2, 4, device=device)
            parts.setdefault(backend.unsupported(LinearCall(x, x, x, relu_eps, 4, **options)), []).append(kind)  # type: ignore[arg-type]
        texts = [", ".join(kinds) + (f": not supported, {reason}" if reason else "") for reason, kinds in parts.items()]
        kernel = load()
        sets = (
            f" ({', '.join(kernel.instruction_sets)}; in use: {kernel.instruction_set})"
            if name == "native" and not isinstance(kernel, str)
            else ""
        )
        found[name] = "; ".join(texts) + sets
    return found
