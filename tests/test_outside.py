"""One file outside the package each adds an encoding, an attention and a feature map."""

import re
import subprocess
import sys
import textwrap

FILES = {
    "flip": """
        import torch
        from permuteformer import POSITIONS, PositionEncoding

        @POSITIONS.register("flip")
        class Flip(PositionEncoding):
            '''Features of tokens at odd positions in reverse: a permutation of order 2.'''

            is_group = True

            def tables(self, positions):
                return (positions[..., 0] % 2 == 1)[:, None, :, None]

            def transform(self, x, tables):
                return torch.where(tables, x.flip(-1), x)
    """,
    "last": """
        from permuteformer import ATTENTIONS, Attention

        @ATTENTIONS.register("last")
        class Last(Attention):
            '''Every token attends to itself.'''

            modes = frozenset({"bidirectional", "causal"})

            def mix(self, q, k, v, tokens, state):
                return v, None
    """,
    "cube": """
        from permuteformer import feature_map

        @feature_map
        def cube(x):
            return x.relu() ** 3 + 1e-3
    """,
}
PROGRAM = """
    import sys
    sys.path[:0] = [{folder!r}, {tests!r}]
    import flip, last, cube, checks
    from permuteformer import build

    layer = build("linear", [("flip", {{}})], hidden_size=16, num_heads=2, causal=True, feature_map="cube").double()
    for check in ("causal", "padding", "resume", "packed"):
        checks.CHECKS[check](layer)
    build("last", hidden_size=16, num_heads=2)
    try:
        build("last", [("flip", {{}})], hidden_size=16, num_heads=2)
    except ValueError as error:
        print(error)
"""


def test_one_file_each_from_outside(tmp_path, request):
    for name, text in FILES.items():
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
    program = textwrap.dedent(PROGRAM).format(folder=str(tmp_path), tests=str(request.config.rootpath / "tests"))
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert re.search(r"'last'.*'flip'.*transform", run.stdout)
