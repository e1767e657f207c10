"""Runs a notebook's code from the first cell to the last, in this process, and takes what each cell gives as Jupyter would show it.

``python tests/run_notebook.py examples/tour.ipynb`` runs it in a new process and writes what came out into the file; with ``--print`` it is
printed as JSON, and the file stays as it is. (Jupyter itself would bring some thirty packages more into the tests.)
"""

import ast
import base64
import contextlib
import io
import json
import sys
from pathlib import Path


def run(notebook):
    """The outputs of every cell, in nbformat's form; ``[]`` for those without code."""
    import matplotlib

    matplotlib.use("Agg")
    space = {"__name__": "__main__"}
    return [_run_cell("".join(cell["source"]), space) if cell["cell_type"] == "code" else [] for cell in notebook["cells"]]


def texts(outputs):
    """Return the texts of a cell's outputs: printed, or the value of its last line."""
    return ["".join(output.get("text", output.get("data", {}).get("text/plain", []))) for output in outputs if _is_text(output)]


def pictures(outputs):
    """The PNG files among a cell's outputs."""
    return [base64.b64decode(output["data"]["image/png"]) for output in outputs if not _is_text(output)]


def _is_text(output):
    return "image/png" not in output.get("data", {})


def _run_cell(source, space):
    tree = ast.parse(source)
    last = ast.Expression(tree.body.pop().value) if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "<cell>", "exec"), space)
        value = None if last is None else eval(compile(last, "<cell>", "eval"), space)
    outputs = []
    if printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": printed.getvalue().splitlines(keepends=True)})
    if value is not None:
        data = {"text/plain": repr(value).splitlines(keepends=True)}
        outputs.append({"data": data, "execution_count": None, "metadata": {}, "output_type": "execute_result"})
    return outputs + [{"data": {"image/png": png}, "metadata": {}, "output_type": "display_data"} for png in _figures()]


def _figures():
    """The figures that a cell left open, as PNG; then they are closed."""
    from matplotlib import pyplot

    for number in pyplot.get_fignums():
        file = io.BytesIO()
        pyplot.figure(number).savefig(file, format="png", dpi=72, metadata={"Software": None})
        yield base64.b64encode(file.getvalue()).decode()
    pyplot.close("all")


if __name__ == "__main__":
    path, only_print = Path(sys.argv[1]), sys.argv[2:] == ["--print"]
    content = json.loads(path.read_text(encoding="utf-8"))
    found = run(content)
    if only_print:
        sys.stdout.write(json.dumps(found))
    else:
        count = 0
        for cell, outputs in zip(content["cells"], found, strict=True):
            if cell["cell_type"] == "code":
                count += 1
                cell |= {"execution_count": count, "outputs": outputs}
                for output in outputs:
                    if "execution_count" in output:
                        output["execution_count"] = count
        path.write_text(json.dumps(content, indent=1, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")
