"""Nothing in the source runs what a file says: told from its syntax, and every rule finds what it forbids."""

import ast
from pathlib import Path

import pytest

import permuteformer

SOURCE = Path(permuteformer.__file__).parent

CALLED = {
    "eval": "runs a text",
    "exec": "runs a text",
    "compile": "makes a program of a text",
    "__import__": "imports by name",
    "os.system": "starts a shell",
    "os.popen": "starts a shell",
    "subprocess.getoutput": "starts a shell",
    "subprocess.getstatusoutput": "starts a shell",
    "yaml.load": "makes any object",
    "yaml.unsafe_load": "makes any object",
    "torch.hub.load": "runs code of others",
    "torch.jit.load": "runs code of others",
}
MODULES = ("pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve")
"""Not to be imported: the reader of CIFAR's pickles uses ``pickletools`` alone, which lists instructions."""

MUST_SAY = {"torch.load": ("weights_only", True)}
MUST_NOT_SAY = {"shell": False, "allow_pickle": False, "trust_remote_code": False, "weights_only": True}
"""Keywords to the one value that they may have; a value that is computed is none."""


def forbidden(tree):
    """What is wrong in a file, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from ((node.lineno, f"imports {name}") for name in names if name.split(".")[0] in MODULES)
            if isinstance(node, ast.ImportFrom):
                yield from _called(node.lineno, [f"{node.module}.{alias.name}" for alias in node.names])
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            yield from _called(node.lineno, [name])
            said = {keyword.arg: keyword.value for keyword in node.keywords}
            for keyword, allowed in MUST_NOT_SAY.items():
                if keyword in said and not (isinstance(said[keyword], ast.Constant) and said[keyword].value is allowed):
                    yield node.lineno, f"{keyword}={ast.unparse(said[keyword])}"
            if name in MUST_SAY:
                keyword, value = MUST_SAY[name]
                if keyword not in said or ast.literal_eval(said[keyword]) is not value:
                    yield node.lineno, f"{name} without {keyword}={value}"


def _called(line, names):
    yield from ((line, f"{name} {CALLED[name]}") for name in names if name in CALLED)


def test_the_source_runs_nothing_that_it_reads():
    files = sorted(SOURCE.rglob("*.py"))
    assert len(files) > 100
    found = {path.relative_to(SOURCE).as_posix(): list(forbidden(ast.parse(path.read_text(encoding="utf-8")))) for path in files}
    assert not {name: wrong for name, wrong in found.items() if wrong}


@pytest.mark.parametrize(
    "text",
    [
        "eval('1')",
        "exec(text)",
        "compile(text, 'a', 'exec')",
        "__import__(name)",
        "import os\nos.system('ls')",
        "from os import system",
        "import pickle",
        "from pickle import loads",
        "import marshal",
        "def f():\n    import dill",
        "import torch\ntorch.load(path)",
        "import torch\ntorch.load(path, weights_only=False)",
        "import torch\ntorch.load(path, **options)",
        "loader(path, weights_only=chosen)",
        "import yaml\nyaml.load(text)",
        "from yaml import load",
        "subprocess.run(command, shell=True)",
        "subprocess.run(command, shell=shell)",
        "numpy.load(path, allow_pickle=True)",
        "Auto.from_pretrained(path, trust_remote_code=True)",
        "torch.hub.load('a/b', 'c')",
    ],
)
def test_the_rules_find_what_they_forbid(text):
    assert list(forbidden(ast.parse(text)))


def test_modules_are_imported_by_names_of_ours_alone():
    """``importlib.import_module`` of a name that is computed stands in the registries, over files of the package, and nowhere else."""
    computed = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and ast.unparse(node.func).endswith("import_module")
                and not isinstance(node.args[0], ast.Constant)
            ):
                computed.add(path.relative_to(SOURCE).as_posix())
    assert computed == {"__init__.py", "registry.py", "bench/subjects/__init__.py"}
